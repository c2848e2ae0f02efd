"""The page in a browser, as a person uses it: each view, both themes, by keyboard, and when things go wrong."""

from __future__ import annotations

import json
import re

import httpx
import pytest
from browser import chromium, opened
from browser import violations as violations_of_a_theme
from served import served, tiny_chat

import foredraft

KEPT = ".tokens .tok.accepted, .tokens .tok.own"


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def url(browser):
    """A server that really drafts; chains of four, so that rounds do not depend on how busy the machine is."""
    with served(
        foredraft.Speculator("zoo:python-8m", "draft-model:zoo:python-1m", shape="chain(4)", dtype="float32", execution="eager")
    ) as address:
        yield address


def violations(page) -> list[str]:
    """In either theme."""
    found = []
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme)
        page.evaluate("() => document.getAnimations().forEach((each) => each instanceof CSSTransition && each.finish())")
        found += violations_of_a_theme(page)
    return found


def write(page, seed: int = 5) -> None:
    page.get_by_label("Seed").fill(str(seed))
    page.get_by_label("Max. tokens").fill("40")
    page.get_by_role("button", name="Continue the text").click()
    page.locator(".answer p.note").wait_for()


def test_a_text_is_written_and_its_rounds_open(browser, url):
    with opened(browser, url) as page:
        write(page)
        text = "".join(page.locator(KEPT).all_text_contents())
        body = {"prompt": page.get_by_label("Beginning of the text").input_value(), "max_tokens": 40, "temperature": 0.7, "seed": 5}
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        assert text == httpx.post(f"{url}/v1/completions", json={"model": model, **body}, timeout=60).json()["choices"][0]["text"]
        assert page.locator(".tokens .tok.accepted").count() > 0
        assert "guessed by draft-model" in page.locator(".tokens .tok.accepted").first.get_attribute("title")
        assert f"{page.locator(KEPT).count()} tokens in" in page.locator(".answer p.note").inner_text()
        assert violations(page) == []

        assert page.locator(".tokens .tok.rejected").count() == 0
        page.get_by_label("Hide refused guesses").uncheck()
        page.locator(".tokens .tok.rejected").first.click()
        card = page.locator(".card.round")
        assert "4 tokens guessed" in card.inner_text() and "The model did not go along" in card.inner_text()
        assert card.locator("svg .node.rejected").count() > 0 and card.locator("svg .node.own").count() == 1
        for place in (".tokens .tok", ".legend .tok", "svg .node"):
            assert struck(page, place) == {"accepted": False, "own": False, "rejected": True}, place
        card.get_by_text("The same as a table").click()
        assert "draft-model" in card.locator("tbody").inner_text()
        assert violations(page) == []

        page.get_by_label("Hide refused guesses").check()
        assert page.locator(".tokens .tok.rejected").count() == 0
        page.keyboard.press("Escape")
        assert card.count() == 0


def struck(page, place: str) -> dict[str, bool]:
    """For each kind of token at ``place``, whether all are struck out: by a line paler than the text, or a hyphen would vanish in it."""
    return page.evaluate(
        """(place) => {
          const struck = (each) => {
            const word = each.querySelector('.word') ?? each, style = getComputedStyle(word), letters = word.querySelector('tspan');
            const paler = letters ? style.fill !== getComputedStyle(letters).fill : style.textDecorationColor !== style.color;
            return style.textDecorationLine === 'line-through' && paler;
          };
          const all = ['accepted', 'own', 'rejected'].map((kind) => [kind, [...document.querySelectorAll(`${place}.${kind}`)]]);
          return Object.fromEntries(all.filter(([, found]) => found.length).map(([kind, found]) => [kind, found.every(struck)]));
        }""",
        place,
    )


def test_where_nothing_is_guessed_it_says_why_and_compares_no_speeds(browser, url):
    def plainly(route):  # as where the planner finds that drafts do not pay
        route.continue_(post_data=json.dumps({**route.request.post_data_json, "speculation": "off"}))

    with opened(browser, url, motion="reduce") as page:
        page.route("**/v1/completions", plainly)
        write(page)
        why = "the server has no drafter, or found that guessing does not make this text faster on this machine now."
        assert why in page.locator(".answer p.note").inner_text()
        page.locator(".tokens .tok").nth(3).click()
        assert why in page.locator(".card.round").inner_text()
        assert "fewer passes" not in page.locator("main").inner_text()
        page.goto(f"{url}/#race")
        page.get_by_label("Tokens").fill("10")
        page.get_by_role("button", name="Run both").click()
        said = page.locator(".verdict").inner_text()
        assert why in said and "No guesses were used" in said and "times as many" not in said
        assert page.locator(".verdict.good").count() == 0
        assert violations(page) == []


def test_tokens_are_read_and_opened_by_keyboard(browser, url):
    with opened(browser, url) as page:
        write(page)
        assert page.locator('.tokens [tabindex="0"]').count() == 1  # one stop for Tab, whatever the length
        page.locator('.tokens [tabindex="0"]').focus()
        for _ in range(3):
            page.keyboard.press("ArrowRight")
        focused = page.evaluate("() => [...document.querySelectorAll('.tokens .tok')].indexOf(document.activeElement)")
        assert focused == 3
        page.keyboard.press("Enter")
        assert page.locator(".card.round").count() == 1
        assert "Round" in page.locator(".view > [role=status]").inner_text()
        for key in ("Enter", "Escape"):  # from within the round the focus returns to its token
            page.get_by_role("button", name="Close the round").focus()
            page.keyboard.press(key)
            page.locator(".card.round").wait_for(state="detached")
            assert page.evaluate("() => [...document.querySelectorAll('.tokens .tok')].indexOf(document.activeElement)") == 3
            page.keyboard.press("Enter")
            page.locator(".card.round").wait_for()


def test_the_focus_stays_where_a_button_was_pressed(browser, url):
    focused = "(text) => document.activeElement.textContent === text"
    with opened(browser, url) as page:
        page.get_by_label("Max. tokens").fill("8")
        page.get_by_role("button", name="Continue the text").press("Enter")
        page.locator(".answer p.note").wait_for()
        page.wait_for_function(focused, arg="Continue the text")
        page.goto(f"{url}/#roll")
        page.get_by_role("button", name="Roll 500").press("Enter")
        page.wait_for_function(focused, arg="Stop")
        page.keyboard.press("Enter")
        page.wait_for_function(focused, arg="Roll 500")


def test_a_number_stays_as_it_is_typed(browser, url):
    with opened(browser, url) as page:
        field = page.get_by_label("Temperature")
        field.fill("")
        field.press_sequentially("1.0")
        assert field.input_value() == "1.0"
        field.fill("")
        field.press_sequentially("0.7")
        assert field.input_value() == "0.7"


def test_a_round_is_rolled_step_by_step(browser, url):
    with opened(browser, f"{url}/#roll") as page:
        page.get_by_role("button", name="Roll", exact=True).click()
        for step, name in enumerate(["Draft", "Verify", "Accept", "Correct"]):
            page.get_by_role("button", name=name).click()
            assert page.locator(".guesses .coin").count() == 0 or step >= 2
        landed = page.locator(".landed").inner_text()
        kept = page.locator(".guesses tr.accepted").count()
        assert landed.startswith(f"{kept} of 5 guesses landed; this pass wrote {kept + 1} token")
        assert page.locator(".guesses .coin").count() == min(kept + 1, 5)
        for row in page.locator(".guesses tr").filter(has=page.locator(".coin")).all():
            inside = "<" in row.locator(".coin .figure").inner_text()
            assert inside == ("kept" in row.inner_text())
        assert violations(page) == []
        page.get_by_role("button", name="Try the other rules").click()
        page.locator(".outcomes li").nth(7).wait_for()
        assert page.locator(".outcomes li").filter(has_text="typical").locator(".badge").inner_text() == "lossy"
        for place in (".strip .tok", ".guesses .tok"):
            assert all(found == (kind == "rejected") for kind, found in struck(page, place).items()), place
        assert "rejected" in struck(page, ".strip .tok")


def passed(found) -> int:
    return sum(coin["coin"] < coin["probability"] for coin in found["coins"])


@pytest.mark.parametrize("rule", [pytest.param("block", marks=pytest.mark.nightly), "traversal"])
def test_a_guess_kept_with_a_later_one_is_said_to_be(browser, url, rule):
    """At 360 px as well all figures are to be seen; and a round says which rule and shape it belongs to."""
    body = {"prompt": "def mean(values):\n    return sum(", "rule": rule}
    rounds = (httpx.post(f"{url}/rounds", json={**body, "seed": seed}, timeout=60).json() for seed in range(100))
    found = next(each for each in rounds if each["round"]["ended"] == "mismatch" and len(each["round"]["path"][1:]) > passed(each["round"]))
    with opened(browser, f"{url}/#roll", width=360, motion="reduce") as page:
        page.route("**/rounds", lambda route: route.fulfill(json=found) if route.request.method == "POST" else route.continue_())
        page.get_by_label("Rule").select_option(rule)
        page.get_by_role("button", name="Roll", exact=True).click()
        page.locator(".landed").wait_for()
        kept = page.locator(".guesses tr.accepted")
        for row in kept.all():
            assert ("<" in row.locator("td").nth(2).inner_text()) != ("kept with a later token" in row.inner_text())
        own = page.locator(".guesses tr.own th").get_attribute("class")
        assert own == f"deep-{found['round']['accepted'] + 1}"
        header = page.locator(".one > header")
        assert f"chain(5), rule {rule}" in header.inner_text() and "changed" not in header.inner_text()
        inside = "(box) => box.scrollWidth <= box.clientWidth"
        assert page.get_by_role("region", name="Tree of guesses").evaluate(inside)
        assert all(cell.evaluate(inside) for cell in page.locator(".guesses td").all())
        page.get_by_label("Rule").select_option("rejection")
        assert f"rule {rule}" in header.inner_text() and "The settings above have changed since" in header.inner_text()
        assert violations(page) == []


def test_many_rolls_close_on_p_and_those_of_a_lossy_rule_do_not(browser, url):
    """Takes as long as several hundred rounds do."""
    with opened(browser, f"{url}/#roll") as page:
        card = page.locator(".many")

        def roll(rule: str, least: int) -> None:
            page.get_by_label("Rule").select_option(rule)
            page.get_by_role("button", name="Roll 500").click()
            page.wait_for_function(
                "([rule, least]) => { const card = document.querySelector('.many'); "
                "return card?.innerText.includes(rule) && parseInt(card.querySelector('h2').innerText) >= least; }",
                arg=[rule, least],
            )
            page.get_by_role("button", name="Stop").click()
            page.get_by_role("button", name="Roll 500").wait_for()
            counts = card.locator("table").first.locator("tbody tr td:nth-child(3)").all_inner_texts()
            assert sum(map(int, counts)) == int(card.get_by_role("heading", level=2).inner_text().split()[0]) >= least

        marks = []
        while "≈" not in marks and len(marks) < 3:  # once in a while chance alone is that far off
            roll("rejection", 150)
            marks.append(card.locator(".closing .mark").inner_text())
        assert "≈" in marks
        assert re.search(r"Even a perfect rule would be about \d+ % off .* seldom more than \d+ %", card.locator(".closing").inner_text())
        assert violations(page) == []
        roll("typical", 300)
        assert card.locator(".closing .mark").inner_text() == "≠"
        assert card.locator(".badge").inner_text() == "lossy"
        assert "this rule throws no coin" in card.inner_text()


def test_exactly_500_are_rolled_where_the_server_stops_early(browser, url):
    answer = {"rolls": 0, "seed": 1, "landed": [], "expected": None, "first": [], "distance": 0, "chance": 0.1, "spread": 0.05}
    answer |= {"rule": "match", "lossless": True, "drafter": "draft-model", "shape": "chain(1)"}
    asked = []

    def roll(route):
        if route.request.method == "GET":
            return route.continue_()
        asked.append(route.request.post_data_json)
        made = min(asked[-1]["rolls"], 37)
        first = [{"token": 1, "text": "x", "count": made, "p": 1.0}]
        return route.fulfill(json={**answer, "rolls": made, "landed": [made, 0], "first": first})

    with opened(browser, f"{url}/#roll") as page:
        page.route("**/rounds", roll)
        page.get_by_role("button", name="Roll 500").click()
        page.get_by_role("heading", name="500 rolls", exact=True).wait_for()
        page.get_by_role("button", name="Roll 500").wait_for()
        assert "no expected number" in page.locator(".many").inner_text()
        assert [each["first"] for each in asked] == list(range(0, 500, 37)) and asked[-1]["rolls"] == 500 - 13 * 37


def test_a_round_without_a_guess_is_not_said_to_refuse_one(browser, url):
    with opened(browser, f"{url}/#roll", motion="reduce") as page:
        page.get_by_label("Drafter").select_option("prompt-lookup")
        page.get_by_label("Text so far").fill("a b c d e f")
        page.get_by_role("button", name="Roll", exact=True).click()
        page.locator(".landed").get_by_text("0 of 0 guesses").wait_for()
        assert "Nothing was guessed" in page.locator(".one .about").inner_text()
        page.get_by_role("button", name="Draft").click()
        assert "has nothing to offer" in page.locator(".one .about").inner_text()


def test_plain_and_speculative_write_the_same_text(browser, url):
    with opened(browser, f"{url}/#race") as page:
        page.get_by_label("Tokens").fill("24")
        page.get_by_role("button", name="Run both").click()
        page.locator(".verdict").wait_for(timeout=60_000)
        assert "The texts are the same" in page.locator(".verdict").inner_text()
        plain, speculative = (
            "".join(page.get_by_role("region", name=name).locator(KEPT).all_text_contents()) for name in ("Plain", "Speculative")
        )
        assert plain == speculative != ""
        passes = [int(page.get_by_role("region", name=name).locator("dd").nth(2).inner_text()) for name in ("Plain", "Speculative")]
        assert passes[0] == 24 > passes[1]
        token = page.get_by_role("region", name="Plain").locator(KEPT).first  # there is no round to open
        assert token.get_attribute("role") is None and token.evaluate("(each) => getComputedStyle(each).cursor") != "pointer"
        assert violations(page) == []


def test_without_motion_nothing_is_replayed(browser, url):
    with opened(browser, f"{url}/#race", motion="reduce") as page:
        page.get_by_label("Tokens").fill("10")
        page.get_by_role("button", name="Run both").click()
        page.locator(".pair").wait_for()
        assert page.locator(".verdict").count() == 1  # at once
        page.goto(f"{url}/#roll")
        page.get_by_role("button", name="Roll", exact=True).click()
        page.locator(".one").wait_for()
        assert page.locator(".landed").count() == 1


def test_live_shows_what_the_server_does(browser, url):
    with opened(browser, f"{url}/#live") as page:
        page.locator(".chart").first.wait_for()
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        # Sent by the page and not awaited: the value is shown for a second, which the browser must not miss for the answer.
        body = {"model": model, "prompt": "def f(x):\n", "max_tokens": 30}
        page.evaluate(
            "(body) => { fetch('v1/completions', {method: 'POST', headers: {'Content-Type': 'application/json'}, body}) }", json.dumps(body)
        )
        page.wait_for_function("() => parseFloat(document.querySelector('.chart dd').textContent) > 1", timeout=60_000)
        assert page.locator(".chart").first.locator("dt").inner_text() == "draft-model"
        assert page.locator(".chart canvas").count() == 4
        assert violations(page) == []


def test_live_has_recorded_what_happened_under_another_view(browser, url):
    with opened(browser, url) as page:
        for _ in range(2):
            page.wait_for_event("response", lambda response: response.url.endswith("/metrics"))
        page.get_by_role("link", name="Live").click()
        page.get_by_role("heading", name="Live").wait_for()
        assert page.locator(".chart").count() == 4
        page.get_by_text("no drafts").wait_for()


@pytest.mark.parametrize("width", [360, pytest.param(768, marks=pytest.mark.nightly), 1400])
def test_every_view_fits_its_window(browser, url, width):
    with opened(browser, url, width=width, motion="reduce") as page:
        write(page)
        page.locator(".tokens .tok").first.click()
        assert fits(page)
        page.goto(f"{url}/#roll")
        page.get_by_role("button", name="Roll", exact=True).click()
        page.locator(".landed").wait_for()
        assert fits(page)
        page.goto(f"{url}/#live")
        page.locator(".chart canvas").first.wait_for()
        assert fits(page)
        page.goto(f"{url}/#race")
        page.get_by_label("Tokens").fill("10")
        page.get_by_role("button", name="Run both").click()
        page.locator(".verdict").wait_for()
        assert fits(page)


def test_long_tokens_fit_a_narrow_window(browser, url):
    with opened(browser, f"{url}/#roll", width=360, motion="reduce") as page:
        page.get_by_label("Rule").select_option("rejection")
        for _ in range(100):
            page.get_by_role("button", name=re.compile("^Roll( again)?$")).click()
            page.locator(".landed").wait_for()
            if page.locator(".residual").count():
                break
        else:
            pytest.fail("none of 100 rolls refused a guess")
        for found in (".residual .tok", ".bars code"):
            if found == ".bars code":  # another roll, which may have no residual
                page.get_by_role("button", name="Roll 500").click()
                page.locator(".closing").wait_for()
            page.locator(found).first.evaluate("(each) => { each.textContent = '#'.repeat(64); }")
            assert fits(page), found


def fits(page) -> bool:
    return page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


# -- when things go wrong ---------------------------------------------------------------------------------------------------


def test_empty_texts_and_refusals_are_said(browser, url):
    with opened(browser, url) as page:
        page.get_by_label("Beginning of the text").fill("  ")
        page.get_by_role("button", name="Continue the text").click()
        assert "Write a beginning first" in page.get_by_role("alert").inner_text()
        page.route("**/v1/completions", lambda route: route.fulfill(status=400, json={"error": {"message": "the prompt is too long"}}))
        page.get_by_label("Beginning of the text").fill("x")
        page.get_by_role("button", name="Continue the text").click()
        page.get_by_text("the prompt is too long").wait_for()
        assert violations(page) == []
        page.goto(f"{url}/#roll")
        page.get_by_label("Text so far").fill("x")
        page.get_by_role("button", name="Roll", exact=True).click()
        page.get_by_text("single token").wait_for()  # the real server's words
        busy = {"error": {"message": "the server is decoding for others, and this needs it alone; try again when it is idle"}}
        page.route("**/rounds", lambda route: route.fulfill(status=503, headers={"retry-after": "1"}, json=busy))
        page.get_by_role("button", name="Roll", exact=True).click()
        page.get_by_text("decoding for others").wait_for()
        said = page.get_by_role("alert").locator("p").inner_text()
        assert said == "The server is decoding for others, and this needs it alone; try again when it is idle."
        assert [line for line in page.said if "400" not in line and "503" not in line] == []
        page.said.clear()


def test_a_server_that_is_gone_is_said_and_tried_again(browser, url):
    with opened(browser, url) as page:
        page.route("**/v1/completions", lambda route: route.abort())
        page.get_by_role("button", name="Continue the text").click()
        page.get_by_text("The server does not answer").wait_for()
        page.route("**/v1/models", lambda route: route.abort())
        page.reload()
        page.get_by_text("The server does not answer").wait_for()
        page.unroute("**/v1/models")
        page.get_by_role("button", name="Try again").click()
        page.get_by_role("heading", name="Complete").wait_for()
        assert [line for line in page.said if "ERR_FAILED" not in line] == []
        page.said.clear()


def test_rounds_that_could_not_be_asked_for_are_tried_again(browser, url):
    with opened(browser, url) as page:
        page.get_by_role("heading", name="Complete").wait_for()
        page.route("**/rounds", lambda route: route.abort())
        page.goto(f"{url}/#roll")
        page.reload()
        page.get_by_text("The server does not answer").wait_for()
        assert violations(page) == []
        page.unroute("**/rounds")
        page.get_by_role("button", name="Try again").click()
        page.get_by_role("button", name="Roll", exact=True).wait_for()
        page.route("**/rounds", lambda route: route.fulfill(status=404, json={"error": {"message": "there is no /rounds here"}}))
        page.get_by_role("link", name="Write").click()
        page.get_by_role("link", name="Roll a round").click()
        page.get_by_role("button", name="Roll", exact=True).wait_for()  # asked for once
        page.reload()
        page.get_by_text("does not offer rounds to roll").wait_for()
        assert [line for line in page.said if "ERR_FAILED" not in line and "404" not in line] == []
        page.said.clear()


def test_a_broken_stream_keeps_what_came(browser, url):
    chunk = {"choices": [{"index": 0, "text": "hello", "finish_reason": None}]}
    with opened(browser, url) as page:
        page.route(
            "**/v1/completions", lambda route: route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(chunk)}\n\n")
        )
        page.get_by_role("button", name="Continue the text").click()
        page.get_by_text("The connection broke off").wait_for()
        assert page.locator(".tokens").inner_text() == "hello"
        error = {"error": {"message": "the server stops", "code": 503}}
        page.route(
            "**/v1/completions", lambda route: route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(error)}\n\n")
        )
        page.get_by_role("button", name="Continue the text").click()
        page.get_by_text("the server stops").wait_for()


def test_a_text_may_end_on_a_guess(browser, url):
    """The model then adds no token of its own."""
    round = {"shape": "chain(1)", "tokens": [1, 2], "texts": ["<", "end"], "parents": [-1, 0], "p": [None, 0.5], "q": None}
    chunk = {"choices": [{"index": 0, "text": "end", "round": {**round, "path": [0, 1], "accepted": 1, "bonus": None, "ended": "eos"}}]}
    body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    with opened(browser, url) as page:
        page.route("**/v1/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
        page.get_by_role("button", name="Continue the text").click()
        page.locator(".answer .note").get_by_text("1 token in 1 pass").wait_for()
        page.locator(".tokens .tok.accepted").click()
        assert "the model wrote its end token" in page.locator(".card.round").inner_text()


def test_a_character_of_several_tokens_is_shown_whole(browser, url):
    """At its last token, in a later round as well; and the token that ends the text is none of its."""

    def round_of(above: str, kept: list[str], bonus: str, ended: str = "end of draft") -> dict:
        count = len(kept)
        tree = {
            "tokens": list(range(count + 1)),
            "texts": [above, *kept],
            "parents": list(range(-1, count)),
            "path": list(range(count + 1)),
        }
        numbers = {"p": [None] + [0.5] * count, "q": None, "bonus": {"token": 9, "text": bonus, "p": 0.9}}
        return {"shape": f"chain({count})", **tree, **numbers, "accepted": count, "ended": ended}

    first = round_of("<", ["caf", "bytes:\\xc3"], "bytes:\\xa9")
    second = round_of("bytes:\\xa9", ["!", "bytes:\\xf0\\x9f"], "bytes:\\x99\\x82")
    third = round_of("bytes:\\x99\\x82", ["."], "<end>", ended="eos")
    said = [("caf\N{LATIN SMALL LETTER E WITH ACUTE}", first), ("!\N{SLIGHTLY SMILING FACE}", second), (".", third)]
    chunks = [{"choices": [{"index": 0, "text": text, "round": round}]} for text, round in said]
    chunks[-1]["choices"][0]["finish_reason"] = "stop"
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    with opened(browser, url) as page:
        page.route("**/v1/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
        page.get_by_role("button", name="Continue the text").click()
        page.locator(".answer .note").get_by_text("7 tokens in 3 passes").wait_for()
        assert page.locator(KEPT).all_text_contents() == ["caf", "", said[0][0][3:], "!", "", said[1][0][1:], "."]
        assert page.locator(KEPT).nth(1).get_attribute("aria-label").startswith("part of a character")
        assert page.locator(KEPT).nth(1).bounding_box()["width"] > 0
        page.locator(KEPT).nth(5).click()
        assert "bytes:" in page.locator(".card.round svg").inner_html()
        assert violations(page) == []


def test_a_key_is_asked_for_and_kept_in_this_tab(browser, url):
    with opened(browser, url) as page:
        right = {"authorization": "Bearer sesame"}

        def guarded(route):
            if route.request.headers.get("authorization") == right["authorization"]:
                route.fallback()
            else:
                route.fulfill(status=401, json={"error": {"message": "no API key was given"}})

        page.route("**/v1/**", guarded)
        page.reload()
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("Key").fill("wr\N{EN DASH}ng")  # as is no letter of a header
        assert violations(page) == []
        dialog.get_by_role("button", name="Continue").click()
        page.get_by_text("did not take this key").wait_for()
        dialog.get_by_label("Key").fill("sesame")
        dialog.get_by_role("button", name="Continue").click()
        page.get_by_role("heading", name="Complete").wait_for()
        assert page.evaluate("() => [sessionStorage.getItem('foredraft-key'), localStorage.length]") == ["sesame", 0]
        page.evaluate("() => sessionStorage.removeItem('foredraft-key')")
        page.reload()
        dialog.get_by_role("button", name="Cancel").click()
        page.get_by_text("This server asks for an API key").wait_for()
        assert [line for line in page.said if "401" not in line] == []
        page.said.clear()


def test_a_browser_may_forbid_storage(browser, url):
    with opened(browser, url) as page:
        page.add_init_script("Object.defineProperty(window, 'sessionStorage', {get() { throw new DOMException('no', 'SecurityError'); }})")
        page.reload()
        page.get_by_role("heading", name="Complete").wait_for()
        page.get_by_label("Beginning of the text").fill("x = 1\n")
        write(page)
        assert page.locator(KEPT).count() > 0


def test_chat_is_offered_where_there_is_a_template(browser, url):
    said = [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}]
    first = {
        "shape": "chain(2)",
        "tokens": [1, 2, 3],
        "texts": ["<", "Hel", "p"],
        "parents": [-1, 0, 1],
        "drafters": ["", "suffix", "suffix"],
        "p": [None, 0.5, 0.1],
        "q": None,
        "path": [0, 1],
        "accepted": 1,
        "bonus": {"token": 4, "text": "lo", "p": 0.6},
        "ended": "mismatch",
    }
    said.append({"choices": [{"index": 0, "delta": {"content": "Hello"}, "round": first}]})
    stream = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in said) + ": ping\n\ndata: [DONE]\n\n"
    asked = []
    with opened(browser, url) as page:
        assert page.get_by_role("button", name="Chat").count() == 0  # python-8m has no template
        page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "tiny", "chat": True}]}))
        page.route(
            "**/v1/chat/completions",
            lambda route: (asked.append(route.request.post_data_json), route.fulfill(content_type="text/event-stream", body=stream)),
        )
        page.add_init_script("sessionStorage.clear()")  # what the page as it was may still have kept
        page.reload()
        page.get_by_role("heading", name="Chat").wait_for()
        for text in ("Hi", "And now?"):
            page.get_by_label("Message").fill(text)
            page.keyboard.press("Enter")
            page.get_by_text("2 tokens in 1 pass").nth(len(asked) - 1).wait_for()
        assert [each["content"] for each in asked[1]["messages"]] == ["Hi", "Hello", "And now?"]
        assert page.locator(".tokens .tok.accepted").first.inner_text() == "Hel"
        page.get_by_label("Hide refused guesses").uncheck()
        assert page.locator(".tokens .tok.rejected").first.inner_text() == "p"
        assert "1 by suffix" in page.locator(".answer .note").first.inner_text()
        assert violations(page) == []
        page.get_by_role("button", name="Complete", exact=True).click()
        page.get_by_label("Beginning of the text").wait_for()


def test_a_conversation_with_a_real_server(browser):
    with served(tiny_chat()) as chatty, opened(browser, chatty) as page:
        page.get_by_role("heading", name="Chat").wait_for()
        page.get_by_label("Seed").fill("5")
        page.get_by_label("Max. tokens").fill("20")
        asked = {"temperature": float(page.get_by_label("Temperature").input_value()), "seed": 5, "max_tokens": 20}
        messages = []
        for number, text in enumerate(("hello", "the user")):
            page.get_by_label("Message").fill(text)
            page.keyboard.press("Enter")
            page.get_by_text(re.compile(r"\d tokens in \d")).nth(number).wait_for()
            messages.append({"role": "user", "content": text})
            answer = httpx.post(f"{chatty}/v1/chat/completions", json={"messages": messages, **asked}, timeout=60).json()
            written = answer["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": written})
            assert "".join(page.locator(".tokens").nth(number).locator(".tok.accepted, .tok.own").all_text_contents()) == written
        assert violations(page) == []


def test_while_a_text_is_written_no_other_begins(browser, url):
    """Enter sends nothing, and the kind of text stays."""
    asked = []
    with opened(browser, url) as page:
        page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "tiny", "chat": True}]}))
        page.route("**/v1/chat/completions", lambda route: asked.append(route))  # no answer comes
        page.add_init_script("sessionStorage.clear()")  # what the page as it was may still have kept
        page.reload()
        page.get_by_role("heading", name="Chat").wait_for()
        other = page.get_by_role("button", name="Complete", exact=True)
        for text in ("Hi", "And now?"):
            page.get_by_label("Message").fill(text)
            page.keyboard.press("Enter")
            page.get_by_role("button", name="Stop").wait_for()
            assert other.is_disabled()
        page.get_by_role("button", name="Stop").click()
        page.get_by_role("button", name="Send").wait_for()
        assert len(asked) == 1 and other.is_enabled() and page.get_by_label("Message").input_value() == "And now?"


def test_what_was_not_answered_can_be_sent_again(browser, url):
    """And Enter sends neither what an input method is still composing, nor fields that are wrong."""
    asked = []
    with opened(browser, url) as page:
        page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "tiny", "chat": True}]}))
        page.route("**/v1/chat/completions", lambda route: asked.append(route))  # no answer comes
        page.add_init_script("sessionStorage.clear()")  # what the page as it was may still have kept
        page.reload()
        message = page.get_by_label("Message")
        message.fill("Hi")
        message.evaluate("(box) => box.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', isComposing: true, bubbles: true}))")
        page.get_by_label("Seed").fill("luck")
        message.press("Enter")
        page.get_by_label("Seed").fill("7")
        message.press("Enter")
        page.get_by_role("button", name="Stop").click()
        page.get_by_role("button", name="Send").wait_for()
        assert message.input_value() == "Hi" and [route.request.post_data_json["seed"] for route in asked] == [7]


def test_a_drafter_without_trees_is_offered_chains(browser, url):
    """Whatever shape another drafter was asked for before."""
    known = httpx.get(f"{url}/rounds").json()
    first, second = known["drafters"][:2]
    second["rules"].pop("tree")
    with opened(browser, f"{url}/#roll", motion="reduce") as page:
        page.route("**/rounds", lambda route: route.fulfill(json=known) if route.request.method == "GET" else route.continue_())
        page.reload()
        page.get_by_label("Shape of the draft").fill("product(3,2,1)")
        page.get_by_role("button", name="Roll", exact=True).click()
        page.locator(".landed").wait_for()
        page.get_by_label("Drafter").select_option(second["id"])
        assert page.get_by_label("Shape of the draft").input_value() == "chain(5)"
        assert all(
            each.startswith("chain") for each in page.locator("#shapes option").evaluate_all("(all) => all.map(({ value }) => value)")
        )
        page.get_by_role("button", name="Try the other rules").click()
        page.locator(".outcomes li").nth(len(first["rules"]["tree"]) - 1).wait_for()
        page.get_by_role("button", name="Roll again").click()
        page.locator(".one > header").get_by_text(f"{second['name']}, chain(5)").wait_for()


def test_any_shape_and_drafter_can_be_typed_or_chosen(browser, url):
    """The server says what is wrong with a shape."""
    with opened(browser, f"{url}/#roll", motion="reduce") as page:
        page.get_by_role("button", name="Roll", exact=True).wait_for()
        names = page.get_by_label("Drafter").locator("option").all_inner_texts()
        assert names[0] == "draft-model" and "draft-verify" in names
        shape = page.get_by_label("Shape of the draft")
        for wrong, why in [("ring(3)", "Unknown shape 'ring(3)'"), ("product(9,9)", "1 to 64 nodes")]:
            shape.fill(wrong)
            page.get_by_role("button", name="Roll", exact=True).click()
            page.get_by_role("alert").get_by_text(why).wait_for()
        page.get_by_label("Drafter").select_option("draft-verify")
        shape.fill("paths(0,1,0.0)")
        page.get_by_role("button", name="Roll", exact=True).click()
        page.locator(".one > header").get_by_text("draft-verify, paths(0,1,0.0)").wait_for()
        assert violations(page) == []
        assert all("400" in line for line in page.said)
        page.said.clear()


def test_nothing_comes_from_elsewhere(browser, url):
    """One origin, and a policy that holds it to that; a chart's library only where charts are."""
    with opened(browser, "about:blank") as page:
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        answer = page.goto(f"{url}/")
        page.get_by_role("heading", name="Complete").wait_for()
        policy = answer.headers["content-security-policy"].split("; ")
        assert policy[0] == "default-src 'self'" and "form-action 'none'" in policy  # no key can get into an address
        assert all(each.startswith(url) for each in asked)
        assert not any("uPlot.esm" in each for each in asked)

"""The audit of a server finds faults that are planted in a server without a model, and passes the server without them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fake_openai import FakeServer, serve
from kernel_cases import needs_kernels
from served import served
from typer.testing import CliRunner

from foredraft import ConfigurationError, ExactnessError, Speculator
from foredraft.auditing.server import BIAS, SAMPLES, ServerReport, audit_server, repeating, samples
from foredraft.auditing.server.abilities import Abilities, find
from foredraft.auditing.server.answers import Answer, Request, answers
from foredraft.auditing.server.client import Client, ServerError, events
from foredraft.auditing.server.contents import counts, readable, shorter
from foredraft.auditing.server.plan import Plan
from foredraft.cli import app
from foredraft.serving.sse import data

PROMPTS = ["Tell me about cats", "The mat was blue and"]
SMALL: dict[str, Any] = {"prompts": PROMPTS[:1], "max_new_tokens": 24, "samples": 40}
AGAIN, LOAD, LOADED = "the same request again", "the same request under load", "log-probabilities under load"
STREAM, SPECULATION, SEEDS, CHOICES = "streamed or not", "speculation on and off", "other seeds, other texts", "n choices"
SHORTER, STOPS, MISSING, JOINED = "a shorter answer is the beginning", "stop strings", "no token is missing", "the text is its tokens"
POSSIBLE, GREEDY = "log-probabilities are possible", "greedy takes the likeliest token"

FAULTS = {  # the check that must find each, and whether answers are wrong, or only do not repeat
    "ignores the seed": (AGAIN, "not reproducible"),
    "a global seed": (LOAD, "fault"),
    "noise by slot": (LOAD, "not reproducible"),
    "text changes with the batch": (LOAD, "not reproducible"),
    "log-probabilities change under load": (LOADED, "not reproducible"),
    "text changes with speculation": (SPECULATION, "fault"),
    "streamed text differs": (STREAM, "fault"),
    "one seed for all": (SEEDS, "fault"),
    "n choices are alike": (CHOICES, "fault"),
    "drops the last token": (MISSING, "fault"),
    "drops the last token and does not count it": (MISSING, "fault"),
    "drops the last token from the text": (JOINED, "fault"),
    "leaks a stop string": (STOPS, "fault"),
    "leaks the beginning of a stop string": (STOPS, "fault"),
    "loses what it held back": (STOPS, "fault"),
    "log-probability 0 for drafted tokens": (POSSIBLE, "fault"),
    "log-probability 0 and no alternatives": (POSSIBLE, "fault"),
    "greedy is not greedy": (GREEDY, "fault"),
}


def audited(*faults: str, server: dict[str, Any] | None = None, **options: Any) -> ServerReport:
    fake = FakeServer(frozenset(faults), **(server or {}))
    return audit_server("http://server", transport=fake.transport(), **{**SMALL, **options})


def status(report: ServerReport, name: str) -> str:
    return next(check.status for check in report.checks if check.name == name)


def test_a_server_without_faults_passes():
    report = audited(samples=80, prompts=PROMPTS)
    assert report.verdict == "exact", report.summary
    assert {check.status for check in report.checks} == {"ok"}
    assert report.samples is not None and report.samples.tokens > 1600 and report.drafted
    assert "would have been found with probability 0.9" in report.summary
    report.raise_for_fault()
    document = json.loads(json.dumps(report.to_dict()))
    assert document["verdict"] == "exact" and len(document["checks"]) == 15 and document["samples"]["power"][0]["trials"] == 40


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str):
    report, (name, verdict) = audited(fault), FAULTS[fault]
    assert status(report, name) == "fault", [(check.name, check.status, check.found) for check in report.checks]
    assert report.verdict == verdict and any(reason.startswith(name) for reason in report.reasons)
    with pytest.raises(ExactnessError, match=name):
        report.raise_for_fault()


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("ignores the seed", marks=pytest.mark.nightly),
        "noise by slot",
        pytest.param("text changes with the batch", marks=pytest.mark.nightly),
    ],
)
def test_what_does_not_repeat_may_still_be_exact(fault: str):
    report = audited(fault, samples=40)
    assert all(check.reproducibility for check in report.checks if check.status == "fault")
    assert status(report, SAMPLES) == "ok" and "no other fault was found" in report.summary


def test_parts_of_a_character_are_no_other_text():
    """Some tokenizers show each byte of it as a character."""

    def answer(request: Request, text: str) -> Answer:
        return Answer(request, (text,), None, "length", None, None)

    def asked(text: str) -> str:
        client: Any = SimpleNamespace(in_turn=lambda requests: [answer(each, text) for each in requests])
        abilities = Abilities(None, {}, (), True, True, False)
        return shorter(Plan(client, abilities, ["a"], 0, 6, [answer(Request("a"), "ab\N{GRINNING FACE}c")], [True])).status

    assert [asked(text) for text in ("ab\ufffd\ufffd\ufffd", "ab", "b\ufffd")] == ["ok", "ok", "fault"]


def drawn(*faults: str, seed: int = 0, count: int | None = None, alternatives: int = 20) -> samples.Samples:
    """The statistical part alone, on answers of 48 tokens."""
    client = Client("http://server", transport=FakeServer(frozenset(faults)).transport())
    plan = Plan(client, Abilities(alternatives, {}, (), True, True, False), PROMPTS, seed, 48)
    return samples.check(plan, samples=count, significance=1e-3, bias=BIAS)


@pytest.mark.parametrize("fault", ["biased by 0.03", "noise is used twice"])
def test_samples_that_leave_their_log_probabilities_are_found(fault: str):
    """A bias of 0.03 has 40 chances in 40 by the report of the server without it; here its seeds are fixed."""
    assert not drawn(fault).passed


def test_the_default_number_of_samples_finds_the_bias_that_it_is_made_for():
    found = drawn()
    assert found.passed and found.power[0].direction == "the likeliest token"
    assert found.power[0].smallest < 0.03 and all(each.found >= 36 for each in found.power)


@pytest.mark.parametrize("alternatives", [20, 5])
def test_correct_servers_are_not_accused(alternatives: int):
    """p-values of audits that share no seed; docs/audit.md has those of many more."""
    p_values = [drawn(seed=1000 * number, count=10, alternatives=alternatives).p_value for number in range(4)]
    assert min(p_values) > 1e-2


# -- servers that take less ---------------------------------------------------------------------------------------------


def test_without_log_probabilities_nothing_is_counted_as_passed_that_was_not_asked():
    report = audited(server={"without": frozenset({"logprobs"})})
    assert report.verdict == "inconclusive" and report.samples is None
    assert status(report, SAMPLES) == status(report, POSSIBLE) == "not asked" and status(report, LOAD) == "ok"
    assert "the server gives no log-probabilities" in report.notes and "could not be asked everything" in report.summary


def test_a_server_that_takes_the_number_of_alternatives_and_gives_none_is_not_tested_on_them():
    report = audited("no alternatives")
    assert report.verdict == "inconclusive" and report.samples is None and status(report, SAMPLES) == "not asked", report.summary
    assert "the server gives 0 alternatives at each token" in report.notes


def test_a_server_that_gives_fewer_alternatives_than_asked_for_is_not_accused():
    """It adds the drawn token to its five."""
    asked = Client("http://server", transport=FakeServer(frozenset({"five alternatives"})).transport())
    assert find(asked, PROMPTS[0]).logprobs in (5, 6)
    assert drawn("five alternatives", count=40, alternatives=6).passed and drawn("five alternatives", count=40, alternatives=5).passed


def test_log_probabilities_that_are_missing_in_streams_are_not_called_equal():
    report = audited("no log-probabilities in a stream")
    found = {check.name: check.found for check in report.checks}
    assert report.verdict == "exact" and found[LOAD].startswith("9 answers") and found[LOADED].endswith("in 6 answers")


def test_answers_that_cannot_be_counted_are_not():
    def answer(usage: int | None) -> Answer:
        return Answer(Request("a", max_tokens=3), ("abc",), None, "length", usage, None)

    plan: Any = SimpleNamespace(client=SimpleNamespace(seen=[answer(3), answer(None), answer(3)]))
    assert counts(plan).found.startswith("counts agree in 2 answers; only by usage")


def test_a_server_that_only_chats_is_asked_that():
    report = audited(server={"chat_only": True})
    assert report.verdict == "exact" and report.endpoint == "/v1/chat/completions", report.summary
    assert status(audited("log-probability 0 for drafted tokens", server={"chat_only": True}), POSSIBLE) == "fault"


def test_a_server_that_takes_unknown_fields_may_ignore_speculation():
    report = audited(server={"lenient": True})
    assert status(report, SPECULATION) == "not asked" and report.verdict == "exact"
    assert any("may ignore" in note for note in report.notes)


def test_filters_that_cannot_be_turned_off_are_said():
    report = audited(server={"without": frozenset({"top_k", "min_p"})})
    assert report.verdict == "exact" and "the server does not take top_k, min_p: its own defaults hold" in report.notes


def test_a_server_that_fails_under_load_is_not_passed():
    report = audited("fails under load")
    assert report.verdict == "inconclusive" and "HTTP 500: out of memory" in report.summary


def test_a_fingerprint_that_ends_in_approx_allows_rounding():
    report = audited("log-probabilities change under load", server={"fingerprint": "fp-approx"})
    check = next(check for check in report.checks if check.name == LOADED)
    assert check.status == "ok" and "by up to 0.01 nats" in check.found


def test_seeds_and_choices_say_what_they_would_have_found():
    found = {check.name: check.power for check in audited().checks}
    assert "repeats the text of another in 19% of answers would have been found" in found[SEEDS]  # in one of 11 that follow the first
    assert "in 54% of answers" in found[CHOICES]
    unknown = [Answer(Request("a", 1, max_tokens=2), (text,), None, "length", 2, None) for text in "abc"]
    assert "a few equal texts would be no fault" in repeating.distinct(SEEDS, unknown, "requests").power


def test_and_no_more_than_rounding():
    report = audited("log-probabilities are wrong under load", server={"fingerprint": "fp-approx"})
    assert status(report, LOADED) == "fault" and "by up to 0.6 nats" in next(each.found for each in report.checks if each.name == LOADED)


def test_answers_that_test_nothing_do_not_say_exact():
    report = audited(samples=2)
    assert report.verdict == "inconclusive" and status(report, SAMPLES) == "not asked"
    assert "nothing could be tested by 2 answers, 48 tokens: they are too few" in report.summary


def test_no_drafted_token_says_nothing_about_speculation():
    report = audited(server={"drafts": False})
    assert report.drafted is None and "whether the server speculates: its metrics do not say" in report.limits


# -- the wire -----------------------------------------------------------------------------------------------------------


def client(handle: Any) -> Client:
    found = Client("http://server/v1/", transport=httpx.MockTransport(handle))
    found.model = "m"
    return found


def test_a_full_queue_is_waited_for():
    replies = [httpx.Response(429, headers={"retry-after": "0"}), httpx.Response(200, json={"choices": [{"index": 0, "text": "x"}]})]
    asked = client(lambda request: replies.pop(0))
    assert asked.one(Request("p")).text == "x" and asked.requests == 2


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (httpx.Response(500, json={"error": {"message": "boom"}}), "HTTP 500: boom"),
        (httpx.Response(503, text="draining"), "HTTP 503: draining"),
        (httpx.Response(200, text="<html>"), "no JSON"),
        (httpx.Response(200, json={"choices": []}), "0 choices where 1"),
        (httpx.Response(200, json=[1]), "cannot be read"),
    ],
)
def test_answers_that_are_none(reply: httpx.Response, message: str):
    with pytest.raises(ServerError, match=message):
        client(lambda request: reply).one(Request("p"))


@pytest.mark.parametrize(
    ("lines", "message"), [('data: {"error": {"message": "lost"}}\n\n', "lost"), ('data: {"choices": []}\n\n', "without")]
)
def test_streams_that_break_are_no_answers(lines: str, message: str):
    with pytest.raises(ServerError, match=message):
        client(lambda request: httpx.Response(200, text=lines)).one(Request("p", stream=True))


def test_both_forms_of_log_probabilities_are_read():
    old = {"tokens": ["a", "\ufffd"], "token_logprobs": [-1.0, None], "top_logprobs": [{"b": -0.5, "a": -1.0, "c": -3.0}, {}]}
    first, second = answers(Request("p", logprobs=2), [{"choices": [{"index": 0, "text": "a", "logprobs": old}]}])[0].tokens or ()
    assert [each.text for each in first.top] == ["b", "a"] and first.key == "a"
    assert second.key is None and second.logprob != second.logprob
    listed = [{"token": "\ufffd", "bytes": [195], "logprob": -0.7}, {"token": "\ufffd", "bytes": [194], "logprob": -0.9}]
    new = {"content": [{"token": "\ufffd", "bytes": [194], "logprob": -0.9, "top_logprobs": listed}]}
    (token,) = answers(Request("p", logprobs=2), [{"choices": [{"message": {"content": "x"}, "logprobs": new}]}])[0].tokens or ()
    assert token.key == (194,) and [each.key for each in token.top] == [(195,), (194,)]


def test_what_is_told_apart_does_not_depend_on_the_token_drawn():
    """A server adds the drawn token to its alternatives; ties at the edge, and tokens shown alike, are left out."""
    listed = {"a": -1.0, "b": -1.5, "\ufffd": -1.7, "c": -2.0, "d": -2.5, "e": -2.5}

    def position(name: str, extra: dict[str, float]) -> samples.Position:
        old = {"tokens": [name], "token_logprobs": [-9.0], "top_logprobs": [{**listed, **extra}]}
        (token,) = answers(Request("p", logprobs=6), [{"choices": [{"text": "", "logprobs": old}]}])[0].tokens or ()
        return samples.position(token, 6)

    drawn, other = position("z", {"z": -9.0}), position("a", {})
    assert drawn.keys == other.keys == ["a", "b", "c"] and drawn.p == other.p and (drawn.outcome, other.outcome) == (3, 0)


def test_what_a_server_takes_is_found_out():
    asked = Client("http://server", transport=FakeServer(without=frozenset({"min_p", "stream_options"})).transport())
    found = find(asked, "p")
    assert found == Abilities(20, {"top_k": 0, "repetition_penalty": 1.0}, ("min_p",), True, True, False) and not asked.stream_usage


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("localhost:8000", {}, "takes an address"),
        ("http://server", {"model": "other"}, "no model 'other'; it lists fake"),
        ("http://server", {"significance": 2}, "significance"),
        ("http://server", {"max_new_tokens": 0}, "max_new_tokens"),
        ("http://server:port", {}, "takes an address such as .* Invalid port"),
        ("http://server", {"api_key": "k\N{LATIN SMALL LETTER E WITH ACUTE}y"}, "ASCII characters only"),
        ("http://server", {"prompts": "a text"}, "prompts must be a list of texts"),
        ("http://server", {"prompts": []}, "prompts must be a list of texts"),
    ],
)
def test_mistakes(url: str, options: dict[str, Any], message: str):
    with pytest.raises(ConfigurationError, match=message):
        audit_server(url, transport=FakeServer().transport(), **options)


# -- the command --------------------------------------------------------------------------------------------------------


@contextmanager
def running(*faults: str) -> Iterator[str]:
    server = serve(FakeServer(frozenset(faults)))
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["audit", *arguments], prog_name="foredraft")


def test_the_command_prints_a_table_and_the_verdict(tmp_path: Path):
    file, prompts = tmp_path / "audit.json", tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    with running() as url:
        result = command(
            "--server", url, "--prompts", str(prompts), "--max-new-tokens", "16", "--samples", "64", "--at-once", "4", "--json", str(file)
        )
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].startswith(f"EXACT: fake at {url} is exact and reproducible")
    assert json.loads(file.read_text())["at_once"] == 4 and all(len(line) <= 140 for line in result.stdout.splitlines()[:-1])


def test_what_was_checked_before_ctrl_c_is_shown_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(plan: Plan) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(repeating, "streamed", interrupted)
    file = tmp_path / "audit.json"
    with running() as url:
        result = command("--server", url, "--max-new-tokens", "12", "--samples", "4", "--json", str(file))
    assert result.exit_code == 130 and "no fault found, but the audit was interrupted" in result.stdout.splitlines()[-1], result.output
    document = json.loads(file.read_text())
    statuses = {check["name"]: check["status"] for check in document["checks"]}
    assert document["complete"] is False and document["verdict"] == "inconclusive"
    assert statuses[LOADED] == "ok" and statuses[STREAM] == statuses[SAMPLES] == statuses[GREEDY] == "not asked"


def test_a_faulty_server_ends_with_1(tmp_path: Path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(PROMPTS[0])
    with running("leaks a stop string") as url:
        result = command("--server", url, "--prompts", str(prompts), "--max-new-tokens", "12", "--samples", "4")
    assert result.exit_code == 1 and "FAULT: fake at" in result.stdout and "the stop string is in the text" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--server", "http://127.0.0.1:9"], "takes the address of a server that runs"),
        (["--server", "http://x", "--rule", "match", "--shape", "chain(2)"], "--shape, --rule"),
        (["--server", "http://x", "zoo:python-1m"], "TARGET"),
        (["--api-key", "k"], "--api-key needs --server"),
    ],
)
def test_what_cannot_work_is_refused(arguments: list[str], message: str):
    result = command(*arguments)
    assert result.exit_code == 2 and "error: " in result.stderr
    assert message in result.stderr or (message == "--shape, --rule" and "--rule, --shape" in result.stderr)


def test_parts_of_characters_are_no_text():
    """As vLLM and Foredraft name them."""
    tokens = [SimpleNamespace(text=text) for text in ("a", "bytes:\\xf0\\x9f", "bytes:\\x98\\x80")]
    answer = SimpleNamespace(tokens=tokens, text="a\U0001f600", request=SimpleNamespace(extra={}))
    assert not readable(answer) and readable(SimpleNamespace(**{**vars(answer), "tokens": tokens[:1], "text": "a"}))  # type: ignore[arg-type]


def test_a_chunk_is_cut_at_line_feeds_alone():
    said = [{"text": "a\u2028b\u0085c"}, {"text": "d"}]
    body = "".join(f"data: {json.dumps(each, ensure_ascii=False)}\r\n\r\n" for each in said) + "data: [DONE]\n\n"
    assert list(events(httpx.Response(200, content=body.encode()))) == said
    assert "\u2028" not in data(said[0]).decode() and json.loads(data(said[0])[6:]) == said[0]


@needs_kernels
def test_our_own_server_is_exact(tmp_path: Path):
    """By the command, over HTTP. On the kernels, so that the verdict depends on no rounding."""
    prompt = tmp_path / "prompt"
    prompt.write_text("x = [1, 2, 3]\ny = [1, 2,", encoding="utf-8")
    speculator = Speculator("zoo:python-1m", "prompt-lookup", shape="chain(2)", dtype="float32")
    few = ["--samples", "60", "--max-new-tokens", "12", "--at-once", "16", "--prompts", str(prompt)]
    with served(speculator) as url:
        result = CliRunner().invoke(app, ["audit", "--server", url, *few])
    assert result.exit_code == 0 and "EXACT" in result.output and "-approx" not in result.output, result.output
    assert not re.search(r"\b0 tokens drafted", result.output) and "tokens drafted" in result.output

"""The suite of drafters that need no training: who meets whom, replays, what is claimed, and what becomes of what fails."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fake_peers import engine
from typer.testing import CliRunner

from benchmarks import datasets, environment, report, speed_tables
from benchmarks.cli import app
from benchmarks.datasets import Prompt
from benchmarks.drafters import DraftersSuite
from benchmarks.drafters_plan import KINDS, RANDOM_TEXTS, Settings, cells, library_files, methods, turns, with_store
from benchmarks.simulation import Kept, Reading, Setting, Simulation, Texts, simulated
from benchmarks.speed_calls import Measurement
from benchmarks.speed_plan import RANDOM, TEXT
from foredraft.drafters.ngram import NGram
from foredraft.drafters.prompt_lookup import PromptLookup
from foredraft.errors import ConfigurationError

SMALL = Settings(
    targets=("zoo:python-8m",),
    dtypes=("float32",),
    drafters=("prompt-lookup", "suffix", "ngram", "several"),
    members="suffix,ngram",
    suites=("embedded", "chat"),
    lengths=(5,),
    limit=1,
    tokens=8,
    repeats=2,
    replayed="",
    threads=1,
    timeout=20,
)
PLAIN, SUFFIX, NGRAM, MERGED = "foredraft plain", "foredraft suffix, auto", "foredraft ngram, auto", "foredraft several, auto"


def finished(tmp_path, work, **changes):
    run = DraftersSuite(replace(SMALL, peers_path=tmp_path / "peers", work_path=work, **changes))
    run.run()
    return run


def pages(run):
    document = run.document(command="c", environment={**environment.describe(), "threads": 1})
    assert DraftersSuite.read(json.loads(json.dumps(document))).report(document).markdown() == run.report(document).markdown()
    return document, run.tables(), run.report(document).notes


# -- who meets whom -------------------------------------------------------------------------------------------------------


def test_every_drafter_as_it_comes_with_nothing_kept_and_in_chains():
    found = {each.name: each for each in methods(replace(SMALL, lengths=(5, 10)))}
    names = list(found)
    assert names[:2] == [PLAIN, "vllm plain"]
    for name in ("foredraft suffix, chain(10)", "vllm suffix, γ=5", "vllm lookup, γ=10", "foredraft prompt-lookup, chain(5)"):
        assert name in names
    assert "foredraft suffix, auto, nothing kept" not in names  # it keeps nothing as it is
    assert found["foredraft ngram, auto, nothing kept"].fresh and not found[NGRAM].fresh
    assert dict(found[MERGED].options)["drafter"] == "several:suffix,ngram"
    assert [name for name in names if found[name].hopeless] == [f"foredraft {name}, auto, random text" for name in SMALL.drafters]


def test_random_text_is_apart_and_for_those_who_are_there_for_it():
    everyone = methods(SMALL)
    found = cells(SMALL, [("embedded", [1, 2]), ("chat", [3])], everyone, 100)
    texts, others = found[:2], found[2:]
    random = others[0]
    assert len({cell.ids for cell in others}) == len({cell.index for cell in others}) == len(others) == RANDOM_TEXTS
    assert [(cell.scenario, cell.category) for cell in texts] == [(TEXT, "embedded"), (TEXT, "chat")]
    assert not any("random" in name for name in texts[0].methods)
    assert random.scenario == RANDOM and random.temperature > 1 and random.methods[0] == PLAIN
    assert set(random.methods) == {PLAIN, *(each.name for each in everyone if each.hopeless)}
    assert len(cells(replace(SMALL, worst=False), [("chat", [3])], methods(replace(SMALL, worst=False)), 100)) == 1


def test_a_prompt_that_vllm_has_no_room_for_is_refused():
    with pytest.raises(ConfigurationError, match="chat has 2044 tokens"):
        cells(SMALL, [("chat", [1] * 2044)], methods(SMALL), 100)
    alone = replace(SMALL, peers=())
    assert cells(alone, [("chat", [1] * 2044)], methods(alone), 100)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"drafters": ("suffix", "oracle")}, r"oracle.*prompt-lookup"),
        ({"members": "suffix"}, "two or more"),
        ({"members": "suffix,several"}, "several asks"),
        ({"peers": ("openvino",)}, "only vllm"),
        ({"tokens": 1}, "2 or more"),
    ],
)
def test_settings_that_can_not_be_are_refused(changes, said):
    with pytest.raises(ConfigurationError, match=said):
        replace(SMALL, **changes)


def test_so_many_turns_are_taken():
    prompts = [Prompt("a", "chat", ("1", "2")), Prompt("b", "chat", ("3", "4"))]
    assert [each.turns for each in turns(prompts, 3)] == [("1", "2"), ("3",)]
    assert [each.turns for each in turns(prompts, 1)] == [("1",)]
    assert turns(prompts, None) == prompts


def test_suites_by_name_and_by_file(tmp_path, work):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    run = DraftersSuite(replace(SMALL, suites=(*KINDS, str(file)), limit=2, work_path=work))
    turned = [prompt.category for prompt in run.prompts for _ in prompt.turns]
    assert turned == [kind for kind in (*KINDS, "mine") for _ in range(2)]


def test_a_later_turn_follows_what_was_answered():
    class Words:
        def __call__(self, text, add_special_tokens):
            return {"input_ids": [0] * add_special_tokens + [len(word) for word in text.split()]}

        def decode(self, ids, skip_special_tokens):
            return "said"

    prompt = Prompt("a", "chat", ("one three", "four"))
    assert list(datasets.conversation(prompt, Words(), lambda ids: [7, 8])) == [[0, 3, 5], [0, 3, 5, 7, 8, 4]]
    assert list(datasets.conversation(prompt, Words(), lambda ids: None)) == [[0, 3, 5]]
    with pytest.raises(ConfigurationError, match="no token of prompt a"):
        list(datasets.conversation(Prompt("a", "chat", ("",)), lambda text, add_special_tokens: {"input_ids": []}, lambda ids: []))


def test_the_datastore_goes_where_rest_is_named():
    assert with_store("rest", Path("/d/s")) == "rest:/d/s"
    assert with_store("several:suffix,rest", Path("/d/s")) == "several:suffix,rest:/d/s"
    assert with_store("suffix", Path("/d/s")) == "suffix"
    assert not {file.stem for file in library_files()} & {"textwrap", "calendar"}  # suites are made from these


# -- simulation -----------------------------------------------------------------------------------------------------------


def test_a_simulation_keeps_what_greedy_decoding_would():
    """After 1 2 3 4 1 2 the prompt's pass yields 3; of the copy 4 1 the first round keeps 4, and 9 from the target; the last 9 is alone."""
    reading = Reading("s", 6, [1, 2, 3, 4, 1, 2, 3, 4, 9, 9])
    (found,) = simulated(Setting("prompt-lookup"), PromptLookup(), [reading], 3, 10)
    assert found == Kept("s", 0, "prompt-lookup", "", 3, kept=3, passes=2, drafted=2)


def test_what_is_learned_from_one_text_is_known_in_the_next():
    readings = [Reading("s", 2, [1, 2, 3, 4, 5, 6, 7, 8]), Reading("s", 2, [1, 2, 3, 4, 5, 6, 7, 8])]
    learning, forgetting = (simulated(Setting("d"), drafter, readings, 4, 10) for drafter in (NGram(), PromptLookup()))
    assert learning[0].passes == 5 and learning[1].passes < 3
    assert [each.passes for each in forgetting] == [5, 5]


def test_behind_a_known_beginning_the_next_token_is_certain():
    known = Texts([[1, 2, 3], [1, 5]], 8)
    assert known.batch([[1], [1, 2], [5], [1, 2, 3]]).argmax(-1).tolist() == [2, 3, 0, 0]


def test_settings_of_prompt_lookup_are_all_tried_once():
    given = replace(SMALL, drafters=("prompt-lookup", "suffix", "lookahead", "several"), ngrams=(1, 3))
    names = [(each.drafter, each.setting) for each in Simulation.settings(given)]
    lookups = [("prompt-lookup", setting) for setting in ("1 to 1", "2 to 3", "3 to 3")]
    assert names == [("prompt-lookup", ""), ("suffix", ""), ("several", ""), *lookups]  # lookahead reads logits
    merged = replace(given, members="suffix,token-recycling")
    assert "several" not in {each.drafter for each in Simulation.settings(merged)}


def test_simulation_on_real_texts(work):
    changes = {
        "replayed": "zoo:python-8m",
        "replay_limit": 1,
        "replay_tokens": 12,
        "ngrams": (2,),
        "lengths": (3,),
        "drafters": ("prompt-lookup", "suffix"),
    }
    run = DraftersSuite(replace(SMALL, work_path=work, **changes))
    found = Simulation(run.settings, run.read_prompts(1), None).run()
    assert {(each.suite, each.name) for each in found} == {
        (suite, name)
        for suite in ("embedded", "chat")
        for name in ("prompt-lookup", "suffix", "prompt-lookup, 1 to 2", "prompt-lookup, 2 to 2")
    }
    assert all(each.kept == 11 and 3 <= each.passes <= 11 for each in found)


# -- claims ---------------------------------------------------------------------------------------------------------------


def call(method, suite="embedded", index=0, seconds=1.5, scenario=TEXT, rounds=10):
    times = (0.5, *[seconds] * 10)
    return Measurement("t", "bfloat16", scenario, 1, index, suite, method, 0, 11, seconds, times, rounds=rounds, kept=10, passes=11)


@pytest.fixture
def claimed():
    run = DraftersSuite(replace(SMALL, targets=("t",), dtypes=("bfloat16",)))
    run.methods, run.categories = methods(run.settings), ["embedded", "chat"]
    for index, suite in enumerate(("embedded", "chat")):
        run.measurements += [
            call(PLAIN, suite, index),
            call(SUFFIX, suite, index, seconds=1.0, rounds=5),
            call("foredraft suffix, chain(5)", suite, index, seconds=1.1, rounds=5),
            call(NGRAM, suite, index, seconds=0.9),
            call("foredraft ngram, auto, nothing kept", suite, index, seconds=0.6),
            call(MERGED, suite, index, seconds=0.9 if suite == "chat" else 0.91),
            call("vllm suffix, γ=5", suite, index, seconds=1.4, rounds=4),
        ]
    run.measurements += [
        call(PLAIN, RANDOM, scenario=RANDOM),
        call("foredraft suffix, auto, random text", RANDOM, seconds=1.55, scenario=RANDOM),
    ]
    run.simulated = [
        Kept("edit", prompt, drafter, setting, 5, 100, passes, 200)
        for prompt in (0, 1)
        for drafter, setting, passes in (("suffix", "", 20), ("prompt-lookup", "", 25), ("prompt-lookup", "1 to 8", 20))
    ]
    return run


def test_claims_by_hand(claimed):
    found = {figure.name.removeprefix("bfloat16: "): figure for figure in claimed.figures()}

    def measured(name):
        figure = found[name]
        return None if figure.spread is None else round(figure.spread.median, 4), figure.verdict

    for name, value, verdict in [
        ("edit, γ = 5: acceptance length of suffix over prompt lookup's", 1.25, "met"),
        ("edit, γ = 5: acceptance length of suffix over prompt lookup's best setting", 1.0, "missed"),  # more, not as much
        ("embedded: tokens/s of several over its best member's, after the first token", round(0.4 / 0.41, 4), "missed"),
        ("chat: tokens/s of several over its best member's, after the first token", 1.0, "met"),
        ("random text: tokens/s over plain, suffix", round(1.5 / 1.55, 4), "missed"),
        ("random text: tokens/s over plain, ngram", None, "not measured"),
        ("all suites: tokens/s of suffix over vllm's suffix", 1.4, "missed"),
        ("all suites: tokens/s of suffix over vllm's suffix, after the first token", 1.8, "met"),
        ("all suites: acceptance length of suffix over vllm's suffix, γ = 5", 0.8, "missed"),
        ("all suites: tokens/s of prompt-lookup over vllm's ngram", None, "not measured"),
    ]:
        assert measured(name) == (value, verdict), name
    assert found["edit, γ = 5: acceptance length of suffix over prompt lookup's best setting"].bound == "> 1"
    assert found["edit, γ = 5: acceptance length of suffix over prompt lookup's best setting"].how.endswith("(prompt-lookup, 1 to 8)")
    assert found["all suites: tokens/s of suffix over vllm's suffix"].low == 1.5
    how = found["embedded: tokens/s of several over its best member's, after the first token"].how
    assert how == "foredraft several, auto 24.39, foredraft ngram, auto 25.00"  # a row with nothing kept is no member


def test_in_float32_more_than_vllm_is_asked_for(claimed):
    claimed.settings = replace(claimed.settings, dtypes=("float32",))
    assert {figure.bound for figure in claimed.figures() if "tokens/s of suffix over" in figure.name} == {"> 1"}


def test_what_several_has_no_members_beside_is_not_measured(claimed):
    claimed.measurements = [each for each in claimed.measurements if each.method not in (SUFFIX, NGRAM)]
    found = [figure for figure in claimed.figures() if "best member" in figure.name]
    assert found and {figure.verdict for figure in found} == {"not measured"}


# -- runs with fake peers -------------------------------------------------------------------------------------------------


def test_a_run_and_its_report(adapters, tmp_path, work):
    adapters("vllm", second=0.02)
    run = finished(tmp_path, work)
    assert run.failures == []
    text = [each for each in run.measurements if each.scenario == TEXT]
    assert {each.category for each in text} == {"embedded", "chat"} and all(each.same for each in text)
    document, tables, notes = pages(run)
    json.dumps(document, allow_nan=False)
    suffix = next(row for row in tables[2].rows if row[0] == SUFFIX)
    assert suffix[1].startswith(f"{8 / (0.5 + 3 * 0.01):.1f} ") and suffix[2].startswith(f"{0.57 / 0.53:.2f} ")
    titles = [table.title for table in tables]
    assert titles[:4] == ["Figures to reach", "Embedded, float32", "Chat, float32", "All suites, float32"]
    suffix = next(row for row in tables[2].rows if row[0] == "foredraft suffix, chain(5)")
    assert suffix[4].startswith(f"{(0.5 + 3 * 0.02) / (0.5 + 3 * 0.01):.2f}") and suffix[-1] == "2/2"
    assert any("ngram: n-grams of earlier texts" in note and "vLLM's ngram and suffix keep nothing" in note for note in notes)
    assert str(tmp_path) not in json.dumps(document)


class Recorder:
    """A process that answers at once, and keeps what it was asked."""

    def __init__(self):
        self.asked = []

    def ask(self, op, *, limit, **arguments):
        self.asked.append((op, arguments.get("name")))
        if op == "generate":
            rows = [[7] * arguments["tokens"] for _ in arguments["ids"]]
            return {"ids": rows, "seconds": 1.0, "times": [0.5, 1.0], "rounds": 1, "kept": 1}
        return {}

    def cpu_seconds(self):
        return 0.0

    def close(self):
        pass


def test_drafters_forget_between_repeats_and_some_before_every_call(adapters, tmp_path, work):
    recorder = Recorder()
    settings = replace(SMALL, peers=(), drafters=("ngram",), worst=False, suites=("embedded",), limit=2)
    settings = replace(settings, peers_path=tmp_path / "peers", work_path=work)
    run = DraftersSuite(settings, launch=lambda peer, log: recorder)
    run.run()
    assert run.failures == []
    kept, fresh = NGRAM, "foredraft ngram, auto, nothing kept"
    mine = {name: "".join(op[0] for op, whose in recorder.asked if whose == name and op != "load") for name in (PLAIN, kept, fresh)}
    # a warm-up call, then for each of two repeats two prompts: generate a token, forget, generate
    assert mine == {PLAIN: "g" + "gggg" * 2, kept: "g" + "fgggg" * 2, fresh: "g" + "fgfggfg" * 2}


@pytest.mark.parametrize(
    ("how", "stage", "said"),
    [
        pytest.param(
            {"on_load": "if mode == 'suffix': raise ModuleNotFoundError('not installed: arctic')"},
            "set-up",
            "not installed: arctic",
            marks=pytest.mark.nightly,
        ),
        ({"on_generate": "if mode == 'suffix': os._exit(3)"}, "warm-up", "ended with 3"),
    ],
)
def test_a_method_that_vllm_lacks_is_a_row_and_the_others_are_measured(adapters, tmp_path, work, how, stage, said):
    adapters("vllm", **how)
    run = finished(tmp_path, work, worst=False)
    assert [(each.method, each.stage) for each in run.failures] == [("vllm suffix, γ=5", stage)] and said in run.failures[0].message
    _, tables, _ = pages(run)
    by_title = {table.title: table for table in tables}
    rows = {row[0]: row for row in by_title["Embedded, float32"].rows}
    assert rows["vllm suffix, γ=5"][1] == "failed" and rows["vllm lookup, γ=5"][1] != "failed"
    verdicts = {row[0].removeprefix("float32: "): row[3] for row in by_title["Figures to reach"].rows}
    assert verdicts["all suites: tokens/s of suffix over vllm's suffix"] == "not measured"
    assert verdicts["all suites: tokens/s of prompt-lookup over vllm's ngram"] != "not measured"
    if stage == "set-up":
        assert "Failed" not in by_title and speed_tables.missing(run) == "Not installed, and not measured: vllm suffix, γ=5 (arctic)."
    else:
        assert said in by_title["Failed"].rows[0][3]


def test_a_drafter_of_ours_that_fails_is_a_row(adapters, tmp_path, work):
    broken = "if name == 'foredraft ngram, auto': raise ValueError('no such file')"
    (tmp_path / "adapters" / "foredraft.py").write_text(engine("foredraft", on_generate=broken))
    run = finished(tmp_path, work, peers=(), worst=False)
    assert [(each.method, each.stage) for each in run.failures] == [(NGRAM, "warm-up")]
    _, tables, _ = pages(run)
    rows = {row[0]: row for row in tables[1].rows}
    assert rows[NGRAM][1] == "failed" and rows[SUFFIX][1] != "failed"


def test_the_command(adapters, tmp_path, work):
    adapters("vllm", installed=False)
    out = tmp_path / "out"
    given = ["drafters", "--quick", "--target", "zoo:python-8m", "--dtype", "float32", "--drafter", "suffix", "--drafter", "prompt-lookup"]
    given += ["--gamma", "3", "--suite", "embedded", "--replay-tokens", "8", "--threads", "1", "--peers", str(tmp_path / "peers")]
    result = CliRunner().invoke(app, [*given, "--work", str(work), "--out", str(out)])
    assert result.exit_code == 0, result.output
    document = report.load(out / "drafters.json.gz")
    assert document["suite"] == "drafters" and document["simulated"] and document["settings"]["tokens"] == 16
    assert {each["method"] for each in document["failures"]} == {"vllm plain", "vllm lookup, γ=3", "vllm suffix, γ=3"}
    page = (out / "drafters.md").read_text()
    assert "| foredraft suffix, chain(3) |" in page and "## Acceptance length of chains" in page
    assert str(tmp_path) not in page.replace(document["command"], "")
    refused = CliRunner().invoke(app, ["drafters", "--drafter", "oracle", "--peers", str(tmp_path)])
    assert refused.exit_code == 2 and "oracle" in refused.output

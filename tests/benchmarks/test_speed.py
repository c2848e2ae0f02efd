"""The speed suite: its arithmetic with a clock of its own, what becomes of peers that fail, and its report."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks import checkpoints, environment, report, speed_tables
from benchmarks.checkpoints import Checkpoint
from benchmarks.cli import app
from benchmarks.figures import Figure, best
from benchmarks.peer_process import ADAPTERS, PeerError, PeerProcess, find
from benchmarks.report import Report
from benchmarks.speed import Speed
from benchmarks.speed_calls import Calls, Curve, Measurement, Read, first_difference
from benchmarks.speed_plan import Cell, Method, Settings, cells, hopeless, methods
from foredraft.errors import ConfigurationError
from foredraft.estimates import Estimate, quotient
from foredraft.loading import load_model

SMALL = Settings(
    targets=("zoo:python-8m",),
    dtypes=("float32",),
    batches=(1,),
    limit=1,
    tokens=8,
    repeats=2,
    warmups=1,
    worst=False,
    threads=1,
    timeout=20,
)
NOT_INSTALLED = "not installed: make peers installs it"
PLAIN, AUTO = "foredraft plain", "foredraft draft, auto"


def finished(tmp_path, work, clock=None, **changes):
    settings = replace(SMALL, peers_path=tmp_path / "peers", work_path=work, **changes)
    run = Speed(settings, **({} if clock is None else {"clock": clock}))
    run.run()
    return run


def call(method, index=0, repeat=0, **changes):
    times = tuple(0.5 + 0.01 * step for step in range(11))
    like = Measurement("t", "bfloat16", "text", 1, index, "python", method, repeat, 11, 0.6, times, rounds=10, kept=10, passes=11)
    return replace(like, **changes)


# -- arithmetic -----------------------------------------------------------------------------------------------------------


def test_a_quotient_is_a_sum_over_medians():
    tokens, seconds = np.full((2, 3), 10.0), np.array([[1.0, 2.0, 9.0], [4.0, 3.0, 1.0]])
    found = quotient(tokens, seconds)
    assert found.value == pytest.approx(20 / (2 + 3))
    assert found.spread.low <= found.value <= found.spread.high
    assert 20 / (9 + 9) <= found.spread.low < found.spread.high <= 20 / (1 + 1)


def test_quotients_are_paired_by_prompt_and_repeat():
    """Each repeat twice as slow as the last, on both sides: the interval of the quotient is a point."""
    seconds = np.array([[1.0, 2.0, 4.0], [3.0, 6.0, 12.0]])
    tokens = np.ones((2, 3))
    ratio = quotient(tokens, seconds) / quotient(tokens, 2 * seconds)
    assert (ratio.spread.low, ratio.value, ratio.spread.high) == pytest.approx((2, 2, 2))
    assert quotient(tokens, seconds).spread.high > 1.5 * quotient(tokens, seconds).spread.low


def test_calls_of_one_turn_are_compared_whatever_the_machine_does_between_turns():
    """The other side is twice as fast in each turn; one turn in three is ten times as slow for the first prompt, and for both sides."""
    slow = {(0, 1): 10.0}
    calls = Calls(
        [
            call(name, index, repeat, seconds=seconds * slow.get((index, repeat), 1.0 + index + repeat))
            for name, seconds in ((PLAIN, 2.0), (AUTO, 1.0))
            for index in range(2)
            for repeat in range(3)
        ]
    )
    found = calls.in_turns(AUTO, PLAIN)
    assert (found.spread.low, found.value, found.spread.high) == pytest.approx((2, 2, 2))
    mixed = Calls(
        [call(AUTO, seconds=1.0), call(AUTO, repeat=1, seconds=4.0), call(PLAIN, seconds=2.0), call(PLAIN, repeat=1, seconds=2.0)]
    )
    assert mixed.in_turns(AUTO, PLAIN).value == pytest.approx((2 + 0.5) / 2)  # sums of medians say 2 / 2.5
    assert calls.in_turns(AUTO, "nobody") is None


def test_figures_of_calls():
    calls = Calls([call(PLAIN, index, repeat) for index in range(2) for repeat in range(2)])
    assert calls.rate(PLAIN).value == pytest.approx(11 / 0.6)
    assert calls.decoding_rate(PLAIN).value == pytest.approx(100)
    assert calls.acceptance(PLAIN).value == pytest.approx(1)
    assert calls.first_token(PLAIN) == pytest.approx(0.5)
    assert calls.percentiles(PLAIN) == pytest.approx((0.01, 0.01, 0.01))
    assert calls.rate("nobody") is None and calls.percentiles("nobody") is None


def test_tokens_of_the_first_moment_are_not_of_a_round():
    calls = Calls([call(PLAIN, times=(0.5, 0.5, 0.5, 0.6, 0.6), seconds=0.7)])
    assert calls.decoding_rate(PLAIN).value == pytest.approx(2 / 0.2)
    assert calls.percentiles(PLAIN) == pytest.approx((0.0, 0.07, 0.097))


def test_bandwidth_is_paired_with_the_read_beside_it():
    """Twice as slow in the second repeat, memory too: the same share of it."""
    slow = tuple(2 * moment for moment in call(PLAIN).times)
    calls = Calls([call(PLAIN), call(PLAIN, repeat=1, times=slow, seconds=1.2)])
    share = calls.over_reads(PLAIN, 600_000_000, {(0, 0): 80e9, (0, 1): 40e9})
    assert (share.spread.low, share.value, share.spread.high) == pytest.approx((0.75, 0.75, 0.75))
    assert calls.over_reads(PLAIN, 600_000_000, {(0, 0): 80e9}) is None


def test_a_method_that_missed_a_call_has_no_figures():
    calls = Calls([call(PLAIN, index, 0) for index in range(2)] + [call(AUTO, 0, 0)])
    assert calls.finished == [PLAIN] and calls.rate(AUTO) is None
    assert calls.first_token(AUTO) is None and calls.percentiles(AUTO) is None
    assert best([PLAIN, AUTO], calls.rate)[0] == PLAIN


def test_what_is_not_told_is_not_made_up():
    calls = Calls([call(PLAIN, times=(), rounds=None, kept=None)])
    assert calls.rate(PLAIN) is not None
    assert calls.decoding_rate(PLAIN) is None and calls.acceptance(PLAIN) is None and calls.first_token(PLAIN) is None
    assert calls.share(PLAIN, "draft") is None


@pytest.mark.parametrize(
    ("a", "b", "place"), [([[1, 2]], [[1, 2]], None), ([[1, 2]], [[1, 3]], 1), ([[1], [2]], [[1], [3]], 0), ([[1]], [[1, 2]], 1)]
)
def test_first_difference(a, b, place):
    assert first_difference(a, b) == place


# -- claims ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def claimed():
    """A run whose every figure can be worked out by hand: plain rounds of 10 ms, drafts that keep 3 a round of 12.5 ms."""
    settings = Settings(targets=("t",), dtypes=("bfloat16",), batches=(1, 4), peers=("transformers", "vllm"), shapes=("auto", "chain(5)"))
    run = Speed(settings)
    run.methods = [*methods(settings), *hopeless(settings)]
    run.bytes_per_pass = {"t bfloat16": 600_000_000}
    run.reads = [Read("t", "bfloat16", 0, 0, 80e9), Read("t", "float32", 0, 0, 1e9)]
    quick = tuple(0.5 + 0.0125 * (-(-step // 3)) for step in range(31))
    split = {"target": 0.12, "draft": 0.005, "prefill": 0.5, "overhead": 0.0}
    drafted = {"split": split, "times": quick, "seconds": quick[-1], "tokens": 31, "rounds": 10, "kept": 30}
    rows = [call(PLAIN, split={"target": 0.1}), call("transformers plain", seconds=1.2)]
    rows += [call(AUTO, **drafted, predicted=250.0), call("foredraft draft, chain(5)", **drafted)]
    rows += [call("transformers draft, γ=5", seconds=1.2), call("vllm draft, γ=5", tokens=22)]
    rows += [call(PLAIN, scenario="batch", batch=4, tokens=44), call(AUTO, scenario="batch", batch=4, tokens=88)]
    rows += [call(PLAIN, scenario="hopeless draft"), call("foredraft draft, auto, untrained", scenario="hopeless draft", seconds=0.625)]
    run.measurements = rows
    values = {"t1": 0.01, "tn": 0.011, "draft": 0.0015, "target": {"1": 0.01}}
    run.curves = [Curve("t", "bfloat16", "foredraft draft, chain(5)", 5, 1, 0, values)]
    return run


def test_claims_by_hand(claimed):
    found = {figure.name.removeprefix("bfloat16: "): figure for figure in claimed.figures()}

    def measured(name):
        return found[name].spread.median, found[name].verdict

    ours = 31 / 0.625
    for name, value, verdict in [
        ("plain decoding's effective bandwidth over that of a large read", 100 * 0.6 / 80, "missed"),
        ("tokens/s over the best peer's, draft model", ours / (22 / 0.6), "missed"),
        ("tokens/s over transformers' assisted generation", ours / (11 / 1.2), "met"),
        ("speed-up over what acceptance and cost curve allow, foredraft draft, chain(5)", 2.4 / (3 * 10 / 12.5), "met"),
        ("speed-up over what acceptance and its own passes allow, foredraft draft, chain(5)", 2.4 / (3 * 10 / 12.5), "met"),
        ("measured over planner-predicted tokens/s, foredraft draft, auto", 240 / 250, "met"),
        ("hopeless draft, batch 1: tokens/s over plain, foredraft draft, auto, untrained", 0.6 / 0.625, "missed"),
        ("batch 4: tokens/s over plain, foredraft draft, auto", 2.0, "met"),
        ("batch 4 over batch 1: total tokens/s, foredraft draft, auto", (88 / 0.6) / ours, "met"),
    ]:
        assert measured(name) == (pytest.approx(value, rel=1e-3), verdict), name
    assert found["tokens/s over the best peer's, prompt lookup"].verdict == "not measured"
    assert found["measured over planner-predicted tokens/s, foredraft lookup, auto"].verdict == "not measured"
    assert found["tokens/s over the best peer's, draft model"].how == f"foredraft draft, auto {ours:.1f}, vllm draft, γ=5 36.7"


def test_float32_has_bounds_of_its_own_and_no_claim_against_assisted_generation(claimed):
    claimed.settings = replace(claimed.settings, dtypes=("float32",))
    found = {figure.name: figure.low for figure in claimed.figures()}
    assert found["float32: tokens/s over the best peer's, draft model"] == 1.2
    assert not any("assisted" in name for name in found)


def test_on_a_gpu_the_claims_are_others(claimed):
    claimed.settings = replace(claimed.settings, device="cuda")
    names = {figure.name: figure.low for figure in claimed.figures()}
    assert names["bfloat16: plain decoding's effective bandwidth over that of a device copy"] == 0.55
    assert names["bfloat16: tokens/s over transformers' compiled plain decoding"] == 2
    assert not any("best peer" in name for name in names)


def test_a_figure_with_two_bounds():
    spread = Estimate(1.2, np.array([1.2])).spread
    assert Figure("f", spread, 0.9, 1.1).verdict == "missed"
    assert Figure("f", spread, 0.9).verdict == "met"
    assert Figure("f", None, 0.9, 1.1).bound == "0.9–1.1"


# -- who meets whom -------------------------------------------------------------------------------------------------------


def test_methods_are_all_combinations():
    names = [each.name for each in methods(replace(SMALL, peers=("transformers", "llamacpp", "openvino"), lengths=(3, 5)))]
    assert names[:5] == [PLAIN, "transformers plain", "llamacpp plain", "openvino plain, PA", "openvino plain, SDPA"]
    for name in (AUTO, "foredraft draft, chain(5)", "transformers draft, γ=3", "llamacpp lookup, ngram-simple, γ=5"):
        assert name in names
    assert len(set(names)) == len(names)


def test_rules_count_where_foredraft_samples_and_then_peers_stay_away():
    sampled = methods(replace(SMALL, temperature=1.0, rules=("block", "match"), drafters=("ngram:zoo:python-ngram",)))
    assert {each.side for each in sampled} == {"foredraft"}
    assert {dict(each.options)["rule"] for each in sampled if each.mode != "plain"} == {"block", "match"}
    assert any(dict(each.options).get("drafter") == "ngram:zoo:python-ngram" for each in sampled)


def test_cells_of_every_scenario():
    settings = replace(SMALL, batches=(1, 3), worst=True)
    everyone = [*methods(settings), *hopeless(settings)]
    found = cells(settings, [("a", list(range(40))), ("b", list(range(50, 100)))], everyone, 1000)
    kinds = [(cell.scenario, cell.batch) for cell in found]
    pairs = [("hopeless draft", 1), ("random text", 1), ("hopeless draft", 3), ("random text", 3)]
    assert kinds == [("text", 1), ("text", 1), ("batch", 3), *pairs]
    assert [len(row) for row in found[2].ids] == [40, 50, 35]  # prompts run out: the first again, cut shorter
    assert not any("untrained" in name or "random" in name for name in (*found[0].methods, *found[2].methods))
    assert found[3].methods == (PLAIN, "foredraft draft, auto, untrained")
    assert found[4].methods == (PLAIN, "foredraft lookup, auto, random text") and found[4].temperature > 1
    assert set(found[2].methods) == {PLAIN, AUTO, "foredraft lookup, auto"}


def test_settings_that_can_not_be_are_refused():
    with pytest.raises(ConfigurationError, match=r"guess.*plain"):
        Settings(modes=("guess",))
    with pytest.raises(ConfigurationError, match="2 or more"):
        Settings(tokens=1)


# -- checkpoints ----------------------------------------------------------------------------------------------------------


def test_zeros_are_told_apart_and_the_function_stays():
    from foredraft import inflate, zoo

    small = zoo.load("python-8m", dtype=torch.float32)
    model = inflate(small, hidden_size=256, layers=10)
    ids = torch.arange(5, 25)[None]
    before = model(ids).logits
    assert checkpoints.told_apart(model) == 4  # two layers more, each with two silent matrices
    matrices = [each for each in model.parameters() if each.dim() == 2]
    assert all(each.any() for each in matrices)
    assert torch.equal(model(ids).logits, before)


def test_bytes_of_a_pass(work):
    found = checkpoints.written("zoo:python-8m", work)
    model = load_model("zoo:python-8m")
    expected = sum(each.numel() for each in model.parameters())  # the embedding is the output layer, and counts once
    assert checkpoints.pass_bytes(found.path, "float32") == 4 * expected
    assert checkpoints.pass_bytes(found.path, "bfloat16") == 2 * expected


def test_an_embedding_that_is_only_looked_up_is_not_read(tmp_path):
    from safetensors.torch import save_file

    weights = {"model.embed_tokens.weight": torch.zeros(100, 4), "lm_head.weight": torch.zeros(100, 4), "a.weight": torch.zeros(4, 4)}
    save_file(weights, tmp_path / "model.safetensors")
    assert checkpoints.pass_bytes(tmp_path, "float32") == 4 * (400 + 16)
    assert checkpoints.pass_bytes(tmp_path / "nothing", "float32") is None


def test_an_untrained_draft_has_the_shape_and_nothing_else(work):
    draft = checkpoints.written("zoo:python-1m", work)
    lost = checkpoints.untrained(draft, work)
    assert checkpoints.pass_bytes(lost.path, "float32") == checkpoints.pass_bytes(draft.path, "float32")
    knows, guesses = (load_model(str(each.path))(torch.arange(5, 45)[None]).logits.argmax(-1) for each in (draft, lost))
    assert (knows == guesses).float().mean() < 0.2


def test_a_target_that_is_no_folder_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="no folder with a checkpoint"):
        checkpoints.written(str(tmp_path), tmp_path)
    assert isinstance(checkpoints.written("zoo:python-8m", tmp_path), Checkpoint)


# -- processes ------------------------------------------------------------------------------------------------------------


def process(tmp_path, name="vllm"):
    return PeerProcess(find(name, tmp_path / "peers"), threads=1, log=tmp_path / "log")


def state_of(pid):
    time.sleep(0.01)
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_the_conversation(adapters, tmp_path):
    adapters("vllm")
    one = process(tmp_path)
    assert one.ask("start", limit=20, threads=1, device="cpu", folder="") == {"versions": {"fake": "vllm 1.0"}}
    assert one.cpu_seconds() is None or one.cpu_seconds() >= 0
    with pytest.raises(PeerError, match=r"AttributeError.*no_such"):
        one.ask("no_such", limit=20)
    assert one.ask("prepare", limit=20, checkpoint="c", folder="", dtype="d") == "c.d"  # it is still there
    if sys.platform == "linux":
        assert any(state_of(one.process.pid) == "T" for _ in range(200))  # it is stopped while it has nothing to do
    one.close()
    assert "this is no answer" in (tmp_path / "log").read_text()
    with pytest.raises(PeerError, match="ended"):
        one.ask("start", limit=20)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"on_load": "os.kill(os.getpid(), signal.SIGKILL)"}, "killed by signal SIGKILL"),
        ({"on_load": "print('no room', file=sys.stderr); os._exit(3)"}, "ended with 3: no room"),
        ({"on_load": "time.sleep(60)"}, "no answer to 'load' within 1 s"),
        ({"on_load": "raise ValueError('not me')"}, "ValueError: not me"),
        ({"on_load": "raise ValueError('Raised at core.cpp:7:\\nnot me')"}, "ValueError: not me"),
    ],
)
def test_what_goes_wrong_is_said(adapters, tmp_path, how, said):
    adapters("vllm", **how)
    one = process(tmp_path)
    limit = 1 if "within" in said else 20
    with pytest.raises(PeerError, match=said):
        one.ask("load", limit=limit, name="a", checkpoint="", draft=None, dtype="", mode="plain", length=0, ngram=0, options={})
    one.close()


def test_an_answer_that_is_none(adapters, tmp_path):
    adapters("vllm")
    (tmp_path / "adapters" / "serve.py").write_text("for line in open(0): print('gibberish', flush=True)\n")
    with pytest.raises(PeerError, match=r"its answer to 'start' is no answer: 'gibberish'"):
        process(tmp_path).ask("start", limit=20)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a stopped process outlives a driver that is killed")
def test_nobody_stays_behind_when_the_driver_dies(tmp_path):
    code = f"""
import os
from pathlib import Path
from benchmarks.peer_process import PeerProcess, find
one = PeerProcess(find("foredraft", Path({str(tmp_path)!r})), threads=1, log=Path({str(tmp_path / "log")!r}))
try:
    one.ask("no_such", limit=20)
except Exception:
    print(one.process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    left = int(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True).stdout)

    def gone():
        try:
            return state_of(left) in "ZX"
        except OSError:
            return True

    assert any(gone() for _ in range(500))


def test_a_peer_that_is_not_there(tmp_path):
    with pytest.raises(PeerError, match="make peers"):
        find("vllm", tmp_path)
    with pytest.raises(PeerError, match="no adapter for 'gpt'"):
        find("gpt", tmp_path)
    assert find("transformers", tmp_path).python == Path(sys.executable)


# -- runs with fake peers -------------------------------------------------------------------------------------------------


def test_a_run_and_its_report(adapters, tmp_path, work):
    adapters("transformers", second=0.03)
    adapters("vllm", second=0.02)
    ticks = count()
    run = finished(tmp_path, work, clock=lambda: next(ticks) * 0.01, peers=("transformers", "vllm"), batches=(1, 2), worst=True, limit=2)
    assert run.failures == []
    assert [each.rate for each in run.reads] == [pytest.approx((1 << 20) / 0.01)] * len(run.reads) and run.reads
    text = [each for each in run.measurements if each.scenario == "text"]
    assert len({each.method for each in text}) == 3 * 3 + 2 and {each.repeat for each in text} == {0, 1}
    assert all(each.same and each.same_as_reference for each in text) and run.reference == "transformers plain"
    first = {(each.repeat, each.index): each.method for each in reversed(text)}
    assert first[0, 0] != first[1, 0] == first[0, 1]  # also with an even number of cells
    assert {each.scenario for each in run.measurements} == {"text", "batch", "hopeless draft", "random text"}
    assert all(each.same is None for each in run.measurements if each.scenario == "random text")
    calls = Calls(text)
    assert calls.rate("vllm plain").value == pytest.approx(8 / (0.5 + 7 * 0.02))
    assert calls.acceptance("vllm draft, γ=5").value == pytest.approx(7 / 3)
    assert calls.equal("vllm plain") == (4, 4, None)
    document = run.document(command="c", environment={**environment.describe(), "threads": 1})
    page = run.report(document).markdown()
    assert "## Figures to reach" in page and "| foredraft draft, auto |" in page and "vllm 1.0" in page
    report.save(tmp_path / "speed.json.gz", document)
    again = report.load(tmp_path / "speed.json.gz")
    assert again == document and Speed.read(again).report(again).markdown() == page
    drawn = run.charts(tmp_path / "out", "speed")
    assert sorted(drawn) == [f"speed-{name}-float32.png" for name in ("cost", "depth", "speedup", "split")]
    assert all((tmp_path / "out" / name).stat().st_size > 5000 for name in drawn)


@pytest.mark.parametrize(
    ("how", "stage", "said"),
    [
        ({"on_generate": "os.kill(os.getpid(), signal.SIGKILL)"}, "warm-up", "SIGKILL"),
        ({"on_generate": "if self.calls > 1: os.kill(os.getpid(), signal.SIGKILL)"}, "measurement", "SIGKILL"),
        ({"on_generate": "time.sleep(60)"}, "warm-up", "within 1 s"),
        ({"on_load": "raise MemoryError('too large')"}, "set-up", "MemoryError: too large"),
        ({"on_answer": "rows = [row[:-1] for row in rows]"}, "warm-up", r"[7] tokens came back where 1 of 8 were asked for"),
        ({"installed": False}, "set-up", "not installed"),
    ],
)
def test_a_peer_that_fails_is_a_row(adapters, tmp_path, work, how, stage, said):
    adapters("vllm", **how)
    run = finished(tmp_path, work, peers=("vllm",), modes=("plain",), timeout=1 if "within" in said else 20)
    assert [(each.method, each.stage) for each in run.failures] == [("vllm plain", stage)]
    assert said in run.failures[0].message
    assert {each.method for each in run.measurements if each.method == PLAIN} == {PLAIN}
    tables = {table.title: table for table in run.tables()}
    if said == "not installed":
        assert "Failed" not in tables and speed_tables.missing(run) == "Not installed, and not measured: vllm (make peers installs it)."
    else:
        assert tables["Failed"].rows[0][0] == "vllm plain" and said in tables["Failed"].rows[0][3] and not speed_tables.missing(run)
    assert any("not measured" in row for row in tables["Figures to reach"].rows)


def test_a_peer_that_dies_takes_those_in_its_process_along_and_nobody_else(adapters, tmp_path, work):
    adapters("transformers", on_generate="if mode == 'draft': os._exit(5)")
    run = finished(tmp_path, work, peers=("transformers",))
    assert {each.method for each in run.failures} == {"transformers draft, γ=5", "transformers lookup, γ=5", "transformers plain"}
    done = Calls(run.measurements).finished
    assert done and all(name.startswith("foredraft") for name in done)


def test_a_peer_with_another_text_is_measured_and_shown(adapters, tmp_path, work):
    adapters("transformers", on_answer="if mode == 'draft' and tokens > 5: rows[0][5] += 1")
    run = finished(tmp_path, work, peers=("transformers",), modes=("plain", "draft"))
    assert run.failures == []
    calls = Calls(run.measurements)
    assert calls.equal("transformers draft, γ=5") == (0, 2, 5) and calls.equal(AUTO) == (2, 2, None)
    table = next(each for each in run.tables() if each.title.startswith("Equality"))
    assert ("transformers draft, γ=5", "0 of 2", "5", "0 of 2", "5") in table.rows


def test_turns_after_the_first_follow_the_answer(adapters, tmp_path, work):
    questions = tmp_path / "question.jsonl"
    questions.write_text('{"question_id": 1, "category": "writing", "turns": ["def a", "def b"]}\n')
    run = finished(tmp_path, work, peers=(), prompts=(str(questions),), limit=None)
    assert {each.index for each in run.measurements} == {0, 1} and {each.category for each in run.measurements} == {"writing"}


def test_nobody_always_follows_the_same(adapters, tmp_path, work):
    run = finished(tmp_path, work, peers=(), limit=3, repeats=3, modes=("plain", "lookup"))
    first = [each.method for each in run.measurements][::3]
    assert len(set(first)) == 3


# -- the real adapters that need nothing else -----------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["foredraft", "transformers"])
def test_adapters_of_this_environment(side, work):
    import importlib.util

    spec = importlib.util.spec_from_file_location(f"adapter_{side}", ADAPTERS / f"{side}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    one = module.Engine()
    assert one.start(threads=1, device="cpu", folder="")["versions"]["torch"] == torch.__version__
    target, draft = (str(checkpoints.written(name, work).path) for name in ("zoo:python-8m", "zoo:python-1m"))
    texts = {}
    for mode in ("plain", "draft", "lookup"):
        one.load(name=mode, checkpoint=target, draft=draft, dtype="float32", mode=mode, length=3, ngram=3, options={})
        got = one.generate(name=mode, ids=[list(range(10, 40))], tokens=12, temperature=0.0, seed=0)
        json.dumps(got)
        texts[mode] = got["ids"]
        assert len(got["ids"][0]) == len(got["times"]) == 12 and got["times"] == sorted(got["times"])
        assert 0 < got["times"][0] < got["times"][-1] <= got["seconds"] * 1.001
        assert got["kept"] >= got["rounds"] and got["passes"] == got["rounds"] + 1
        assert 0.5 * got["seconds"] < sum(got["split"].values()) < 1.1 * got["seconds"]  # a stall may fall between them
    assert texts["plain"] == texts["draft"] == texts["lookup"]
    two = one.generate(name="plain", ids=[list(range(10, 40)), list(range(20, 30))], tokens=4, temperature=0.0, seed=0)
    assert [len(row) for row in two["ids"]] == [4, 4] and two["ids"][0] == texts["plain"][0][:4]


def test_transformers_is_not_slowed_by_being_watched_on_a_gpu(work, monkeypatch):
    """Nobody waits for single passes there, and what is compiled is compiled without hooks."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("adapter_watched", ADAPTERS / "transformers.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    one, waits = module.Engine(), []
    one.start(threads=1, device="cpu", folder="")
    target = str(checkpoints.written("zoo:python-1m", work).path)
    for mode in ("plain", "compiled"):
        one.load(name=mode, checkpoint=target, draft=None, dtype="float32", mode=mode, length=0, ngram=3, options={})
    one.device = "cuda"  # as far as it knows
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
    plain, compiled = (one.generate(name=mode, ids=[[5, 6, 7]], tokens=4, temperature=0.0, seed=0) for mode in ("plain", "compiled"))
    assert len(waits) == 2 * 2 and plain["passes"] == 4 and "split" not in plain
    assert "passes" not in compiled and len(compiled["times"]) == 4


def test_the_cost_curve_is_measured(work, monkeypatch):
    import importlib.util

    spec = importlib.util.spec_from_file_location("adapter_foredraft", ADAPTERS / "foredraft.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SECONDS", 0.3)
    one = module.Engine()
    one.start(threads=1, device="cpu", folder="")
    target, draft = (str(checkpoints.written(name, work).path) for name in ("zoo:python-8m", "zoo:python-1m"))
    one.load(name="a", checkpoint=target, draft=draft, dtype="float32", mode="draft", length=3, ngram=3, options={})
    drafts, drafter = [], one.speculators["a"].drafter
    draft = drafter.draft
    monkeypatch.setattr(drafter, "draft", lambda request: drafts.append(request.proposal) or draft(request))
    for temperature, proposal in ((0.0, "deterministic"), (0.7, "iid")):
        drafts.clear()
        curve = one.costs(name="a", rows=1, length=3, context=64, temperature=temperature, seconds=0.3)
        assert curve["t1"] > 0 and curve["tn"] > 0 and curve["draft"] > 0 and "1" in curve["target"]
        assert proposal in drafts
    assert "target" not in one.costs(name="a", rows=1, length=3, context=64, seconds=0.1, sizes=False)


# -- the command ----------------------------------------------------------------------------------------------------------


def command(tmp_path, work, *more):
    options = ["--target", "zoo:python-8m", "--dtype", "float32", "--threads", "1", "--quick", "--tokens", "8", "--limit", "1"]
    return CliRunner().invoke(app, ["speed", *options, "--peers", str(tmp_path / "peers"), "--work", str(work), *more])


def test_the_command_writes_everything(adapters, tmp_path, work):
    adapters("transformers")
    adapters("vllm", installed=False)
    result = command(tmp_path, work, "--peer", "transformers", "--peer", "vllm", "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    document = report.load(tmp_path / "out" / "speed.json.gz")
    assert {(each["method"].split()[0], each["message"]) for each in document["failures"]} == {("vllm", NOT_INSTALLED)}
    page = (tmp_path / "out" / "speed.md").read_text()
    assert "Not installed, and not measured: vllm (make peers installs it)." in page and "| vllm" not in page
    assert "![speed-speedup-float32](speed-speedup-float32.png)" in page
    assert str(tmp_path) not in page.replace(document["command"], "")  # a report says nothing of where it was made


def test_a_failure_of_what_is_installed_makes_the_exit_code_1(adapters, tmp_path, work):
    adapters("vllm", on_load="raise ValueError('broken')")
    assert command(tmp_path, work, "--peer", "vllm").exit_code == 1


def test_what_can_not_be_asked_ends_with_2(adapters, tmp_path, work):
    for wrong, said in [(("--mode", "guess"), "guess"), (("--prompts", str(tmp_path / "none.jsonl")), "none.jsonl")]:
        result = command(tmp_path, work, "--peer", "none", *wrong)
        assert result.exit_code == 2 and said in "".join(result.output.split())


def test_without_charts_the_page_says_so():
    assert "foredraft[plot]" in Report("Speed", [], [], []).markdown() and "Charts" not in Report("Trees", [], []).markdown()


def test_method_names_and_cells_are_plain_values():
    assert Method("vllm", "draft", "γ=5").name == "vllm draft, γ=5"
    assert Cell("text", 0, "a", ((1, 2), (3, 4)), 5, 0.0, ()).key == ("text", 2, 0)

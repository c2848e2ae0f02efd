"""The benchmarks: their arithmetic, their document, and that what fails is never given another's figures."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kernel_cases import needs_kernels
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from benchmarks import drafters_plan, environment, hosts, kernels, libraries, overhead, peer_process, prompts, report, verification, xnnpack
from benchmarks.cli import app
from benchmarks.figures import Figure
from benchmarks.overhead import Measurement, Overhead, Settings, measurement
from benchmarks.overhead_methods import Method, methods, of_transformers
from benchmarks.passes import Pass, PassRecorder
from benchmarks.report import Table
from foredraft.backends import native
from foredraft.backends.packing import onednn_lays_out
from foredraft.errors import ConfigurationError
from foredraft.estimates import Spread, turned
from foredraft.tree import TokenTree
from foredraft.verification import names as rule_names

QUICK = Settings(target="zoo:python-1m", threads=1, tokens=7, prompts=1, repeats=2, noise_vocab_size=500, noise_repeats=2, dtype="float32")
OPTIONS = [
    argument
    for name in ("target", "threads", "tokens", "prompts", "repeats", "noise_vocab_size", "noise_repeats", "dtype")
    for argument in ("--beginnings" if name == "prompts" else f"--{name.replace('_', '-')}", str(getattr(QUICK, name)))
]
WHO = {"method": "c", "repeat": 0, "prompt": 0, "same_as_plain": True}


def tiny_llama(vocab_size):
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )
    return LlamaForCausalLM(config).eval()


# -- arithmetic ---------------------------------------------------------------------------------------------------------------


def test_a_round_starts_after_the_prefill():
    """A prompt of 10, prefilled alone, then rounds of 3 and 1 tokens; drafts between."""
    passes = [
        Pass("target", 1.0, 2.0, 10, 0),
        Pass("draft", 2.1, 2.2, 1, 10),
        Pass("target", 2.5, 3.0, 4, 10),
        Pass("target", 3.5, 4.0, 4, 13),
    ]
    got = measurement(passes, 10, 5, 0.5, 4.25, **WHO)
    assert (got.rounds, got.round_tokens, got.target_passes, got.draft_passes) == (2, 4, 3, 1)
    assert got.first_pass_at == pytest.approx(1.5)
    assert got.round_wall == pytest.approx(2.25)
    assert got.round_outside == pytest.approx(2.25 - 1.0 - 0.1)
    assert got.outside == pytest.approx(3.75 - 2.0 - 0.1)


def test_a_first_pass_that_verifies_a_draft_yields_tokens_of_its_own():
    """transformers drafts before the prefill: two of its drafts survive, so three tokens come from the first pass."""
    passes = [Pass("draft", 0.1, 0.2, 10, 0), Pass("target", 1.0, 2.0, 15, 0), Pass("target", 3.0, 4.0, 6, 12)]
    got = measurement(passes, 10, 5, 0.0, 4.5, **WHO)
    assert (got.rounds, got.round_tokens) == (1, 2)
    assert got.round_outside == pytest.approx(1.5)  # the draft before the prefill is no part of a round


def test_a_prefill_in_chunks_is_no_round():
    passes = [Pass("target", 0.0, 1.0, 8, 0), Pass("target", 1.0, 2.0, 2, 8), Pass("target", 2.0, 3.0, 1, 10)]
    assert measurement(passes, 10, 2, 0.0, 3.0, **WHO).rounds == 1


def sample(method, repeat, **changes):
    like = Measurement(method, repeat, 0, 64, 20, 0, 2.0, 1.0, 0.0, 0.1, 20, 63, 1.9, 0.5, True)
    return replace(like, **changes)


def test_ratios_are_paired_within_a_repeat():
    """Each repeat is half as slow again as the last on both sides; the ratio does not see it."""
    rows = [sample("transformers plain", n, round_outside=0.4 * (n + 1)) for n in range(3)]
    rows += [sample("foredraft plain", n, round_outside=0.1 * (n + 1)) for n in range(3)]
    ratio = overhead.ratios(rows)["plain"]["outside_per_round"]
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((0.25, 0.25, 0.25))


def test_a_method_that_missed_a_call_has_no_median():
    rows = [sample("transformers plain", n) for n in range(3)] + [sample("foredraft plain", n) for n in range(2)]
    assert list(overhead.summaries(rows)) == ["transformers plain"]
    assert set(overhead.ratios(rows)["plain"].values()) == {None}


@pytest.mark.parametrize(
    ("at_most", "spread", "verdict"),
    [
        (True, Spread(0.4, 0.3, 0.7), "met"),
        (True, Spread(0.6, 0.4, 0.7), "within noise"),
        (True, Spread(0.6, 0.55, 0.7), "missed"),
        (False, Spread(0.4, 0.3, 0.6), "within noise"),
        (False, Spread(0.6, 0.3, 0.7), "met"),
        (False, Spread(0.4, 0.3, 0.45), "missed"),
        (True, None, "not measured"),
    ],
)
def test_verdicts(at_most, spread, verdict):
    assert Figure("f", spread, None if at_most else 0.5, 0.5 if at_most else None, noise=True).verdict == verdict


def test_nobody_always_follows_the_same():
    assert {tuple(turned(["a", "b", "c"], by)) for by in range(6)} == {("a", "b", "c"), ("b", "c", "a"), ("c", "a", "b")}


# -- recording ----------------------------------------------------------------------------------------------------------------


def test_passes_are_recorded_and_the_hooks_taken_off():
    model = tiny_llama(50)
    before = dict(vars(model))
    with PassRecorder(target=model) as recorder:
        model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert [(each.model, each.start, each.nodes) for each in recorder.passes] == [("target", 0, 3), ("target", 3, 1), ("target", 4, 1)]
    assert all(each.begin < each.end for each in recorder.passes)
    assert vars(model) == before and not model._forward_hooks and not model._forward_pre_hooks


def test_prompts_share_no_beginning_worth_reusing():
    assert len({text[:30] for text in prompts.PYTHON}) == len(prompts.PYTHON)


def test_the_environment_names_no_place():
    described = environment.describe()
    assert described["packages"]["torch"] and described["threads"] >= 1
    assert str(Path.home()) not in json.dumps(described) and str(Path.cwd()) not in json.dumps(described)


# -- a run --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmarks")
    result = CliRunner().invoke(app, ["overhead", *OPTIONS, "--out", str(folder)])
    assert result.exit_code == 0, result.output
    return report.load(folder / "overhead.json.gz"), (folder / "overhead.md").read_text()


def test_the_document_has_its_schema(written):
    document, _ = written
    names = {each.name for each in methods()}
    assert (document["schema"], document["suite"], document["failures"]) == (2, "overhead", [])
    assert document["settings"]["tokens"] == QUICK.tokens and document["command"].startswith("python -m benchmarks")
    assert {"commit", "dirty", "cpu", "threads", "packages", "date"} <= document["environment"].keys()
    assert {each["method"] for each in document["measurements"]} == names
    assert len(document["measurements"]) == len(names) * QUICK.repeats * QUICK.prompts
    assert {each["nodes"] for each in document["noise"]} == {1, QUICK.draft_length + 1}
    assert [each["verdict"] in ("met", "within noise", "missed") for each in document["figures"]] == [True] * 7


def test_both_sides_do_the_same_work(written):
    """float32: the same tokens everywhere, and as many passes as the definition of each mode says."""
    document, _ = written
    assert {each["same_as_plain"] for each in document["measurements"]} == {True}
    for each in document["measurements"]:
        assert each["tokens"] == QUICK.tokens
        assert 0 < each["round_outside"] < each["wall"] - each["target_seconds"] - each["draft_seconds"]
        if each["method"].endswith("plain"):
            assert each["rounds"] == QUICK.tokens - 1 and each["draft_passes"] == 0
        if each["method"].endswith("draft-model"):
            assert each["draft_passes"] > each["rounds"] and each["draft_seconds"] > 0


def test_the_markdown_holds_the_tables(written):
    _, text = written
    assert text.startswith("# Overhead") and "| foredraft prompt-lookup |" in text and "returned the tokens of plain transformers" in text


# -- failures -----------------------------------------------------------------------------------------------------------------


def broken(side, mode, when):
    """A method that fails at set-up, in the warm-up, or once in its second repeat."""

    def build(field):
        if when == "set-up":
            raise ValueError("no such thing")
        decode, calls = of_transformers(field), []

        def fail(prompt):
            calls.append(prompt)
            if when == "warm-up" or len(calls) == 3:
                raise ValueError("no such thing")
            return decode(prompt)

        return fail

    return Method(side, mode, build)


@pytest.mark.parametrize("when", ["set-up", "warm-up", "measurement"])
def test_a_failure_stays_a_failure(when):
    settings = replace(QUICK, prompts=1, repeats=3, noise_repeats=0)
    run = Overhead(settings, compared=[methods()[0], broken("foredraft", "plain", when)])
    run.run()
    document = run.document(command="c", environment=environment.describe())
    assert [(each["method"], each["stage"], each["message"]) for each in document["failures"]] == [
        ("foredraft plain", when, "ValueError: no such thing")
    ]
    measured = [each["method"] for each in document["measurements"]]
    assert measured.count("foredraft plain") == (when == "measurement")  # the repeat before; after a failure it is out
    assert list(overhead.summaries(run.measurements)) == ["transformers plain"]
    assert set(overhead.ratios(run.measurements)["plain"].values()) == {None}
    assert all(each["verdict"] == "not measured" for each in document["figures"]) and run.failed()
    assert "| foredraft plain |" in run.report(document).markdown()


def test_without_the_reference_no_tokens_are_compared():
    settings = replace(QUICK, prompts=1, repeats=1, noise_repeats=0)
    run = Overhead(settings, compared=[broken("transformers", "plain", "warm-up"), methods()[1]])
    run.run()
    assert [each.same_as_plain for each in run.measurements] == [None]
    assert "not compared" in run.notes({})[-1]


def test_a_failure_makes_the_exit_code_1(tmp_path):
    """A draft of another vocabulary: both sides refuse it, the other modes are measured."""
    tiny_llama(50).save_pretrained(tmp_path / "draft")
    quick = [*OPTIONS, "--beginnings", "1", "--repeats", "1", "--noise-repeats", "0"]
    result = CliRunner().invoke(app, ["overhead", *quick, "--draft", str(tmp_path / "draft"), "--out", str(tmp_path)])
    assert result.exit_code == 1
    document = report.load(tmp_path / "overhead.json.gz")
    assert {each["method"] for each in document["failures"]} == {"transformers draft-model", "foredraft draft-model"}
    assert len({each["method"] for each in document["measurements"]}) == 4


def test_too_few_tokens_are_refused():
    with pytest.raises(ConfigurationError, match="7 or more"):
        replace(QUICK, tokens=6)
    assert CliRunner().invoke(app, ["overhead", "--tokens", "6"]).exit_code == 2


def test_a_model_that_is_none_is_an_error_of_the_caller():
    result = CliRunner().invoke(app, ["overhead", "--target", "./no-such-model"])
    assert result.exit_code == 2 and "no-such-model" in result.output


def test_tables_are_written_as_markdown():
    assert Table("T", ("a", "b"), [("x", "1")]).markdown() == "## T\n\n| a | b |\n| --- | ---: |\n| x | 1 |\n"


# -- the verification suite ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def verified(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verification")
    options = ["--shape", "product(2,2)", "--chain", "chain(2)", "--vocab-size", "300", "--threads", "1", "--repeats", "3"]
    result = CliRunner().invoke(app, ["verification", *options, "--rows", "2", "--out", str(folder)])
    assert result.exit_code == 0, result.output
    return report.load(folder / "verification.json.gz"), (folder / "verification.md").read_text()


def test_the_verification_suite_times_every_rule(verified):
    document, text = verified
    assert (document["schema"], document["suite"], document["figures"]) == (2, "verification", [])
    assert {each["rule"] for each in document["methods"]} == set(rule_names())
    assert len(document["measurements"]) == 3 * len(document["methods"])
    for each in document["measurements"]:
        assert set(each["seconds"]) == {"verification", "processors", "softmax", "rule"}
        assert min(each["seconds"].values()) > 0 and 0 <= each["accepted"] <= 2
    assert text.startswith("# Verification") and "| typical | deterministic | product(2,2) | LOSSY |" in text
    assert "product(2,2) has 6 drafted nodes" in text


def test_its_repeats_have_noise_of_their_own(verified):
    """Trees and verdicts change from repeat to repeat, and are the same for the same seed."""
    document, _ = verified
    kept = [each["accepted"] for each in document["measurements"]]
    assert len(set(kept)) > 2


def test_its_shapes_are_checked():
    for options, said in [(["--chain", "product(2)"], "branches"), (["--shape", "dynamic(depth=2,k=2,total=4)"], "static")]:
        result = CliRunner().invoke(app, ["verification", *options])
        assert result.exit_code == 2 and said in result.output


def test_it_claims_for_gpus_alone():
    run = verification.Verification(verification.Settings(shape="product(2)", chain="chain(1)", vocab_size=50, threads=1, repeats=1))
    run.run()
    assert run.figures() == []
    run.settings = replace(run.settings, device="cuda")
    assert [each.name.partition(",")[0] for each in run.figures()] == ["match", "traversal", "traversal"]


# -- the kernels suite -------------------------------------------------------------------------------------------------------


def test_the_kernels_suite_times_every_configuration_and_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "READ", 1 << 20)
    monkeypatch.setattr(libraries, "COPIES", 1 << 17)
    options = [
        "--target",
        "zoo:python-1m",
        "--configurations",
        "float32/eager bfloat16/packed",
        "--passes",
        "1x1 2x3",
        "--contexts",
        "8 20",
        "--products",
        "128x256",
        "--tokens",
        "1 9",
        "--peers",
        str(tmp_path),
    ]
    result = CliRunner().invoke(app, ["kernels", *options, "--repeats", "2", "--threads", "1", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    found = report.load(tmp_path / "kernels.json.gz")
    timed = [(each["configuration"], each["rows"], each["nodes"], each["context"], each["repeat"]) for each in found["measurements"]]
    names, contexts = ("float32/eager", "bfloat16/packed"), (8, 20)
    passes = [
        (name, rows, nodes, context, repeat)
        for name in names
        for rows, nodes in ((1, 1), (2, 3))
        for context in contexts
        for repeat in (1, 2)
    ]
    readings = [(name, rows, 0, context, 0) for name in names for rows in (1, 2) for context in contexts]
    assert sorted(timed) == sorted(passes + readings)
    assert found["executions"] == {"float32/eager": "eager", "bfloat16/packed": "packed"} and len(found["reads"]) == 4
    assert "behind 20 tokens" in (tmp_path / "kernels.md").read_text()
    if native.refusal(torch.bfloat16) is None:
        missing = set() if onednn_lays_out(torch.bfloat16) else {("bfloat16", "oneDNN, packed")}
        sides = {(each["kind"], each["side"]) for each in found["timings"]}
        assert sides == {(name, side) for name, kind in libraries.KINDS.items() for side in kind.sides} - missing
        assert {each["tokens"] for each in found["timings"]} == {1, 9} and len(found["timings"]) == 4 * len(sides)
        assert "int4, bfloat16, by tokens" in (tmp_path / "kernels.md").read_text()


@needs_kernels
@pytest.mark.skipif(xnnpack.found(peer_process.folder()) is None, reason="needs XNNPACK: make peer-xnnpack")
def test_xnnpack_multiplies_rightly(monkeypatch):
    monkeypatch.setattr(libraries, "COPIES", 1 << 17)
    library = xnnpack.Xnnpack(xnnpack.found(peer_process.folder()), 2)
    timed = [each for found in libraries.timings([(128, 256)], [1, 9], 1, library) for each in found if each.side.startswith("XNNPACK")]
    assert {"float32", "int8, bfloat16", "int4, bfloat16"} <= {each.kind for each in timed}


@needs_kernels
def test_a_library_that_has_no_kernel_here_is_left_out(monkeypatch):
    def refuse(weight, dtype):
        raise xnnpack.UnsupportedHere

    monkeypatch.setattr(libraries, "COPIES", 1 << 17)
    kind = replace(libraries.KINDS["bfloat16"], sides={"ours": libraries.ours, "other": refuse})
    monkeypatch.setattr(libraries, "KINDS", {"bfloat16": kind})
    assert {each.side for each in next(libraries.timings([(128, 256)], [1], 1))} == {"ours"}


@needs_kernels
def test_a_library_that_multiplies_wrongly_is_not_timed(monkeypatch):
    monkeypatch.setattr(libraries, "COPIES", 1 << 17)
    wrong = replace(libraries.KINDS["bfloat16"], sides={"ours": lambda weight, dtype: lambda x: 2 * nn.functional.linear(x, weight)})
    monkeypatch.setattr(libraries, "KINDS", {"bfloat16": wrong})
    with pytest.raises(ConfigurationError, match=r"ours multiplies bfloat16 of 128x256 wrongly"):
        next(libraries.timings([(128, 256)], [1], 1))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--configurations", "bfloat16", "WEIGHTS/EXECUTION"),
        ("--passes", "16", "ROWSxNODES"),
        ("--configurations", "float32/fast", "unknown execution 'fast'"),
    ],
)
def test_a_kernels_suite_that_makes_no_sense_is_refused(option, value, message):
    result = CliRunner().invoke(app, ["kernels", "--target", "zoo:python-1m", option, value])
    assert result.exit_code and message in str(result.output) + str(result.exception)


# -- the hosts suite ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def few_files(monkeypatch):
    """Of Python's library."""
    files = hosts.library_files()[:40]
    monkeypatch.setattr(hosts, "library_files", lambda: files)


def test_the_hosts_suite_times_every_drafter_beside_the_pass_over_its_draft(tmp_path, few_files):
    options = ["--target", "zoo:python-1m", "--dtype", "float32", "--threads", "1", "--context", "1500", "--rounds", "3"]
    result = CliRunner().invoke(app, ["hosts", *options, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    found = report.load(tmp_path / "hosts.json.gz")
    names = [f"{name}, {shape}" for shape in ("chain(5)", "product(3,2,1,1)") for name in drafters_plan.DRAFTERS]
    assert sorted((each["method"], each["round"]) for each in found["measurements"]) == sorted(
        (name, number) for name in names for number in range(3)
    )
    assert all(each["host"] > 0 and each["target"] > 0 and 1 <= each["nodes"] <= 64 for each in found["measurements"])
    assert len(found["figures"]) == len(names) and found["known"] > 10_000
    page = (tmp_path / "hosts.md").read_text()
    assert "behind 1500 tokens" in page and page.count("| several |") == 2


def test_the_hosts_suite_divides_medians():
    rounds = [hosts.Measurement("a", number, 6, host, target) for number, (host, target) in enumerate([(1, 50), (2, 100), (3, 400)])]
    run = hosts.Hosts(hosts.Settings(drafters="suffix", shapes="chain(2)"))
    run.measurements = [replace(each, method="suffix, chain(2)") for each in rounds]
    (figure,) = run.figures()
    assert figure.spread.median == 2 / 100 and figure.verdict == "met" and hosts.share(rounds[1:]).median == 2.5 / 250


def test_rounds_go_on_along_the_text():
    tree = TokenTree.from_lists([[7, 1, 2, 3, 4]], [[-1, 0, 0, 2, 2]], [[True, True, True, True, False]])
    assert hosts.reached(tree, [2, 3, 9, 9]) == [0, 2, 3]
    assert hosts.reached(tree, [2, 4, 9]) == [0, 2], "what is filler was not proposed"
    assert hosts.reached(tree, [2]) == [0], "the last one comes from the target"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--shapes", "chain(0)", "shapes have nodes"),
        ("--drafters", "sufix", "unknown drafter 'sufix'"),
        ("--members", "suffix,ngrm", "unknown drafter 'ngrm'"),
        ("--context", "100000000", "Python's library here has"),
    ],
)
def test_a_hosts_suite_that_makes_no_sense_is_refused(option, value, message, few_files):
    result = CliRunner().invoke(app, ["hosts", "--target", "zoo:python-1m", option, value])
    assert result.exit_code == 2 and message in result.output.replace("\n", " ")

"""The acceptance and trees suites: their arithmetic, their documents, and that what they say follows from what they measured."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from benchmarks import acceptance, prompts, report, trees
from benchmarks.acceptance import Acceptance, Lengths, beginnings, methods
from benchmarks.cli import app
from benchmarks.passes import Pass
from benchmarks.trees import Call, Spent, outermost, watched
from foredraft import Speculator, zoo
from foredraft.drafters.draft_model import DraftModel
from foredraft.errors import ConfigurationError

# -- acceptance: arithmetic ---------------------------------------------------------------------------------------------------

QUICK = acceptance.Settings(
    target="zoo:python-1m", threads=1, prompts=2, seeds=2, tokens=8, chain="chain(2)", trees="product(2,1)", grown="opt(total=4,depth=2)"
)


def measured(**kept_and_passes):
    """A run whose methods kept so many tokens in so many passes, prompt by prompt."""
    run = Acceptance(replace(QUICK, prompts=4, trees="", grown=""))
    rules = {each.rule: name for name, each in run.methods.items() if each.siblings == "iid"}
    run.methods = {rules[rule]: run.methods[rules[rule]] for rule in kept_and_passes}
    for rule, counts in kept_and_passes.items():
        run.measurements += [
            acceptance.Measurement(rules[rule], prompt, 0, kept, passes, 0) for prompt, (kept, passes) in enumerate(counts)
        ]
    return run, rules


def test_lengths_are_summed_then_divided():
    run, rules = measured(block=[(30, 10), (10, 10), (4, 2), (4, 2)])
    got = Lengths(run).of(rules["block"])
    assert got.median == pytest.approx(48 / 24)
    assert 1 <= got.low < 48 / 24 < got.high <= 3


def test_differences_are_paired_by_prompt():
    """Prompts differ far more than the rules do; a pair of rules that differs alike everywhere has an interval without width."""
    passes = [(10, 10), (20, 10), (30, 10), (40, 10)]
    run, rules = measured(rejection=passes, block=[(kept + 1, count) for kept, count in passes])
    lengths = Lengths(run)
    (figure,) = run.figures()
    assert figure.name == "block − rejection, iid, chain(2)"
    assert (figure.spread.median, figure.spread.low, figure.spread.high) == pytest.approx((0.1, 0.1, 0.1)) and figure.verdict == "met"
    assert lengths.of(rules["block"]).high - lengths.of(rules["block"]).low > 1


@pytest.mark.parametrize(("by", "verdict"), [((1, 1, 1, 1), "missed"), ((4, -3, 3, -2), "within noise"), ((-1, -1, -1, -1), "met")])
def test_a_shortfall_inside_the_interval_is_noise(by, verdict):
    run, _ = measured(rejection=[(20, 10)] * 4, block=[(20 - less, 10) for less in by])
    (figure,) = run.figures()
    assert figure.verdict == verdict


def test_the_interval_covers_the_truth():
    """Rows with a known mean: about 95 of 100 intervals hold it (percentile intervals of 25 prompts are a little narrow)."""
    import numpy as np

    numbers, covered = np.random.default_rng(1), 0
    for _ in range(100):
        kept = 20 + numbers.poisson(10, 25)  # of 10 passes: 3 per pass
        run, rules = measured(block=[(int(each), 10) for each in kept[:4]])
        run.settings = replace(run.settings, prompts=25)
        run.measurements = [acceptance.Measurement(rules["block"], prompt, 0, int(each), 10, 0) for prompt, each in enumerate(kept)]
        spread = Lengths(run).of(rules["block"])
        covered += spread.low <= 3 <= spread.high
    assert 88 <= covered <= 99


# -- acceptance: what is run --------------------------------------------------------------------------------------------------


def test_beginnings_are_different_and_cut_after_lines():
    found = beginnings(25)
    assert len(set(found)) == 25
    assert all(text.endswith("\n") and any(whole.startswith(text) for whole in prompts.PYTHON) for text in found)
    for count in (0, 10_000):
        with pytest.raises(ConfigurationError, match="prompts must be"):
            beginnings(count)


def test_shapes_have_to_be_of_their_kind():
    for wrong in ({"chain": "product(2,1)"}, {"trees": "opt(total=4)"}, {"grown": "chain(2)"}):
        with pytest.raises(ConfigurationError, match="of one kind each"):
            methods(replace(QUICK, **wrong))


@pytest.fixture(scope="module")
def accepted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("acceptance")
    flags = {"prompts": "beginnings"}
    options = [word for name in vars(QUICK) for word in (f"--{flags.get(name, name)}", str(getattr(QUICK, name)))]
    result = CliRunner().invoke(app, ["acceptance", *options, "--out", str(folder)])
    assert result.exit_code == 0, result.output
    return report.load(folder / "acceptance.json.gz"), (folder / "acceptance.md").read_text()


def test_every_method_continues_every_prompt_with_every_seed(accepted):
    document, _ = accepted
    names = {each.name for each in methods(QUICK)}
    assert len(names) == 15
    rows = [(each["method"], each["prompt"], each["seed"]) for each in document["measurements"]]
    assert sorted(rows) == sorted((name, prompt, seed) for name in names for prompt in range(QUICK.prompts) for seed in range(2))
    assert {each["kept"] for each in document["measurements"]} == {QUICK.tokens - 1}  # the first token is the prefill's


def test_a_draft_that_is_its_target_is_always_accepted(accepted):
    """Target and draft are one model: the rules that compare with q, and match with the target's own noise, keep all there is room
    for: passes of 3, 3 and 1 tokens."""
    document, _ = accepted
    lengths = Lengths(Acceptance.read(document))
    for siblings, rule in (("iid", "rejection"), ("iid", "block"), ("keyed", "match")):
        assert lengths.whole[f"{rule}, {siblings}, chain(2)"] == pytest.approx(7 / 3)
    assert lengths.whole["match, iid, chain(2)"] < 7 / 3


def test_lossy_rules_are_marked(accepted):
    _, text = accepted
    assert text.count("LOSSY |") == 1
    assert "| typical | top-k | product(2,1) | LOSSY |" in text and text.startswith("# Acceptance length")


def test_the_document_has_claims_and_where_it_ran(accepted):
    document, text = accepted
    assert (document["schema"], document["suite"], document["settings"]["tokens"]) == (2, "acceptance", QUICK.tokens)
    assert [each["name"].partition(",")[0] for each in document["figures"]] == ["block − rejection"] + ["traversal − multi-candidate"] * 2
    assert {"commit", "dirty", "packages", "threads"} <= document["environment"].keys()
    assert document["command"].startswith("python -m benchmarks") and "bootstraps over prompts" in text


# -- trees: arithmetic --------------------------------------------------------------------------------------------------------


def test_where_a_round_goes():
    """A draft of two levels, a target pass, verification, commits; forward passes taken out of whatever they lie in."""
    passes = [Pass("draft", 1.2, 1.5, 1, 0), Pass("draft", 2.1, 2.2, 1, 0), Pass("target", 3.5, 4.5, 1, 0)]
    calls = [
        Call("own", 1.1, 1.6),  # 0.2 outside
        Call("own", 2.0, 2.4),  # 0.3
        Call("draft", 1.0, 3.0),  # 1.6 outside, 1.1 of it outside its cache's verbs
        Call("score", 3.1, 4.8),  # 0.7
        Call("commit", 5.8, 6.0),  # 0.2, after 1.0 of verification
        Call("own", 6.3, 6.4),
        Call("observe", 6.2, 6.5),  # 0.3
    ]
    got = Spent.of(passes, calls, 0.5, 7.0)
    assert (got.wall, got.target, got.draft) == pytest.approx((6.5, 1.0, 0.4))
    assert got.parts == pytest.approx({"growth": 1.1, "draft side": 0.8, "target side": 0.9, "verification": 1.0, "rest": 1.3})
    assert sum(got.parts.values()) == pytest.approx(6.5 - 1.0 - 0.4)


def test_calls_within_calls_count_once():
    outer, inner, after = Call("own", 0.0, 2.0), Call("own", 0.5, 1.0), Call("own", 2.0, 3.0)
    assert outermost([inner, outer, after]) == [outer, after]


def test_watching_leaves_nothing_behind():
    model = zoo.load("python-1m")
    speculator = Speculator(model, DraftModel(model), shape="product(2,1)")
    owners = (speculator.target, speculator.drafter, speculator.drafter.model)
    before = [dict(vars(owner)) for owner in owners]
    with watched(speculator):
        assert "score" in vars(speculator.target) and model._forward_hooks
    assert [dict(vars(owner)) for owner in owners] == before and not model._forward_hooks


# -- trees: a run -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trees")
    options = ["--target", "zoo:python-1m", "--shapes", "chain(2) product(2,1) dynamic(depth=2,k=2,total=4)", "--nodes", "4"]
    options += ["--threads", "1", "--beginnings", "1", "--rounds", "2", "--repeats", "2"]
    result = CliRunner().invoke(app, ["trees", *options, "--out", str(folder)])
    assert result.exit_code == 0, result.output
    return report.load(folder / "trees.json.gz"), (folder / "trees.md").read_text()


def test_every_round_is_taken_apart(timed):
    document, _ = timed
    assert (document["schema"], document["suite"], len(document["rules"])) == (2, "trees", 6)
    assert len(document["rounds"]) == 6 * 2 * 2
    for each in document["rounds"]:
        assert set(each["parts"]) == set(trees.PARTS) and min(each["parts"].values()) > 0
        assert sum(each["parts"].values()) == pytest.approx(each["wall"] - each["target"] - each["draft"])
        assert each["target"] > 0 and each["draft"] > 0 and 1 <= each["tokens"] <= 3


def test_the_claim_is_about_trees_of_that_size(timed):
    document, text = timed
    shapes = ("product(2,1)", "dynamic(depth=2,k=2,total=4)")
    assert [each["name"].partition(":")[0] for each in document["figures"]] == [
        f"{mode}, {shape}" for mode in trees.MODES for shape in shapes
    ]
    assert {(each["low"], each["high"]) for each in document["figures"]} == {(None, trees.LIMIT)}
    assert document["rules"]["sampled, product(2,1)"] == "traversal"
    assert document["rules"]["greedy, product(2,1)"] == "match"
    assert text.startswith("# Trees") and "| greedy, chain(2) |" in text


def test_a_shape_that_drafts_nothing_is_refused():
    result = CliRunner().invoke(app, ["trees", "--shapes", "chain(0)"])
    assert result.exit_code == 2 and "drafted nodes" in result.output

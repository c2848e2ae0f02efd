"""The suite of self-speculation: what it refuses, what it counts, what it claims, and what becomes of what fails."""

import importlib
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_peers import engine
from helpers import SMALL_IDS, small_llama, tiny
from training_helpers import make_data
from typer.testing import CliRunner

from benchmarks import checkpoints, environment, peer_process, self_models
from benchmarks.cli import app
from benchmarks.self_models import Accepted, Agreement, Bits
from benchmarks.self_speculation import (
    DEEP,
    LATER,
    SEARCHING,
    SHALLOW,
    UNTRAINED,
    WIDE,
    SelfSpeculation,
    Settings,
    cells,
    long_cells,
    methods,
)
from benchmarks.speed_calls import Curve, Measurement
from foredraft import inflate
from foredraft.drafters.layer_skip import LayerSkip
from foredraft.errors import ConfigurationError, ForedraftError
from foredraft.heads import checkpoints as head_files
from foredraft.heads.exit import ExitHead
from foredraft.loading import load_tokenizer
from foredraft.models.skips import SkipSet
from recipes.zoo.corpus import Corpus, SourceFile
from recipes.zoo.tokenization import Encoded

PARTS = "exits,layer-skip,transformers,frozen,nothing"
SMALL = Settings(
    parts=PARTS, exits=(1,), lengths=(3,), exit="1", limit=1, tokens=8, repeats=2, documents=2, answered=2, threads=1, timeout=20
)
PLAIN, AUTO, OURS = "foredraft plain", "foredraft layer-skip, auto", "foredraft layer-skip, exit 1, γ=3"
THEIRS, THEIR_PLAIN = "transformers early-exit, exit 1, γ=3", "transformers plain"
SOURCE = "def total(values):\n    return sum(value for value in values if value is not None)\n\n\n" * 20


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A checkpoint with the tokens of the embedded models."""
    folder = tmp_path_factory.mktemp("deep")
    small_llama(vocab_size=4096, initializer_range=0.1).save_pretrained(folder)
    load_tokenizer("zoo:python-8m").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zoo")
    files = [SourceFile("h11", f"{name}.py", f"# {name}\n{SOURCE}") for name in ("a", "b", "c")]
    Corpus(tuple(files), tuple(files), {}).save(folder / "corpus")
    return folder


@pytest.fixture
def peers(tmp_path, monkeypatch):
    """Adapters that compute nothing; returns a function that writes one."""
    folder = tmp_path / "adapters"
    folder.mkdir()
    shutil.copy(peer_process.ADAPTERS / "serve.py", folder)
    monkeypatch.setattr(peer_process, "ADAPTERS", folder)
    monkeypatch.setattr("benchmarks.speed_runner.READ", 1 << 20)

    def put(name, **how):
        (folder / f"{name}.py").write_text(engine(name, **how))
        home = tmp_path / "peers" / name / "venv" / "bin"
        home.mkdir(parents=True)
        (home / "python").symlink_to(sys.executable)

    put("foredraft")
    return put


def encoded(ids):
    tokens = ids.flatten().numpy().astype("uint16")
    return Encoded(tokens, torch.tensor([0, len(tokens)]).numpy(), torch.tensor([3 * len(tokens)]).numpy())


# -- models ---------------------------------------------------------------------------------------------------------------


def test_layers_that_do_nothing_are_refused():
    model = small_llama()
    self_models.refuse_silent_layers(inflate(model, hidden_size=128, layers=3), "wide")
    deeper = inflate(model, hidden_size=128, layers=4)
    for _ in range(2):  # zeros, and the tiny numbers that stand for them in files
        with pytest.raises(ConfigurationError, match=r"layer 3 of deeper does nothing.*inflate in width alone"):
            self_models.refuse_silent_layers(deeper, "deeper")
        checkpoints.told_apart(deeper)
    model.model.layers[1].mlp.down_proj.weight.data.zero_()
    with pytest.raises(ConfigurationError, match="layer 1 of it does nothing: the output matrix of its MLP"):
        self_models.refuse_silent_layers(model, "it")


def test_a_command_on_an_idle_target_ends_at_once(tmp_path):
    inflate(small_llama(vocab_size=4096), hidden_size=32, layers=5).save_pretrained(tmp_path / "deep")
    result = CliRunner().invoke(app, ["self", "--deep", str(tmp_path / "deep"), "--work", str(tmp_path / "work"), "--threads", "1"])
    assert result.exit_code == 2 and "does nothing" in result.output


def test_exits_and_sublayers_are_judged_by_the_last_layer():
    model, files = small_llama(), [encoded(SMALL_IDS[:2]), encoded(SMALL_IDS[1:])]
    found = {each.what: each for each in [*self_models.exits("m", model, files), *self_models.sublayers("m", model, files)]}
    parts = [f"without {part} {layer}" for layer in range(3) for part in ("attention", "MLP")]
    assert list(found) == ["exit 1", "exit 2", *parts]
    ids = [self_models.beginning(each)[:, :-1] for each in files]
    with torch.no_grad():
        whole = [model(each).logits.argmax(-1) for each in ids]
        layers = model.model.layers
        model.model.layers = layers[:2]
        early = [model(each).logits.argmax(-1) for each in ids]
        model.model.layers = layers
        assert found["exit 2"].same == pytest.approx([int((one == last).sum()) for one, last in zip(early, whole)])
        model.model.layers[1].self_attn.o_proj.weight.zero_()
        ids = [self_models.beginning(each) for each in files]
        without = [model(each).logits.argmax(-1) for each in ids]
    expected = found["without attention 1"].same
    assert 0 < sum(expected) < sum(found["without attention 1"].tokens) and sum(found["exit 2"].same)
    model = small_llama()
    whole = [model(each).logits.argmax(-1) for each in ids]
    assert expected == tuple(float((one == last).sum()) for one, last in zip(without, whole))


def test_width_alone_keeps_what_every_exit_knows():
    """float32: the wide model's exits say what the narrow one's say."""
    model, files = small_llama(), [encoded(SMALL_IDS)]
    wide = inflate(model, hidden_size=128, layers=3)
    here, there = (self_models.exits("m", each, files) for each in (wide, model))
    assert [each.same for each in here] == [pytest.approx(each.same) for each in there]
    assert self_models.sublayers("m", wide, files) == self_models.sublayers("m", model, files)


def test_wide_checkpoints_follow_the_weights(tmp_path, deep):
    model = small_llama(vocab_size=4096)
    first = self_models.widened(model, "deep", "zoo:python-8m", tmp_path)
    assert first == self_models.widened(model, "deep", "zoo:python-8m", tmp_path) and (first.path / "tokenizer.json").exists()
    model.lm_head.weight.data[0] += 1
    assert self_models.widened(model, "deep", "zoo:python-8m", tmp_path).path != first.path


def test_an_untrained_exit_accepts_what_the_bare_one_does(tmp_path):
    model = small_llama()
    places = {attention: tmp_path / f"exit-{attention}" for attention in (False, True)}
    for attention, place in places.items():
        head_files.save(ExitHead.for_target(model, exit=2, attention=attention), place)
    made = {(2, attention): place for attention, place in places.items()}
    bare, trained, behind = self_models.frozen(model, made, SMALL_IDS.tolist(), 6)
    assert (bare.side, trained.side, behind.side) == self_models.SIDES
    assert bare.accepted == trained.accepted and bare.rounds == trained.rounds and len(behind.rounds) == len(bare.rounds)
    out = self_models.Speculator(model, LayerSkip(exit=2), shape="chain(5)").generate(SMALL_IDS, max_new_tokens=6, do_sample=False)
    assert sum(bare.rounds) == out.stats.row_passes and sum(bare.accepted) == out.stats.kept - out.stats.row_passes


def test_exits_are_trained_once(tmp_path, monkeypatch):
    asked = []

    def command(*arguments):
        asked.append(arguments)
        if arguments[0] == "train":
            Path(arguments[arguments.index("--out") + 1]).mkdir(exist_ok=True)

    monkeypatch.setattr(self_models, "foredraft", command)
    for _ in range(2):
        self_models.train_exits("m", tmp_path / "data", tmp_path, (2,), texts=9, steps=4, threads=1)
    assert [each[0] for each in asked] == ["data", "train", "train", "data"]
    assert "exit=2" in asked[1] and "attention=false" in asked[1] and "attention=true" in asked[2] and "--resume" not in asked[1]


def test_sets_of_sublayers_are_searched_once(tmp_path, monkeypatch):
    """Greedy elimination goes by the texts and costs of the search, for as many trials."""
    asked, model = [], tiny()
    model.save_pretrained(tmp_path / "wide")
    make_data(tmp_path / "texts", count=8)
    costs = {"attention": [1.0] * 2, "mlp": [0.1] * 2, "rest": 0.1, "passes": [2.3] * 6}

    def command(*arguments):
        asked.append(arguments)
        if arguments[0] == "skip":
            trials = [{"attention": [1], "mlp": [], "agreement": 0.1}, {"attention": [], "mlp": [0], "agreement": 0.6}]
            SkipSet((), (0,)).save(tmp_path / "set-4.json", model, trials, costs=costs)

    monkeypatch.setattr(self_models, "foredraft", command)
    for _ in range(2):
        found = self_models.search_sets("deep", str(tmp_path / "wide"), tmp_path / "data", tmp_path, trials=4, threads=1)
    assert found["searched set"] == ["mlp=0", "60.0%"] and "attention=" in found["greedy elimination"][0], "attention is dear"
    assert [each[0] for each in asked] == ["data", "skip"] and "--other-target" in asked[1]
    run = SelfSpeculation(replace(SMALL, parts="draft-verify"))
    run.sets = found
    plain, searched, greedy = methods(run.settings, WIDE)
    checkpoint = checkpoints.Checkpoint("deep", tmp_path, "deep")
    assert run.options(searched, checkpoint)["drafter"] == "draft-verify;skip=mlp=0"
    assert run.options(greedy, checkpoint)[
        "drafter"
    ] == f"draft-verify;skip={found['greedy elimination'][0]}" and "drafter" not in run.options(plain, checkpoint)


def test_a_command_that_fails_is_quoted():
    with pytest.raises(ForedraftError, match="foredraft train nothing ended with 2"):
        self_models.foredraft("train", "nothing")


# -- adapters -------------------------------------------------------------------------------------------------------------


def test_early_exit_of_transformers(deep):
    """float32: the same text as plain decoding, in as many passes of all layers as it takes rounds."""
    peer = importlib.import_module("benchmarks.peers.transformers").Engine()
    peer.start(1, "cpu", "")
    for name, mode, length, options in (
        ("plain", "plain", 0, {}),
        ("exit", "early-exit", 3, {"exit": 2}),
        ("short", "early-exit", 1, {"exit": 1}),
    ):
        peer.load(name, str(deep), None, "float32", mode, length, 3, options)
    told = {name: peer.generate(name, [[5, 9, 7]], 12, 0.0, 0) for name in ("plain", "exit", "short")}
    assert told["plain"]["ids"] == told["exit"]["ids"] == told["short"]["ids"]
    for name, least in (("exit", 3), ("short", 6)):
        assert least <= told[name]["passes"] <= 12 and told[name]["split"]["draft"] > 0
    assert told["plain"]["passes"] == 12 and told["plain"]["split"]["draft"] == 0
    assert told["exit"]["kept"] == 12 - (12 - told["exit"]["kept"]) and told["exit"]["rounds"] == told["exit"]["passes"] - 1


def test_costs_of_a_draft_that_shares_the_target(deep, monkeypatch):
    monkeypatch.setattr("benchmarks.peers.foredraft.SECONDS", 0.05)
    peer = importlib.import_module("benchmarks.peers.foredraft").Engine()
    peer.start(1, "cpu", "")
    peer.load(
        "mine", str(deep), None, "float32", "layer-skip", 3, 3, {"drafter": "layer-skip;exit=2", "shape": "chain(3)", "execution": "eager"}
    )
    before = list(peer.speculators["mine"].target.layer_tokens)
    costs = peer.costs("mine", 1, 3, 10)
    assert set(costs) == {"begin", "t1", "tn", "draft"} and min(costs[part] for part in ("t1", "tn", "draft")) > 0
    low, high = (after - earlier for after, earlier in zip(peer.speculators["mine"].target.layer_tokens[1:], before[1:]))
    assert low == high, "no layer reads a node twice"


# -- who meets whom ---------------------------------------------------------------------------------------------------------


def test_who_meets_whom():
    wide, shallow = (methods(SMALL, target) for target in (WIDE, SHALLOW))
    assert [each.name for each in wide[:5]] == [PLAIN, AUTO, THEIR_PLAIN, OURS, THEIRS]
    assert [each.name for each in wide[5:]] == [f"{AUTO}, random text", f"{AUTO}, random prompt"] and all(each.fresh for each in wide[5:])
    assert [each.name for each in shallow] == [PLAIN, AUTO]
    found = cells(SMALL, [("held-out", [1, 2])], wide, 100)
    assert [(cell.scenario, cell.temperature, len(cell.methods)) for cell in found[:3]] == [
        ("text", 0, 5),
        ("sampled", 1, 2),
        ("random text", 100, 2),
    ]
    assert {cell.methods[1] for cell in found if cell.scenario == "random prompt"} == {f"{AUTO}, random prompt"}
    for parts, names in (("exits,frozen", []), ("nothing", [PLAIN, wide[5].name, wide[6].name]), ("layer-skip", [PLAIN, AUTO])):
        assert [each.name for each in methods(replace(SMALL, parts=parts), WIDE)] == names
    assert not any(methods(replace(SMALL, parts="layer-skip"), SHALLOW))


def test_a_search_is_followed_from_its_first_token():
    settings = replace(SMALL, parts="auto-search")
    plain, searched, _, searching = methods(settings, WIDE)
    found = long_cells([[1]] * 10)
    assert not cells(settings, [("held-out", [1])], [plain, searching], 100), "it is not warmed up"
    assert [cell.scenario for cell in found] == [SEARCHING] * 8 + [LATER] * 2 and {cell.tokens for cell in found} == {500}
    assert [cell.methods for cell in found[4:6]] == [(searching.name,), (plain.name, searching.name)]
    assert found[-1].methods == (plain.name, searching.name, searched.name) and not searching.fresh
    run = SelfSpeculation(settings)
    run.methods = run.everyone()
    speeds = {plain.name: 2.0, searching.name: 1.6, searched.name: 1.25}
    run.measurements = [call(name, speeds[name], scenario=cell.scenario, index=cell.index) for cell in found for name in cell.methods]
    assert [(each.name.partition(": ")[2][:20], round(each.spread.median, 3), each.verdict) for each in run.figures()][-2:] == [
        ("searching, later: sh", round(0.25 / 0.6, 3), "missed"),
        ("searching: tokens/s ", 1.25, "met"),
    ]


@pytest.mark.parametrize(("option", "value", "said"), [("--parts", "exits,speed", "unknown parts speed"), ("--exit", "last", "or auto")])
def test_settings_that_make_no_sense_are_refused(option, value, said):
    result = CliRunner().invoke(app, ["self", option, value])
    assert result.exit_code == 2 and said in result.output


def test_a_corpus_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="python -m recipes"):
        self_models.texts(tmp_path, build=False)


# -- claims ---------------------------------------------------------------------------------------------------------------


def call(method, seconds, target=WIDE, scenario="text", rounds=10, index=0):
    times, split = (0.5, *[seconds] * 10), {"prefill": 0.5, "draft": 0.1, "target": 0.2, "overhead": 0.0}
    where = {"target": target, "dtype": "bfloat16", "scenario": scenario, "batch": 1, "index": index, "category": "held-out", "repeat": 0}
    return Measurement(**where, method=method, tokens=11, seconds=seconds, times=times, rounds=rounds, kept=10, passes=11, split=split)


@pytest.fixture
def claimed():
    run = SelfSpeculation(replace(SMALL, exits=(4,), lengths=(3,)))
    run.methods, run.categories = run.everyone(), ["held-out"]
    pair = "exit 4, γ=3"
    run.measurements = [
        *(call(PLAIN, 1.5, scenario=scenario) for scenario in ("text", "sampled", "random text", "random prompt")),
        call(AUTO, 1.0, rounds=5),
        call(AUTO, 1.4, scenario="sampled"),
        call(f"foredraft layer-skip, {pair}", 1.0, rounds=4),
        call(THEIR_PLAIN, 3.0),
        call(f"transformers early-exit, {pair}", 2.4),
        call(f"{AUTO}, random text", 1.6, scenario="random text"),
        call(f"{AUTO}, random prompt", 1.5, scenario="random prompt"),
        *(call(PLAIN, 1.5, SHALLOW, scenario) for scenario in ("text", "sampled")),
        *(call(AUTO, 1.0, SHALLOW, scenario) for scenario in ("text", "sampled")),
    ]
    run.curves = [Curve(WIDE, "bfloat16", f"foredraft layer-skip, {pair}", 3, 1, 0, {"t1": 0.1, "tn": 0.1, "draft": 0.02})]
    run.bits = [Bits(DEEP, (52.0, 52.0), (50, 50)), Bits(UNTRAINED, (50.0, 50.0), (50, 50))]
    run.agreements = [Agreement(DEEP, "exit 4", (5, 7), (10, 10)), Agreement(UNTRAINED, "exit 4", (2, 2), (10, 10))]
    run.agreements += [Agreement(DEEP, f"without {part} 0", (5, 7), (10, 10)) for part in ("attention", "MLP")]
    run.accepted = [
        Accepted("bare", 4, (1, 1), (10, 10)),
        Accepted("trained", 4, (2, 2), (10, 10)),
        Accepted("trained, behind attention", 4, (4, 4), (10, 10)),
        Accepted("trained", 2, (1, 0), (10, 10)),
    ]
    return run


def test_claims_by_hand(claimed):
    found = [
        (each.name.removeprefix(f"{WIDE} bfloat16: "), each.spread and round(each.spread.median, 3), each.verdict)
        for each in claimed.figures()
    ]
    assert found == [
        ("python-deep: held-out bits per byte over the same model without the recipe", 1.04, "met"),
        ("python-deep, exit 4: agreement with the last layer, over that of the model without the recipe", 3.0, "met"),
        ("python-deep, exit 4: agreement with the last layer", 0.6, "met"),
        ("text: tokens/s of layer-skip over plain", 1.5, "met"),
        ("sampled: tokens/s of layer-skip over plain", 1.071, "met"),
        (f"speed-up over what acceptance and its own passes allow, {AUTO}", 3.0, "met"),
        ("exit 4, γ=3: tokens/s over transformers' early exit", 2.4, "missed"),
        ("speed-up over what acceptance and cost curve allow, foredraft layer-skip, exit 4, γ=3", round(2 / (2.5 / 1.2), 3), "met"),
        ("speed-up over what acceptance and its own passes allow, foredraft layer-skip, exit 4, γ=3", 3.0, "met"),
        ("random text: tokens/s of layer-skip over plain", 0.938, "missed"),
        ("random prompt: tokens/s of layer-skip over plain", 1.0, "met"),
        ("python-8m, frozen, exit 4: acceptance length - 1, trained, behind attention, over bare", 4.0, "met"),
        (f"{SHALLOW} bfloat16: sampled: tokens/s of layer-skip over plain", 1.5, "met"),
        (f"{SHALLOW} bfloat16: text: tokens/s of layer-skip over plain", 1.5, "met"),
    ]


def test_every_dtype_is_reported(claimed):
    claimed.settings = replace(claimed.settings, dtypes=("bfloat16", "float32"))
    claimed.measurements += [replace(each, dtype="float32") for each in claimed.measurements]
    found = [each.name for each in claimed.figures() if each.name.endswith("text: tokens/s of layer-skip over plain")]
    for target in (WIDE, SHALLOW):
        assert {f"{target} {dtype}: text: tokens/s of layer-skip over plain" for dtype in ("bfloat16", "float32")} <= {*found}
        assert {f"Text, {target}, {dtype}" for dtype in ("bfloat16", "float32")} <= {each.title for each in claimed.tables()}


def test_what_was_not_measured_is_not_met(claimed):
    claimed.measurements, claimed.bits, claimed.accepted, claimed.agreements = [], [], [], []
    assert {each.verdict for each in claimed.figures()} == {"not measured"}


def test_the_page_says_it_all(claimed):
    document = claimed.document(command="c", environment={**environment.describe(), "threads": 1})
    page = claimed.report(document).markdown()
    assert SelfSpeculation.read(json.loads(json.dumps(document))).report(document).markdown() == page
    for line in (
        "| layer 0 | 0.600 (0.500–0.700) | 0.600 (0.500–0.700) |",
        "| exit 4 | 0.100",
        "| exit 2 | — | 0.050",
        "plain over plain 2.00",
    ):
        assert line in page


# -- a run ------------------------------------------------------------------------------------------------------------------


def test_a_part_that_fails_says_why_and_the_others_go_on(tmp_path, deep, corpus, peers, monkeypatch):
    peers("transformers", on_load='if mode == "early-exit": raise ValueError("no such layer")')

    def refuse(*arguments):
        raise ForedraftError("it would not train")

    monkeypatch.setattr(self_models, "foredraft", refuse)
    places = {"deep": str(deep), "deep_plain": str(deep), "frozen": str(deep), "corpus": corpus}
    steps = []
    settings = replace(SMALL, **places, dtypes=("float32",), peers_path=tmp_path / "peers", work_path=tmp_path / "work")
    run = SelfSpeculation(settings, lambda: steps.append(1))
    run.run()
    assert [(each.method, each.stage) for each in run.failures] == [("python-8m", "trained exits"), (THEIRS, "set-up")] and run.failed()
    page = run.report(run.document(command="c", environment={**environment.describe(), "threads": 1})).markdown()
    assert "it would not train" in page and "no such layer" in page and "without one sublayer" in page
    verdicts = {each.name: each.verdict for each in run.figures()}
    assert verdicts["python-deep: held-out bits per byte over the same model without the recipe"] == "met"
    missing = ("exit 4: agreement", "over transformers' early exit", "over bare")  # the model has three layers
    assert all((verdict == "not measured") == any(each in name for each in missing) for name, verdict in verdicts.items())
    assert {(each.target, each.scenario) for each in run.measurements} == {
        *((WIDE, scenario) for scenario in ("text", "sampled", "random text", "random prompt")),
        *((SHALLOW, scenario) for scenario in ("text", "sampled")),
    }
    assert str(tmp_path) not in json.dumps(run.document(command="c", environment={}), default=str).replace(str(deep), "")

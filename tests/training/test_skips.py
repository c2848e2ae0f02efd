"""``foredraft skip search`` from texts to a stored set."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch
from architectures import build
from helpers import alone, clone, small_llama, tiny
from training_helpers import make_data

from foredraft import Speculator
from foredraft.errors import ConfigurationError
from foredraft.models.skips import SkipSet, Sublayers
from foredraft.planning.skip_costs import measure_costs
from foredraft.target import Target
from foredraft.training.data import Texts
from foredraft.training.skips import Agreement, run

optuna = pytest.mark.skipif("not __import__('importlib.util').util.find_spec('optuna')", reason="needs optuna (foredraft[search])")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts") / "data"
    make_data(folder, count=12)
    return folder


@pytest.fixture
def costs(tmp_path):
    """Seconds of the tiny model, in a file."""
    layers = tiny().config.num_hidden_layers
    held = {"attention": [1e-3] * layers, "mlp": [2e-3] * layers, "rest": 1e-3, "passes": [(3 * layers + 1) * 1e-3] * 5}
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(held))
    return path


def test_agreement_is_that_of_each_text_by_itself(data):
    """With padding as without."""
    model, texts, skip = tiny(), Texts(data), SkipSet((0,), (1,))
    sublayers = Sublayers(model)
    right = total = 0
    for index in range(len(texts)):
        ids = torch.as_tensor(texts[index].astype("int64"))[None]
        whole = model(input_ids=ids).logits[0, texts.prompt_lengths[index] - 1 : -1].argmax(-1)
        with sublayers.left_out(skip):
            found = model(input_ids=ids).logits[0, texts.prompt_lengths[index] - 1 : -1].argmax(-1)
        right, total = right + int((found == whole).sum()), total + len(whole)
    agreement = Agreement(model, sublayers, texts, range(len(texts)), 10**9)
    assert agreement.tokens == total == int((texts.lengths - texts.prompt_lengths).sum())
    assert agreement(skip) == right / total and 0 < right < total


def test_seconds_of_sublayers_add_up():
    target = Target(tiny(), execution="eager")
    costs = measure_costs(target, seconds=0.2)
    assert len(costs.sublayers) == 2 * tiny().config.num_hidden_layers and min(*costs.sublayers, costs.rest, *costs.passes) > 0
    assert sum(costs.sublayers) + costs.rest < 3 * costs.passes[0] and list(costs.passes) == sorted(costs.passes)
    assert target.lengths == []


@optuna
def test_a_search_stores_a_set_that_drafts(data, costs, tmp_path):
    out, again, said = tmp_path / "set.json", tmp_path / "again.json", []
    assert run(clone(tiny()), data, out, trials=6, seed=3, costs=costs, report=said.append)
    assert run(clone(tiny()), data, again, trials=6, seed=3, costs=costs)
    assert out.read_bytes() == again.read_bytes()
    held = json.loads(out.read_text())
    assert len(held["trials"]) == 6 and held["target"]["layers"] == tiny().config.num_hidden_layers
    assert held["trials"][0]["rate"] == max(trial["rate"] for trial in held["trials"])
    assert SkipSet.load(out, tiny()) == SkipSet(held["trials"][0]["attention"], held["trials"][0]["mlp"])
    assert any("predicted" in line for line in said) and f"draft-verify:{out}" in said[-1]
    prompt = Texts(data).prompt(0)
    found = Speculator(clone(tiny()), f"draft-verify:{out}", shape="chain(2)").generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=12
    )
    assert found.sequences[0, len(prompt) :].tolist() == alone(tiny(), prompt, max_new_tokens=12)
    with pytest.raises(ConfigurationError, match="was made for"):
        SkipSet.load(out, small_llama(num_hidden_layers=tiny().config.num_hidden_layers + 1))


@optuna
def test_the_best_sets_are_timed(data, tmp_path, monkeypatch):
    monkeypatch.setattr("foredraft.training.skips.ANSWER", 4)
    out, said = tmp_path / "set.json", []
    assert run(clone(tiny()), data, out, trials=4, finalists=2, report=said.append)
    held = json.loads(out.read_text())
    timed = [trial for trial in held["trials"] if "measured" in trial]
    best = max(timed, key=lambda trial: trial["measured"])
    assert len(timed) == 2 and (held["attention"], held["mlp"]) == (best["attention"], best["mlp"])
    assert any("tokens/s measured" in line for line in said)


@pytest.fixture
def interruptible():
    """A process started in the background of a shell inherits that SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@optuna
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_search_stores_the_best_set_so_far(data, costs, tmp_path, number):
    out, before = tmp_path / "set.json", signal.getsignal(signal.SIGTERM)

    def report(line):
        if line.split()[0] == "3":
            os.kill(os.getpid(), number)

    assert not run(clone(tiny()), data, out, trials=50, costs=costs, report=report)
    assert 3 <= len(json.loads(out.read_text())["trials"]) <= 4 and signal.getsignal(signal.SIGTERM) is before


def test_data_that_does_not_fit_is_refused(data, costs, tmp_path):
    other, few, bare = tiny("gpt2"), tmp_path / "few", tmp_path / "bare"
    with pytest.raises(ConfigurationError, match="generate data with this target"):
        run(other, data, tmp_path / "set.json", trials=4, costs=costs)
    make_data(few, count=4)
    make_data(bare, count=12, max_new_tokens=0)
    for folder in (few, bare):
        with pytest.raises(ConfigurationError, match="more than 4 texts with answers"):
            run(tiny(), folder, tmp_path / "set.json", trials=4, costs=costs)


@optuna
def test_models_without_mlp_modules_leave_out_attention_alone(tmp_path):
    model, said = build("opt"), []
    make_data(tmp_path / "data", count=8, model=model)
    assert run(model, tmp_path / "data", tmp_path / "set.json", trials=3, finalists=0, report=said.append)
    held = json.loads((tmp_path / "set.json").read_text())
    assert "only attention is left out" in said[0] and held["attention"] and not held["mlp"]

"""``draft-verify:auto``: the search while texts are written, its budget, and what is kept for the next start."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
import torch
from architectures import build
from drafting import Row
from helpers import alone, clone, generate, padded, plainly, prompts, small_llama, tiny

from foredraft import ConfigurationError, Speculator
from foredraft.cli.checks import check_drafter
from foredraft.drafters import skip_tuning
from foredraft.drafters.draft_verify import DraftVerify
from foredraft.drafters.skip_tuning import SkipTuner
from foredraft.models.skips import SkipSet
from foredraft.target import Target


@dataclass
class Clock:
    """Says what it is told."""

    now: float = 0.0
    calls: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now


def planted():
    """A model of four layers in which the attention of layers 1 and 3 and the MLP of layer 2 do nothing."""
    model = small_llama(num_hidden_layers=4, initializer_range=0.2)
    layers = model.model.layers
    with torch.no_grad():
        for weight in (layers[1].self_attn.o_proj.weight, layers[3].self_attn.o_proj.weight, layers[2].mlp.down_proj.weight):
            weight.zero_()
    return model


def rows(count=1, length=90, vocabulary=97):
    return [Row(ids, slot, prompt_length=4) for slot, ids in enumerate(prompts([length] * count, vocabulary=vocabulary))]


@pytest.fixture
def hasty(monkeypatch):
    """Every round leaves time for a pass of the search."""
    monkeypatch.setattr(skip_tuning, "SHARE", 1e9)


def tuned(tuner, rounds, texts):
    """After so many rounds."""
    for _ in range(rounds):
        tuner.clock.now += 1.0
        tuner.observe(texts)
    return tuner


def test_sublayers_that_do_nothing_are_found(hasty):
    tuner = tuned(SkipTuner(Target(planted(), execution="eager"), Clock()), 40, rows())
    useless = SkipSet((1, 3), (2,))
    right, total = tuner.judged[tuner._mask(useless)]
    assert right == total > 0
    assert set(tuner.skip.attention) >= {1, 3} and 2 in tuner.skip.mlp


def test_the_search_goes_on_where_another_set_has_become_the_best():
    tuner = SkipTuner(Target(small_llama(num_hidden_layers=4), execution="eager"), Clock())
    proposals = tuner._proposed([1.0] * len(tuner.sublayers))
    while (found := next(proposals)) is not None:  # until none near the best is left
        tuner.judged[found] = 1, 1
    tuner._best = tuple(not left_out for left_out in tuner._best)
    assert next(proposals) not in (None, *tuner.judged)


def test_sets_that_leave_out_the_last_layers_are_among_the_first(hasty):
    target = Target(small_llama(num_hidden_layers=8), execution="eager")
    tuner = tuned(SkipTuner(target, Clock()), 2 * len(skip_tuning.TAILS) + 4, rows())
    tails = [SkipSet(tuple(range(first, 8)), tuple(range(first, 8))) for first in (2, 4, 6)]
    assert all(tuner._mask(each) in tuner.judged for each in tails)


def test_the_search_takes_two_per_cent_of_the_time_at_most(monkeypatch):
    clock, texts = Clock(), rows()
    tuner, shares = SkipTuner(Target(tiny(), execution="eager"), clock), []
    apart = tuner.target.apart

    def slow(*given):
        clock.now += 0.3
        return apart(*given)

    monkeypatch.setattr(tuner.target, "apart", slow)
    for _ in range(4000):
        clock.now += 0.05
        tuner.observe(texts)
        shares.append(tuner.spent / tuner.elapsed)
    assert len(tuner.judged) >= 5 and max(shares) <= 0.02
    assert tuner.elapsed == pytest.approx(clock.now, abs=0.4)


def test_time_without_rows_does_not_count():
    clock = Clock()
    tuner = SkipTuner(Target(tiny(), execution="eager"), clock)
    clock.now += 1000
    tuner.begin()
    clock.now += 1
    tuner.observe(rows(length=8))
    assert tuner.elapsed == 1 and not tuner.judged


OF_A_SEED = {"do_sample": True, "temperature": 0.9, "seed": 3, "max_new_tokens": 60}


@pytest.mark.parametrize("shape", [pytest.param("chain(3)", marks=pytest.mark.nightly), "product(2,2)", "auto"])
def test_text_is_plain_while_it_searches(hasty, monkeypatch, shape):
    drafter, sets = DraftVerify("auto"), set()
    speculator = Speculator(clone(tiny()), drafter, shape=shape)
    observe = drafter.observe

    def observed(*given):
        observe(*given)
        sets.add(drafter.skip)

    monkeypatch.setattr(drafter, "observe", observed)
    texts = prompts([30, 44])
    found = generate(speculator, texts, do_sample=False, max_new_tokens=60)
    assert found == [alone(tiny(), text, max_new_tokens=60) for text in texts]
    assert generate(speculator, texts, **OF_A_SEED) == plainly(tiny(), texts, **OF_A_SEED)
    assert len(sets) > 1 and len(drafter.tuner.judged) >= 5


def test_its_passes_are_counted(hasty):
    """Hooks of the user see as many tokens in each layer as the statistics say."""
    model = clone(tiny())
    seen = [0] * model.config.num_hidden_layers
    for index, layer in enumerate(model.model.layers):

        def count(layer, given, named, index=index):
            seen[index] += given[0].shape[:2].numel()

        layer.register_forward_pre_hook(count, with_kwargs=True)
    speculator = Speculator(model, "draft-verify:auto", shape="chain(2)", execution="eager", self_test=False)
    seen[:] = [0] * len(seen)
    stats = speculator.generate(**padded(prompts([40])), do_sample=False, max_new_tokens=50, pad_token_id=0).stats
    assert speculator.drafter.tuner.judged and stats.layer_tokens == seen


def test_a_set_is_kept_for_the_next_start(hasty, monkeypatch, tmp_path):
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    first = tuned(SkipTuner(Target(planted(), execution="eager"), Clock()), 30, rows())
    assert not list(tmp_path.glob("skips/*"))
    first.store()
    again = SkipTuner(Target(planted(), execution="eager"), Clock())
    assert again.skip == first.skip != again.target.sublayers.spread and again.judged == first.judged
    assert SkipTuner(Target(clone(tiny()), execution="eager"), Clock()).judged == {}  # of another model
    (kept,) = tmp_path.glob("skips/*.json")
    written = kept.stat().st_mtime_ns
    again.store()
    assert kept.stat().st_mtime_ns == written  # nothing new
    kept.write_text(json.dumps({"format": "something else"}))
    anew = SkipTuner(Target(planted(), execution="eager"), Clock())
    assert anew.judged == {} and anew.skip == anew.target.sublayers.spread


def test_a_model_that_has_changed_is_searched_anew(hasty):
    model = clone(tiny())
    speculator = Speculator(model, "draft-verify:auto", shape="chain(2)")
    generate(speculator, prompts([40]), do_sample=False, max_new_tokens=40)
    before = speculator.drafter.tuner
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    text = prompts([40])
    assert generate(speculator, text, do_sample=False, max_new_tokens=12) == [alone(model, text[0], max_new_tokens=12)]
    assert before.judged and speculator.drafter.tuner is not before


def test_models_without_mlp_modules_leave_out_attention_alone(hasty):
    tuner = tuned(SkipTuner(Target(build("opt"), execution="eager"), Clock()), 12, rows(vocabulary=128))
    assert tuner.judged and tuner.skip.attention and not tuner.skip.mlp


def test_the_command_line_takes_it_for_no_file():
    check_drafter("draft-verify:auto", {})
    with pytest.raises(ConfigurationError, match="there is no file 'none'"):
        check_drafter("draft-verify:none", {})


def test_forgetting_begins_anew():
    drafter = DraftVerify("auto")
    speculator = Speculator(clone(tiny()), drafter, shape="chain(2)")
    tuned_before = drafter.tuner
    tuned_before.judged[tuned_before._best] = (1, 1)
    drafter.forget()
    assert drafter.tuner.judged == {} and drafter.skip == speculator.target.sublayers.spread

"""A trained exit: begins as the bare one, learns from the target, is stored, and drafts through layer-skip."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from cover import covered
from helpers import alone, batch_of, generate, prompts, repetitive, tiny
from training_helpers import make_data, trainer

from foredraft import ConfigurationError, Speculator
from foredraft.drafters.draft_verify import DraftVerify
from foredraft.drafters.layer_skip import LayerSkip
from foredraft.heads import checkpoints
from foredraft.heads.exit import ExitHead
from foredraft.models.skips import SkipSet
from foredraft.target import Target
from foredraft.training.batches import Tokens
from foredraft.training.features import Reader
from foredraft.tree import TokenTree

SAMPLED = {"do_sample": True, "seed": 7, "temperature": 1.0, "top_k": 0}


def taught(steps: int = 60, *, attention: bool = False) -> ExitHead:
    """An exit behind the first layer of the tiny llama, trained for a moment on what that says."""
    model = tiny("llama")
    head = ExitHead.for_target(model, exit=1, attention=attention)
    batch = batch_of(model, head, [row + alone(model, row, max_new_tokens=30) for row in repetitive()])
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        head.loss(batch).total.backward()
        optimizer.step()
    return head.requires_grad_(False)


def test_it_begins_as_the_bare_exit_and_learns():
    model, rows = tiny("llama"), repetitive()
    fresh, head = ExitHead.for_target(model, exit=1), taught()
    bare = Speculator(model, LayerSkip(exit=1), shape="chain(3)", execution="eager")
    expected = bare.generate(torch.tensor(rows[:1]), max_new_tokens=24, do_sample=False)
    same = Speculator(model, LayerSkip(fresh), shape="chain(3)", execution="eager")
    found = same.generate(torch.tensor(rows[:1]), max_new_tokens=24, do_sample=False)
    assert found.sequences.tolist() == expected.sequences.tolist() and found.stats.accepted == expected.stats.accepted
    trained = Speculator(model, LayerSkip(head), shape="chain(3)", execution="eager")
    found = trained.generate(torch.tensor(rows[:1]), max_new_tokens=24, do_sample=False)
    assert found.sequences.tolist() == expected.sequences.tolist() and found.stats.accepted > expected.stats.accepted + 4


def test_behind_attention_it_begins_as_the_layers_without_the_rest_and_learns():
    model, rows = tiny("llama"), repetitive()
    fresh, head = ExitHead.for_target(model, exit=1, attention=True), taught(attention=True)
    assert fresh.skip == SkipSet((), (1,))
    found = [
        Speculator(model, drafter, shape="chain(3)", execution="eager").generate(torch.tensor(rows[:1]), max_new_tokens=24, do_sample=False)
        for drafter in (DraftVerify(skip=fresh.skip), LayerSkip(fresh), LayerSkip(head), LayerSkip(taught()))
    ]
    assert len({str(each.sequences.tolist()) for each in found}) == 1
    left_out, begun, trained, without = (each.stats for each in found)
    assert begun.accepted == left_out.accepted and begun.drafted == left_out.drafted and begun.layer_tokens == left_out.layer_tokens
    assert trained.accepted > begun.accepted + 4
    assert len(set(without.layer_tokens)) == 1 < len(set(trained.layer_tokens))  # drafts enter the next layer for its attention


def test_training_reads_what_drafting_reads():
    model, ids = tiny("llama"), torch.tensor(prompts((12,)))
    head = ExitHead.for_target(model, exit=1, attention=True)
    hidden, logits = Reader(model, head.features, skip=head.skip)(Tokens(ids, ids >= 0, ids >= 0, np.zeros(1, int)))
    target = Target(model, execution="eager")
    target.open(ids[:, :4].tolist(), reserve=[16])
    target.prefill(ids[:, :4].tolist(), first=0)
    drafted = target.score_early(TokenTree.from_chain(ids[:, 4:]), head.skip, head=head)
    torch.testing.assert_close(head(hidden[:, 4:, 0]), drafted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model(ids).logits, logits)


@pytest.mark.parametrize(("shape", "attention"), covered(["chain(3)", "product(2,2)", "dynamic(3,2,5)"], [False, True], ways=1))
def test_the_text_is_plain_with_a_stored_one(shape: str, attention: bool, tmp_path: Path):
    model, rows = tiny("llama"), prompts((20, 11))
    checkpoints.save(taught(5, attention=attention), tmp_path)
    speculator = Speculator(model, f"layer-skip:{tmp_path}", rule="match", shape=shape, execution="eager")
    plain = Speculator(model, "none", rule="match", execution="eager")
    for options in ({"do_sample": False}, SAMPLED):
        assert generate(speculator, rows, max_new_tokens=12, **options) == generate(plain, rows, max_new_tokens=12, **options)


@pytest.mark.parametrize(
    "attention", [pytest.param(False, id="alone", marks=pytest.mark.nightly), pytest.param(True, id="behind attention")]
)
def test_a_run_ends_with_an_exit_that_drafts(attention: bool, tmp_path: Path):
    make_data(tmp_path / "data")
    run = trainer(tmp_path / "data", tmp_path / "run", cls=ExitHead, head={"exit": 1, "attention": attention})
    outcome = run.train()
    assert outcome.finished and isinstance(outcome.head, ExitHead) and outcome.state.best_length >= 1


def test_what_does_not_fit_is_refused(tmp_path: Path):
    model = tiny("llama")
    head = ExitHead.for_target(model, exit=1)
    with pytest.raises(ConfigurationError, match="trained for layer 1"):
        Speculator(model, LayerSkip(head, exit=2), execution="eager")
    with pytest.raises(ConfigurationError, match="exit must lie between"):
        ExitHead.for_target(model, exit=0)
    with pytest.raises(ConfigurationError, match="no option 'depth'"):
        ExitHead.for_target(model, depth=2)
    with pytest.raises(ConfigurationError, match="attention must be true or false"):
        ExitHead.for_target(model, attention=2)
    with pytest.raises(ConfigurationError, match="no module of its own"):
        Speculator(tiny("opt"), LayerSkip(ExitHead.for_target(tiny("opt"), exit=1, attention=True)), execution="eager")
    checkpoints.save(head, tmp_path)
    with pytest.raises(ConfigurationError, match="trained for"):
        Speculator(tiny("deepseek_v3"), f"layer-skip:{tmp_path}", execution="eager")

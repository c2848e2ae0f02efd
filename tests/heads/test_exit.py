"""A trained exit: begins as the bare one, learns from the target, is stored, and drafts through layer-skip."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import alone, batch_of, generate, prompts, repetitive, tiny
from training_helpers import make_data, trainer

from foredraft import ConfigurationError, Speculator
from foredraft.drafters.layer_skip import LayerSkip
from foredraft.heads import checkpoints
from foredraft.heads.exit import ExitHead

SAMPLED = {"do_sample": True, "seed": 7, "temperature": 1.0, "top_k": 0}


def taught(steps: int = 60) -> ExitHead:
    """An exit behind the first layer of the tiny llama, trained for a moment on what that says."""
    model = tiny("llama")
    head = ExitHead.for_target(model, exit=1)
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


@pytest.mark.parametrize("shape", ["chain(3)", "product(2,2)", "dynamic(3,2,5)"])
def test_the_text_is_plain_with_a_stored_one(shape: str, tmp_path: Path):
    model, rows = tiny("llama"), prompts((20, 11))
    checkpoints.save(taught(5), tmp_path)
    speculator = Speculator(model, f"layer-skip:{tmp_path}", rule="match", shape=shape, execution="eager")
    plain = Speculator(model, "none", rule="match", execution="eager")
    for options in ({"do_sample": False}, SAMPLED):
        assert generate(speculator, rows, max_new_tokens=12, **options) == generate(plain, rows, max_new_tokens=12, **options)


def test_a_run_ends_with_an_exit_that_drafts(tmp_path: Path):
    make_data(tmp_path / "data")
    run = trainer(tmp_path / "data", tmp_path / "run", cls=ExitHead, head={"exit": 1})
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
    checkpoints.save(head, tmp_path)
    with pytest.raises(ConfigurationError, match="trained for"):
        Speculator(tiny("deepseek_v3"), f"layer-skip:{tmp_path}", execution="eager")

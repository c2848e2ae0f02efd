"""Shared by the tests of drafters that learn while they serve."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft.drafters.learning.drafter import LearningDrafter
from foredraft.drafters.learning.serving import Learning, LearnOptions
from foredraft.planning import FixedPlanner
from foredraft.session import Session
from foredraft.target import Target
from foredraft.testing import continuation_law
from foredraft.verification import create as create_rule


def noisy(weights: dict[str, torch.Tensor], seed: int, amount: float = 0.2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: value + amount * value.float().std(correction=0) * torch.randn(value.shape, generator=generator).to(value)
        for name, value in weights.items()
    }


def never_started(folder: Path, options: LearnOptions) -> Any:
    return SimpleNamespace(poll=lambda: None, kill=lambda: None, wait=lambda: 0)


def restless(drafter: LearningDrafter, seed: int = 0) -> Learning:
    """Other weights after every round from now on."""
    learning = drafter.learning
    assert learning is not None
    first = learning.versions.load(0)
    for number in (1, 2, 3):
        learning.versions.save(number, noisy(first, seed + number))
    turns = itertools.cycle((1, 2, 3))
    learning._newer = lambda now: next(turns)  # type: ignore[method-assign]
    return learning


def small(seed: int) -> LlamaForCausalLM:
    """A model of three tokens."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=3, eos_token_id=None, bos_token_id=None, tie_word_embeddings=False, **sizes)
    model, generator = LlamaForCausalLM(config).eval(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.8, generator=generator)
    return model


def law_of(drafter: LearningDrafter, rule: str, *, swapping: bool) -> dict:
    """Of three tokens of ``small(0)``, so two rounds or more."""
    target = Target(small(0), test=False, reuse_prefix=False, execution="eager")
    drafter.bind(target)
    learning = restless(drafter)
    if not swapping:
        learning._newer = lambda now: None  # type: ignore[method-assign]

    def session(randomness: Any) -> Session:
        if swapping:  # every world has the same weights in the same round
            drafter._take_up(3)
            turns = itertools.cycle((1, 2, 3))
            learning._newer = lambda now: next(turns)  # type: ignore[method-assign]
        return Session(target, drafter, create_rule(rule), proposal="iid", planner=FixedPlanner("chain(2)"), randomness=randomness)

    return continuation_law(session, [0, 1], 3)


def exact_law() -> dict:
    model, law = small(0), {}
    for text in itertools.product(range(3), repeat=3):
        scores = model(torch.tensor([[0, 1, *text]])).logits[0, 1:-1].double().log_softmax(-1)
        law[text] = float(scores.gather(1, torch.tensor(text)[:, None]).detach().sum().exp())
    return law

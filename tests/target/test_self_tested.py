"""The self-test of targets is left out for models that passed it, and for no others."""

from __future__ import annotations

from types import SimpleNamespace

import self_tested
import torch
from architectures import build


def test_models_that_differ_are_tested_each():
    tested = []
    test = self_tested.once(tested.append)

    def asked(model, overrides=None) -> bool:
        before = len(tested)
        test(SimpleNamespace(facts=SimpleNamespace(model=model, chains_only=None), overrides=overrides))
        return len(tested) > before

    model = build("llama")
    assert asked(model) and not asked(build("llama"))
    assert asked(build("llama", "eager")) and asked(build("mistral")) and asked(build("llama"), overrides="packed")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3
    assert asked(model) and not asked(model)
    model.model.layers[0].register_forward_hook(lambda *given: None)
    assert asked(model) and asked(model), "hooks may do anything"


def test_a_test_that_patches_something_is_known(monkeypatch):
    assert self_tested.patching


def test_one_that_does_not_is_known_too():
    assert not self_tested.patching

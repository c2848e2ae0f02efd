"""The self-test finds what no list knows: a model that cannot keep siblings apart, and one whose window is not what it says."""

from __future__ import annotations

import pytest
import torch
from architectures import build
from helpers import tiny, watched

from foredraft import TokenTree, UnsupportedModelError
from foredraft.backends import eager as execution
from foredraft.models import masks
from foredraft.target import Target
from foredraft.tree import chain_layout, static_ancestors

TREE = TokenTree(torch.tensor([[4, 5, 6]]), torch.tensor([[-1, 0, 0]]))


def blind_to_branches(tree, window, positions):
    """A layout in which every node sees all nodes before it, siblings too."""
    seen = TokenTree(tree.tokens, tree.parents)
    seen.__dict__["ancestors"] = static_ancestors(chain_layout(tree.nodes), tree.tokens.device).expand(tree.rows, -1, -1)
    return masks.MaskInputs(seen, window, tree.depths + positions[:, :1])


@torch.inference_mode()
def test_a_model_that_fails_on_trees_alone_is_served_chains(monkeypatch):
    monkeypatch.setattr(execution, "MaskInputs", blind_to_branches)
    target = Target(tiny())
    assert "self-test of LlamaForCausalLM" in target.chains_only and "branching tree" in target.chains_only
    target.open([[3, 4, 5]])
    target.prefill([[3, 4, 5]], first=0)
    target.score(TokenTree.from_chain(TREE.tokens))
    with pytest.raises(UnsupportedModelError, match=r"only verify chains: in the self-test.*differed"):
        target.score(TREE)


@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "llama4_text"])
def test_the_prefix_is_longer_than_the_window(name, monkeypatch):
    lengths = []
    with watched(tiny(name), lambda kwargs: lengths.append(kwargs["input_ids"].shape[1])):
        assert Target(tiny(name)).chains_only is None
    assert max(lengths) > 12 + 4

    def everything(**arguments):
        where = arguments["config"].foredraft_mask_inputs
        return where.visible[:, None]

    monkeypatch.setitem(masks.AttentionMaskInterface()._global_mapping, masks.NAME, everything)
    with pytest.raises(UnsupportedModelError, match="rolled-back cache"):
        Target(tiny(name))


def test_a_wide_window_is_not_exceeded_and_a_small_context_not_overrun():
    model = build("mistral")
    model.config.sliding_window = 4096
    lengths = []
    with watched(model, lambda kwargs: lengths.append(kwargs["input_ids"].shape[1])):
        Target(model)
    assert max(lengths) < 20
    model.config.sliding_window, model.config.max_position_embeddings = 400, 64
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": "dynamic", "factor": 2.0}
    lengths.clear()
    with watched(model, lambda kwargs: lengths.append(kwargs["input_ids"].shape[1])):
        Target(model)
    assert max(lengths) <= 64


def test_too_many_passes_are_not_made_at_load():
    """Eight compare passes over pages with those of the model's own cache."""
    for name, most in (("llama", 18), ("qwen3", 18)):
        passes = []
        with watched(tiny(name), lambda kwargs, passes=passes: passes.append(1)):
            target = Target(tiny(name))
        assert len(passes) <= most and target.passes == 0

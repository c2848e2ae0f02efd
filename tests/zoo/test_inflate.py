"""An inflated model is larger, costs more, and says the same."""

from __future__ import annotations

import pytest
import torch
from helpers import SMALL_IDS, small_llama
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

from foredraft import inflate


@pytest.mark.parametrize("ratio", [1, 4, 16])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}])
def test_logits_are_the_same_in_float32(ratio, changes):
    model = small_llama(**changes)
    inflated = inflate(model, hidden_size=32 * ratio, layers=7)
    assert inflated.config.num_hidden_layers == 7 and inflated.config.num_attention_heads == 4 * ratio
    assert inflated.num_parameters() > model.num_parameters()
    with torch.no_grad():
        torch.testing.assert_close(inflated(SMALL_IDS).logits, model(SMALL_IDS).logits, atol=1e-4, rtol=0)


def test_rescaled_weights_are_exact_in_bfloat16():
    model = small_llama().to(torch.bfloat16)
    inflated = inflate(model, hidden_size=128, layers=4)
    assert inflated.dtype == torch.bfloat16
    with torch.no_grad():
        # The weights hold the same numbers, so in float32 arithmetic the two agree as closely as float32 models do.
        exact, same = model.float()(SMALL_IDS).logits, inflated.float()(SMALL_IDS).logits
    torch.testing.assert_close(same, exact, atol=1e-4, rtol=0)


def test_bfloat16_logits_stay_close():
    model = small_llama(initializer_range=0.05).to(torch.bfloat16)
    inflated = inflate(model, hidden_size=128, layers=6)
    with torch.no_grad():
        logits, other = model(SMALL_IDS).logits.float(), inflated(SMALL_IDS).logits.float()
    assert (logits - other).abs().max() <= 0.03 * logits.abs().max()


def test_cached_decoding_works_and_the_source_is_untouched():
    model = small_llama()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    inflated = inflate(model, hidden_size=128, layers=5, intermediate_size=100)
    assert inflated.config.intermediate_size == 100
    cache = DynamicCache()
    with torch.no_grad():
        inflated(SMALL_IDS[:, :9], past_key_values=cache)
        tail = inflated(SMALL_IDS[:, 9:], past_key_values=cache).logits
        torch.testing.assert_close(tail, model(SMALL_IDS).logits[:, 9:], atol=1e-4, rtol=0)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_new_weights_are_numbers_that_cost_what_numbers_cost():
    inflated = inflate(small_llama(), hidden_size=128, layers=5)
    for layer in inflated.model.layers:
        for part in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.mlp.gate_proj, layer.mlp.up_proj):
            assert (part.weight == 0).float().mean() < 0.01
    assert not any(weight.is_meta for weight in [*inflated.parameters(), *inflated.buffers()])


@pytest.mark.parametrize("hidden_size", [16, 33, 64, 96, 256])
def test_widths_that_would_lose_exactness_are_refused(hidden_size):
    with pytest.raises(ValueError, match="power of four"):
        inflate(small_llama(), hidden_size=hidden_size, layers=3)


def test_other_refusals():
    with pytest.raises(ValueError, match="layers must be at least"):
        inflate(small_llama(), hidden_size=128, layers=2)
    with pytest.raises(ValueError, match="intermediate_size must be at least"):
        inflate(small_llama(), hidden_size=128, layers=3, intermediate_size=47)
    with pytest.raises(ValueError, match="gpt2"):
        inflate(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9)), hidden_size=32, layers=2)

"""An inflated model is larger, costs more, and says the same."""

from __future__ import annotations

import pytest
import torch
from helpers import SMALL_IDS, small_llama
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from foredraft import inflate
from foredraft.models.cache_names import cache_argument


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
    cache = {cache_argument(type(inflated)): DynamicCache()}
    with torch.no_grad():
        inflated(SMALL_IDS[:, :9], **cache)
        tail = inflated(SMALL_IDS[:, 9:], **cache).logits
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


def small_t5(**changes) -> T5ForConditionalGeneration:
    options = {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_heads": 4,
        "num_layers": 3,
        "num_decoder_layers": 2,
        "vocab_size": 64,
        "decoder_start_token_id": 0,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = T5ForConditionalGeneration(T5Config(**{**options, "feed_forward_proj": "gated-gelu", **changes})).eval()
        for weight in model.parameters():
            if weight.ndim == 1:  # a norm
                torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model


@pytest.mark.parametrize("ratio", [4, 16])
@pytest.mark.parametrize("changes", [{}, {"feed_forward_proj": "relu"}, {"tie_word_embeddings": False}])  # False: no scale before the head
def test_t5_grows_in_width_with_the_same_logits(ratio, changes):
    model = small_t5(**changes)
    inflated = inflate(model, hidden_size=32 * ratio)
    assert (inflated.config.d_ff, inflated.config.num_heads, inflated.config.num_decoder_layers) == (48 * ratio, 4 * ratio, 2)
    source, text = SMALL_IDS % 60 + 2, SMALL_IDS[:, :7] % 60 + 2
    mask = torch.ones_like(source)
    mask[:, 5:8] = 0
    with torch.no_grad():
        found = [each(input_ids=source, attention_mask=mask, decoder_input_ids=text).logits for each in (model, inflated)]
    assert found[0].std() > 0.1
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=0)
    assert not any(weight.is_meta for weight in [*inflated.parameters(), *inflated.buffers()])
    assert inflated.lm_head.weight is inflated.shared.weight is inflated.decoder.embed_tokens.weight


def test_inflated_t5_generates_the_same_and_is_exact_in_bfloat16():
    model = small_t5().to(torch.bfloat16)
    inflated = inflate(model, hidden_size=128)
    assert inflated.dtype == torch.bfloat16
    options = {"input_ids": SMALL_IDS % 60 + 2, "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.float().generate(**options), inflated.float().generate(**options))
    with pytest.raises(ValueError, match="width alone: layers must be its own 3, not 4"):
        inflate(model, hidden_size=128, layers=4)


def test_other_refusals():
    with pytest.raises(ValueError, match="layers must be at least"):
        inflate(small_llama(), hidden_size=128, layers=2)
    with pytest.raises(ValueError, match="intermediate_size must be at least"):
        inflate(small_llama(), hidden_size=128, layers=3, intermediate_size=47)
    with pytest.raises(ValueError, match="gpt2"):
        inflate(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9)), hidden_size=32, layers=2)

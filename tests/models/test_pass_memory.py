"""What a pass takes besides weights and cache is known without making it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, build
from helpers import tiny
from kernel_cases import build as described
from kernel_cases import needs_kernels
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft import Speculator
from foredraft.models import pass_memory
from foredraft.models.pass_memory import Peak, pass_bytes
from foredraft.target import budgets
from foredraft.target.budgets import SAMPLED, SPARE, UNKNOWN
from foredraft.target.target import PREFILL_TOKENS, SCORED

ROWS, TOKENS = 3, 96


@torch.inference_mode()
def really(model) -> int:
    """The bytes of a pass with numbers, over the same texts."""
    ids = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS) % 50
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().expand(ROWS, 1, TOKENS, TOKENS)
    if model.config._attn_implementation == "eager":
        seen = torch.zeros(seen.shape).masked_fill(~seen, -1e9)
    with Peak() as peak:
        model(input_ids=ids, attention_mask=seen, position_ids=torch.arange(TOKENS).expand(ROWS, -1), use_cache=False, logits_to_keep=1)
    return peak.most


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "phi3", "gpt_neox", "olmo2"])
def test_it_is_what_a_pass_takes(family):
    model = build(family, ARCHITECTURES[family].implementations[0])
    assert 0.9 <= pass_bytes(model, ROWS, TOKENS) / really(model) <= 1.3


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_experts_are_not_read_one_by_one(family):
    model = build(family, ARCHITECTURES[family].implementations[0])
    assert pass_bytes(model, ROWS, 2 * TOKENS) > 1.5 * pass_bytes(model, ROWS, TOKENS) > 0


def test_scores_of_eager_attention_count():
    eager, fused = build("llama", "eager"), build("llama", "sdpa")
    heads = eager.config.num_attention_heads
    assert pass_bytes(eager, ROWS, 512) - pass_bytes(fused, ROWS, 512) > 4 * ROWS * heads * 512 * 512


def test_it_is_what_the_docs_say_of_a_large_model():
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    said = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
    assert f"For Llama-3.1-8B in bfloat16 that is another {pass_bytes(model, 4, 1024) / 2**20:.0f} MiB" in said
    assert f"at {SAMPLED} bytes each ({SAMPLED * SCORED >> 20} MiB)" in said


def test_it_is_measured_once_and_unknown_where_it_fails(monkeypatch):
    calls = []
    monkeypatch.setattr(pass_memory, "_known", {})
    monkeypatch.setattr(pass_memory, "_measured", lambda *about: calls.append(about) or 1 / 0)
    assert pass_bytes(tiny(), 1, 5) is None and pass_bytes(tiny(), 1, 5) is None
    assert len(calls) == 1
    assert pass_bytes(tiny(), 1, 6) is None and len(calls) == 2


@needs_kernels
def test_auto_leaves_room_for_the_largest_pass(monkeypatch):
    free, model = [8 << 30], described("qwen3", torch.float32)
    monkeypatch.setattr(budgets, "free_memory_of", lambda device: free[0])

    def budget() -> int:
        made = Speculator(model, "none", execution="native")
        made.close()
        return made.target.budget

    asked = []

    def measured(model, rows, tokens):
        asked.append((rows, tokens))
        return 3 << 20

    monkeypatch.setattr(budgets, "pass_bytes", measured)
    logits = SAMPLED * PREFILL_TOKENS * model.config.vocab_size
    assert budget() == int((1 - SPARE) * free[0] - (3 << 20) - logits)
    assert asked[0][0] * asked[0][1] >= PREFILL_TOKENS / 2
    free[0] = 10 << 20  # what a pass takes would leave nothing
    assert budget() == free[0] // 2
    monkeypatch.setattr(budgets, "pass_bytes", lambda *about: None)
    assert budget() == int((1 - UNKNOWN) * free[0])

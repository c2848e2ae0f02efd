"""Shapes that people run, with random weights, as checkpoints in bfloat16.

A model of random weights soon repeats one token. Such text goes through the same experts at every step, and any lookup guesses it. So the
output embeddings of some hundred tokens are set so that each is by far the likeliest behind the one before it: a walk. Attention writes
little to the residual stream, so that this holds behind any text. Text then goes on with tokens that differ, which no lookup can guess
unless they have been seen; where they have, it copies. All sides write the same. A pass reads and computes what it would with any weights.

Routers of random weights choose between experts that are nearly as likely, so that rounding decides. Experts write little too, so that
logits hardly depend on that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.checkpoints import DONE, Checkpoint, pass_bytes
from foredraft.errors import ConfigurationError
from foredraft.loading import load_tokenizer

TEST = "-test"
TOKENIZER = "zoo:python-8m"
SHARE = 0.001  # of what attention would write
OF_EXPERTS = 0.01  # of what experts would write
EMBEDDING = 0.02  # standard deviation
WALK = 256  # tokens
SPECIAL = 16  # tokens that are not in it
NODES = (1, 8)
POSITIONS = 8192
EXPERTS, ACTIVE = 16, 4  # of a layer, and of a token
ROUTED = {"num_experts_per_tok": ACTIVE, "moe_intermediate_size": 512}
SMALL = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 64, "moe_intermediate_size": 64, "initializer_range": 0.05,
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A class of transformers' configurations, and its values."""

    config: str
    values: Mapping[str, Any]

    @property
    def routed(self) -> bool:
        return "num_experts_per_tok" in self.values


def heads(number: int, shared: int, size: int) -> dict[str, int]:
    return {"num_attention_heads": number, "num_key_value_heads": shared, "head_dim": size}


def sizes(vocabulary: int, width: int, inner: int, layers: int, tied: bool) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
        "tie_word_embeddings": tied,
    }  # fmt: skip


SHAPES = {
    "qwen3": Shape("Qwen3Config", {**sizes(151936, 1024, 3072, 28, True), **heads(16, 8, 128)}),
    "phi3": Shape("Phi3Config", {**sizes(32064, 1536, 4096, 20, False), "num_attention_heads": 16, "num_key_value_heads": 16}),
    "gemma3": Shape("Gemma3TextConfig", {**sizes(262144, 1152, 6912, 26, True), **heads(4, 1, 256), "sliding_window": 512}),
    "qwen3_moe": Shape(
        "Qwen3MoeConfig",
        {**sizes(32768, 1024, 3072, 15, False), **heads(16, 4, 64), **ROUTED, "num_experts": EXPERTS, "norm_topk_prob": True},
    ),
    "llama": Shape("LlamaConfig", {**sizes(128256, 2048, 8192, 16, True), **heads(32, 8, 64)}),
    "gpt_oss": Shape(
        "GptOssConfig",
        {**sizes(32768, 1024, 512, 14, False), **heads(16, 4, 64), "num_local_experts": EXPERTS, "num_experts_per_tok": ACTIVE},
    ),
    "deepseek_v3": Shape(
        "DeepseekV3Config",
        {
            **sizes(32768, 1024, 3072, 14, False), **ROUTED, "num_attention_heads": 16, "num_key_value_heads": 16,
            "n_routed_experts": EXPERTS, "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
            "q_lora_rank": 384, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        },
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Made(Checkpoint):
    """A checkpoint of a shape.

    Attributes:
        walk: tokens that follow one another.
        touched: distinct experts of a layer, in the mean over layers, that the first 1 and 8 tokens of the vocabulary go through; the
            adapter times its passes over these.
    """

    walk: tuple[int, ...]
    touched: tuple[float, float] | None
    shape: Shape

    @property
    def pass_bytes(self) -> int | None:
        """Bytes of weights that a pass over one token reads."""
        return pass_bytes(self.path, "bfloat16", experts=ACTIVE / EXPERTS)


def find(name: str) -> Shape:
    """The shape of that name; ``NAME-test`` has its layers in a size that is no load.

    Raises:
        ConfigurationError: there is none.
    """
    if (shape := SHAPES.get(name.removesuffix(TEST))) is None:
        raise ConfigurationError(f"unknown shape {name!r}; choose from {', '.join(SHAPES)}")
    small = {key: value for key, value in SMALL.items() if key in shape.values or key == "initializer_range"}
    return replace(shape, values={**shape.values, **small}) if name.endswith(TEST) else shape


def written(name: str, work: Path) -> Made:
    """The checkpoint of a shape, made unless it is under ``work``."""
    shape, slug = find(name), f"families-{name}"
    path = (work / slug / "hf").absolute()
    about = path / "walk.json"
    if not (path / DONE).exists():
        model = made(shape)
        walk = laid(model)
        touched = [experts(model, list(range(nodes))) for nodes in NODES] if shape.routed else None
        model.save_pretrained(path)
        load_tokenizer(TOKENIZER).save_pretrained(path)
        about.write_text(json.dumps({"walk": walk, "touched": touched}), encoding="utf-8")
        (path / DONE).touch()
    found = json.loads(about.read_text(encoding="utf-8"))
    return Made(name, path, slug, tuple(found["walk"]), found["touched"] and tuple(found["touched"]), shape)


@torch.no_grad()
def made(shape: Shape) -> Any:
    import transformers

    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": POSITIONS}
    config = getattr(transformers, shape.config)(**shape.values, **special)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        for weight in {id(each.weight): each.weight for each in (model.get_input_embeddings(), model.get_output_embeddings())}.values():
            weight.normal_(std=EMBEDDING / getattr(model.get_input_embeddings(), "scalar_embed_scale", 1.0))
    normed = any("pre_feedforward_layernorm" in name for name, _ in model.named_parameters())  # Gemma: what attention writes is normed
    for name, weight in model.named_parameters():
        if "o_proj" in name:
            weight.mul_(SHARE)
        elif "experts.down_proj" in name:
            weight.mul_(OF_EXPERTS)
        elif normed and "post_attention_layernorm" in name:
            weight.fill_(SHARE - 1)  # 1 is added to it
    return model


@torch.no_grad()
def laid(model: Any) -> list[int]:
    """Lay a walk: every token's output embedding gets half its direction from the last state of the token before it."""
    generator = torch.Generator().manual_seed(1)
    head = model.get_output_embeddings().weight
    order = torch.randperm(len(head) - SPECIAL, generator=generator)[:WALK] + SPECIAL
    for token, following in pairwise(order.tolist()):
        state = model.model(input_ids=torch.tensor([[token]]), use_cache=False).last_hidden_state[0, -1].float()
        row = head[following].float()
        mixed = state / state.norm() + row / row.norm()
        head[following] = (mixed * row.norm() / mixed.norm()).to(head.dtype)
    return [int(token) for token in order]


@torch.no_grad()
def experts(model: Any, ids: list[int]) -> float:
    """Distinct experts of a layer that ``ids`` go through, in the mean over layers."""
    counts: list[int] = []

    def count(module: Any, arguments: tuple[Any, ...]) -> None:
        counts.append(arguments[1].unique().numel())  # [tokens, active]

    hooks = [each.register_forward_pre_hook(count) for name, each in model.named_modules() if name.endswith("mlp.experts")]
    model(input_ids=torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return mean(counts)

"""Draft models that are known to fit families of published models. The table in ``docs/drafters.md`` is this one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Pair:
    """A family of targets and its draft model.

    Attributes:
        targets: the family, for people.
        types: its ``model_type`` in ``config.json``.
        vocab: the smallest and the largest vocabulary, padding included.
        draft: a hub id or ``zoo:NAME``.
        billions: parameters of the draft.
        named: what a target's name contains; of several pairs that fit, the first counts.
        tried: it was run with Foredraft.
    """

    targets: str
    types: tuple[str, ...]
    vocab: tuple[int, int]
    draft: str
    billions: float
    named: str = ""
    tried: bool = False

    def fits(self, source: str, config: dict[str, Any]) -> bool:
        low, high = self.vocab
        known = config.get("model_type") in self.types and low <= (config.get("vocab_size") or 0) <= high
        return known and re.search(self.named, source, re.IGNORECASE) is not None


QWEN = (151_936, 152_064)
PAIRS = (
    Pair("embedded: `zoo:python-8m`, `zoo:python-300m`", ("llama",), (4096, 4096), "zoo:python-1m", 0.001, "^zoo:", True),
    Pair("Qwen3 4B to 32B, 30B-A3B, 235B-A22B", ("qwen3", "qwen3_moe"), QWEN, "Qwen/Qwen3-0.6B", 0.6),
    Pair("Qwen2.5-Coder 3B to 32B", ("qwen2",), QWEN, "Qwen/Qwen2.5-Coder-0.5B-Instruct", 0.5, "qwen2.5-coder"),
    Pair("DeepSeek-R1-Distill-Qwen 7B to 32B", ("qwen2",), QWEN, "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 1.8, "r1-distill-qwen"),
    Pair("Qwen2.5 3B to 72B", ("qwen2",), QWEN, "Qwen/Qwen2.5-0.5B-Instruct", 0.5),
    Pair("Llama 3.1 8B to 405B, 3.3 70B", ("llama",), (128_256, 128_256), "meta-llama/Llama-3.2-1B-Instruct", 1.2),
    Pair("Llama 2 7B to 70B", ("llama",), (32_000, 32_000), "TinyLlama/TinyLlama-1.1B-Chat-v1.0", 1.1),
    Pair("DeepSeek-Coder 6.7B, 33B", ("llama",), (32_256, 32_256), "deepseek-ai/deepseek-coder-1.3b-instruct", 1.3),
    Pair("SmolLM2 1.7B", ("llama",), (49_152, 49_152), "HuggingFaceTB/SmolLM2-135M-Instruct", 0.13),
    Pair("Gemma 2 9B, 27B", ("gemma2",), (256_000, 256_000), "google/gemma-2-2b-it", 2.6),
    Pair("Gemma 3 4B to 27B", ("gemma3", "gemma3_text"), (262_144, 262_208), "google/gemma-3-1b-it", 1.0),
    Pair("OLMo 2 7B to 32B", ("olmo2",), (100_352, 100_352), "allenai/OLMo-2-0425-1B-Instruct", 1.5),
    Pair("Granite 3 8B", ("granite",), (49_152, 49_160), "ibm-granite/granite-3.3-2b-instruct", 2.5),
    Pair("StarCoder2 15B", ("starcoder2",), (49_152, 49_152), "bigcode/starcoder2-3b", 3.0),
    Pair("Pythia 1B to 12B", ("gpt_neox",), (50_254, 50_688), "EleutherAI/pythia-160m", 0.16),
    Pair("OPT 1.3B to 66B", ("opt",), (50_272, 50_272), "facebook/opt-125m", 0.13),
    Pair("BLOOM 3B to 176B", ("bloom",), (250_880, 250_880), "bigscience/bloom-560m", 0.56),
    Pair("GPT-2 large, XL", ("gpt2",), (50_257, 50_257), "distilbert/distilgpt2", 0.08),
)


def pair_for(source: str, config: dict[str, Any]) -> Pair | None:
    """The draft for the target ``source`` with this ``config``."""
    return next((each for each in PAIRS if each.fits(source, config)), None)


def markdown() -> str:
    """The table for the documentation."""
    rows = [f"| {each.targets} | `{each.draft}` | {each.billions:g} B | {'yes' if each.tried else 'no'} |" for each in PAIRS]
    return "\n".join(["| target | draft model | parameters | tried here |", "|---|---|---:|---|", *rows])

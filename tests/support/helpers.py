"""Shared by the tests of the loop: prompts, padding, references from transformers, and drafters that really get some tokens wrong."""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from architectures import VOCABULARY, build
from mtp_cases import mtp_layers
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft import Speculator, drafters, heads
from foredraft.drafters.base import Drafter, DraftRequest
from foredraft.drafters.datastore import Datastore
from foredraft.drafters.draft_model import DraftModel
from foredraft.drafters.ngram import NGram
from foredraft.drafters.rest import Rest
from foredraft.drafters.several import Several
from foredraft.heads.base import Batch
from foredraft.planning import CostModel
from foredraft.training.batches import Tokens
from foredraft.training.features import Reader
from foredraft.tree import TokenTree

PAD = 0
LENGTHS = (52, 41, 44)  # all longer than any window of the tiny models


_said: dict[int, dict[str, Any]] = {}  # by models that no test changes, what `alone` and `plainly` found


@cache
def tiny(name: str = "llama", implementation: str = "sdpa") -> Any:
    """The tiny model of `architectures.build`, shared between tests: do not change it."""
    model = build(name, implementation)
    _said[id(model)] = {}
    return model


@cache
def perturbed(name: str = "llama", implementation: str = "sdpa", amount: float = 0.06, seed: int = 5) -> Any:
    """A model that mostly agrees with ``tiny(name)``: the same weights and a little noise."""
    model = build(name, implementation)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(amount * weight.std(correction=0) * torch.randn(weight.shape, generator=generator).to(weight.device))
    return model


def prompts(lengths: Sequence[int] = LENGTHS, *, seed: int = 1, vocabulary: int = VOCABULARY) -> list[list[int]]:
    """Random prompts; the ids below 3 stay free for padding and ends."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def repetitive(lengths: Sequence[int] = LENGTHS, *, seed: int = 1) -> list[list[int]]:
    """Prompts that repeat themselves, so that prompt lookup has something to copy."""
    return [(prompt[:9] * 20)[:length] for prompt, length in zip(prompts(lengths, seed=seed), lengths)]


def padded(rows: Sequence[Sequence[int]], side: str = "left") -> dict[str, torch.Tensor]:
    """``input_ids`` and ``attention_mask`` of a ragged batch."""
    width = max(map(len, rows))
    ids, mask = torch.full((len(rows), width), PAD), torch.zeros(len(rows), width, dtype=torch.long)
    for line, keep, row in zip(ids, mask, rows):
        where = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        line[where], keep[where] = torch.tensor(row), 1
    return {"input_ids": ids, "attention_mask": mask}


def alone(model: Any, prompt: Sequence[int], **options: Any) -> list[int]:
    """What transformers' own generate adds to one unpadded prompt; asked once where the model is shared and the options are numbers."""
    ids = torch.tensor([list(prompt)], device=model.device)
    options = {"do_sample": False, "pad_token_id": PAD, **options}
    said, key = _answers(model, options), str((prompt, sorted(options.items())))
    if key not in said:
        said[key] = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
    return list(said[key])


def _answers(model: Any, options: dict[str, Any]) -> dict[str, Any]:
    """What was found before, or nothing where the model is not shared or an option is no number."""
    return _said.get(id(model), {}) if all(isinstance(value, (bool, int, float)) for value in options.values()) else {}


def added(output: Any, width: int) -> list[list[int]]:
    """New tokens per row, without the padding of rows that ended early."""
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    rows = sequences[:, width:].tolist()
    if isinstance(output, torch.Tensor):
        return rows
    return [row[: mine.tokens] for row, mine in zip(rows, output.stats.rows)]


def generate(speculator: Any, rows: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    """New tokens per row of a left-padded batch."""
    return added(speculator.generate(**padded(rows), **{"pad_token_id": PAD, **options}), max(map(len, rows)))


def plainly(model: Any, rows: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    """What our own plain decoding adds to a batch; asked once, like `alone`."""
    said, key = _answers(model, options), str(("plainly", rows, sorted(options.items())))
    if key not in said:
        said[key] = generate(Speculator(model, "none"), rows, **options)
    return [list(row) for row in said[key]]


class Oracle(Drafter):
    """Knows the texts to come and gets every fifth token of them wrong, so that every round accepts and rejects for sure."""

    name = "oracle"
    summary = "for tests"

    def __init__(self, texts: Sequence[Sequence[int]], *, wrong: int = 5):
        self.texts, self.wrong = [list(text) for text in texts], wrong

    def draft(self, request: DraftRequest) -> TokenTree:
        return request.chains([self._next(row.ids, limit, request.vocab_size) for row, limit in zip(request.rows, request.limits)])

    def _next(self, ids: list[int], limit: int, vocabulary: int) -> list[int]:
        text = next((text for text in self.texts if text[: len(ids)] == ids), [])
        places = range(len(ids), min(len(ids) + limit, len(text)))
        return [(text[place] + 1) % vocabulary if place % self.wrong == 2 else text[place] for place in places]


def make_drafter(name: str, family: str = "llama", implementation: str = "sdpa", **options: Any) -> Drafter:
    """A fresh drafter of every registered kind, fit for ``tiny(family)``."""
    if name == "draft-model":
        return DraftModel(perturbed(family, implementation), **options)
    if name == "ngram":
        return NGram(order=3, learn=True)
    if name == "rest":
        return Rest(Datastore.build(repetitive(), vocab_size=VOCABULARY), **options)
    if name in ("medusa", "hydra", "rnn"):
        steps = 40 if name == "medusa" else 12  # these learn faster, and should be wrong now and then
        return drafters.find(name)(taught_head(name, family, implementation, steps), **options)
    if name == "eagle3":
        return drafters.find(name)(eagle3_head(family, implementation), **options)
    if name == "mtp":
        return drafters.find(name)(mtp_layers(tiny(family, implementation)), **options)
    if name == "several":
        return Several([DraftModel(perturbed(family, implementation)), "prompt-lookup"])
    return drafters.create(name, options)


@cache
def taught_head(kind: str, family: str = "llama", implementation: str = "sdpa", steps: int = 40, **options: Any) -> Any:
    """A head for ``tiny(family)``, eight tokens ahead, trained for a moment on what the model adds to ``repetitive`` prompts."""
    model, rows = tiny(family, implementation), repetitive()
    head = heads.find(kind).for_target(model, **{"steps" if kind == "rnn" else "heads": 8, **options})
    batch = batch_of(model, head, [row + alone(model, row, max_new_tokens=30) for row in rows])
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        head.loss(batch).total.backward()
        optimizer.step()
    return head.requires_grad_(False)


@torch.no_grad()
def batch_of(model: Any, head: Any, texts: Sequence[Sequence[int]], *, prompt: int = 1) -> Batch:
    """What a training step sees of ``texts``; all but the first ``prompt`` tokens of each are counted."""
    width = max(map(len, texts))
    device = model.device
    ids, valid = torch.full((len(texts), width), PAD, device=device), torch.zeros(len(texts), width, dtype=torch.bool, device=device)
    for line, real, text in zip(ids, valid, texts):
        line[: len(text)], real[: len(text)] = torch.tensor(text), True
    counted = valid & (torch.arange(width, device=device) >= prompt)
    reader = Reader(model, head.features, skip=head.skip)
    return Batch(ids, valid, counted, *reader(Tokens(ids, valid, counted, np.arange(len(texts)))))


@cache
def eagle3_head(family: str = "llama", implementation: str = "sdpa", amount: float = 0.3, seed: int = 3, **options: Any) -> Any:
    """A head for ``tiny(family)`` with weights as wide as a tiny model's, so that every part of it shows in what it drafts."""
    model = tiny(family, implementation)
    head = heads.find("eagle3").for_target(model, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if "lm_head" in name:
                continue
            noise = amount * torch.randn(weight.shape, generator=generator).to(weight.device)
            weight.add_(noise if weight.ndim == 1 else 4 * noise / weight.shape[-1] ** 0.5)
    return head


def drafter_names() -> list[str]:
    return drafters.names()


@contextmanager
def watched(model: Any, seen: Callable[[dict[str, Any]], None]) -> Any:
    """Call ``seen`` with the keyword arguments of every forward pass of ``model``."""
    handle = model.register_forward_pre_hook(lambda module, args, kwargs: seen(kwargs), with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def forked(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function`` in a copy of this process, which need not import anything anew; ``exitcode`` is minus the signal that killed it."""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    return process


def clone(model: Any) -> Any:
    """A copy that a test may change."""
    return copy.deepcopy(model)


def random_tree(rows: int, nodes: int, seed: int) -> TokenTree:
    """Another shape in every row."""
    generator = torch.Generator().manual_seed(seed)
    parents = [[-1] + [int(torch.randint(0, node, (), generator=generator)) for node in range(1, nodes)] for _ in range(rows)]
    return TokenTree(torch.randint(3, 128, (rows, nodes), generator=generator), torch.tensor(parents))


def small_llama(**changes: Any) -> LlamaForCausalLM:
    """A Llama of 97 tokens whose norms and biases matter, small enough to be inflated."""
    settings = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.3, "rms_norm_eps": 1e-3,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**settings | changes)).eval()
        for name, weight in model.named_parameters():
            if "norm" in name:  # weights of one would hide a norm that is not rescaled
                torch.nn.init.uniform_(weight, 0.5, 1.5)
            if name.endswith("bias"):
                torch.nn.init.uniform_(weight, -0.5, 0.5)
    return model


def known_costs(*, pass_: float, level: float) -> CostModel:
    """Of one row: seconds of the target's passes, whatever they read, and of a level of the draft. The rest of a round takes nothing."""
    costs = CostModel()
    for size in (1, 13):
        costs.target.measured(1, size, pass_)
    costs.level.measured(1, 1, level)
    costs.rest.measured(1, 1, 1e-12)
    return costs


SMALL_IDS = torch.arange(3 * 17).reshape(3, 17) * 31 % 97

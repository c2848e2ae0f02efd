"""Requests as drafters get them, without a session."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from foredraft.drafters.base import DraftRequest
from foredraft.logits.noise import Noise
from foredraft.logits.processors import Pipeline
from foredraft.logits.sampler import Sampler
from foredraft.shapes import TreeShape


@dataclass
class Row:
    ids: list[int]
    slot: int = 0
    prompt_length: int = 1
    capacity: int = 500
    children: list = field(default_factory=list)


def request(rows, depth=5, vocabulary=128, **options) -> DraftRequest:
    lengths = [len(row.ids) for row in rows]
    noise = Noise(torch.tensor([row.slot for row in rows]), torch.tensor(lengths) - 1)
    committed = torch.zeros(len(rows), 600, dtype=torch.long)
    for line, row in zip(committed, rows):
        line[: len(row.ids)] = torch.tensor(row.ids)
    sampler = Sampler(
        [Pipeline()] * len(rows), [options.get("proposal") in ("iid", "keyed")] * len(rows), lengths, noise, lambda: committed
    )
    options = {"limits": [depth] * len(rows), "proposal": "deterministic", "needs_q": False, **options}
    shape = TreeShape.parse(options.pop("shape", f"chain({depth})"))
    return DraftRequest(rows=rows, shape=shape, depth=depth, vocab_size=vocabulary, device=torch.device("cpu"), sampler=sampler, **options)


def drafted(tree) -> list[list[int]]:
    tree.check(128)
    valid = torch.ones_like(tree.tokens, dtype=torch.bool) if tree.valid is None else tree.valid
    return [tokens[keep][1:].tolist() for tokens, keep in zip(tree.tokens, valid)]

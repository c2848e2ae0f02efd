"""Requests as drafters get them, without a session."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from foredraft.drafters.base import DraftRequest
from foredraft.logits.noise import Noise
from foredraft.logits.processors import Pipeline
from foredraft.logits.sampler import Sampler
from foredraft.shapes import TreeShape


@dataclass
class Row:
    """A row without a session."""

    ids: list[int]
    slot: int = 0
    prompt_length: int = 1
    capacity: int = 500
    isolation: str | None = None


def request(rows, depth=5, vocabulary=128, shape=None, proposal="deterministic", **options) -> DraftRequest:
    shape, drawn = TreeShape.parse(f"chain({depth})" if shape is None else shape), proposal in ("iid", "without-replacement")
    lengths = [len(row.ids) for row in rows]
    noise = Noise(torch.tensor([row.slot for row in rows]), torch.tensor(lengths) - 1)
    committed = torch.zeros(len(rows), 600, dtype=torch.long)
    for line, row in zip(committed, rows):
        line[: len(row.ids)] = torch.tensor(row.ids)
    sampler = Sampler([Pipeline()] * len(rows), [drawn or proposal == "keyed"] * len(rows), lengths, noise, lambda: committed)
    options = {"limits": [shape.depth] * len(rows), "needs_q": drawn, **options}
    device = torch.device("cpu")
    return DraftRequest(rows, shape, shape.depth, proposal=proposal, vocab_size=vocabulary, device=device, sampler=sampler, **options)


def drafted(tree) -> list[list[int]]:
    tree.check(128)
    valid = torch.ones_like(tree.tokens, dtype=torch.bool) if tree.valid is None else tree.valid
    return [tokens[keep][1:].tolist() for tokens, keep in zip(tree.tokens, valid)]

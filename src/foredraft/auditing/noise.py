"""The noise part: random numbers as they are in use, where the exact part puts an enumeration in their place.

The rule and the shape run in the real loop on the exact part's tables, with the noise of :mod:`foredraft.logits.noise` and rows under
neighbouring seeds. Whole continuations, and the first tokens of neighbouring rows, are counted against what the target's table says
(Pearson's chi-square). Besides, tokens are drawn over the model's own vocabulary, on the model's device.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from foredraft.auditing.exact import PROMPT, cut, session_on_tables, tables
from foredraft.auditing.report import NoisePart, Statistic
from foredraft.auditing.tally import upper_tail
from foredraft.logits.noise import Noise, Purpose, row_key
from foredraft.rows import RowParameters
from foredraft.speculator import Speculator
from foredraft.testing import continuations, plain_law

TOKENS = 4  # per continuation: three rounds at least where a draft fails
CONTINUATIONS, BATCH = 12_288, 4096
LAGS = (1, 2)  # rows of one call, and the same row of the next seed
NUMBERS = 1 << 27  # random numbers for the draws over the model's vocabulary: seconds
GROUPS = 32  # of tokens with about the same probability together
EXPECTED = 8.0  # cells that expect fewer are counted together


@torch.inference_mode()
def check(speculator: Speculator, *, seed: int, significance: float) -> NoisePart:
    """Test the noise under ``speculator``'s rule and shape; ``significance`` is for all tests together."""
    begin = time.perf_counter()
    vocab_size, device = speculator.target.vocab_size, speculator.target.device
    draws = min(CONTINUATIONS, max(GROUPS * 16, NUMBERS // vocab_size))
    statistics = [*in_the_loop(speculator, seed), *over_the_vocabulary(vocab_size, draws, seed, device)]
    return NoisePart(
        continuations=CONTINUATIONS,
        shape=str(cut(speculator.shape)),
        draws=draws,
        vocab_size=vocab_size,
        statistics=statistics,
        p_value=min(1.0, len(statistics) * min(each.p_value for each in statistics)),
        significance=significance,
        seconds=time.perf_counter() - begin,
    )


def in_the_loop(speculator: Speculator, seed: int) -> list[Statistic]:
    """Continuations of the dense table under seeds as ``generate`` makes them: rows 0 and 1 of each seed."""
    p, q = tables()["dense"]
    texts: list[tuple[int, ...]] = []
    for first in range(0, CONTINUATIONS, BATCH):
        rows = [
            RowParameters(max_new_tokens=TOKENS, do_sample=True, seed=(seed + row // 2, row % 2)) for row in range(first, first + BATCH)
        ]
        texts += continuations(session_on_tables(speculator, cut(speculator.shape), p, q, Noise), [PROMPT] * BATCH, rows)
    whole, single = plain_law(p, PROMPT, TOKENS), plain_law(p, PROMPT, 1)
    pairs = {a + b: single[a] * single[b] for a in single for b in single}
    return [
        chi_square("whole continuations", texts, whole),
        *(chi_square(f"first tokens of rows {lag} apart", [a[:1] + b[:1] for a, b in disjoint_pairs(texts, lag)], pairs) for lag in LAGS),
    ]


def disjoint_pairs(texts: Sequence[tuple[int, ...]], lag: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Each text once: with the one ``lag`` further on, so that pairs are independent of each other."""
    return [(texts[row], texts[row + lag]) for row in range(len(texts) - lag) if row % (2 * lag) < lag]


def over_the_vocabulary(vocab_size: int, draws: int, seed: int, device: torch.device) -> list[Statistic]:
    """Tokens drawn by the match race and by a fresh draw from one distribution, steep at the top as a model's is."""
    p = torch.softmax(-1.2 * torch.arange(1, vocab_size + 1, dtype=torch.float64).log(), 0)  # on the CPU: MPS has no float64
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed % 2**63))
    p = torch.empty_like(p).scatter_(0, order, p)  # likely tokens lie anywhere
    groups = {
        "from likely to unlikely": grouped(p, order),
        "in the order of their ids": grouped(p, torch.arange(vocab_size)),
    }
    race, fresh = [], []
    step = max(1, min(draws, NUMBERS // 16 // vocab_size))
    for first in range(0, draws, step):
        rows = range(first, min(draws, first + step))
        noise = Noise(torch.tensor([row_key((seed, row)) for row in rows], device=device), torch.tensor(rows, device=device) % 61)
        weights = p.float().to(device).expand(len(rows), -1)
        race.append(noise.race(weights[:, None], torch.zeros(len(rows), 1, dtype=torch.long, device=device))[:, 0])
        fresh.append(noise.draw(weights, Purpose.RESIDUAL))
    return [
        chi_square(f"{name}, tokens {how}", group[torch.cat(tokens).cpu()].tolist(), law)
        for name, tokens in (("match race", race), ("fresh draw", fresh))
        for how, (group, law) in groups.items()
    ]


def grouped(p: Tensor, order: Tensor) -> tuple[Tensor, dict[int, float]]:
    """``[V]`` the group of every token, neighbours in ``order`` with about the same probability together, and the groups' probabilities."""
    middle = p[order].cumsum(0) - p[order] / 2
    group = torch.empty_like(order).scatter_(0, order, (middle * GROUPS).long().clamp(max=GROUPS - 1))
    mass = torch.zeros(GROUPS, dtype=p.dtype).index_add_(0, group, p).tolist()
    return group, {number: each for number, each in enumerate(mass) if each > 0}


def chi_square(name: str, outcomes: Iterable[Hashable], law: Mapping[Any, float]) -> Statistic:
    """Pearson's test of ``outcomes`` against ``law``; rare ones are counted together."""
    counts = Counter(outcomes)
    total, cells, rare = sum(counts.values()), [], [0.0, 0.0]
    if impossible := counts.keys() - law.keys():
        return Statistic(f"{name}: {min(impossible, key=repr)!r} cannot occur", 0.0)
    for outcome, probability in law.items():
        cell = (float(counts[outcome]), probability * total)
        if cell[1] >= EXPECTED:
            cells.append(cell)
        else:
            rare = [rare[0] + cell[0], rare[1] + cell[1]]
    if rare[1] >= EXPECTED or not cells:
        cells.append((rare[0], rare[1]))
    chi2, freedom = sum((seen - expected) ** 2 / expected for seen, expected in cells), len(cells) - 1
    return Statistic(name, upper_tail(chi2, freedom) if freedom else 1.0, chi2=chi2, freedom=freedom)

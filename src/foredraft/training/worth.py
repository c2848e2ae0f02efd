"""What a draft model is worth: acceptance length greedy and sampled, α = 1 - E[TV(p, q)], and the speed that these predict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import torch

from foredraft import drafters
from foredraft.heads.base import Head
from foredraft.planning.costs import PROMPT, CostModel, measure
from foredraft.planning.largest import largest_shape
from foredraft.speculator import Speculator
from foredraft.training.acceptance import DEPTH, Held, Measured, drafter_of
from foredraft.training.drafts import Draft
from foredraft.training.losses import Loss, compare

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Worth(Measured):
    """``acceptance_length`` is the mean of ``greedy`` and ``sampled``, ``by_depth`` that of greedy chains, ``by_depth_sampled`` that of
    sampled ones; ``alphas`` are mean α of each held-out text, and ``agreement`` is how often the likeliest tokens are the same."""

    greedy: float
    sampled: float
    by_depth_sampled: tuple[float, ...]
    alphas: tuple[float, ...]
    agreement: float

    def to_dict(self) -> dict[str, Any]:
        own = {"greedy_length": self.greedy, "sampled_length": self.sampled, "accepted_by_depth_sampled": list(self.by_depth_sampled)}
        return {**super().to_dict(), **own, "alpha": fmean(self.alphas), "alphas": list(self.alphas), "agreement": self.agreement}


@dataclass(frozen=True, eq=False)
class DraftHeld(Held):
    """Measures drafts on prompts that are answered greedily and at the temperature ``served_at``, there with rejection sampling. α and
    agreement are seen on answers that the target wrote alone at that temperature, the same ones for every draft."""

    served_at: float = 1.0
    _texts: list[tuple[list[int], int]] = field(default_factory=list)

    def measure(self, model: PreTrainedModel, head: Head) -> Worth:
        assert isinstance(head, Draft)
        if not self._texts:
            _, rows = replace(self, temperature=self.served_at, drafter=lambda head: drafters.create("none", {}))._answer(model, head)
            self._texts.extend((row.ids, row.prompt_length) for row in rows)
        greedy = Held.measure(self, model, head)
        sampled = Held.measure(replace(self, temperature=self.served_at, rule="rejection"), model, head)
        alphas, agreement = self._compared(model, head.model)
        mean = (greedy.acceptance_length + sampled.acceptance_length) / 2
        lengths = greedy.acceptance_length, sampled.acceptance_length
        return Worth(mean, greedy.by_depth, greedy.tokens + sampled.tokens, *lengths, sampled.by_depth, alphas, agreement)

    @torch.no_grad()
    def _compared(self, target: PreTrainedModel, draft: PreTrainedModel) -> tuple[tuple[float, ...], float]:
        alphas, agreeing = [], []
        for text, prompt in self._texts:
            ids = torch.tensor([text], device=target.device)
            p, q = (model(input_ids=ids, use_cache=False).logits[0, prompt - 1 : -1].float() for model in (target, draft))
            both = min(p.shape[-1], q.shape[-1])
            found = compare(Loss.parse("tvd"), q[:, :both], p[:, :both], self.served_at)
            alphas.append(float(found.alpha.mean()))
            agreeing.append(float(found.agrees.mean()))
        return tuple(alphas), fmean(agreeing)


@dataclass(frozen=True)
class Prices:
    """Seconds of plain decoding and of rounds with chains of 1, 2, … drafted tokens, one row."""

    plain: float
    rounds: tuple[float, ...]

    @classmethod
    @torch.inference_mode()
    def measured(cls, model: PreTrainedModel, head: Head) -> Prices:
        speculator = Speculator(model, drafter_of(head), shape="chain(1)", self_test=False, reuse_prefix=False)
        try:
            costs = CostModel()
            measure(costs, speculator.target, speculator.drafter, largest=largest_shape(branches=False, depth=DEPTH, nodes=DEPTH))
        finally:
            speculator.close()
        verify = costs.verify(1, range(1, DEPTH + 2), PROMPT)
        return cls(verify[0], tuple(verify[deep] + costs.draft_seconds(1, [1] * deep) for deep in range(1, DEPTH + 1)))

    def speed(self, by_depth: Sequence[float]) -> tuple[float, int]:
        """Of the best chain over plain decoding, and its length, by the share of chains that is accepted to each depth."""
        tokens = [1 + sum(by_depth[: deep + 1]) for deep in range(len(by_depth))]
        return max((many * self.plain / seconds, deep) for deep, (many, seconds) in enumerate(zip(tokens, self.rounds), 1))


def compared(before: Mapping[str, Any], after: Mapping[str, Any], prices: Prices, temperature: float) -> list[str]:
    """Two lines of the log with what :class:`Worth` says, as sentences."""
    gains = [now - then for then, now in zip(before["alphas"], after["alphas"])]
    margin = 1.96 * stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.inf
    speeds = {name: [prices.speed(line[name]) for line in (before, after)] for name in ("accepted_by_depth", "accepted_by_depth_sampled")}

    def change(name: str) -> str:
        return f"{before[name]:.3f} → {after[name]:.3f}"

    said = [
        f"at temperature {temperature:g}: α = 1 - E[TV] {change('alpha')} ({fmean(gains):+.3f} ± {margin:.3f} over {len(gains)} texts), "
        f"greedy agreement {change('agreement')}",
        f"tokens per pass, chain of {DEPTH}: greedy {change('greedy_length')}, sampled {change('sampled_length')}",
    ]
    for name, ((then, _), (now, deep)) in zip(("greedy", "sampled"), speeds.values()):
        said.append(f"predicted speed, {name}, one row: {then:.2f} → {now:.2f} times plain decoding, chain of {deep}")
    if fmean(gains) <= margin:
        said.append(
            f"distilling gained nothing that {len(gains)} held-out texts can show. Pairs that are close already often gain nothing; more "
            "--held-out, more steps or another --loss may tell more"
        )
    return said

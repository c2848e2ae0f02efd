"""What a draft model is worth: acceptance length greedy and sampled, α = 1 - E[TV(p, q)], and the speed that these predict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from foredraft import drafters
from foredraft.heads.base import Head
from foredraft.losses import Loss, compare
from foredraft.planning.costs import PROMPT, CostModel, measure
from foredraft.planning.largest import largest_shape
from foredraft.planning.teacher_forced import Numbers, expected_rounds
from foredraft.training.acceptance import DEPTH, Held, Measured, as_served
from foredraft.training.drafts import Draft


@dataclass(frozen=True)
class Worth(Measured):
    """``acceptance_length`` is the mean of ``greedy`` and ``sampled``, ``by_depth`` that of greedy chains, ``by_depth_sampled`` that of
    sampled ones; ``alphas`` are mean α of each held-out text and ``greedy_lengths`` its greedy length, and ``agreement`` is how often the
    likeliest tokens are the same."""

    greedy: float
    sampled: float
    by_depth_sampled: tuple[float, ...]
    alphas: tuple[float, ...]
    greedy_lengths: tuple[float, ...]
    agreement: float

    def to_dict(self) -> dict[str, Any]:
        own = {"greedy_length": self.greedy, "sampled_length": self.sampled, "accepted_by_depth_sampled": list(self.by_depth_sampled)}
        own["greedy_lengths"] = list(self.greedy_lengths)
        return {**super().to_dict(), **own, "alpha": fmean(self.alphas), "alphas": list(self.alphas), "agreement": self.agreement}


@dataclass(frozen=True)
class Forced:
    """Of each text: ``chances`` that a token is accepted once it and those before it in its chain are drafted, mean α and mean greedy
    agreement."""

    chances: list[Numbers]
    alphas: tuple[float, ...]
    agreeing: tuple[float, ...]

    @property
    def rounds(self) -> Numbers:
        """``[texts, DEPTH]``, with chains of 1, 2, … tokens."""
        return expected_rounds(self.chances, DEPTH)

    @property
    def lengths(self) -> list[float]:
        """Tokens per pass, with chains of 1, 2, … ``DEPTH`` tokens."""
        tokens = sum(map(len, self.chances))
        return [tokens / rounds for rounds in self.rounds.sum(0).tolist()]

    @property
    def of_texts(self) -> tuple[float, ...]:
        """Tokens per pass of each text, with chains of ``DEPTH`` tokens."""
        return tuple(len(each) / rounds for each, rounds in zip(self.chances, self.rounds[:, -1].tolist()))

    @property
    def by_depth(self) -> tuple[float, ...]:
        """How often the first, the first two, … tokens of a chain are accepted."""
        return tuple(np.diff([1.0, *self.lengths]).tolist())


@dataclass(frozen=True, eq=False)
class DraftHeld(Held):
    """Measures drafts on answers that the target wrote alone, greedily and at the temperature ``served_at``; the same ones for every draft.

    No round is run. What rounds with chains of ``DEPTH`` tokens and rejection sampling keep of a text is expected from p and q at each of
    its tokens, which varies far less from draft to draft than counting rounds does.
    """

    served_at: float = 1.0
    _texts: dict[float, list[tuple[list[int], int]]] = field(default_factory=dict)

    def measure(self, model: PreTrainedModel, head: Head) -> Worth:
        assert isinstance(head, Draft)
        greedy, sampled = (self.forced(model, head, temperature) for temperature in (0.0, self.served_at))
        tokens = sum(map(len, greedy.chances + sampled.chances))
        lengths = greedy.lengths[-1], sampled.lengths[-1]
        of_texts = sampled.alphas, greedy.of_texts
        return Worth(fmean(lengths), greedy.by_depth, tokens, *lengths, sampled.by_depth, *of_texts, fmean(sampled.agreeing))

    @torch.no_grad()
    def forced(self, target: PreTrainedModel, head: Draft, temperature: float) -> Forced:
        """What ``head`` would get accepted of the target's answers at ``temperature``."""
        if temperature not in self._texts:
            alone = replace(self, temperature=temperature, drafter=lambda head: drafters.create("none", {}))
            self._texts[temperature] = [(row.ids, row.prompt_length) for row in alone._answer(target, head)[1]]
        chances, alphas, agreeing = list[Numbers](), list[float](), list[float]()
        for text, prompt in self._texts[temperature]:
            ids = torch.tensor([text], device=target.device)
            p, q = (model(input_ids=ids, use_cache=False).logits[0, prompt - 1 : -1].float() for model in (target, head.model))
            both = min(p.shape[-1], q.shape[-1])
            p, q, tokens = p[:, :both], q[:, :both], ids[0, prompt:, None]
            found = compare(Loss.parse("tvd"), q, p, temperature or 1.0)
            alphas.append(float(found.alpha.mean()))
            agreeing.append(float(found.agrees.mean()))
            if temperature:
                of_p, of_q = (torch.log_softmax(each / temperature, -1).gather(-1, tokens)[:, 0] for each in (p, q))
                accepted = (of_q - of_p).exp().clamp(max=1)
            else:
                accepted = q.argmax(-1) == tokens[:, 0]
            chances.append(accepted.cpu().double().numpy())
        return Forced(chances, tuple(alphas), tuple(agreeing))


@dataclass(frozen=True)
class Prices:
    """Seconds of plain decoding and of rounds with chains of 1, 2, … drafted tokens, one row; and how the target's passes were made."""

    plain: float
    rounds: tuple[float, ...]
    execution: str

    @classmethod
    def measured(cls, model: PreTrainedModel, draft: str) -> Prices:
        """Of ``model``, as it runs where it is loaded by name, with the ``draft`` of that name."""
        drafter, costs = drafters.create(f"draft-model:{draft}", {}), CostModel()
        with as_served(model, drafter) as target, torch.inference_mode():
            measure(costs, target, drafter, largest=largest_shape(branches=False, depth=DEPTH, nodes=DEPTH))
            execution = target.execution
        verify = costs.verify(1, range(1, DEPTH + 2), PROMPT)
        rounds = tuple(verify[deep] + costs.draft_seconds(1, [1] * deep) for deep in range(1, DEPTH + 1))
        return cls(verify[0], rounds, execution)

    def speed(self, by_depth: Sequence[float]) -> tuple[float, int]:
        """Of the best chain over plain decoding, and its length, by the share of chains that is accepted to each depth."""
        tokens = [1 + sum(by_depth[: deep + 1]) for deep in range(len(by_depth))]
        return max((many * self.plain / seconds, deep) for deep, (many, seconds) in enumerate(zip(tokens, self.rounds), 1))


def compared(before: Mapping[str, Any], after: Mapping[str, Any], prices: Prices, temperature: float) -> list[str]:
    """Two lines of the log with what :class:`Worth` says, as sentences."""
    speeds = {name: [prices.speed(line[name]) for line in (before, after)] for name in ("accepted_by_depth", "accepted_by_depth_sampled")}
    (alpha, alpha_margin), (length, length_margin) = (_gain(before, after, name) for name in ("alphas", "greedy_lengths"))
    texts = len(after["alphas"])

    def change(name: str) -> str:
        return f"{before[name]:.3f} → {after[name]:.3f}"

    said = [
        f"at temperature {temperature:g}: α = 1 - E[TV] {change('alpha')} ({alpha:+.3f} ± {alpha_margin:.3f} over {texts} texts), "
        f"greedy agreement {change('agreement')}",
        f"tokens per pass, chain of {DEPTH}: greedy {change('greedy_length')} ({length:+.3f} ± {length_margin:.3f}, mean of texts), "
        f"sampled {change('sampled_length')}",
    ]
    for name, ((then, _), (now, deep)) in zip(("greedy", "sampled"), speeds.values()):
        said.append(f"predicted speed, {name}, one row, {prices.execution}: {then:.2f} → {now:.2f} times plain decoding, chain of {deep}")
    if alpha <= alpha_margin and length <= length_margin:
        said.append(
            f"distilling gained nothing that {texts} held-out texts can show, neither in α nor in greedy length. Pairs that are close "
            "already often gain nothing; more --held-out, more steps or another --loss may tell more"
        )
    return said


def _gain(before: Mapping[str, Any], after: Mapping[str, Any], name: str) -> tuple[float, float]:
    """By how much the texts gained on average, and the margin of error; 0 where a log of an older version does not have it."""
    gains = [now - then for then, now in zip(before.get(name, ()), after.get(name, ()))]
    margin = 1.96 * stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.inf
    return fmean(gains) if gains else 0.0, margin

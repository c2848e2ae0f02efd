"""The sparse tree of a head (Cai et al. 2024): how often its guesses are right, and the tree that makes most of that at a measured cost.

With a_k^(i) the share of tokens that the i-th guess of head k gets right, a node whose path has ranks i_1, …, i_d is accepted with
probability Π a_k^(i_k), taking heads for independent, and the acceptance length to be expected is 1 + Σ over nodes of that. A node is
never likelier than its parent or the sibling before it, so that adding the likeliest node again and again gives the best tree of every
size. How many nodes are worth verifying is told by what they cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from foredraft import shapes
from foredraft.errors import ConfigurationError
from foredraft.heads.base import Batch, refuse_another_target
from foredraft.heads.losses import AT_ONCE, before
from foredraft.heads.medusa import MedusaHead
from foredraft.heads.ngram_log_odds import NgramLogOdds
from foredraft.heads.vocabulary import VocabularyHead
from foredraft.models.encoder_decoder import Source
from foredraft.models.features import features_of_texts
from foredraft.shapes import Path, StaticShape, TreeShape

RANKS = 10  # guesses of a head that are looked at


@dataclass(frozen=True)
class Calibration:
    """What :func:`calibrate` found.

    Attributes:
        accuracies: ``accuracies[k][i]`` says how often the i-th guess of head k was right.
        tree: the tree with the most expected tokens per cost, of at least one node.
        expected: the acceptance length that it promises.
        tokens: how many tokens the first head was asked for.
        execution: of the passes whose cost the tree was chosen by; None where none were measured.
    """

    accuracies: tuple[tuple[float, ...], ...]
    tree: StaticShape
    expected: float
    tokens: int
    execution: str | None = None

    def store(self, head: VocabularyHead) -> None:
        """Put tree and accuracies into the head's configuration, from where its drafter takes them."""
        head.config = replace(head.config, tree=str(self.tree), accuracies=self.accuracies)


def calibrate(
    head: VocabularyHead,
    target: PreTrainedModel,
    texts: Sequence[Sequence[int]],
    *,
    cost: Callable[[int], float],
    most_nodes: int = 64,
    answers: Sequence[int] | None = None,
    sources: Sequence[Source] = (),
    ranks: int = RANKS,
) -> Calibration:
    """Measure a head on texts of the kind that it is to draft for, and choose its tree.

    Args:
        head, target: fitting each other.
        texts: token ids.
        cost: of a round that verifies so many drafted nodes, the root not counted, the draft included. In any unit,
            such as the seconds of :func:`foredraft.planning.tree_costs.tree_costs`.
        most_nodes: of the tree.
        answers: per text, the number of its first token that counts; all but the first count unless given.
        sources: what the target's encoder reads for each text, if it has one.
        ranks: guesses per head that are looked at, and children of a node at most.

    Raises:
        ConfigurationError: a head for another target, or texts that leave nothing to predict.
    """
    refuse_another_target(head.config, target)
    measured, tokens = measure_accuracies(head, target, _batches(head, target, texts, answers, sources), ranks)
    if not tokens:
        raise ConfigurationError("the texts are too short for the head to predict a token; pass longer texts")
    accuracies = tuple(tuple(round(rate, 5) for rate in line) for line in measured)
    return Calibration(accuracies, *best_tree(accuracies, cost, most_nodes), tokens)


@torch.inference_mode()
def measure_accuracies(
    head: VocabularyHead, target: PreTrainedModel, batches: Iterator[Batch], ranks: int
) -> tuple[list[list[float]], int]:
    """``[k][i]`` how often the i-th guess of head k is right, and how many tokens the first head was asked for."""
    ranks = min(ranks, head.config.target.vocab_size)
    hits: dict[int, Tensor] = {}
    asked: Counter[int] = Counter()
    for k, states, tokens, above in _guesses(head, batches, AT_ONCE):
        right = head.guessed(states, k, above).topk(ranks, -1).indices == tokens[:, None]
        hits[k] = hits.get(k, 0) + right.sum(0).cpu()
        asked[k] += len(tokens)
    return [(hits[k].double() / max(asked[k], 1)).tolist() for k in sorted(hits)], asked[0]


def _guesses(head: VocabularyHead, batches: Iterator[Batch], at_once: int) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Parts of at most ``at_once`` logits, and the number k of their head: the states ``[M, d]`` that its LM head reads, the tokens ``[M]``
    that follow, and the two before each ``[M, 2]``."""
    rows = max(1, at_once // head.config.target.vocab_size)
    for batch in batches:
        ids = batch.ids.flatten()
        for k, guess in enumerate(head.guesses(batch)):
            for states, places in zip(torch.split(guess.states, rows), torch.split(guess.places, rows)):
                yield k, states, ids[places], before(batch, places)


def _batches(
    head: VocabularyHead,
    target: PreTrainedModel,
    texts: Sequence[Sequence[int]],
    answers: Sequence[int] | None,
    sources: Sequence[Source],
) -> Iterator[Batch]:
    """One text each, with its hidden states."""
    features = features_of_texts(target, head.features)
    for index, text in enumerate(texts):
        ids, first = torch.tensor([list(text)], device=target.device), 1 if answers is None else answers[index]
        source = {name: each.to(target.device) for name, each in sources[index].inputs.items()} if sources else {}
        with torch.inference_mode():
            hidden, logits = features.read(target, ids, source)
        valid = torch.ones_like(ids, dtype=torch.bool)
        counted = torch.arange(ids.shape[1], device=ids.device)[None] >= first
        yield Batch(ids, valid, counted, hidden, logits)


# -- trees --------------------------------------------------------------------------------------------------------------------


def best_tree(accuracies: Sequence[Sequence[float]], cost: Callable[[int], float], most_nodes: int) -> tuple[StaticShape, float]:
    """The tree with the most expected tokens per cost, and its expected acceptance length."""
    paths, expected = [], [1.0]
    for path, probability in likeliest_nodes(accuracies, most_nodes):
        paths.append(path)
        expected.append(expected[-1] + probability)
    if not paths:
        raise ConfigurationError("no guess of the head was right on these texts, so no tree helps; train the head on similar texts")
    nodes = max(range(1, len(expected)), key=lambda count: expected[count] / cost(count))
    chain = all(rank == 0 for path in paths[:nodes] for rank in path)
    return TreeShape.chain(nodes) if chain else TreeShape.paths(paths[:nodes]), expected[nodes]


def likeliest_nodes(accuracies: Sequence[Sequence[float]], most: int) -> Iterator[tuple[Path, float]]:
    """At most ``most`` nodes, as paths of ranks, and how likely each is to be accepted, likeliest first; none that never is.

    A guess that was right more often than the one before it, which can only be luck, counts for as much as that one.
    """
    return shapes.likeliest_nodes([[min(line[: rank + 1]) for rank in range(len(line))] for line in accuracies], most)


# -- n-gram log-odds ----------------------------------------------------------------------------------------------------------

WEIGHTS = tuple(step / 10 for step in range(16))  # that are tried


@torch.inference_mode()
def weigh_log_odds(
    head: MedusaHead,
    target: PreTrainedModel,
    texts: Sequence[Sequence[int]],
    *,
    answers: Sequence[int] | None = None,
    sources: Sequence[Source] = (),
) -> NgramLogOdds:
    """The n-gram log-odds of ``head``, with the weight per head under which ``texts`` are likeliest; arguments as of :func:`calibrate`."""
    counted = head.log_odds
    assert counted is not None
    spent = torch.zeros(head.config.heads, len(WEIGHTS), dtype=torch.float64)
    whole = counted.weighed([1.0] * head.config.heads).to(target.device)
    for k, states, tokens, above in _guesses(head, _batches(head, target, texts, answers, sources), AT_ONCE >> 2):
        logits = head.logits(states, k).float()
        odds = whole.added(torch.zeros_like(logits), above, k)
        for index, weight in enumerate(WEIGHTS):
            spent[k, index] += cross_entropy(logits + weight * odds, tokens, reduction="sum").cpu().double()
    return counted.weighed([WEIGHTS[int(line.argmin())] for line in spent])

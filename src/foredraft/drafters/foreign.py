"""A draft model whose tokenizer is not the target's: what its logits say of the target's tokens, and how it reads the live rows.

Timor et al. 2025 draft across vocabularies in two ways. Token by token (TLI): the draft's logits count where both vocabularies have a token
of the same bytes (:class:`Intersection`). By text (SLEM): what the draft has written is tokenised again, as the target would.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.device import to_device
from foredraft.drafters.base import Feedback, Row
from foredraft.drafters.vocabularies import Reading, Vocabularies, Words
from foredraft.errors import ConfigurationError
from foredraft.loading import name_of, tokenizer_of, vocabulary_difference
from foredraft.models.encoder_decoder import Source, start_of
from foredraft.target import Target

VOCABULARIES = ("auto", "intersection", "text")
ENOUGH = 0.75  # of q on the tokens that are shared, from which on "auto" drafts these
SAMPLE = (
    'The river was low that summer, so in 1987 they walked across it. "How far is it?" she asked.\n\n'
    "def mean(values):\n    return sum(values) / len(values)  # 12.5\n"
)


@dataclass(frozen=True, eq=False)
class Intersection:
    """The tokens that two vocabularies share.

    Attributes:
        common: ``[n]`` each: the target's tokens, and the draft's of the same meaning.
        again: further tokens of the draft that mean the same: in each pair ``[m]`` different tokens of the target, and the draft's.
        known: ``[V]`` the draft's token for each of the target's, 0 where there is none.
    """

    common: tuple[Tensor, Tensor]
    again: tuple[tuple[Tensor, Tensor], ...]
    known: Tensor

    @staticmethod
    def of(target_of: Mapping[int, int], vocab_size: int, device: torch.device) -> Intersection:
        """From the target's token for each of the draft's that has one; of several for one the first is the one that is read."""
        shared: dict[int, list[int]] = {}
        for theirs, ours in target_of.items():
            shared.setdefault(ours, []).append(theirs)
        levels = []
        for level in range(max(map(len, shared.values()), default=1)):
            there = [(ours, each[level]) for ours, each in shared.items() if len(each) > level]
            pairs = to_device(there, device).view(-1, 2)
            levels.append((pairs[:, 0], pairs[:, 1]))
        known = torch.zeros(vocab_size, dtype=torch.long, device=device).scatter(0, *levels[0])
        return Intersection(levels[0], tuple(levels[1:]), known)

    def scattered(self, logits: Tensor) -> Tensor:
        """``[..., V]`` the draft's ``logits`` at the target's tokens, -inf at those that the draft does not know; tokens of one meaning
        have the sum of their probabilities."""
        ours, theirs = self.common
        found = logits.new_full((*logits.shape[:-1], len(self.known)), float("-inf"))
        found[..., ours] = logits[..., theirs]
        for ours, theirs in self.again:
            found[..., ours] = torch.logaddexp(found[..., ours], logits[..., theirs])
        return found

    def mass(self, logits: Tensor) -> float:
        """The probability that ``logits`` ``[n, V']`` of the draft give to the tokens that are shared, on average."""
        inside = torch.cat([self.common[1], *(theirs for _, theirs in self.again)])
        return float(logits.float().softmax(-1)[:, inside].sum(-1).mean())


class Foreign:
    """A draft model whose tokenizer is not the target's: how it reads the live rows, and what its logits say.

    Attributes:
        readings: by slot.
        intersection, on_host: on the draft's device, and on the host.
        known: the draft's token for each of the target's, on its device; 0 where there is none.
    """

    def __init__(
        self, vocabularies: Vocabularies, vocab_size: int, device: torch.device, draft_device: torch.device, by: str = "intersection"
    ):
        self.vocabularies = vocabularies
        self.intersection = Intersection.of(vocabularies.target_of, vocab_size, draft_device)
        host = torch.device("cpu")
        self.on_host = self.intersection if draft_device == host else Intersection.of(vocabularies.target_of, vocab_size, host)
        self.known = self.intersection.known.to(device)
        self._host = self.intersection.known.tolist()
        self._sorted = to_device(vocabularies.sorted, draft_device)
        self.readings: dict[int, Reading] = {}
        self.by = by
        self.mass: float | None = None

    def __str__(self) -> str:
        mass = "" if self.mass is None else f", which have {self.mass:.0%} of its probability"
        how = "another tokenizer" if self.vocabularies.template is None else "a template"
        return f"{self.by} ({how}: the target knows {self.vocabularies.share:.0%} of the draft's tokens{mass})"

    def choose(self, draft: PreTrainedModel) -> None:
        """Draft by the intersection if ``draft`` gives it enough of its probability, else by text."""
        ids = to_device([[*self.vocabularies.draft.prefix, *self.vocabularies.draft.encode(SAMPLE)[0]]], draft.device)
        with torch.no_grad():
            known = ids.clamp(max=draft.get_input_embeddings().weight.shape[0] - 1)  # a tokenizer may have grown alone
            read = {"decoder_input_ids": known} if draft.config.is_encoder_decoder else {}
            self.mass = self.intersection.mass(draft(input_ids=known, **read, use_cache=False).logits[0])
        self.by = "intersection" if self.mass >= ENOUGH else "text"

    def first(self, row: Row, logits: Tensor) -> tuple[int, int]:
        """What the draft writes first, by its ``logits`` ``[n, V']`` at the last tokens that it reads, and in place of how many of these:
        the text may end within a token of the draft's, which then stands for its beginning."""
        scores = logits.float().log_softmax(-1)
        best, token = scores[-1].max(-1)
        likely, found = float(best), (int(token), 0)
        for back, longer, said in self._longer(self.readings[row.slot], scores):
            best, place = said.max(-1)
            if float(best) > likely:
                likely, found = float(best), (int(longer[place]), back)
        return found

    def covering(self, reading: Reading, scores: Tensor) -> tuple[int, int, Tensor]:
        """In place of how many of the last tokens of ``reading`` the draft likely writes a longer one, by its log-probabilities ``scores``
        ``[n, V']`` at these; how many bytes they have; and ``[V']`` log-probabilities of what it writes there."""
        likely, found = 0.0, (0, 0, scores[-1])
        for back, longer, said in self._longer(reading, scores):
            total = float(said.logsumexp(-1))
            if total > likely:
                spelt = sum(len(self.vocabularies.draft.bytes[token]) for token in reading.ids[-back:])
                likely, found = total, (back, spelt, torch.full_like(scores[-1], float("-inf")).index_copy(0, longer, said - total))
        return found

    def _longer(self, reading: Reading, scores: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """For the last token of ``reading``, the last two, …: their number, the draft's tokens ``[m]`` that spell them and go on, and the
        log-probabilities ``[m]`` of these, over what it gives to those that it has read."""
        read = 0.0
        for back, (first, last) in enumerate(reading.pieces(len(scores) - 1), 1):
            if reading.ids[-back] >= scores.shape[-1]:
                break  # a tokenizer may have grown alone
            read += float(scores[-1 - back, reading.ids[-back]])
            if first < last and read > float("-inf"):
                longer = self._sorted[first:last].to(scores.device)
                yield back, longer, scores[-1 - back, longer] - read

    def written(self, rows: Sequence[Row], texts: Sequence[Sequence[int]], backs: Sequence[int]) -> list[list[int]]:
        """What the draft wrote below ``rows``, in place of so many of the tokens that it reads, in the target's tokens."""
        drafts = []
        for row, text, back in zip(rows, texts, backs):
            reading = self.readings[row.slot]
            drafts.append(self.vocabularies.continued(reading, text, back))
            reading.drafted(text, back)
        return drafts

    def begin(self, rows: Sequence[Row]) -> list[Reading]:
        self.readings.update({row.slot: Reading(self.vocabularies, row) for row in rows})
        return [self.readings[row.slot] for row in rows]

    def source(self, source: Source) -> Source:
        """The text of ``source`` in the draft's tokens.

        Raises:
            ConfigurationError: there is no text.
        """
        return Source.of(self.vocabularies.draft.tokenizer(self.vocabularies.text(source))["input_ids"])

    def follow(self, rows: Sequence[Row]) -> tuple[list[Reading], list[int]]:
        """The rows in the draft's tokens, and how much of what its cache holds of them stands."""
        own = [self.readings[row.slot] for row in rows]
        return own, [reading.follow(row.ids) for reading, row in zip(own, rows)]

    def drafted(self, rows: Sequence[Row], feedback: Feedback) -> None:
        """A round with a draft from the intersection is over."""
        for row, accepted in zip(rows, feedback.accepted):
            reading = self.readings[row.slot]
            reading.drafted([self._host[token] for token in row.ids[reading.read : reading.read + accepted]])

    def end(self, slots: set[int]) -> None:
        self.readings = {slot: reading for slot, reading in self.readings.items() if slot not in slots}


def foreign(target: Target, draft: PreTrainedModel, tokenizer: Any, vocabulary: str, template: str | None = None) -> Foreign | None:
    """How ``draft`` drafts for ``target`` across their vocabularies; None if they have the same, and no ``template`` is read as text.

    Raises:
        ConfigurationError: they differ, and a tokenizer is missing or not a fast one, or nothing is shared.
    """
    given = target.tokenizer, tokenizer
    tokenizers = [tokenizer_of(model) if own is None else own for own, model in zip(given, (target.model, draft))]
    difference = vocabulary_difference(target.model, draft, *tokenizers)
    if difference is None and vocabulary == "auto" and template is None:
        return None
    if vocabulary == "auto" and draft.main_input_name != "input_ids":
        raise ConfigurationError(
            f"the draft model {name_of(draft)!r} has another vocabulary ({difference}), and what its encoder reads is no text; give a "
            "draft with the target's tokenizer"
        )
    passing = ("Speculator(..., tokenizer=...)", "drafter_options={'tokenizer': ...}")
    for found, model, how in zip(tokenizers, (target.model, draft), passing):
        if found is None:
            why = difference or f"{f'vocabulary={vocabulary!r}' if template is None else 'a template'} reads their tokens as text"
            raise ConfigurationError(
                f"the draft model {name_of(draft)!r} has another vocabulary ({why}), so both tokenizers are needed, and none is "
                f"found for {name_of(model)!r}; pass it as {how}"
            )
    sizes = target.vocab_size, int(draft.get_output_embeddings().weight.shape[0])
    starts = (start_of(target.model), start_of(draft)) if target.sourced else None
    vocabularies = Vocabularies(Words(tokenizers[0]), Words(tokenizers[1]), *sizes, starts, template)
    if not vocabularies.target_of and vocabulary == "intersection":
        raise ConfigurationError(
            f"the tokenizer of the draft model {name_of(draft)!r} shares no token with the target's, so it has to draft by text: "
            "vocabulary='text'"
        )
    found = Foreign(vocabularies, target.vocab_size, target.device, draft.device, vocabulary)
    if vocabulary == "auto":
        found.choose(draft)
    return found

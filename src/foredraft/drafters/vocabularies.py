"""Two vocabularies of one text: what a target's tokens are to a draft model with another tokenizer, and the other way round.

Timor et al. 2025 draft across vocabularies in two ways. Token by token (TLI): the draft's logits count where both vocabularies have a token
of the same bytes (:class:`Intersection`). By text (SLEM): what the draft has written is tokenised again, as the target would
(:meth:`Vocabularies.continued`). Either way the draft reads the row's text in tokens of its own (:class:`Reading`).

Nothing here runs a model, and the tokenizers that are handed in stay as they are.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.device import to_device
from foredraft.drafters.base import Feedback, Row
from foredraft.errors import ConfigurationError
from foredraft.grammars import token_bytes
from foredraft.loading import name_of, tokenizer_of, vocabulary_difference
from foredraft.models.encoder_decoder import Source, start_of
from foredraft.target import Target

VOCABULARIES = ("auto", "intersection", "text")
SOURCE, TEXT = "{source}", "{text}"  # in a template
ENOUGH = 0.75  # of q on the tokens that are shared, from which on "auto" drafts these
SAMPLE = (
    'The river was low that summer, so in 1987 they walked across it. "How far is it?" she asked.\n\n'
    "def mean(values):\n    return sum(values) / len(values)  # 12.5\n"
)
TAIL = 32  # newest tokens that are kept as text, to be tokenised again together with what follows
LONGEST = 32  # characters at the end of a text that may become one token with those to come
CONTEXT = 32  # characters in front of a text that is tokenised
REMEMBERED = 100_000  # beginnings of texts whose first token is kept
BLURRED = 4  # first ones of these, which may come out otherwise because the text before them is missing


class Words:
    """What the tokens of one fast tokenizer mean.

    Attributes:
        bytes: what each token stands for inside a text, special tokens left out.
        special: what each special token says, by number; those that say nothing, such as padding, are left out.
        roles: the tokens that begin (``bos``) and end (``eos``) a text, as far as there are any.
        prefix: special tokens that the tokenizer puts before a text.
        strips: a text does not begin with the space of its first token.

    Raises:
        ConfigurationError: it is no fast tokenizer.
    """

    def __init__(self, tokenizer: Any):
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigurationError(
                f"drafting with another tokenizer needs fast tokenizers of transformers, got {type(tokenizer).__name__}; pass a fast one"
            )
        from tokenizers import Tokenizer

        self._own = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())  # the user's may cut or pad, or be in use in another thread
        self._own.no_padding()
        self._own.no_truncation()
        self.prefix = self._prefix()
        self._own.post_processor = None
        self.tokenizer = tokenizer
        begin, end = (tokenizer.bos_token_id, tokenizer.cls_token_id), (tokenizer.eos_token_id, tokenizer.sep_token_id)
        first = {role: next((each for each in ids if each is not None), None) for role, ids in (("bos", begin), ("eos", end))}
        self.roles: dict[str, int] = {role: number for role, number in first.items() if number is not None}
        added = tokenizer.added_tokens_decoder
        special = {number for number, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        silent = {tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.mask_token_id} - set(self.roles.values())
        names = {number: token for token, number in tokenizer.get_vocab().items()}
        self.special = {number: names[number] for number in special - silent if number in names}
        self.bytes = {number: word for number, word in self._bytes(names).items() if number not in special and word}
        self.single = {word[0]: number for number, word in sorted(self.bytes.items(), reverse=True) if len(word) == 1}
        self._spelt = {number for number, name in names.items() if len(name) == 6 and name.startswith("<0x") and name.endswith(">")}
        self._sorted = sorted(set(self.bytes.values()))
        self._first: dict[bytes, int | None] = {}
        spaced = next((number for number, word in self.bytes.items() if len(word) > 1 and word[:1] == b" "), None)
        self.strips = spaced is not None and not self.text([spaced]).startswith(" ")

    def encode(self, text: str) -> tuple[list[int], list[int]]:
        """The tokens of ``text`` alone, and where each begins."""
        encoding = self._own.encode(text, add_special_tokens=False)
        return encoding.ids, [begin for begin, _ in encoding.offsets]

    def text(self, ids: Sequence[int]) -> str:
        return str(self._own.decode(ids, skip_special_tokens=False))

    def unfinished(self, word: bytes) -> bool:
        """Whether a token begins with ``word`` and goes on."""
        place = bisect_right(self._sorted, word)
        return place < len(self._sorted) and self._sorted[place].startswith(word)

    def encode_after(self, context: str, text: str) -> list[int] | None:
        """The tokens of ``text`` behind ``context``; None where one of them begins before it."""
        ids, starts = self.encode(context + text)
        begin = 0 if not context else next((place for place, start in enumerate(starts) if start == len(context)), None)
        return None if begin is None else ids[begin:]

    def settled(self, context: str, text: str) -> list[int] | None:
        """The tokens of ``text`` behind ``context`` that stay as they are whatever follows; None where ``text`` does not begin a token.

        In front of a boundary that two texts have in common, their tokens are the same. So more text changes a token only where one of the
        new tokens reaches over the end of ``text``: whatever such a token may begin with is taken away, and what differs is left out."""
        ids = self.encode_after(context, text)
        for begin in range(max(0, len(text) - LONGEST), len(text)):
            if ids and self.unfinished(text[begin:].encode()):
                others = self.encode_after(context, text[:begin]) or []
                same = next((place for place, pair in enumerate(zip(ids, others)) if pair[0] != pair[1]), min(len(ids), len(others)))
                ids = ids[:same]
        return ids

    def first(self, word: bytes) -> int | None:
        """The first token of a text that begins with ``word``; None where ``word`` is no text. A space at the end mostly belongs to the
        word that follows."""
        if word not in self._first:
            if len(self._first) >= REMEMBERED:
                self._first.clear()
            self._first[word] = self._begins(word)
        return self._first[word]

    def _begins(self, word: bytes) -> int | None:
        try:
            text = word.decode()
        except UnicodeDecodeError:
            return None
        for context in ("\n", "") if self.strips else ("", "\n"):  # some begin a text with a space of their own
            for more in ("x", "") if text[-1:].isspace() else ("",):
                token = next(iter(self.encode_after(context, text + more) or ()), -1)
                if token in self.bytes and word.startswith(self.bytes[token]):
                    return token
        return None

    def by_bytes(self) -> dict[bytes, list[int]]:
        """The tokens of each spelling; first those that are no mere byte written out (``<0x41>``)."""
        found: dict[bytes, list[int]] = {}
        for number in sorted(self.bytes, key=lambda number: (number in self._spelt, number)):
            found.setdefault(self.bytes[number], []).append(number)
        return found

    def _prefix(self) -> list[int]:
        encoding = self._own.encode("a")
        count = next((place for place, special in enumerate(encoding.special_tokens_mask) if not special), 0)
        return list(encoding.ids[:count])

    def _bytes(self, names: Mapping[int, str]) -> dict[int, bytes]:
        try:
            return token_bytes(self.tokenizer)
        except ValueError:  # another kind, such as WordPiece: what a token adds to a text
            anchor = (self.encode("a")[0] or self.encode("1")[0] or [0])[-1]
            alone, numbers = self.text([anchor]), sorted(names)
            texts = self._own.decode_batch([[anchor, number] for number in numbers], skip_special_tokens=False)
            return {number: text[len(alone) :].encode() for number, text in zip(numbers, texts) if text.startswith(alone)}


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


class Vocabularies:
    """A target's words and those of a draft with another tokenizer.

    Attributes:
        target_of: the target's token for each of the draft's tokens that has one, the likelier way to spell it first.
        share: of the draft's words, special tokens left out, the part that the target has as well.
        start: the token that the target's texts start with, where they follow a source; the draft's start with one of their own.
        template: the text in front of the draft's text, with ``{source}`` for the source, where the draft has no encoder to read that.
    """

    def __init__(
        self,
        target: Words,
        draft: Words,
        target_size: int,
        draft_size: int,
        starts: tuple[int | None, ...] | None = None,
        template: str | None = None,
    ):
        self.target, self.draft, self.template = target, draft, template
        self.start = None if starts is None else starts[0]
        draft.prefix = draft.prefix if starts is None or template else [each for each in starts[1:] if each is not None]
        ours = {word: ids[0] for word, ids in target.by_bytes().items()}
        same = {number: ours[word] for word, ids in draft.by_bytes().items() if word in ours for number in ids}
        self.share = len(same) / max(1, len(draft.bytes))
        self.special = counterparts(target, draft)  # the draft's token for each special one of the target's
        same.update(counterparts(draft, target))
        self.target_of = {theirs: mine for theirs, mine in same.items() if theirs < draft_size and mine < target_size}
        self._sorted = sorted((word, number) for number, word in draft.bytes.items() if number < draft_size)
        self.sorted = [number for _, number in self._sorted]  # the draft's tokens by their bytes

    def longer(self, word: bytes) -> tuple[int, int]:
        """Where in ``sorted`` those tokens stand that begin with ``word`` and go on."""
        first, last = (side(self._sorted, word, key=lambda pair: pair[0][: len(word)]) for side in (bisect_left, bisect_right))
        return bisect_right(self._sorted, word, first, last, key=lambda pair: pair[0]), last

    def text(self, source: Source) -> str:
        """What ``source`` says.

        Raises:
            ConfigurationError: there is no text.
        """
        if not source.ids:
            raise ConfigurationError(
                f"{'a template' if self.template else 'a draft with another tokenizer'} reads the source as text, "
                "and there is none; pass input_ids"
            )
        return str(self.target.tokenizer.decode(source.ids, skip_special_tokens=True))

    def prompt(self, row: Row) -> str:
        """What the draft reads in front of the text of ``row``."""
        return "" if self.template is None or row.source is None else self.template.replace(SOURCE, self.text(row.source))

    def continued(self, reading: Reading, written: Sequence[int], back: int = 0) -> list[int]:
        """The target's tokens for what the draft has ``written`` in place of the last ``back`` tokens of ``reading``, without those that
        more text may change.

        An end that the draft has written is one of the target's; behind another special token nothing counts."""
        said = next((place for place, token in enumerate(written) if token not in self.draft.bytes), len(written))
        begun = reading.unfinished
        spelt = begun + b"".join(self.draft.bytes[token] for token in written[:said])
        spelt = spelt[sum(len(self.draft.bytes[token]) for token in reading.ids[len(reading.ids) - back :]) :]
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(spelt)
        end = [self.target_of[token] for token in written[said : said + 1] if token in self.target_of]
        encode = self.target.encode_after if end else self.target.settled
        found = next((ids for context in (reading.end[-CONTEXT:], "\n") if (ids := encode(context, text)) is not None), [])
        while begun and found:  # the text ends in a part of a character
            word = self.target.bytes.get(found.pop(0), b"")
            if not word or not begun.startswith(word):
                return []
            begun = begun[len(word) :]
        return [] if begun else [*found, *end]


def counterparts(ours: Words, theirs: Words) -> dict[int, int]:
    """For special tokens of ``ours`` the one of ``theirs`` that says the same: by its text, else by its role."""
    by_text = {text: number for number, text in theirs.special.items()}
    found = {number: by_text[text] for number, text in ours.special.items() if text in by_text}
    for role in ("eos", "bos"):
        if role in ours.roles and role in theirs.roles:
            found.setdefault(ours.roles[role], theirs.roles[role])
    return found


class Reading:
    """A row's text in the draft's tokens, read on as it grows; for the draft's cache it is the row.

    The newest tokens are tokenised again together with what follows, and the others stay. Bytes that are no character yet are read as
    single bytes.

    Attributes:
        ids: what the draft is to have read.
        cached: what its cache holds at most.
        read: how many of the target's tokens it has read.
        behind: the draft has no tokens for the end of the text.
    """

    source: Source | None = None  # what an encoder reads is not read in other tokens
    isolation: str | None = None  # of the target's row

    def __init__(self, vocabularies: Vocabularies, row: Row):
        self._words, self.slot, self.capacity, self.prompt_length = vocabularies, row.slot, row.capacity, row.prompt_length
        self._prompt = vocabularies.prompt(row)
        self.ids: list[int] = []
        self.cached: list[int] = []
        self._begin()
        self.follow(row.ids)

    def _begin(self) -> None:
        del self.ids[:]
        self.ids += self._words.draft.prefix
        self.read = self._loose = self._changed = 0
        self.behind = False
        self._lost = False  # what was read last does not join what was read before
        self._segment()
        self._fresh, self._lead = self._prompt, len(self._prompt)

    def _segment(self) -> None:
        """Between two special tokens, texts are tokenised for themselves."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._fresh, self._tail, self._starts = "", "", list[int]()
        self._lead = 0  # characters at the beginning of the tail that are the template's
        self._whole = True  # the tail is all there is of it

    def follow(self, text: Sequence[int]) -> int:
        """Read on to the end of ``text``, the target's tokens; returns how many of those ``cached`` stand, all of ``ids`` but the last at
        most."""
        if len(text) > self.read:
            self._changed = min(self._changed, len(self.ids) - self._loose)
            del self.ids[len(self.ids) - self._loose :]
            for place in range(self.read, len(text)):
                self._next(text[place], first=place == 0)
            self.read = len(text)
            self._flush()
            if self._lost:
                self._begin()
                return self.follow(text)
            self._finish()
        same, most = min(self._changed, len(self.cached)), min(len(self.cached), len(self.ids) - 1)
        while same < most and self.cached[same] == self.ids[same]:
            same += 1
        self._changed = len(self.ids)
        del self.cached[min(same, most) :]
        return len(self.cached)

    def drafted(self, fed: Sequence[int], back: int = 0) -> None:
        """The draft has read ``ids`` but for the last ``back``, and ``fed`` below them."""
        self._changed = len(self.ids) - back
        del self.cached[self._changed :]
        self.cached += [*self.ids[len(self.cached) : self._changed], *fed]

    def pieces(self, most: int) -> list[tuple[int, int]]:
        """Where the tokens stand that spell the last one, the last two, … of ``ids`` and go on."""
        found, word = [], b""
        for token in reversed(self.ids[max(1, len(self.ids) - most) :] if not self._loose else []):
            if token not in self._words.draft.bytes:
                break
            word = self._words.draft.bytes[token] + word
            found.append(self._words.longer(word))
        return found

    @property
    def unfinished(self) -> bytes:
        """The bytes at the end of the text that are no character yet."""
        return bytes(self._decoder.getstate()[0])

    @property
    def end(self) -> str:
        """The newest text since the last special token, without unfinished bytes."""
        return self._tail[self._lead :]

    def _next(self, token: int, *, first: bool) -> None:
        words, target = self._words, self._words.target
        if first and token == words.start:
            return
        if token in target.special:
            self._fresh += self._decoder.decode(b"", True)
            self._flush()
            said = words.special.get(token)
            if first and token == target.roles.get("bos"):
                said = None if words.draft.prefix else words.draft.roles.get("bos", said)
            self.ids += [] if said is None else [said]
            self._segment()
            return
        word = target.bytes.get(token, b"")
        begins = len(self._tail) + len(self._fresh) == self._lead and (not self._lead or self._prompt[-1].isspace())
        if target.strips and begins and word[:1] == b" ":
            word = word[1:]
        self._fresh += self._decoder.decode(word)

    def _flush(self) -> None:
        """Tokenise the text that has come."""
        if not self._fresh:
            return
        text, self._fresh = self._tail + self._fresh, ""
        ids, starts = self._words.draft.encode(text)
        base = len(self.ids) - len(self._starts)
        kept = joint = 0
        if not self._whole:
            where = {start: place for place, start in reversed(list(enumerate(starts)))}
            for kept in range(BLURRED, len(self._starts)):
                joint = where.get(self._starts[kept], -1)
                if joint >= 0 and self._starts[kept] > self._starts[kept - 1] and ids[joint] == self.ids[base + kept]:
                    break
            else:
                self._lost = True
                return
        self._changed = min(self._changed, base + kept)
        self.ids[base + kept :] = ids[joint:]
        self._tail, self._starts = text, self._starts[:kept] + starts[joint:]
        if len(self._starts) > 2 * TAIL:
            begin = self._starts[-TAIL]
            self._tail, self._starts, self._whole = text[begin:], [start - begin for start in self._starts[-TAIL:]], False
            self._lead = max(0, self._lead - begin)

    def _finish(self) -> None:
        """Read what is no character yet as bytes."""
        single = [self._words.draft.single.get(byte) for byte in self.unfinished]
        loose = [number for number in single if number is not None]
        self.behind = len(loose) < len(single) or not (self.ids or loose)
        if self.behind:
            loose = [] if self.ids else [0]  # a row without any text must still be a row
        self._loose = len(loose)
        self.ids += loose


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

"""Two vocabularies of one text: what a target's tokens are to a draft model with another tokenizer, and the other way round.

A draft with another tokenizer reads the row's text in tokens of its own (:class:`Reading`). What it has written can be tokenised again, as
the target would (SLEM, Timor et al. 2025; :meth:`Vocabularies.continued`).

Nothing here runs a model, and the tokenizers that are handed in stay as they are.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from foredraft.drafters.base import Row
from foredraft.errors import ConfigurationError
from foredraft.grammars import token_bytes
from foredraft.models.encoder_decoder import Source

SOURCE, TEXT = "{source}", "{text}"  # in a template
REMEMBERED = 100_000  # beginnings of texts whose first token is kept
TAIL = 32  # newest tokens that are kept as text, to be tokenised again together with what follows
LONGEST = 32  # characters at the end of a text that may become one token with those to come
CONTEXT = 32  # characters in front of a text that is tokenised
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


def checked_template(template: str | None) -> str | None:
    """``template`` as far as the text that is to be written; refused where it has no place for the source, or more behind the text."""
    said = template if template is None else template.removesuffix(TEXT)
    if said is not None and (SOURCE not in said or TEXT in said):
        raise ConfigurationError(f"a template has {SOURCE} where the source stands, and ends where the text begins; got {template!r}")
    return said


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

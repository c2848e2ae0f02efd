"""Files of token sequences that survive a crash and several processes.

A file is replaced as a whole: written beside the old one, made to reach the disk, and then given its name. Who writes holds a lock
(``PATH.lock``, which stays) and takes over what the file holds, so that nothing that another process saved is lost.
"""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foredraft.drafters.stores import FileFormat
from foredraft.errors import ConfigurationError
from foredraft.files import locked

FILE = FileFormat("foredraft-suffix-store", "1", "a store of past texts", "the suffix drafter's save", ("tokens", "lengths"))

Tokens = NDArray[np.uint32]


@dataclass(frozen=True)
class Held:
    """What a file holds: sequences, the oldest first, and what they are made of as far as that is known."""

    sequences: list[Tokens]
    vocab_size: int | None
    tokenizer: str | None


def read(path: str | Path) -> Held:
    """The sequences of a file.

    Raises:
        ConfigurationError: there is no such file, it is of another kind or version, or it is damaged.
    """
    if not Path(path).is_file():
        raise ConfigurationError(f"there is no store of past texts at {str(path)!r}; drafter.save(path) makes one")
    (tokens, lengths), vocab_size, about = FILE.read(path)
    tokens, lengths = tokens.astype(np.uint32), lengths.astype(np.int64)  # copies, so that the file can be replaced
    if lengths.sum() != len(tokens) or lengths.min(initial=0) < 0:
        raise ConfigurationError(f"{str(path)!r} is damaged: its lengths do not add up; save it again")
    sequences = np.split(tokens, lengths.cumsum()[:-1]) if len(lengths) else []
    return Held(sequences, vocab_size, about.get("tokenizer") or None)


def write(path: str | Path, sequences: Sequence[Tokens], vocab_size: int | None, tokenizer: str | None, capacity: int) -> None:
    """Write ``sequences``, and before them those that the file holds and that are not among them; the latest ``capacity`` tokens in all.

    Raises:
        ConfigurationError: the file there is no store, or one for another vocabulary or tokenizer.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_name(path.name + ".lock"), wait=True):
        wanted = {digest(each): each for each in sequences}
        if path.exists():
            held = read(path)
            differs = refusal(held, vocab_size, tokenizer)
            if differs:
                raise ConfigurationError(f"{str(path)!r} {differs}; save to another file")
            older = {digest(each): each for each in held.sequences}
            wanted = {**{name: each for name, each in older.items() if name not in wanted}, **wanted}
            vocab_size, tokenizer = vocab_size or held.vocab_size, tokenizer or held.tokenizer
        kept = latest(list(wanted.values()), capacity)
        arrays = np.concatenate([np.empty(0, np.uint32), *kept]), np.array([len(each) for each in kept], np.int64)
        for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):  # by a process that was killed
            left.unlink()
        FILE.write(path, arrays, vocab_size, private=True, tokenizer=tokenizer or "")  # private: it holds what was generated


def refusal(held: Held, vocab_size: int | None, tokenizer: str | None) -> str | None:
    """Why what is ``held`` is not for this vocabulary and tokenizer, as far as they are known; None if it may be."""
    if held.tokenizer and tokenizer:
        return None if held.tokenizer == tokenizer else "was made with another tokenizer"
    if held.vocab_size and vocab_size and held.vocab_size != vocab_size:
        return f"was made for a vocabulary of {held.vocab_size} tokens, not {vocab_size}"
    return None


def digest(tokens: Tokens) -> bytes:
    """What a sequence is recognised by."""
    return hashlib.blake2b(np.ascontiguousarray(tokens).tobytes(), digest_size=16).digest()


def latest(sequences: Sequence[Tokens], capacity: int) -> list[Tokens]:
    """The last sequences that ``capacity`` has room for, an end each included."""
    first = len(sequences)
    while first and len(sequences[first - 1]) + 1 <= capacity:
        first -= 1
        capacity -= len(sequences[first]) + 1
    return list(sequences[first:])

"""Files that drafters keep: replaced in one step, mapped into memory rather than read, and tied to the tokenizer they were made with."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from foredraft.errors import ConfigurationError
from foredraft.files import current_name, read_text, replacing
from foredraft.loading import fingerprint, fingerprint_of

if TYPE_CHECKING:
    from foredraft.target import Target

DTYPES = {"U8": "<u1", "U16": "<u2", "U32": "<u4", "U64": "<u8", "I32": "<i4", "I64": "<i8", "F32": "<f4"}
LONGEST_HEADER = 100_000_000  # bytes, as safetensors has it

Tokenizer = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class FileFormat:
    """A kind of safetensors file. Its metadata hold the ``format`` and the ``version``; ``what`` it is and the method that is its
    ``writer`` stand in messages; ``arrays`` are the names of those that it must have."""

    format: str
    version: str
    what: str
    writer: str
    arrays: tuple[str, ...]

    def write(
        self, path: str | Path, arrays: Sequence[NDArray[Any]], vocab_size: int | None, *, private: bool = False, **about: str
    ) -> None:
        """Write one file in place of what was there, with the metadata ``about``; a crash on the way leaves the old file whole."""
        from safetensors.numpy import save_file

        metadata = {"format": self.format, "version": self.version, "vocab_size": str(vocab_size or ""), **about}
        with replacing(path, private=private) as new:
            save_file(dict(zip(self.arrays, arrays)), str(new), metadata)

    def read(self, path: str | Path) -> tuple[list[NDArray[Any]], int | None, dict[str, str]]:
        """The arrays, mapped read-only so that pages are read when they are looked at; the size of the vocabulary; and the metadata.

        Raises:
            FileNotFoundError: there is no such file.
            ConfigurationError: it is a file of another kind or version, or damaged.
        """
        with Path(path).open("rb") as file:  # opened once: under its name another file may lie a moment later
            try:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= min(size - 8, LONGEST_HEADER):
                    raise ValueError("its header does not fit into it")
                header: dict[str, Any] = json.loads(file.read(length))
                about = header.pop("__metadata__", {})
                refusal = self._refusal(about, header)
                arrays = [] if refusal else [_mapped(file, name, header[name], 8 + length, size) for name in self.arrays]
                vocab_size = int(about.get("vocab_size") or 0) or None
            except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                raise ConfigurationError(f"{str(path)!r} is not {self.what}: not a safetensors file ({error})") from None
        if refusal:
            raise ConfigurationError(f"{str(path)!r} {refusal}")
        return arrays, vocab_size, about

    def _refusal(self, about: dict[str, str], header: dict[str, Any]) -> str | None:
        """Why a file with these metadata and this header is not of this format, or None."""
        if current_name(about.get("format")) != self.format:
            return f"is not {self.what}: it was not written by {self.writer}"
        if about.get("version") != self.version:
            return f"has format version {about.get('version')}; this Foredraft reads version {self.version}"
        missing = [name for name in self.arrays if name not in header]
        return f"is damaged: {', '.join(missing)} missing; save it again" if missing else None


def _mapped(file: BinaryIO, name: str, about: dict[str, Any], first: int, size: int) -> NDArray[Any]:
    """The array that a header tells ``about``, in a file of ``size`` bytes whose data begin at ``first``."""
    dtype, (begin, end), shape = np.dtype(DTYPES[about["dtype"]]), about["data_offsets"], tuple(about["shape"])
    if first + end > size or end - begin != dtype.itemsize * int(np.prod(shape, dtype=np.int64)):
        raise ValueError(f"array {name!r} is cut short")
    return np.memmap(file, dtype, "r", first + begin, shape) if end > begin else np.empty(shape, dtype)


def sorted_positions(tokens: NDArray[Any], reach: int, kind: Literal["stable"] | None = None) -> NDArray[np.int64]:
    """``[n]`` positions of ``tokens`` in the order of the ``reach`` tokens from there on; the end of all comes before any token. With
    kind "stable" equals keep the order of the text.

    Prefix doubling (Manber and Myers 1993): ranks by 2h tokens are pairs of ranks by h tokens.
    """
    rank = np.unique(tokens, return_inverse=True)[1].astype(np.uint64)
    known = 1
    while True:
        beyond = np.zeros_like(rank)
        beyond[:-known] = rank[known:] + np.uint64(1)
        key = rank << np.uint64(32) | beyond
        order = np.argsort(key, kind=kind)
        known *= 2
        ordered = key[order]
        new = np.concatenate(([False], ordered[1:] != ordered[:-1])).cumsum()
        if known >= reach or new[-1] == len(tokens) - 1:
            return order
        rank[order] = new


def name_of(tokenizer: Tokenizer | None) -> str | None:
    """What a tokenizer is recognised by; None for a mere callable."""
    return fingerprint(tokenizer) if hasattr(tokenizer, "get_vocab") else None


def tokens_of(path: Path, tokenizer: Tokenizer | None) -> Sequence[int]:
    """The tokens of a text file.

    Raises:
        ConfigurationError: there is no such file or no tokenizer.
    """
    if not path.is_file():
        raise ConfigurationError(f"there is no file {str(path)!r} to draft from")
    if tokenizer is None:
        raise ConfigurationError(f"drafting from the text {str(path)!r} takes drafter_options={{'tokenizer': ...}}")
    return getattr(tokenizer, "encode", tokenizer)(read_text(path))


def refuse_another_tokenizer(what: str, vocab_size: int | None, made_with: str | None, target: Target) -> None:
    """Raise ConfigurationError if token ids in ``what`` do not mean what they mean to ``target``, as far as can be told: by the
    tokenizers' fingerprints where both are known, and by the numbers of ids."""
    if vocab_size is not None and vocab_size > target.vocab_size:
        raise ConfigurationError(
            f"{what} has {vocab_size} token ids, the target {target.vocab_size}; make it again with the target's tokenizer"
        )
    if made_with:
        theirs = fingerprint_of(target.model)
        if theirs is not None and theirs != made_with:
            raise ConfigurationError(
                f"{what} was made with another tokenizer than that of {target.model.name_or_path!r}: the same ids stand for other text; "
                "make it anew with the target's tokenizer"
            )

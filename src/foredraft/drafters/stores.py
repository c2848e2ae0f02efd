"""Files that drafters keep: replaced in one step, mapped into memory rather than read, and tied to the tokenizer they were made with."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from foredraft.errors import ConfigurationError
from foredraft.files import replacing
from foredraft.loading import fingerprint_of

if TYPE_CHECKING:
    from foredraft.target import Target

DTYPES = {"U8": "<u1", "U16": "<u2", "U32": "<u4", "U64": "<u8", "I32": "<i4", "I64": "<i8", "F32": "<f4"}
LONGEST_HEADER = 100_000_000  # bytes, as safetensors has it


def write_arrays(path: str | Path, arrays: dict[str, NDArray[Any]], metadata: dict[str, str]) -> None:
    """One safetensors file, in place of what was there."""
    from safetensors.numpy import save_file

    with replacing(path) as new:
        save_file(arrays, str(new), metadata)


def map_arrays(path: str | Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """The arrays of a safetensors file, mapped read-only: pages are read when they are looked at; and its metadata.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not a safetensors file, or cut short.
    """
    path = Path(path)
    with path.open("rb") as file:  # opened once: under its name another file may lie a moment later
        try:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, LONGEST_HEADER):
                raise ValueError("its header does not fit into it")
            header: dict[str, Any] = json.loads(file.read(length))
            metadata = header.pop("__metadata__", {})
            arrays = {name: _mapped(file, name, about, 8 + length, size) for name, about in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{path} is not a safetensors file: {error}") from None
    return arrays, metadata


def _mapped(file: BinaryIO, name: str, about: dict[str, Any], first: int, size: int) -> NDArray[Any]:
    """The array that a header tells ``about``, in a file of ``size`` bytes whose data begin at ``first``."""
    dtype, (begin, end), shape = np.dtype(DTYPES[about["dtype"]]), about["data_offsets"], tuple(about["shape"])
    if first + end > size or end - begin != dtype.itemsize * int(np.prod(shape, dtype=np.int64)):
        raise ValueError(f"array {name!r} is cut short")
    return np.memmap(file, dtype, "r", first + begin, shape) if end > begin else np.empty(shape, dtype)


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

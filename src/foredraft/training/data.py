"""Folders of texts that a target wrote: a manifest and shards, each whole or absent.

``manifest.json`` says what was asked for and by whom the texts were written; it is written once and never changes.
``texts-00012.safetensors`` holds the prompts and answers of shard 12 as token ids, appears in one step when all of it is there, and is
never touched again: what is there after a crash is what counts, and the same command makes the rest. ``hidden-00012.safetensors`` are the
target's hidden states at the same tokens, where they were asked for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foredraft.errors import ConfigurationError
from foredraft.files import make_folder, read_json, replacing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMAT = 1
MANIFEST = "manifest.json"
SOURCES = "sources"  # the setting that says that an encoder reads the prompts


@dataclass(frozen=True)
class Manifest:
    """What a folder of texts is.

    Attributes:
        target, vocabulary, weights: whose texts: its name, a hash of its tokenizer's vocabulary ("" if unknown), a hash of samples of its
            weights.
        vocab_size: rows of its LM head.
        prompts: a hash of all prompts; ``count`` how many there are, ``per_shard`` how many share a file.
        settings: how answers were decoded, by name.
    """

    target: str
    vocabulary: str
    weights: str
    vocab_size: int
    prompts: str
    count: int
    per_shard: int
    settings: Mapping[str, Any]
    format: int = FORMAT

    @property
    def shards(self) -> int:
        return -(-self.count // self.per_shard)

    def members(self, shard: int) -> range:
        """The numbers of the prompts in a shard."""
        return range(shard * self.per_shard, min((shard + 1) * self.per_shard, self.count))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises ConfigurationError if there is none, or none that this version reads."""
        path = folder / MANIFEST
        if not path.exists():
            raise ConfigurationError(f"{str(folder)!r} holds no data; make some with: foredraft data generate --out {folder}")
        found = read_json(path)
        if found.get("format") != FORMAT:
            raise ConfigurationError(f"{str(path)!r} is of another format than {FORMAT}, which this version reads; generate the data again")
        if missing := {each.name for each in fields(cls)} - found.keys():
            raise ConfigurationError(f"{str(path)!r} lacks {', '.join(sorted(missing))}; generate the data again")
        return cls(**{each.name: found[each.name] for each in fields(cls)})

    def claim(self, folder: Path) -> None:
        """Write the manifest, or see that the one that is there is the same.

        Raises:
            ConfigurationError: it cannot be made, or was started with other settings; the message names them.
        """
        if not (folder / MANIFEST).exists():
            make_folder(folder)
            write_json(folder / MANIFEST, asdict(self))
        if changed := changes(Manifest.read(folder)._flat(), self._flat()):
            raise ConfigurationError(
                f"{str(folder)!r} was started with other settings: {'; '.join(changed)}. Give the same ones, or another --out"
            )

    def _flat(self) -> dict[str, Any]:
        found = json.loads(json.dumps(asdict(self)))
        return {**found.pop("settings"), **found}


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The settings of ``now`` that were others ``before``, in words."""
    return [f"{name} was {before.get(name)!r} and is now {value!r}" for name, value in now.items() if value != before.get(name)]


def shard_file(folder: Path, shard: int, kind: str = "texts") -> Path:
    return folder / f"{kind}-{shard:05d}.safetensors"


def save_shard(path: Path, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write a shard so that it is there whole or not at all, also after a power cut."""
    from safetensors.numpy import save

    write_bytes(path, save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    write_bytes(path, (json.dumps(document, indent=1) + "\n").encode())


def write_bytes(path: Path, content: bytes) -> None:
    """In one step: readers see what was there or all of ``content``."""
    with replacing(path) as partial:
        partial.write_bytes(content)


@dataclass(frozen=True, eq=False)
class Shard:
    """Texts of one shard, one behind the other.

    Attributes:
        ids: ``[T]`` int32, prompts and answers; ``lengths`` ``[R]`` of each text, ``prompt_lengths`` ``[R]`` of its prompt.
        source_ids, source_lengths: what the encoder reads for each text, ``[S]`` and ``[R]`` int32, where the target has one.
        top_ids, top_logprobs: ``[A, K]`` the K likeliest tokens at each place of the answers and the target's log-probabilities, before
            temperature, where recorded; A counts the tokens of all answers.
    """

    ids: np.ndarray[Any, np.dtype[np.int32]]
    lengths: np.ndarray[Any, np.dtype[np.int32]]
    prompt_lengths: np.ndarray[Any, np.dtype[np.int32]]
    source_ids: np.ndarray[Any, np.dtype[np.int32]] | None = None
    source_lengths: np.ndarray[Any, np.dtype[np.int32]] | None = None
    top_ids: np.ndarray[Any, np.dtype[np.int32]] | None = None
    top_logprobs: np.ndarray[Any, np.dtype[np.float32]] | None = None

    @classmethod
    def load(cls, path: Path) -> Shard:
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            return cls(**load_file(path))
        except (OSError, SafetensorError, TypeError) as error:
            raise ConfigurationError(f"{str(path)!r} is not a shard of texts: {error}; delete it and generate again") from error

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]], prompt_lengths: Sequence[int], sources: Sequence[Sequence[int]] = ()) -> Shard:
        return cls(*flat(texts), np.asarray(prompt_lengths, np.int32), *(flat(sources) if sources else ()))

    @property
    def sources(self) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
        return [] if self.source_lengths is None else np.split(self.source_ids, np.cumsum(self.source_lengths)[:-1])  # type: ignore[arg-type]

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: array for name, array in found.items() if array is not None}


def flat(lists: Sequence[Sequence[int]]) -> tuple[np.ndarray[Any, np.dtype[np.int32]], np.ndarray[Any, np.dtype[np.int32]]]:
    """The ids of all ``lists``, one behind the other, and how many each has."""
    return np.asarray([token for each in lists for token in each], np.int32), np.asarray(list(map(len, lists)), np.int32)


class Texts:
    """All texts of a folder, in memory: 4 bytes per token.

    Args:
        partial: take the shards that are there; otherwise all must be.
        prompt_tokens: take so many tokens of each text as its prompt, wherever its answer begins.

    Attributes:
        sources: what the encoder reads for each text; none where the target has no encoder.
        sizes: ``[texts, 1]`` how many tokens each has, or ``[texts, 2]`` with those of its source.
    """

    def __init__(self, folder: Path, *, partial: bool = False, prompt_tokens: int | None = None):
        self.folder, self.manifest = Path(folder), Manifest.read(Path(folder))
        self.shards = [shard for shard in range(self.manifest.shards) if shard_file(self.folder, shard).exists()]
        if not self.shards or (len(self.shards) < self.manifest.shards and not partial):
            raise ConfigurationError(
                f"{str(folder)!r} has {len(self.shards)} of {self.manifest.shards} shards: let foredraft data generate finish"
                + (", or take what is there with --partial" if self.shards else "")
            )
        loaded = [Shard.load(shard_file(self.folder, shard)) for shard in self.shards]
        self.origins = [(shard, row) for shard, each in zip(self.shards, loaded) for row in range(len(each.lengths))]
        self._take(loaded)
        if prompt_tokens is not None:
            self.prompt_lengths = np.minimum(prompt_tokens, self.lengths)
        self.parts: tuple[Texts, ...] = (self,)

    @classmethod
    def together(cls, parts: Sequence[Texts]) -> Texts:
        """The texts of several folders, one folder behind the other; ``folder`` and ``manifest`` are the first one's."""
        if len(parts) == 1:
            return parts[0]
        found = copy(parts[0])
        found._take(parts)
        found.parts = tuple(parts)
        return found

    def _take(self, parts: Sequence[Any]) -> None:
        """The texts of shards, or of folders, one behind the other."""
        self.ids = np.concatenate([each.ids for each in parts])
        self.lengths = np.concatenate([each.lengths for each in parts]).astype(np.int64)
        self.prompt_lengths = np.concatenate([each.prompt_lengths for each in parts]).astype(np.int64)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.sources: list[np.ndarray[Any, np.dtype[np.int32]]] = [source for each in parts for source in each.sources]
        self.sizes = np.stack([self.lengths, *([list(map(len, self.sources))] if self.sources else [])], 1)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """The ids of one text."""
        return self.ids[self.starts[index] : self.starts[index] + self.lengths[index]]

    def prompt(self, index: int) -> list[int]:
        """What the target has answered: a source where it has an encoder."""
        return self.sources[index].tolist() if self.sources else self[index][: self.prompt_lengths[index]].tolist()

    def digest(self) -> str:
        arrays = [self.ids, self.lengths, self.prompt_lengths, *([*self.sources, self.sizes] if self.sources else [])]
        return hashlib.sha256(b"".join(each.tobytes() for each in arrays)).hexdigest()[:32]


def weights_digest(model: PreTrainedModel) -> str:
    """A hash of the first values of every weight, rounded to bfloat16 so that the dtype that a checkpoint is loaded in does not matter."""
    import torch

    found = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        values = weight.detach().flatten()[:16].to("cpu", torch.bfloat16)
        found.update(f"{name} {list(weight.shape)} {values.tolist()}\n".encode())
    return found.hexdigest()[:32]


def refuse_other_data(manifest: Manifest, model: PreTrainedModel, *, other_target: bool = False) -> None:
    """Raises ConfigurationError if the texts mean something else to ``model``, or were written by another model and that is not wanted."""
    from foredraft.loading import fingerprint_of, name_of

    name, size = name_of(model), int(model.get_output_embeddings().weight.shape[0])
    sourced = bool(model.config.is_encoder_decoder)
    if bool(manifest.settings.get(SOURCES)) != sourced:
        theirs, ours = ("no sources", "an encoder, which reads some") if sourced else ("sources", "no encoder to read them")
        raise ConfigurationError(
            f"the data of {manifest.target} has {theirs}, and {name} has {ours}; generate data with this target (foredraft data generate)"
        )
    vocabulary = fingerprint_of(model) or ""
    if manifest.vocab_size != size or (manifest.vocabulary and vocabulary and manifest.vocabulary != vocabulary):
        raise ConfigurationError(
            f"the data was written by {manifest.target} with another vocabulary than that of {name} ({manifest.vocab_size} and {size} "
            "ids): the same ids stand for other text; generate data with this target (foredraft data generate)"
        )
    if not other_target and manifest.weights != weights_digest(model):
        raise ConfigurationError(
            f"the data was written by {manifest.target}, which has other weights than {name}; generate data with this target (foredraft "
            "data generate), or accept texts of another with --other-target"
        )

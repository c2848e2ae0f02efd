"""Storing heads and reading them back: folders, repositories of a hub, and embedded heads.

    checkpoints.save(head, "my-medusa", about={"texts": 20000})
    head = checkpoints.load("my-medusa", model)             # a folder, owner/name on a hub, or zoo:NAME
    checkpoints.push_to_hub(head, "owner/my-medusa")

A head is stored so that the engine that has such heads loads the folder as it is (:mod:`foredraft.heads.formats`); one that uses the
target's LM head, or a product of low rank, in a layout of our own, and ``foredraft export`` writes it for engines. Reading is strict: a
tensor that is missing, unknown or of another shape raises ConfigurationError, which names it. A new head has no values, so none can be
left unset. Pickles are not read; ``foredraft convert`` makes safetensors of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foredraft import heads, zoo
from foredraft.errors import ConfigurationError, first_line
from foredraft.files import replacing
from foredraft.heads import formats
from foredraft.heads.base import Head, refuse_another_target
from foredraft.heads.formats import OURS, Contents, Format
from foredraft.heads.formats.folders import PICKLED, dtype_name, read, read_config, read_tensors, refusal, write
from foredraft.heads.inflation import inflate
from foredraft.heads.ngram_log_odds import NgramLogOdds
from foredraft.heads.vocabulary import VocabularyHead
from foredraft.hub import on_this_machine
from foredraft.loading import parse_dtype

LOG_ODDS = "successors/table.safetensors"


def save(
    head: Head,
    folder: str | Path,
    *,
    about: Mapping[str, Any] | None = None,
    format: str | None = None,
    target: str | None = None,
) -> Path:
    """Write ``config.json`` and the weights of ``head`` into ``folder``, and its n-gram log-odds below it unless a ``format`` is given.
    The same head makes the same bytes.

    Args:
        head: what is stored; a format that holds the target's LM head too needs it attached.
        folder: made where it does not exist. Files of these names are replaced, each in one step; others are left alone.
        about: facts for readers, such as how it was trained; what JSON can hold.
        format: one of :func:`foredraft.heads.formats.names`; None takes the usual one of the kind, which an engine loads.
        target: where other readers find the target; None for the name that the head remembers.

    Raises:
        ConfigurationError: an unknown format, or one that cannot carry this head.
    """
    folder = Path(folder).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ConfigurationError(f"{str(folder)!r} is a file; a head is stored in a folder")
    chosen = formats.find(format or formats.usual(head))
    if chosen.kinds and head.kind not in chosen.kinds:
        able = [each for each in formats.names() if not formats.find(each).kinds or head.kind in formats.find(each).kinds]
        raise ConfigurationError(
            f"format {chosen.name!r} stores {' or '.join(chosen.kinds)} heads, not {head.kind}; choose {', '.join(able)}"
        )
    stored = chosen.write(head, about or {}, head.config.target.name if target is None else target)
    if poor := not_finite(stored.tensors):
        raise ConfigurationError(f"the head holds NaN or infinity in {', '.join(poor)}; it is not stored")
    try:
        write(stored, folder)
        write_log_odds(head if format is None else None, folder)
    except OSError as error:
        raise ConfigurationError(f"cannot write {str(folder)!r}: {error.strerror or error}") from error
    return folder


def write_log_odds(head: Head | None, folder: Path) -> None:
    """Those of ``head`` below ``folder``, where engines do not look for weights; none where there are none."""
    from safetensors.torch import save

    found, path = getattr(head, "log_odds", None), folder / LOG_ODDS
    if found is None:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as new:
        new.write_bytes(save(*found.tensors()))


def read_log_odds(folder: Path) -> NgramLogOdds | None:
    """Those below ``folder``, or None.

    Raises:
        ConfigurationError: the file is damaged.
    """
    path = folder / LOG_ODDS
    return NgramLogOdds.of(*read_tensors(path), str(path)) if path.is_file() else None


def load(
    source: str | Path,
    model: PreTrainedModel | None = None,
    *,
    dtype: str | torch.dtype | None = None,
    revision: str | None = None,
) -> Head:
    """The head at ``source``, in evaluation mode.

    Args:
        source: a folder, a hub id or ``zoo:NAME``.
        model: its target. With it the head is checked against the target and attached to it, and takes its dtype and device.
            Without it the head is as stored, on the CPU.
        dtype: another dtype than the target's, or than the file's.
        revision: a branch, tag or commit of the hub.

    Raises:
        ConfigurationError: there is no head, it is damaged, or it belongs to another target; the message names what is wrong.
    """
    source = str(source)
    if source.startswith(zoo.PREFIX):
        if revision is not None:
            raise ConfigurationError(f"{source} is embedded and has no revision {revision!r}")
        return _load_embedded(source, model, dtype)
    return load_folder(local_folder(source, revision=revision), model, dtype=dtype)


def from_pretrained(repo_id: str, model: PreTrainedModel | None = None, *, revision: str | None = None, **options: Any) -> Head:
    """The head in a repository of the hub, or in a folder; the same as :func:`load`, by the name that users of transformers know."""
    return load(repo_id, model, revision=revision, **options)


def push_to_hub(
    head: Head,
    repo_id: str,
    *,
    about: Mapping[str, Any] | None = None,
    format: str | None = None,
    revision: str | None = None,
    private: bool | None = None,
    message: str = "A draft head, stored by foredraft",
) -> str:
    """Upload ``head`` in one commit, and return where it can be looked at. The repository is made where it does not exist.

    ``revision`` is the branch; the rest as for :func:`save`. Who uploads is known to huggingface_hub (``hf auth login``).
    """
    from huggingface_hub import HfApi

    api = HfApi()
    with tempfile.TemporaryDirectory(prefix="foredraft-") as folder:
        save(head, folder, about=about, format=format)
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        return str(api.upload_folder(repo_id=repo_id, folder_path=folder, revision=revision, commit_message=message))


def describe(source: str | Path, *, revision: str | None = None) -> dict[str, Any]:
    """What is stored under ``foredraft`` in the ``config.json`` of a head of ours: ``kind``, ``config``, ``about``. {} for another's."""
    source = str(source)
    folder = zoo.path(source) if source.startswith(zoo.PREFIX) else local_folder(source, revision=revision)
    found = read_config(folder).get(OURS, {})
    return dict(found) if isinstance(found, dict) else {}


# -- reading ----------------------------------------------------------------------------------------------------------------


def local_folder(source: str, *, revision: str | None = None) -> Path:
    """The folder ``source``, or the copy on this machine of the hub's repository ``source``.

    Raises:
        ConfigurationError: neither is there, or it is a single file.
    """
    path = Path(source).expanduser()
    if path.is_file():
        how = refusal(path) if path.suffix in PICKLED else f"a head is a folder, with a config.json beside {path.name}: name the folder"
        raise ConfigurationError(f"{source!r} is a file; {how}")
    if path.is_dir():
        if revision is not None:
            raise ConfigurationError(f"{source!r} is a folder and has no revision {revision!r}; leave revision out")
        return path
    if source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise ConfigurationError(f"there is no head at {source!r}: no such folder, and no owner/name on a hub")
    return _downloaded(source, revision)


def _downloaded(repo_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    how: dict[str, Any] = {"revision": revision, "local_files_only": on_this_machine(repo_id)}
    wanted = ["*.json", "*.safetensors"]
    try:
        folder = Path(snapshot_download(repo_id, allow_patterns=wanted, **how))
        if not any(folder.glob("*.safetensors")):  # then say whether there is a pickle to be converted
            folder = Path(snapshot_download(repo_id, allow_patterns=[*wanted, *(f"*{each}" for each in PICKLED)], **how))
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError, ValueError) as error:
        asked = repo_id if revision is None else f"{repo_id} at {revision}"
        raise ConfigurationError(
            f"there is no folder {repo_id!r}, and {asked!r} cannot be had from the hub: {first_line(error)}"
        ) from error
    return folder


def load_folder(folder: Path, model: PreTrainedModel | None = None, *, dtype: str | torch.dtype | None = None) -> Head:
    """:func:`load` for a folder."""
    stored = read(folder)
    format = formats.recognise(stored)
    head = _made(format.read(stored, model), format, stored.where)
    if isinstance(head, VocabularyHead):
        head.log_odds = read_log_odds(folder)
        if head.log_odds is not None and head.log_odds.vocab_size != head.config.target.vocab_size:
            raise ConfigurationError(f"the n-gram log-odds in {stored.where} were counted for another vocabulary; delete {LOG_ODDS}")
    wanted = parse_dtype(dtype)
    if model is not None:
        refuse_another_target(head.config, model)
        head.to(device=model.device, dtype=wanted or model.dtype)
        head.attach(model)
    elif wanted is not None:
        head.to(wanted)
    return head.eval()


def _load_embedded(source: str, model: PreTrainedModel | None, dtype: str | torch.dtype | None) -> Head:
    entry = zoo.find(source)
    if entry.kind != "head":
        known = ", ".join(zoo.PREFIX + each.name for each in zoo.describe() if each.kind == "head")
        raise ConfigurationError(f"{source} is not a draft head; the embedded heads are {known}")
    if model is None or not zoo.is_inflated(model):
        return load_folder(entry.path, model, dtype=dtype)
    head = inflate(load_folder(entry.path, dtype=model.dtype), model)
    return head if dtype is None else head.to(parse_dtype(dtype))


def _made(contents: Contents, format: Format, where: str) -> Head:
    """The head of that configuration with the tensors of ``contents``."""
    head: Head = heads.find(contents.kind)(contents.config)  # type: ignore[call-arg]
    _refuse_misfits(head.state_dict(), contents.tensors, format, where)
    if spoiled := not_finite(contents.tensors):
        raise ConfigurationError(f"{where} is damaged: NaN or infinity in {', '.join(map(format.spelled, spoiled))}")
    fill(head, contents.tensors)
    return head


def fill(head: Head, tensors: Mapping[str, Tensor]) -> None:
    """Give ``head``, which has no values yet, copies of ``tensors``. Mixed floating-point numbers take the dtype that loses nothing.

    Raises:
        RuntimeError: a tensor of the head is missing, or there is one that it does not have.
    """
    slots, wanted = head.state_dict(), reduce(torch.promote_types, (each.dtype for each in tensors.values() if each.is_floating_point()))
    copies = {name: each.to(wanted if each.is_floating_point() else slots[name].dtype, copy=True) for name, each in tensors.items()}
    head.load_state_dict(copies, strict=True, assign=True)


def _refuse_misfits(slots: Mapping[str, Tensor], tensors: Mapping[str, Tensor], format: Format, where: str) -> None:
    """Raises ConfigurationError unless the names and shapes are the same, naming every tensor that differs."""
    faults = []
    if missing := sorted(slots.keys() - tensors.keys()):
        faults.append(f"lacks {', '.join(format.spelled(each) for each in missing)}")
    if extra := sorted(tensors.keys() - slots.keys()):
        faults.append(f"holds {', '.join(format.spelled(each) for each in extra)}, which such a head does not have")
    for name in sorted(slots.keys() & tensors.keys()):
        if slots[name].shape != tensors[name].shape:
            faults.append(f"has {format.spelled(name)} of shape {list(tensors[name].shape)} instead of {list(slots[name].shape)}")
        elif slots[name].is_floating_point() != tensors[name].is_floating_point():
            faults.append(f"has {format.spelled(name)} in {dtype_name(tensors[name].dtype)} instead of {dtype_name(slots[name].dtype)}")
    if faults:
        raise ConfigurationError(f"{where} does not hold the head that its config.json describes: it {'; it '.join(faults)}")


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of those that hold NaN or infinity."""
    return sorted(name for name, each in tensors.items() if each.is_floating_point() and not each.isfinite().all())

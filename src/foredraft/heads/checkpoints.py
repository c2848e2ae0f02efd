"""Storing heads and reading them back: folders, repositories of a hub, and embedded heads.

    checkpoints.save(head, "my-medusa", about={"texts": 20000})
    head = checkpoints.load("my-medusa", model)             # a folder, owner/name on a hub, or zoo:NAME
    checkpoints.push_to_hub(head, "owner/my-medusa")

A head is stored so that the engine that has such heads loads the folder as it is (:mod:`foredraft.heads.formats`); one that uses the
target's LM head, or a product of low rank, in a layout of our own, and ``foredraft export`` writes it for engines. Reading is strict: a
tensor that is missing, unknown or of another shape is refused by its name. Tensors are copied into parameters that were filled with NaN
before, so that one that nobody set would be found. Pickles are not read; ``foredraft convert`` makes safetensors of them.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foredraft import heads, zoo
from foredraft.errors import ConfigurationError
from foredraft.files import replacing
from foredraft.heads import formats
from foredraft.heads.base import Head, refuse_another_target
from foredraft.heads.formats import OURS, Contents, Format
from foredraft.heads.formats.folders import PICKLED, read, read_config, refusal, write
from foredraft.heads.inflation import inflate
from foredraft.heads.ngram_log_odds import NgramLogOdds
from foredraft.heads.vocabulary import VocabularyHead
from foredraft.loading import parse_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOG_ODDS = "successors/table.safetensors"
UNSET = -(1 << 62)  # what whole numbers are filled with, where floating point takes NaN


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
    if poor := [name for name, tensor in stored.tensors.items() if _spoiled(tensor)]:
        raise ConfigurationError(f"the head holds NaN or infinity in {', '.join(sorted(poor))}; it is not stored")
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
    from safetensors import SafetensorError, safe_open

    path = folder / LOG_ODDS
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            said, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in sorted(file.keys())}
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigurationError(f"{path} is not a readable safetensors file: {error}") from error
    return NgramLogOdds.of(tensors, said, str(path))


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

    wanted = ["*.json", "*.safetensors"]
    try:
        folder = Path(snapshot_download(repo_id, revision=revision, allow_patterns=wanted))
        if not any(folder.glob("*.safetensors")):  # then say whether there is a pickle to be converted
            folder = Path(snapshot_download(repo_id, revision=revision, allow_patterns=[*wanted, *(f"*{each}" for each in PICKLED)]))
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError, ValueError) as error:
        asked = repo_id if revision is None else f"{repo_id} at {revision}"
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigurationError(f"there is no folder {repo_id!r}, and {asked!r} cannot be had from the hub: {reason}") from error
    return folder


def load_folder(folder: Path, model: PreTrainedModel | None = None, *, dtype: str | torch.dtype | None = None) -> Head:
    """:func:`load` for a folder."""
    stored = read(folder)
    format = formats.recognise(stored)
    contents = format.read(stored, model)
    head = _filled(contents, format, stored.where)
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


def _filled(contents: Contents, format: Format, where: str) -> Head:
    """The head with the tensors of ``contents``, after it was full of NaN."""
    head = blank(contents)
    slots = head.state_dict()
    _refuse_misfits(slots, contents.tensors, format, where)
    if spoiled := sorted(name for name, tensor in contents.tensors.items() if _spoiled(tensor)):
        names = ", ".join(format.spelled(each) for each in spoiled)
        raise ConfigurationError(f"{where} is damaged: {names} {_holds(spoiled)} NaN or infinity")
    fill(head, contents.tensors)
    if unset := unset_in(head):
        raise RuntimeError(f"{where}: reading a {contents.kind} head left {', '.join(unset)} unset; this is a bug in Foredraft")
    return head


def blank(contents: Contents) -> Head:
    """A head of that configuration on the CPU, its tensors of the file's dtype and full of NaN."""
    made = heads.find(contents.kind)
    head: Head = made(contents.config)  # type: ignore[call-arg]
    slots = dict(head.state_dict())
    if any(tensor.is_meta for tensor in (*head.parameters(), *head.buffers())):
        head.to_empty(device="cpu")
        slots |= dict(head.named_buffers())  # those that are not stored have no values either now
    floating = [tensor.dtype for tensor in contents.tensors.values() if tensor.is_floating_point()]
    if floating:  # of mixed files, that which loses nothing
        wanted = floating[0]
        for each in floating:
            wanted = torch.promote_types(wanted, each)
        head.to(wanted)
    found = {**dict(head.named_parameters()), **dict(head.named_buffers())}
    with torch.no_grad():
        for name in slots:
            found[name].fill_(_filler(found[name]))
    return head


def fill(head: Head, tensors: Mapping[str, Tensor]) -> None:
    """Copy ``tensors`` into those of ``head`` that have their names."""
    with torch.no_grad():
        for name, slot in head.state_dict().items():
            slot.copy_(tensors[name])


def unset_in(head: Head) -> list[str]:
    """The names of tensors that still hold what :func:`blank` filled them with."""
    found = {**dict(head.named_parameters()), **dict(head.named_buffers())}
    return sorted(name for name, tensor in found.items() if _unset(tensor))


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
            faults.append(f"has {format.spelled(name)} in {_of(tensors[name])} instead of {_of(slots[name])}")
    if faults:
        raise ConfigurationError(f"{where} does not hold the head that its config.json describes: it {'; it '.join(faults)}")


def _of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _filler(tensor: Tensor) -> float | int | bool:
    if tensor.is_floating_point():
        return math.nan
    return False if tensor.dtype == torch.bool else max(UNSET, torch.iinfo(tensor.dtype).min)


def _unset(tensor: Tensor) -> bool:
    if tensor.is_floating_point():
        return bool(tensor.isnan().any())
    return tensor.dtype != torch.bool and bool((tensor == _filler(tensor)).any())


def _spoiled(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not bool(tensor.isfinite().all())


def _holds(names: list[str]) -> str:
    return "holds" if len(names) == 1 else "hold"

"""``foredraft export`` and ``foredraft convert``: heads in the formats of other engines, and published pickles as safetensors."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft import zoo
from foredraft.cli.failures import note, writing
from foredraft.cli.progress import Progress
from foredraft.errors import ConfigurationError, first_line
from foredraft.files import read_json

if TYPE_CHECKING:
    from torch import Tensor

    from foredraft.heads.base import Head

ENGINE = "vllm"
LAYOUTS = {"medusa": "vllm", "eagle3": "speculators"}  # what vLLM loads of each kind
READERS = ("vllm", "speculators", "medusa", "eagle3")
TOKENS = 5  # that an EAGLE-3 head drafts in a row, at most, unless told


def export(
    drafter: Annotated[str, typer.Argument(metavar="HEAD", help="A folder, a hub id, or zoo:NAME.", show_default=False)],
    to: Annotated[
        str,
        typer.Option(
            metavar="FORMAT", show_default=False, help="vllm, speculators (EAGLE-3), medusa or eagle3 (the formats of the authors)."
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where to write it.", show_default=False)],
    target: Annotated[
        str | None, typer.Option(help="Its target: a path, a hub id, or zoo:NAME.", show_default="the one named in the head")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto (the target's or the head's own), float32, bfloat16 or float16.")] = "auto",
    draft_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens per draft in vLLM.", show_default="all of a Medusa head's, 5 of an EAGLE-3 head's")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="A branch, tag or commit of the hub.", show_default=False)] = None,
) -> None:
    """Write a head in another engine's format, and print the command that serves it there.

    Exit codes: 0 success, 2 invalid arguments.
    """
    with Progress(f"loading {drafter}") as progress:
        from foredraft.heads import checkpoints

        if to not in READERS:
            raise ConfigurationError(f"unknown format {to!r}; choose {', '.join(READERS)}")
        head = _loaded(drafter, to, target, dtype, revision)
        for source, what in ((drafter, "the head itself"), (target or head.config.target.name, "the target")):
            if source and Path(source).expanduser().resolve() == out.expanduser().resolve():
                raise ConfigurationError(f"{out} is {what}: choose another folder (--out), which gets what is exported")
        line = serving(head, out, target, draft_length)
        layout = _layout(to, head)
        progress.show(f"writing {out}")
        about = checkpoints.describe(drafter, revision=revision).get("about", {})
        checkpoints.save(head, out, format=layout.name, about=about, target=line.target)
    for each in layout.losses(head):
        note(f"note: {each}")
    for each in line.notes:
        note(f"note: {each}")
    typer.echo(str(line))


def _layout(to: str, head: Head) -> Any:
    """The format that is written.

    Raises:
        ConfigurationError: the engine has no such heads.
    """
    from foredraft.heads import formats

    if to == ENGINE and head.kind not in LAYOUTS:
        raise ConfigurationError(f"vLLM has no {head.kind} heads; it has {' and '.join(LAYOUTS)}. Serve this one with Foredraft")
    return formats.find(LAYOUTS[head.kind] if to == ENGINE else to)


def _loaded(source: str, to: str, target: str | None, dtype: str, revision: str | None) -> Head:
    """The head; with its target where it was given, or where what is written holds a part of it."""
    from foredraft.heads import checkpoints
    from foredraft.loading import load_model

    wanted = None if dtype == "auto" else dtype
    found = checkpoints.describe(source, revision=revision)
    config = found.get("config", {})
    if target is None and config.get("lm_head") == "target" and to in (ENGINE, "medusa"):
        target = config["target"]["name"] or None
        if target is None:
            raise ConfigurationError(
                f"{source} uses its target's LM head, which is written too, and does not say which target: add --target"
            )
    return checkpoints.load(source, None if target is None else load_model(target), dtype=wanted, revision=revision)


@dataclass(frozen=True)
class Line:
    """The command that serves ``target`` with an exported head."""

    target: str
    speculation: dict[str, Any]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"vllm serve {shlex.quote(self.target)} --speculative-config {shlex.quote(json.dumps(self.speculation))}"


def serving(head: Head, folder: Path, target: str | None, length: int | None) -> Line:
    """How vLLM serves ``head`` once it lies in ``folder``; for kinds it does not have, nothing is asked of the result but its ``target``.

    Raises:
        ConfigurationError: it cannot draft ``length`` tokens in a row.
    """
    heads = getattr(head.config, "heads", None)
    if head.kind == "medusa" and length not in (None, heads):
        raise ConfigurationError(f"vLLM drafts one token per head, here {heads}, not {length}; leave --draft-length out")
    tokens = length or heads or min(TOKENS, int(getattr(head.config, "steps", TOKENS)))
    name, notes = _where(target or head.config.target.name)
    return Line(name, {"method": head.kind, "model": str(folder.expanduser().absolute()), "num_speculative_tokens": tokens}, notes)


def _where(target: str) -> tuple[str, tuple[str, ...]]:
    """What another engine calls the target."""
    if not target:
        return "TARGET", ("the head does not say which target it belongs to: put it in place of TARGET",)
    if not target.startswith(zoo.PREFIX):
        return target, ()
    try:
        return str(zoo.path(target)), ()
    except ConfigurationError:
        both = f"z.load({target!r}).save_pretrained('TARGET'); z.load_tokenizer({target!r}).save_pretrained('TARGET')"
        code = f"import foredraft.zoo as z; {both}"
        return "TARGET", (f'{target} has no files: python -c "{code}" writes them',)


def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .pt or .bin file with the tensors of a head.", show_default=False)],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where to write config.json and safetensors.", show_default=False)],
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Its configuration.", show_default="config.json beside it")] = None,
) -> None:
    """Convert a pickled head to safetensors without running code from the pickle.

    Exit codes: 0 success, 2 invalid arguments.
    """
    from foredraft.heads.formats import folders

    described = file.parent / folders.CONFIG if config is None else config
    if not file.is_file():
        raise ConfigurationError(f"there is no file {str(file)!r}" + ("; name the file in that folder" if file.is_dir() else ""))
    if not described.is_file():
        raise ConfigurationError(f"there is no {str(described)!r}, which says what the tensors are; name it with --config FILE")
    tensors = unpickled(file)
    stored = folders.Stored(read_json(described), tensors)
    with writing(out):
        folders.write(stored, out)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    typer.echo(f"{out}: {len(tensors)} tensors, {size / 1e6:.1f} MB")


def unpickled(file: Path) -> dict[str, Tensor]:
    """The tensors of a pickled ``state_dict``, read with ``weights_only=True``.

    Raises:
        ConfigurationError: it holds anything else.
    """
    import pickle

    import torch

    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ConfigurationError(f"{file} holds more than tensors and is not read: {first_line(error)}") from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise ConfigurationError(f"{file} cannot be read: {first_line(error)}") from error
    if not isinstance(found, dict) or not found:
        raise ConfigurationError(f"{file} holds no tensors by name, but {type(found).__name__}")
    if others := sorted(str(name) for name, value in found.items() if not isinstance(value, torch.Tensor)):
        raise ConfigurationError(f"{file} holds more than tensors: {', '.join(others[:5])}; save the state_dict of the head alone")
    return {str(name): tensor.detach().clone().contiguous() for name, tensor in found.items()}

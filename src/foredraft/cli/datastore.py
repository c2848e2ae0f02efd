"""``foredraft datastore build`` and ``info``: the files that the drafter ``rest`` looks continuations up in."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli.failures import exit_codes, quiet, writing
from foredraft.cli.progress import Progress
from foredraft.errors import ConfigurationError

if TYPE_CHECKING:
    from foredraft.drafters.datastore import Datastore

AT_ONCE = 64  # documents that are tokenized together

app = typer.Typer(help="Build and inspect datastores for the drafter rest:PATH.", no_args_is_help=True)


@app.command()
def build(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILES...",
            show_default=False,
            help='One document per file; in a .jsonl file, one per line, a JSON object with a "text".',
        ),
    ],
    target: Annotated[
        str,
        typer.Option(
            "--target", "--tokenizer", help="The model whose tokenizer makes the ids: a path, a hub id, or zoo:NAME.", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="PATH", help="Where to write it; an existing file is replaced.", show_default=False)],
) -> None:
    """Build a datastore for --drafter rest:PATH.

    Exit codes: 0 success, 2 invalid arguments. An interrupted run leaves what was at PATH as it was.
    """
    with exit_codes():
        with Progress(f"loading the tokenizer of {target}") as progress:
            from foredraft.drafters.datastore import Datastore
            from foredraft.loading import fingerprint, load_tokenizer

            quiet()
            begin = time.perf_counter()
            if out.is_dir():
                raise ConfigurationError(f"{str(out)!r} is a folder; --out names the file to write")
            tokenizer = load_tokenizer(target)
            progress.show(f"tokenizing {len(files)} files")
            encoded = list(_encoded(tokenizer, documents(files)))
            progress.show("sorting")
            try:
                store = Datastore.build(encoded, vocab_size=_ids(tokenizer), fingerprint=fingerprint(tokenizer))
            except ValueError as error:
                raise ConfigurationError(f"cannot build a datastore from these files: {error}") from None
            progress.show(f"writing {out}")
            with writing(out):
                store.save(out)
        typer.echo(f"{_described(out, store)}, made in {time.perf_counter() - begin:.1f} s")


@app.command()
def info(
    path: Annotated[Path, typer.Argument(metavar="PATH", show_default=False, help="A file made by foredraft datastore build.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Summarize a datastore."""
    with exit_codes():
        from foredraft.drafters.rest import load

        store = load(path)
        if as_json:
            typer.echo(json.dumps({"path": str(path), **_facts(path, store)}, indent=2))
        else:
            typer.echo(f"{_described(path, store)}\nvocabulary of {store.vocab_size} ids, tokenizer {store.fingerprint or 'unknown'}")


def documents(files: list[Path]) -> Iterator[str]:
    """The texts in ``files``.

    Raises:
        ConfigurationError: one cannot be read, or a line of a .jsonl file holds no text.
    """
    for path in files:
        if path.is_dir():
            raise ConfigurationError(f"{str(path)!r} is a folder; name the files in it, for instance {str(path / '*.txt')!r}")
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"cannot read {str(path)!r}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"{str(path)!r} is not UTF-8 text: {error.reason} at byte {error.start}") from error
        if path.suffix != ".jsonl":
            yield text
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                yield _text_of(line, f"{path}, line {number}")


def _text_of(line: str, where: str) -> str:
    try:
        found: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{where}: this is not JSON: {error.msg}") from None
    if not isinstance(found, dict) or not isinstance(found.get("text"), str):
        raise ConfigurationError(f'{where}: a line of a .jsonl file must be a JSON object with a "text"')
    return str(found["text"])


def _encoded(tokenizer: Any, texts: Iterator[str]) -> Iterator[list[int]]:
    """Token ids of each text, without special tokens."""
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == AT_ONCE:
            yield from tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]
            batch = []
    if batch:
        yield from tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]


def _ids(tokenizer: Any) -> int:
    """One more than the largest id, which ``len(tokenizer)`` need not be."""
    return 1 + max(tokenizer.get_vocab().values())


def _facts(path: Path, store: Datastore) -> dict[str, Any]:
    return {
        "tokens": len(store.suffixes),
        "documents": store.documents,
        "bytes": path.stat().st_size,
        "vocab_size": store.vocab_size,
        "tokenizer": store.fingerprint,
    }


def _described(path: Path, store: Datastore) -> str:
    facts = _facts(path, store)
    many = "" if facts["documents"] == 1 else "s"
    return f"{path}: {facts['tokens']:,} tokens of {facts['documents']:,} document{many}, {facts['bytes'] / 1e6:.1f} MB"

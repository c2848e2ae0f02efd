"""``foredraft datastore build`` and ``info``: the files that the drafter ``rest`` looks continuations up in."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli.checks import check_model, check_output
from foredraft.cli.failures import writing
from foredraft.cli.figures import counted
from foredraft.cli.progress import Progress
from foredraft.errors import ConfigurationError
from foredraft.files import json_lines, read_text

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
    check_model(target, encoders=True)
    check_output(out)
    with Progress(f"loading the tokenizer of {target}") as progress:
        from foredraft.drafters.datastore import Datastore
        from foredraft.loading import fingerprint, load_tokenizer

        begin = time.perf_counter()
        tokenizer = load_tokenizer(target)
        progress.show(f"tokenizing {counted(len(files), 'file')}")
        encoded = list(_encoded(tokenizer, documents(files)))
        progress.show("sorting")
        try:
            ids = 1 + max(tokenizer.get_vocab().values())  # len(tokenizer) may be less
            store = Datastore.build(encoded, vocab_size=ids, fingerprint=fingerprint(tokenizer))
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
        if path.suffix != ".jsonl":
            yield read_text(path).replace("\r\n", "\n")
            continue
        for found, where in json_lines(path):
            if not isinstance(found, dict) or not isinstance(found.get("text"), str):
                raise ConfigurationError(f'{where}: a line of a .jsonl file must be a JSON object with a "text"')
            yield found["text"]


def _encoded(tokenizer: Any, texts: Iterator[str]) -> Iterator[list[int]]:
    """Token ids of each text, without special tokens."""
    while batch := list(islice(texts, AT_ONCE)):
        yield from tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]


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
    return f"{path}: {counted(facts['tokens'], 'token')} of {counted(facts['documents'], 'document')}, {facts['bytes'] / 1e6:.1f} MB"

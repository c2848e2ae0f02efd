"""How commands fail: one line on stderr and an exit code; and how libraries are kept from writing between the lines.

Exit codes: 0 done, 1 it failed while running (the target's output, memory), 2 it cannot work as asked, 130 Ctrl-C.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from foredraft.errors import ConfigurationError, ForedraftError, UnsupportedModelError, first_line

FAILED, USAGE, INTERRUPTED = 1, 2, 130


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn what a person can act on into a message and an exit code; anything else is a defect and keeps its traceback."""
    quiet()
    try:
        yield
    except (ConfigurationError, UnsupportedModelError) as error:
        fail(str(error), USAGE)
    except (ForedraftError, MemoryError) as error:
        fail(str(error) or "out of memory", FAILED)
    except KeyboardInterrupt:
        note("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except RuntimeError as error:
        if "out of memory" not in str(error) and "allocate memory" not in str(error):
            raise
        fail(f"out of memory: {first_line(error)}", FAILED)


def fail(message: str, code: int) -> None:
    note(f"error: {message}")
    raise typer.Exit(code)


def note(message: str) -> None:
    """A line on stderr."""
    sys.stdout.flush()
    typer.echo(message, err=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises:
    ConfigurationError: ``path`` cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"cannot write {str(path)!r}: {error.strerror or error}") from error


def write_json(path: Path, document: dict[str, Any]) -> None:
    with writing(path):
        path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def quiet() -> None:
    """Keep notices and progress bars of the libraries out of the output; errors stay. What is not imported yet reads the environment."""
    os.environ.update(TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
    if (transformers := sys.modules.get("transformers")) is not None:
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module=r"(torch|transformers|huggingface_hub)\b")
    for name in ("torchao", "torch.utils._pytree"):  # transformers imports torchao, which misses kernels for other machines
        logging.getLogger(name).setLevel(logging.ERROR)

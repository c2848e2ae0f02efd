"""What a generation looks like: text as it is committed, results under headers, or lines of JSON."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

from foredraft import __version__
from foredraft.cli.failures import note
from foredraft.cli.figures import figures_line, sentence
from foredraft.cli.progress import Progress
from foredraft.errors import ConfigurationError

if TYPE_CHECKING:
    from foredraft.cli.settings import Configuration, Outcome, Result

Pieces = Sequence[tuple[str, bool]]
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline
HEADER_WIDTH = 60


class Printer:
    """``committed`` is called with every commit, ``finished`` once."""

    def __init__(self, progress: Progress, *, show: bool = False, verbose: bool = False):
        self.progress, self.verbose = progress, verbose
        self.mark = Marking(show)

    def begin(self, configuration: Configuration, seed: int | None) -> None:
        """The model is loaded; ``seed`` is None for greedy decoding."""

    def committed(self, result: Result, pieces: Pieces) -> None:
        raise TypeError(f"{type(self).__name__} must define committed(result, pieces)")

    def end_line(self) -> None:
        """Whatever comes next begins on a line of its own."""
        self.progress.clear()

    def finished(self, outcome: Outcome) -> None:
        self.end_line()
        drafter = outcome.configuration.drafter_name
        note(sentence(outcome.stats, sampled=outcome.sampled, interrupted=outcome.interrupted))
        if self.verbose:
            note(figures_line(outcome.stats, drafter=drafter, sampled=outcome.sampled))
        if any(result.finish_reason == "context" for result in outcome.results):
            note("the model's context is full")


class StreamPrinter(Printer):
    """One prompt: the text appears as it is committed."""

    _begun = False
    _line_open = False

    def committed(self, result: Result, pieces: Pieces) -> None:
        if not self._begun:
            self.progress.clear()
            self.mark.explain()
            self._begun = True
        text = self.mark(pieces)
        if text:
            self._line_open = not result.text.endswith("\n")  # before writing: Ctrl-C may come in between
            write(text)

    def end_line(self) -> None:
        self.progress.clear()
        if self._line_open:
            write("\n")
            self._line_open = False


class BatchPrinter(Printer):
    """Several prompts: each result in one piece under a header, as soon as it is complete."""

    def __init__(self, progress: Progress, *, count: int, show: bool = False, verbose: bool = False):
        super().__init__(progress, show=show, verbose=verbose)
        self.count, self.done, self.tokens = count, 0, 0

    def committed(self, result: Result, pieces: Pieces) -> None:
        self.tokens += sum(1 for text, _ in pieces if text)
        if result.finish_reason is None:
            self.progress.show(f"{self.done} of {self.count} prompts done")
            return
        self.progress.clear()
        if self.done == 0:
            self.mark.explain()
        self.done += 1
        text = self.mark(result.pieces)
        write(f"{self._header(result)}\n{text}" + ("" if result.text.endswith("\n") else "\n"))

    def _header(self, result: Result) -> str:
        first, _, rest = result.prompt.strip().partition("\n")
        short = first[:HEADER_WIDTH] + ("…" if rest or len(first) > HEADER_WIDTH else "")
        return f"── {result.index + 1} of {self.count}: {short}"


class JsonPrinter(Printer):
    """A line of JSON on stdout for each prompt that is complete."""

    def begin(self, configuration: Configuration, seed: int | None) -> None:
        drafter = configuration.drafter_name
        self.facts = {"target": configuration.target, "drafter": drafter, "seed": seed, "foredraft": __version__}

    def committed(self, result: Result, pieces: Pieces) -> None:
        if result.finish_reason is None:
            self.progress.show(f"{len(result.tokens)} tokens of prompt {result.index + 1}")
            return
        self.progress.clear()
        line = {
            "index": result.index,
            "prompt": result.prompt,
            "text": result.text,
            "tokens": result.tokens,
            "finish_reason": result.finish_reason,
            "stats": None if result.stats is None else {**asdict(result.stats), "acceptance_length": result.stats.acceptance_length},
            **logprobs_of(result),
            **self.facts,
        }
        write(json.dumps(without_nan(line), allow_nan=False) + "\n")


def logprobs_of(result: Result) -> dict[str, Any]:
    """``chosen`` ``[L]``, ``ids`` and ``values`` ``[L, K]`` as lists, where they were asked for."""
    if not result.logprobs:
        return {}
    joined = type(result.logprobs[0]).joined(result.logprobs)
    return {"logprobs": {name: tensor.tolist() for name, tensor in vars(joined).items()}}


class Marking:
    """Pieces of text, with those that were drafted and accepted set off: underlined green, or in brackets without colour."""

    def __init__(self, show: bool):
        self.show = show
        if coloured():
            self.open, self.close = "\x1b[4;32m", "\x1b[0m"
        else:
            self.open, self.close = ("⟦", "⟧") if encodable("⟦⟧") else ("[", "]")

    def __call__(self, pieces: Pieces) -> str:
        runs = ((accepted, "".join(text for text, _ in run)) for accepted, run in groupby(pieces, key=lambda piece: piece[1]))
        return "".join(self._run(safe(text), accepted) for accepted, text in runs if text)

    def explain(self) -> None:
        if self.show:
            note(f"{self.open}drafted and accepted{self.close}, the target's own")

    def _run(self, text: str, accepted: bool) -> str:
        return f"{self.open}{text}{self.close}" if self.show and accepted else text


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def safe(text: str) -> str:
    """On a terminal, a model's control characters are shown as what they are, not obeyed."""
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", text) if sys.stdout.isatty() else text


def coloured() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def encodable(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def without_nan(document: dict[str, Any]) -> Any:
    """``document`` with null in place of NaN and infinity, which JSON does not have."""
    return json.loads(json.dumps(document), parse_constant=lambda name: None)


def make_printer(progress: Progress, *, count: int, show: bool, as_json: bool, logprobs: bool = False, verbose: bool = False) -> Printer:
    """Raises:
    ConfigurationError: ``show`` and ``as_json`` exclude each other, and ``logprobs`` needs ``as_json``.
    """
    if logprobs and not as_json:
        raise ConfigurationError("--logprobs needs --json")
    if as_json and show:
        raise ConfigurationError("--show does not work with --json; the stats say what was drafted and accepted")
    if as_json:
        return JsonPrinter(progress, verbose=verbose)
    if count == 1:
        return StreamPrinter(progress, show=show, verbose=verbose)
    return BatchPrinter(progress, count=count, show=show, verbose=verbose)

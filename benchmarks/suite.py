"""What every suite is: settings in, records out, and from the records alone figures and a report.

A suite is a subclass of :class:`Suite`. Its settings are a dataclass whose fields are made by :func:`option`, from which the command line
is generated. ``run`` fills lists of records (dataclasses) and a few plain values. A document holds both, so that :meth:`Suite.read` brings
a finished run back, and a committed report can be written again from its raw data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, Generic, TypeVar, get_args, get_origin, get_type_hints

from benchmarks.figures import Figure
from benchmarks.report import Report, Table
from foredraft.loading import load_model, load_tokenizer

SCHEMA = 2
DIGITS = 9  # after the point, of recorded seconds


def option(default: Any, help: str, *, least: float | None = None, flag: str = "", metavar: str | None = None, place: bool = False) -> Any:
    """A field of a suite's settings, which is an option of its command as well.

    Args:
        default: a tuple for an option that may be repeated.
        least: the smallest value.
        flag: the option, if it is not named as the field.
        place: a folder of this machine, which no document names.
    """
    return field(default=default, metadata={"help": help, "least": least, "flag": flag, "metavar": metavar, "place": place})


@dataclass(frozen=True)
class Settings:
    device: str = option("cpu", "cpu or cuda.")
    threads: int = option(2, "Threads of every side.", least=1)


@dataclass(frozen=True)
class TargetSettings(Settings):
    target: str = option("zoo:python-300m", "A path, a hub id or zoo:NAME.")
    dtype: str = option("bfloat16", "bfloat16, float32 or float16.")


@dataclass(frozen=True)
class PairSettings(TargetSettings):
    draft: str = option("zoo:python-1m", "The draft model, with the target's tokenizer.")

    def load(self) -> tuple[Any, Any, Any]:
        """Target, draft and tokenizer.

        Raises:
            ConfigurationError: a model cannot be loaded.
        """
        target, draft = (load_model(name, dtype=self.dtype, device=self.device) for name in (self.target, self.draft))
        return target, draft, load_tokenizer(self.target)


@dataclass(frozen=True)
class Failure:
    """What could not be measured, at which stage, and why; it has no figures."""

    method: str
    stage: str
    message: str


S = TypeVar("S", bound=Settings)


class Suite(Generic[S]):
    """One benchmark; its docstring is the help of its command.

    The annotated attributes of a subclass are what ``run`` fills: lists of records where they are ``list[SomeDataclass]``, plain values
    otherwise. Both begin empty, and both are in the document.

    Attributes:
        name: of the command and of the files.
        settings_type: the dataclass of its settings.
        quick, on_gpu: settings that ``--quick`` and another device than the CPU bring, unless they are given.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    settings_type: ClassVar[type[Any]]
    quick: ClassVar[Mapping[str, Any]] = {}
    on_gpu: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, settings: S, advance: Callable[[], None] = lambda: None):
        self.settings, self.advance = settings, advance
        for name, kind in self.results().items():
            setattr(self, name, (get_origin(kind) or kind)())

    @classmethod
    def results(cls) -> dict[str, Any]:
        """The types of what ``run`` fills, by attribute."""
        return {name: kind for name, kind in get_type_hints(cls).items() if get_origin(kind) is not ClassVar}

    @property
    def steps(self) -> int:
        """How often ``advance`` is called by a run in which nothing fails."""
        raise NotImplementedError

    def run(self) -> None:
        """Measure, and keep what comes of it.

        Raises:
            ConfigurationError: it cannot run as asked.
        """
        raise NotImplementedError

    def figures(self) -> list[Figure]:
        """The figures that a run should reach, missed ones too."""
        return []

    def tables(self) -> list[Table]:
        raise NotImplementedError

    def notes(self, environment: Mapping[str, Any]) -> list[str]:
        """How it was measured; empty ones are left out."""
        return []

    def charts(self, folder: Any, name: str) -> list[str] | None:
        """Draw charts into ``folder``; their file names, or None for a suite that has none."""
        return None

    def failed(self) -> Sequence[Any]:
        """Failures that make the exit code 1."""
        return getattr(self, "failures", [])

    def document(self, *, command: str, environment: Mapping[str, Any]) -> dict[str, Any]:
        """Everything about a run as plain values."""
        settings = {each.name: getattr(self.settings, each.name) for each in fields(self.settings) if not each.metadata.get("place")}
        return {
            "schema": SCHEMA,
            "suite": self.name,
            "command": command,
            "environment": dict(environment),
            "settings": plain(settings),
            "figures": [figure.plain() for figure in self.figures()],
            **{name: plain(getattr(self, name)) for name in self.results()},
        }

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Suite[Any]:
        """The finished run that ``document`` was made of."""
        found = cls(record(cls.settings_type, document["settings"]))
        for name, kind in cls.results().items():
            entries, of = document[name], get_args(kind)[:1]
            records = get_origin(kind) is list and is_dataclass(of[0])
            setattr(found, name, [record(of[0], entry) for entry in entries] if records else entries)
        return found

    def report(self, document: Mapping[str, Any], charts: Sequence[str] | None = None) -> Report:
        """The page; ``charts`` are images that lie beside it."""
        environment = document["environment"]
        notes = [f"`{document['command']}`", machine(environment), *filter(None, self.notes(environment))]
        return Report(self.title, notes, self.tables(), charts)


def machine(environment: Mapping[str, Any]) -> str:
    packages = environment["packages"]
    changed = " with uncommitted changes" if environment["dirty"] else ""
    return (
        f"foredraft {packages['foredraft']} at commit {environment['commit'] or 'unknown'}{changed}; torch {packages['torch']}, "
        f"transformers {packages['transformers']}, Python {environment['python']}; {environment['cpu']} "
        f"({environment['cpu_capability']}), {environment['cores']} cores, {environment['threads']} threads, device "
        f"{environment['device']}; load {environment['load']} before the run; {environment['date']}."
    )


def plain(value: Any) -> Any:
    """``value`` as JSON has it; floats are rounded to nanoseconds, and an interval without an end has none."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, float):
        return round(value, DIGITS) if math.isfinite(value) else None
    return value


def record(kind: type[Any], entry: Mapping[str, Any]) -> Any:
    """An entry of a document as the dataclass that it was."""
    hints, given = get_type_hints(kind), dict(entry)
    for name, value in entry.items():
        if is_dataclass(hints[name]) and isinstance(value, dict):
            given[name] = record(hints[name], value)  # type: ignore[arg-type]
        elif isinstance(value, list):
            given[name] = tuple(value)
    return kind(**given)


def instrument(targets: Sequence[str]) -> str:
    """What to say of an inflated target."""
    inflated = [each for each in targets if each.startswith("zoo:") and each.endswith("300m")]
    what = "a benchmark instrument: a small model inflated to the cost of a large one, with the same function."
    return f"{inflated[0]} is {what}" if inflated else ""

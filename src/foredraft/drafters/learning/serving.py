"""Learning beside serving, as the server sees it: collect, leave the learner time, take up what it publishes.

Whatever the learner does, the server reads only files that are whole, looks at every number before it uses it, and waits for nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import inf, nan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from foredraft.caching import private_place, warn_once
from foredraft.drafters.base import Feedback, Row
from foredraft.drafters.learning.buffer import Buffer, Layout
from foredraft.drafters.learning.collecting import Collector
from foredraft.drafters.learning.duty import SLICE, Duty
from foredraft.drafters.learning.versions import TEXTS, Versions
from foredraft.errors import ConfigurationError, unknown
from foredraft.heads.base import Head
from foredraft.loading import name_of
from foredraft.losses import Loss
from foredraft.models.identity import shape_of
from foredraft.target import Target

IDLE = "idle"
COLLECTING = 0.02  # of the time of rounds that collecting may take
LOOK = 1.0  # seconds between looks at the learner and the folder
HUNG = 300.0  # seconds without a sign of life
PAUSES = (0.0, 5.0, 30.0, 120.0, 600.0)  # seconds until a learner that has ended is started again; after as many ends, never
KEPT = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}  # of glibc: it keeps the memory of tensors
GUESS = 50  # tokens that a draft reads in the time of a round, until that is known
CURVE = 256  # points that α over time has at most

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LearnOptions:
    """How a drafter learns.

    Attributes:
        folder: where versions and texts are kept; None for one of the cache folder's.
        share: of serving speed that learning may cost; 0 to learn between calls only.
        between: learn between calls as well.
        cores: the learner's; none for any. They count at low priority in either case.
        device: that the learner computes on.
        loss: as of ``foredraft train draft``.
        rate: learning rate; None for one that falls with the number of weights.
        keep: versions that are kept.
    """

    folder: str | None = None
    share: float = 0.05
    between: bool = True
    cores: Sequence[int] = ()
    device: str = "cpu"
    loss: str = "lk"
    rate: float | None = None
    keep: int = 3

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ConfigurationError(f"learn: share must lie between 0 and 1, got {self.share}")
        if self.keep < 1 or (self.rate is not None and not self.rate > 0):
            raise ConfigurationError(f"learn: keep must be at least 1 and rate above 0, got {self.keep} and {self.rate}")
        Loss.parse(self.loss)
        if hasattr(os, "sched_getaffinity") and (missing := set(self.cores) - os.sched_getaffinity(0)):
            raise ConfigurationError(f"learn: this process may not use core {min(missing)}; it may use {sorted(os.sched_getaffinity(0))}")

    @classmethod
    def of(cls, given: bool | str | Path | Mapping[str, Any]) -> LearnOptions | None:
        """``True``, ``"idle"``, a folder, or these options by name; None for False.

        Raises:
            ConfigurationError: an option that there is not.
        """
        if isinstance(given, Mapping):
            known = cls.__dataclass_fields__
            for name in given.keys() - known.keys():
                raise unknown("learn has no option", name, known)
            folder = given.get("folder")
            return cls(**{**given, "folder": None if folder is None else str(folder)})
        if given is False:
            return None
        if given is True:
            return cls()
        if not isinstance(given, (str, Path)) or not str(given):
            raise ConfigurationError(f"learn takes True, 'idle', a folder or a dictionary of options, got {given!r}")
        if str(given).startswith("{"):
            raise ConfigurationError(f'learn: cannot read {given!r}; write options as JSON, such as {{"share": 0.1, "cores": [2, 3]}}')
        return cls(share=0.0) if given == IDLE else cls(folder=str(given))


def spawn(folder: Path, options: LearnOptions) -> subprocess.Popen[bytes]:
    """Start the learner in a process of its own."""
    command = [sys.executable, "-m", "foredraft.training.online", str(folder), "--parent", str(os.getpid())]
    command += ["--device", options.device, "--loss", options.loss, "--keep", str(options.keep)]
    command += [] if options.rate is None else ["--rate", str(options.rate)]
    command += ["--cores", ",".join(map(str, options.cores))] if options.cores else []
    threads = str(max(1, len(options.cores)))
    environment = {**KEPT, **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": threads}
    with open(folder / "learner.log", "wb") as said:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environment, start_new_session=True)


def ended(processes: list[subprocess.Popen[bytes]], owner: int) -> None:
    """End the learner of the process ``owner``, and of no process that it has forked."""
    if os.getpid() == owner:
        for each in processes:
            each.kill()
            each.wait()


class Learning:
    """What one draft model or head learns.

    Args:
        target: that it drafts for.
        about: what the learner makes one like it from: ``class`` or ``kind``, ``name`` and ``config``; and ``width``, the numbers of the
            hidden states that it reads of a token.
        first: its weights by name, as it was loaded.
        frozen: makes what the learner needs besides.
        clock: seconds that both processes know.
        start: starts the learner.

    Attributes:
        version: of the weights in use; 0 are the first ones.
        swaps, unusable, seconds: how often others were taken up, and how many could not be used; seconds that both took.
        curve: pairs of tokens served and the part of the draft tokens looked at that was accepted since the last pair.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        about: Mapping[str, Any],
        first: Mapping[str, Tensor],
        options: LearnOptions,
        *,
        frozen: Callable[[], Mapping[str, Tensor]] = dict,
        clock: Callable[[], float] = time.monotonic,
        start: Callable[[Path, LearnOptions], subprocess.Popen[bytes]] = spawn,
    ):
        self.options, self.clock, self._start = options, clock, start
        whom = {"target": {**asdict(shape_of(target)), "digest": _digest_of_target(target)}, "draft": {"digest": digest(first)}}
        self.versions = Versions(_folder(options, whom), keep=options.keep)
        self.versions.begin({**whom, "model": dict(about)}, first, frozen)
        self._like = {name: (value.shape, value.dtype) for name, value in first.items()}
        self.leads = False
        self.buffer: Buffer | None = None
        self.duty = Duty(options.share)
        self.layout = Layout(about.get("width", 0))
        self.collector = Collector(self._add, self.layout)
        self.version, self.swaps, self.unusable, self.seconds = 0, 0, 0, 0.0
        self._avoided = -1  # the last version that could not be used
        self.curve: list[tuple[int, float]] = []
        self._every, self._since, self._tokens = 1000, [0, 0, 0], 0  # tokens per point; tokens, accepted and looked at since the last
        self._process: subprocess.Popen[bytes] | None = None
        self._owner, self._learners = os.getpid(), list[subprocess.Popen[bytes]]()  # at most one
        weakref.finalize(self, ended, self._learners, self._owner)  # where nobody has closed this
        self._ends, self._next_start, self._heartbeat, self._silent = 0, 0.0, 0.0, 0.0
        self._collecting, self._price = 0.0, 0.0
        self._told = 0, 0  # trials that the log has a line about, and how many of them were refused
        self._last = self._looked = -inf
        self._busy, self._rows = False, 0
        self._round = self._reading = 0.0  # seconds of a round, and of reading a token again
        try:
            self._take_lead()
        except OSError as error:
            raise ConfigurationError(
                f"what is learnt cannot be written to {str(self.versions.folder)!r}: {error.strerror or error}; name a folder of yours, "
                "learn=FOLDER"
            ) from error
        if self.leads:
            self._look_after(clock(), 0.0)  # importing what it needs takes a learner seconds, and nobody waits for the server yet

    # -- rows -----------------------------------------------------------------------------------------------------------

    def begin(self, rows: Sequence[Row], hidden: Sequence[Tensor] = ()) -> None:
        """``hidden`` are the states of each prompt's last tokens, where pieces hold states."""
        self._leave_to_parent()
        if not self._rows:  # what was before was nobody's time
            self._last = self.clock()
            self._grant(0.0)
        self._rows += len(rows)
        if self.leads:
            self.collector.begin(rows, hidden)

    def observe(self, rows: Sequence[Row], feedback: Feedback) -> int | None:
        """A round is over. The version that is to be used from now on, if it is another one."""
        now = self.clock()
        self._account(now, (len(rows), feedback.tree.nodes, feedback.drafted))
        self._count(feedback)
        if self.leads:
            wanted = self._collecting + self._price <= COLLECTING * self.duty.elapsed or not self._price
            if self.collector.observe(rows, feedback, wanted=wanted):
                self._price = self.clock() - now
                self._collected(self._price)
            if self.duty.allows():
                self._grant(now + SLICE)
        return self._newer(now)

    def end(self, rows: Sequence[Row]) -> int | None:
        """As :meth:`observe`, for rows that are over."""
        self._rows = max(0, self._rows - len(rows))
        if self.leads:
            begin = self.clock()
            self.collector.end(rows)
            self._collected(self.clock() - begin)
        if not self._rows and self.options.between:
            self._grant(inf)
        return None if self._rows else self._newer(self.clock())

    def reset(self) -> None:
        """All rows are gone."""
        self._rows = 0
        self.collector.reset()
        if self.options.between:
            self._grant(inf)

    def _leave_to_parent(self) -> None:
        """In a process that was forked: the learner and the texts are its parent's, and what that publishes is used here, too."""
        if os.getpid() == self._owner:
            return
        self._owner, self._process, self._learners = os.getpid(), None, []
        self.leads, self.buffer = False, None
        self.versions.leave()
        self.collector.reset()

    def _collected(self, seconds: float) -> None:
        self._collecting += seconds
        self.duty.spend(seconds)

    # -- time -------------------------------------------------------------------------------------------------------------

    def _account(self, now: float, kind: Hashable) -> None:
        seconds, self._last = max(0.0, now - self._last), now
        self._round += 0.1 * (seconds - self._round)
        busy = self.buffer is not None and bool(self.buffer["busy"])
        self.duty.round(seconds, kind, busy=busy or self._busy)
        self._busy = busy

    def _grant(self, until: float) -> None:
        """The learner may compute until then."""
        if self.buffer is not None:
            self.buffer["granted"] = until

    # -- the learner --------------------------------------------------------------------------------------------------------

    def _take_lead(self) -> None:
        if self.versions.lead():
            self.buffer = Buffer(self.versions.folder / TEXTS, self.layout, create=True)
            self.leads = True  # where there is no room for the buffer it does not, and tries again later
            self.buffer["granted"], self.buffer["busy"], self.buffer["unusable"] = 0.0, 0, 0
            self.buffer["published"] = self.versions.numbers()[-1]
            self._told = self.buffer["trials"], self.buffer["refused"]
        elif self.buffer is None and self._looked == -inf:
            log.info("another process learns in %s; this one uses what it publishes", self.versions.folder)

    def _add(self, piece: Any) -> None:
        if self.buffer is not None:
            self.buffer.add(piece)

    def _newer(self, now: float) -> int | None:
        """The version to use, if it is not the one in use; looks after the learner now and then."""
        if now - self._looked >= LOOK:
            since, self._looked = now - self._looked, now
            if not self.leads:
                with suppress(OSError):
                    self._take_lead()
            if not self.leads:
                newest = self.versions.numbers()[-1]
                return newest if newest not in (self.version, self._avoided) else None
            self._look_after(now, since)
        if self.buffer is None:
            return None
        newest = self.buffer["published"]
        return newest if newest not in (self.version, self._avoided) else None

    def _look_after(self, now: float, since: float) -> None:
        """Start the learner, and start it again where it has ended or shows no sign of life."""
        assert self.buffer is not None
        self._tell()
        if self._process is None:
            if self._ends < len(PAUSES) and now >= self._next_start:
                self._silent = 0.0
                try:
                    self._process = self._start(self.versions.folder, self.options)
                    self._learners[:] = [self._process]
                except OSError as error:  # no memory for it, or no folder any more
                    self._ended(now, error)
            return
        before, self._heartbeat = self._heartbeat, self.buffer["heartbeat"]
        self._silent = self._silent + min(since, 10 * LOOK) if self._heartbeat == before else 0.0
        code = self._process.poll()
        if code is None and self._silent > HUNG:
            log.warning("the learner shows no sign of life; it is ended and started again")
            self._process.kill()
            code = -9
        if code is None:
            return
        self._process = None
        self._learners.clear()
        self._ended(now, code)

    def _tell(self) -> None:
        """A line in the log about the last trial, if there was one since the line before."""
        assert self.buffer is not None
        trials, refused = self.buffer["trials"], self.buffer["refused"]
        if trials > self._told[0]:
            what = "refused" if refused > self._told[1] else f"published as version {self.buffer['published']}"
            alphas = self.buffer["before"], self.buffer["after"]
            log.info("trial %d: α %.4f with the weights in use, %.4f with the new ones, which are %s", trials, *alphas, what)
        self._told = trials, refused

    def _ended(self, now: float, code: object) -> None:
        """It is started again after a while, or given up."""
        assert self.buffer is not None
        self.buffer["busy"] = 0
        self._next_start = now + PAUSES[self._ends]
        self._ends += 1
        if self._ends == len(PAUSES):
            warn_once(
                f"the learner has ended {self._ends} times ({code} the last time, see {self.versions.folder / 'learner.log'}); "
                "the draft learns no more until the next start"
            )
        else:
            log.warning("the learner has ended (%s); serving goes on, and it is started again", code)

    # -- weights ------------------------------------------------------------------------------------------------------------

    def load(self, number: int) -> dict[str, Tensor] | None:
        """Version ``number``; None, and it is never asked for again, if it cannot be used."""
        try:
            weights = self.versions.load(number)
            if wrong := {name: (value.shape, value.dtype) for name, value in weights.items()}.items() ^ self._like.items():
                raise ValueError(f"version {number} has other weights than the draft, such as {min(name for name, _ in wrong)}")
        except ValueError as error:
            log.warning("%s; the draft stays as it is", error)
            self.unusable, self._avoided = self.unusable + 1, number
            if self.leads and self.buffer is not None:
                self.versions.drop(number)
                self.buffer["unusable"] = number
            return None
        return weights

    def swapped(self, number: int, seconds: float) -> None:
        """The draft has the weights of version ``number`` now, which took so long."""
        self.version, self.swaps, self.seconds = number, self.swaps + 1, self.seconds + seconds
        self.duty.spend(seconds)
        if self.buffer is not None:
            self.buffer["accepted"] = number
        log.info("the draft is version %d now, after %.3f s", number, seconds)

    def reads_again(self, rows: Sequence[Row]) -> bool:
        """Whether it pays to read the texts of ``rows`` again with new weights: what more is accepted, over as many tokens as each row
        has got so far, must save more than reading takes."""
        if self.buffer is None or not rows:
            return False
        ahead = sum(min(row.capacity - len(row.ids), len(row.ids) - row.prompt_length) for row in rows) / len(rows)
        reading = sum(len(row.ids) for row in rows) * (self._reading or self._round / GUESS)
        return bool(self.buffer["again"] * ahead * self._round > reading)

    def read_again(self, tokens: int, seconds: float) -> None:
        """So many tokens were read again, which took so long."""
        self._reading = seconds / max(1, tokens)
        self.seconds += seconds
        self.duty.spend(seconds)

    def forget(self) -> None:
        """Back to the first weights; all versions and texts are deleted."""
        self._leave_to_parent()
        if self.buffer is None:
            raise ConfigurationError(f"another process learns in {str(self.versions.folder)!r}; forget there, or use another folder")
        self._end_process()
        last = max(self.versions.numbers()[-1], self.buffer["published"], self.buffer["unusable"])
        self.versions.clear()
        self.buffer.clear()
        self.buffer["published"], self.buffer["unusable"] = 0, last  # no number is used twice: others may have a version of that number
        self.collector.reset()
        self._ends = 0

    def close(self) -> None:
        self._leave_to_parent()
        self._end_process()
        self.buffer, self.leads = None, False
        self.versions.close()

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            self._learners.clear()

    # -- what came of it ------------------------------------------------------------------------------------------------------

    def _count(self, feedback: Feedback) -> None:
        accepted = sum(feedback.accepted)
        kept = accepted + len(feedback.accepted)
        accepted = accepted if feedback.drafted else 0
        looked = accepted + sum(feedback.drafted and count < feedback.tree.height for count in feedback.accepted)
        self._tokens += kept
        self._since = [before + more for before, more in zip(self._since, (kept, accepted, looked))]
        if self._since[0] >= self._every:
            self.curve.append((self._tokens, self._since[1] / self._since[2] if self._since[2] else nan))
            self._since = [0, 0, 0]
            if len(self.curve) >= CURVE:
                self.curve, self._every = self.curve[1::2], 2 * self._every

    def facts(self) -> dict[str, Any]:
        """For statistics and logs."""
        own = {name: getattr(self, name) for name in ("version", "swaps", "unusable", "leads")}
        learner = (
            {}
            if self.buffer is None
            else {name: self.buffer[name] for name in ("written", "steps", "trials", "refused", "before", "after")}
        )
        return {
            **own,
            **learner,
            "seconds": {
                "learner": 0.0 if self.buffer is None else self.buffer["seconds"],
                "collecting": self._collecting,
                "swapping": self.seconds,
                "lost": self.duty.lost,
                "serving": self.duty.elapsed,
            },
            "alpha": list(self.curve),
        }


def learning_of(draft: PreTrainedModel, target: PreTrainedModel, options: LearnOptions) -> Learning:
    """The learning of a ``draft`` that nobody else holds, which gets the newest version of its weights.

    Raises:
        ConfigurationError: it cannot learn, or there is no folder for what it learns.
    """
    if getattr(draft, "is_quantized", False) or getattr(draft, "_hf_peft_config_loaded", False):
        raise ConfigurationError(
            f"the draft {name_of(draft)} has quantized weights or adapters and cannot learn; merge them, or learn=False"
        )
    kind = type(draft)
    if "<locals>" in kind.__qualname__ or kind.__module__.partition(".")[0] in ("__main__", "transformers_modules"):
        raise ConfigurationError(f"the draft's class {kind.__qualname__} cannot be imported by the process that learns; use learn=False")
    about = {
        "class": f"{kind.__module__}:{kind.__qualname__}",
        "name": name_of(draft),
        "config": json.loads(draft.config.to_json_string(use_diff=False)),
    }
    return _newest(draft, Learning(target, about, weights_of(draft), options))


def learning_of_head(head: Head, target: Target, options: LearnOptions) -> Learning:
    """As :func:`learning_of`, of a ``head`` that is attached to ``target``."""
    about = {
        "kind": head.kind,
        "name": head.config.target.name,
        "config": head.config.to_dict(),
        "width": len(head.features) * head.config.target.hidden_size,
    }

    def frozen() -> dict[str, Tensor]:
        with target.unpacked():
            return {name: value.detach().cpu() for name, value in head.frozen().items()}

    return _newest(head, Learning(target.model, about, weights_of(head), options, frozen=frozen))


def weights_of(draft: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu() for name, value in draft.named_parameters()}


def _newest(draft: nn.Module, learning: Learning) -> Learning:
    for number in reversed(learning.versions.numbers()[1:]):
        if (found := learning.load(number)) is not None:
            with torch.no_grad():
                for name, value in draft.named_parameters():
                    value.copy_(found[name])
            learning.version = number
            break
    if learning.buffer is not None:
        learning.buffer["accepted"] = learning.version
    return learning


def digest(weights: Mapping[str, Tensor]) -> str:
    """What a draft is recognised by: shapes, and some of its numbers."""
    found = hashlib.sha256()
    for name, value in sorted(weights.items()):
        found.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        found.update(value.flatten()[:: max(1, value.numel() // 64)].float().cpu().numpy().tobytes())
    return found.hexdigest()[:32]


def _digest_of_target(target: PreTrainedModel) -> str:
    """Of its embeddings, which no kernel takes away."""
    return digest({"": target.get_input_embeddings().weight.detach().to(torch.bfloat16)})


def _folder(options: LearnOptions, whom: Mapping[str, Mapping[str, Any]]) -> Path:
    """The folder asked for, or that of this pair in the cache.

    Raises:
        ConfigurationError: there is none.
    """
    if options.folder is not None:
        return Path(options.folder).expanduser()
    place = private_place("learnt", {who: {name: value for name, value in each.items() if name != "name"} for who, each in whom.items()})
    if place is None:
        raise ConfigurationError(
            "a drafter that learns needs a folder that it can write to, and the cache folder cannot be used; name one, learn=FOLDER"
        )
    return place

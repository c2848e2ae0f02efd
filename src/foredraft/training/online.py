"""The learner of a drafter that learns while it serves: ``python -m foredraft.training.online FOLDER``.

It reads pieces of text that the server keeps (:mod:`foredraft.drafters.learning.buffer`), takes steps, tries the weights on the newest
pieces, and publishes them if the target would accept more. It computes while the server grants it time, and ends with it.
"""

from __future__ import annotations

import argparse
import inspect
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foredraft.drafters.learning.buffer import CONTEXT, TRIAL, Buffer, Piece
from foredraft.drafters.learning.versions import TEXTS, Versions
from foredraft.training.losses import Few, Loss, compare

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BATCH = 4  # pieces of a step
OLD = 1 / 3  # of the pieces that steps are made of
STEPS = 10  # between trials
TIMES = 16  # that a piece is learnt from, at most
WARMUP, CLIP = 10, 1.0  # steps until the learning rate is whole; largest gradient
CERTAIN = 1.0  # standard errors by which new weights must be better
BACK = 4  # refusals in a row, after which learning begins again at the published weights, more slowly
SLOWEST = 0.1  # of the learning rate
PIECES = 4  # on the trial part before there is a trial
POLL = 0.01  # seconds between looks at what the server grants


class OnlineLearner:
    """Learns in ``folder``; :meth:`turns` does the work.

    Args:
        loss: one of :mod:`foredraft.training.losses`.

    Attributes:
        model: in float32, being trained.
        version: that it goes back to.
    """

    def __init__(self, folder: Path, *, device: str = "cpu", loss: str = "lk", rate: float = 3e-4, keep: int = 3):
        self.versions, self.buffer = Versions(folder, keep=keep), Buffer(folder / TEXTS)
        self.device, self.loss, self.rate = torch.device(device), Loss.parse(loss), rate
        self.first = self.versions.load(0)
        self.version = self.buffer["published"]
        self.published = self._load(self.version)
        self.model = build(self.versions.about()["model"]).to(self.device).train()
        self.beside = build(self.versions.about()["model"]).to(self.device).eval()  # has weights that are tried
        self._takes_places = "logits_to_keep" in inspect.signature(self.model.forward).parameters
        self._chance = random.Random(self.buffer["steps"])
        self._speed, self._refusals = 1.0, 0
        self._go_back()

    # -- what is to be done ---------------------------------------------------------------------------------------------

    def turns(self) -> Iterator[bool]:
        """Work without end; pauses after every piece. False where there is nothing to do for now."""
        while True:
            for _ in range(STEPS):
                while not self._fresh:
                    yield False
                self._follow()
                yield from self._step()
            yield from self._trial()

    @property
    def _fresh(self) -> bool:
        """There is something that was not learnt from often enough."""
        return bool(self.buffer["steps"] * BATCH < self.buffer["written"] * TIMES) and bool(self.buffer.draw(1, self._chance, OLD))

    def _follow(self) -> None:
        """The server would not use what was published last, or uses other weights."""
        if self.version and self.buffer["refused"] == self.version:
            self.version = self.buffer["accepted"]
            self.published = self._load(self.version)
            self._go_back()

    def _step(self) -> Iterator[bool]:
        """One step of the optimiser."""
        pieces = self.buffer.draw(BATCH, self._chance, OLD)
        total = sum(float(piece["count"]) for piece in pieces)
        for piece in pieces:
            logits, few = self._read(self.model, piece)
            torch.autograd.backward(compare(self.loss, logits, few).loss.sum() / max(1.0, total))
            yield True
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self._taken += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * self._speed * min(1.0, self._taken / WARMUP)
        if bool(torch.isfinite(norm)):
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.buffer["steps"] += 1

    def _trial(self) -> Iterator[bool]:
        """Try the new weights on the newest pieces; publish them if more is accepted, or else go on, and back after a while."""
        pieces = self.buffer.trial()
        if len(pieces) < min(PIECES, TRIAL):
            return
        weights = {name: value.detach().to(self.first[name].dtype, copy=True).cpu() for name, value in self.model.named_parameters()}
        alphas: list[list[Tensor]] = [[], []]
        for found, tried in zip(alphas, (self.published, weights)):
            _copy(self.beside, tried)
            for piece in pieces:
                with torch.no_grad():
                    found.append(compare(self.loss, *self._read(self.beside, piece)).alpha.cpu())
                yield True
        before, after = map(torch.cat, alphas)
        share = torch.cat([torch.from_numpy(piece["weights"][: piece["count"]]) for piece in pieces])
        share, gain = share / share.sum(), after - before
        mean, was = float((gain * share).sum()), float((before * share).sum())
        error = float(((gain - mean) * share).square().sum().sqrt())
        self.buffer["before"], self.buffer["after"] = was, was + mean
        if mean > CERTAIN * error:  # not of NaN
            yield from self._reading_again(pieces, alphas[1])
            self._publish(weights)
        else:
            self._refuse(finite=mean == mean)
        self.buffer["trials"] += 1

    def _reading_again(self, pieces: Sequence[Piece], fresh: Sequence[Tensor]) -> Iterator[bool]:
        """What is lost where the keys of a text's beginning are those of the published weights; ``fresh``: α with new ones."""
        gains: list[Tensor] = []
        _copy(self.beside, self.published)
        for piece, alpha in zip(pieces, fresh):
            behind = torch.from_numpy(piece["places"][: piece["count"]] >= CONTEXT)
            if not bool(behind.any()):
                continue
            ids, places, few = self._tensors(piece)
            with torch.no_grad():
                keys = self.beside(input_ids=ids[:, :CONTEXT], use_cache=True).past_key_values
                found = self.model(input_ids=ids[:, CONTEXT:], past_key_values=keys, use_cache=True).logits[0]
                mixed = compare(self.loss, found[places[behind] - CONTEXT].float(), few[behind]).alpha.cpu()
            gains.append(alpha[behind] - mixed)
            yield True
        self.buffer["again"] = float(torch.cat(gains).mean()) if gains else 0.0

    def _publish(self, weights: dict[str, Tensor]) -> None:
        self.version = max(self.versions.numbers()[-1], self.buffer["published"], self.buffer["refused"]) + 1
        self.versions.save(self.version, weights)
        self.buffer["published"] = self.version
        self.published, self._refusals = weights, 0

    def _refuse(self, *, finite: bool) -> None:
        self.buffer["refusals"] += 1
        self._refusals += 1
        if self._refusals >= BACK or not finite:
            self._speed, self._refusals = max(SLOWEST, self._speed / 2), 0
            self._go_back()

    def _go_back(self) -> None:
        """Begin again at the published weights."""
        _copy(self.model, self.published)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.rate, betas=(0.9, 0.95), weight_decay=0.0)
        self._taken = 0

    def _load(self, version: int) -> dict[str, Tensor]:
        with suppress(ValueError):
            return self.versions.load(version)
        return self.first

    def _read(self, model: Any, piece: Piece) -> tuple[Tensor, Few]:
        """The model's logits ``[M, V]`` at the places of ``piece``, and what the target says there."""
        ids, places, few = self._tensors(piece)
        wanted = {"logits_to_keep": places} if self._takes_places else {}
        found = model(input_ids=ids, use_cache=False, **wanted).logits[0]
        return (found if wanted else found[places]).float(), few

    def _tensors(self, piece: Piece) -> tuple[Tensor, Tensor, Few]:
        """The text ``[1, L]``, the places ``[M]``, and the target's distributions there."""
        count = int(piece["count"])
        ids, places, tokens, logs = (
            torch.from_numpy(piece[name][:end].astype(kind)).to(self.device)
            for name, end, kind in (("tokens", piece["length"], "i8"), ("places", count, "i8"), ("ids", count, "i8"), ("logs", count, "f4"))
        )
        last = self.model.get_output_embeddings().weight.shape[0] - 1
        outside = tokens > last  # tokens that only the target has
        return ids.clamp(max=last)[None], places, Few(tokens.clamp(max=last), logs.masked_fill(outside, -torch.inf))


def build(about: dict[str, Any]) -> PreTrainedModel:
    """A model like the draft, in float32, with any weights."""
    module, _, name = about["class"].partition(":")
    kind = getattr(import_module(module), name)
    model: PreTrainedModel = kind(kind.config_class.from_dict(about["config"]))
    return model.float()


@torch.no_grad()
def _copy(model: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    for name, value in model.named_parameters():
        value.copy_(weights[name])


# -- the process --------------------------------------------------------------------------------------------------------


def humble(cores: str) -> None:
    """Give way to everybody else on this machine, the first to go where memory is short."""
    with suppress(AttributeError, OSError):
        os.nice(10)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    torch.set_num_threads(len(cores.split(",")))


def end_with(parent: int) -> None:
    """End this process once the server is gone, whatever it is doing."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Learn what a server has collected. The server starts this.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parent", type=int, required=True)
    for name, kind, default in (("device", str, "cpu"), ("loss", str, "lk"), ("rate", float, 3e-4), ("keep", int, 3), ("cores", str, "")):
        parser.add_argument(f"--{name}", type=kind, default=default)
    given = parser.parse_args(arguments)
    humble(given.cores)
    end_with(given.parent)
    learner = OnlineLearner(given.folder, device=given.device, loss=given.loss, rate=given.rate, keep=given.keep)
    work(learner)


def work(learner: OnlineLearner) -> None:
    """Compute while the server grants it."""
    buffer, turns = learner.buffer, learner.turns()
    while True:
        begin = time.monotonic()
        buffer["heartbeat"] = begin
        buffer["busy"] = begin < buffer["granted"] and next(turns)
        if buffer["busy"]:
            buffer["seconds"] += time.monotonic() - begin
        else:
            time.sleep(POLL)


if __name__ == "__main__":
    main()

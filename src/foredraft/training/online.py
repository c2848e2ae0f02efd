"""The learner of a drafter that learns while it serves: ``python -m foredraft.training.online FOLDER``.

It reads pieces of text that the server keeps (:mod:`foredraft.drafters.learning.buffer`), takes steps, tries the mean of their weights on
the newest pieces, and publishes it if the target would accept more. It computes while the server grants it time, and ends with it.

A draft model also rehearses: the draft as it was loaded writes texts from nothing, and the one that learns keeps to what that one says
there. So it forgets little of what it knew, with no text of that kind at hand.
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
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from foredraft import heads
from foredraft.drafters.learning.buffer import Buffer, Layout, Piece
from foredraft.drafters.learning.versions import TEXTS, Versions
from foredraft.heads.base import Batch, Head
from foredraft.losses import Compared, Few, Loss, compare
from foredraft.models.cache_names import cache_argument, cache_of

RATE, SMALL = 1e-3, 1_000_000  # learning rate of so many weights
BATCH = 2  # pieces of a step
OLD = 1 / 3  # of the pieces that steps are made of
REHEARSED, TOGETHER = 192, 64  # texts that the first weights write, and how many at once
LARGE = 10_000_000  # weights: of a draft with more, fewer at once
MEAN = 0.98  # of the mean of the weights stays in a step
LEARNT = 0.9  # of the way from the first weights to that mean are those that are published, of a draft model
STEPS = 20  # between trials
TIMES = 16  # that a piece is learnt from, at most
WARMUP, CLIP = 10, 1.0  # steps until the learning rate is whole; largest gradient
CERTAIN = 1.0  # standard errors by which new weights must be better
BACK = 4  # refusals in a row, after which learning begins again at the published weights, more slowly
SLOWEST = 0.1  # of the learning rate
PIECES = 4  # on the trial part before there is a trial
POLL = 0.01  # seconds between looks at what the server grants
NICE, AUTOGROUP = 19, Path("/proc/self/autogroup")


class OnlineLearner:
    """Learns in ``folder``; :meth:`turns` does the work.

    Args:
        loss: one of :mod:`foredraft.losses`.
        rate: learning rate; None for :data:`RATE`, and of more weights than :data:`SMALL` less, as one over the root of their number.

    Attributes:
        model: in float32, being trained.
        mean: of its weights in the last steps, which is what is published.
        rehearsed: texts that the first weights have written.
        version: that it goes back to.
    """

    def __init__(self, folder: Path, *, device: str = "cpu", loss: str = "lk", rate: float | None = None, keep: int = 3):
        self.versions, self.device = Versions(folder, keep=keep), torch.device(device)
        about = self.versions.about()["model"]
        self.buffer = Buffer(folder / TEXTS, Layout(about.get("width", 0)))
        self.loss = Loss.parse(loss)
        self.first = self.versions.load(0)
        self.version = self.buffer["published"]
        self.published = self._load(self.version)
        frozen = {name: value.to(self.device) for name, value in self.versions.frozen().items()}
        self.model = build(about, frozen).to(self.device).train()
        weights = sum(each.numel() for each in self.model.parameters())
        self.rate = RATE * min(1.0, (SMALL / weights) ** 0.5) if rate is None else rate
        self.beside = build(about, frozen).to(self.device).eval()  # has weights that are tried
        config: Any = self.model.config
        self.decay = config.decay if isinstance(self.model, Head) else 1.0  # of the loss, per token ahead
        self._chance = random.Random(self.buffer["steps"])
        self.rehearsed: list[Tensor] = []
        self._speed, self._refusals = 1.0, 0
        self._go_back()

    # -- what is to be done ---------------------------------------------------------------------------------------------

    def turns(self) -> Iterator[bool]:
        """Work without end; pauses after every piece. False where there is nothing to do for now."""
        while True:
            if not isinstance(self.model, Head):
                _copy(self.beside, self.first)
                if len(self.rehearsed) < REHEARSED:
                    yield from self._write()
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
        if self.version and self.buffer["unusable"] == self.version:
            self.version = self.buffer["accepted"]
            self.published = self._load(self.version)
            self._go_back()

    def _step(self) -> Iterator[bool]:
        """One step of the optimiser."""
        pieces = self.buffer.draw(BATCH, self._chance, OLD)
        total = sum(float(piece["count"]) for piece in pieces)
        for piece in pieces:
            found = [self.decay**k * each.loss.sum() for k, (_, each) in enumerate(self._compared(self.model, piece)) if len(each.loss)]
            if found:
                torch.autograd.backward(torch.stack(found).sum() / max(1.0, total))
            yield True
        if self.rehearsed:
            ids = self._chance.choice(self.rehearsed)[None]
            places = torch.tensor(sorted(self._chance.sample(range(ids.shape[1]), ids.shape[1] // 2)), device=self.device)
            with torch.no_grad():
                first = logits_at(self.beside, ids, places).softmax(-1)
            torch.autograd.backward(functional.cross_entropy(logits_at(self.model, ids, places), first))  # of KL, the gradient
            yield True
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self._taken += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * self._speed * min(1.0, self._taken / WARMUP)
        if bool(torch.isfinite(norm)):
            self.optimizer.step()
        self.optimizer.zero_grad()
        stays = min(MEAN, self._taken / (self._taken + 5))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.mean.values()), list(self.model.parameters()), 1 - stays)
        self.buffer["steps"] += 1

    def _write(self) -> Iterator[bool]:
        """Texts that the first weights, which ``beside`` has, write from nothing until they end, or as long as a piece."""
        assert not isinstance(self.model, Head)
        config, last = self.model.config.get_text_config(), vocabulary_of(self.model) - 1
        begin, ends = (getattr(config, name, None) for name in ("bos_token_id", "eos_token_id"))
        length = min(self.buffer.layout.length, getattr(config, "max_position_embeddings", None) or self.buffer.layout.length)
        count = max(4, min(TOGETHER, TOGETHER * LARGE // sum(each.numel() for each in self.first.values())))
        firsts = [self._chance.randrange(last + 1) if begin is None else min(begin, last) for _ in range(count)]
        ids, keys, dice = torch.tensor(firsts, device=self.device)[:, None], dict[str, Any](), torch.Generator(self.device)
        dice.manual_seed(self._chance.getrandbits(63))
        while ids.shape[1] < length:
            with torch.no_grad():
                said = self.beside(input_ids=ids[:, -1:], use_cache=True, **keys)
                keys = {cache_argument(type(self.model)): cache_of(said)}
                cut = torch.rand(count, 1, generator=dice, device=self.device)
                drawn = torch.searchsorted(said.logits[:, -1].float().softmax(-1).cumsum(-1), cut).clamp(max=last)
                ids = torch.cat([ids, drawn], 1)
            yield True
        final = torch.tensor(ends if isinstance(ends, list) else [-1 if ends is None else ends], device=self.device)
        for text in ids:
            ended = torch.isin(text[1:], final)
            text = text[: 1 + int(ended.nonzero()[0])] if bool(ended.any()) else text
            self.rehearsed += [text] if len(text) > 1 else []

    def _trial(self) -> Iterator[bool]:
        """Try the new weights on the newest pieces; publish them if more is accepted, or else go on, and back after a while."""
        pieces = self.buffer.trial()
        if len(pieces) < PIECES:
            return
        part = 1.0 if isinstance(self.model, Head) else LEARNT
        weights = {name: first.float().lerp(self.mean[name].cpu(), part).to(first.dtype) for name, first in self.first.items()}
        alphas: list[list[Tensor]] = [[], []]
        for found, tried in zip(alphas, (self.published, weights)):
            _copy(self.beside, tried)
            for piece in pieces:
                found.append(self._alphas(self.beside, piece))
                yield True
        share = torch.cat([torch.from_numpy(piece["weights"][: piece["count"]]) for piece in pieces])
        was, mean, error = gained(torch.cat(alphas[0], 1), torch.cat(alphas[1], 1), share)
        self.buffer["before"], self.buffer["after"] = was, was + mean
        if mean > CERTAIN * error:  # not of NaN
            if not isinstance(self.model, Head):
                yield from self._reading_again(pieces, weights, [each[0] for each in alphas[1]])
            self._publish(weights)
        else:
            self._refuse(finite=mean == mean)
        self.buffer["trials"] += 1

    def _reading_again(self, pieces: Sequence[Piece], weights: dict[str, Tensor], fresh: Sequence[Tensor]) -> Iterator[bool]:
        """What new ``weights`` lose where the keys of a text's beginning are those of the published ones; ``fresh``: α without them."""
        gains: list[Tensor] = []
        context = self.buffer.layout.context
        argument = cache_argument(type(self.model))
        keys: list[Any] = []
        _copy(self.beside, self.published)
        for piece in pieces:
            with torch.no_grad():
                keys.append(cache_of(self.beside(input_ids=self._tensors(piece)[0][:, :context], use_cache=True)))
            yield True
        _copy(self.beside, weights)
        for piece, alpha, former in zip(pieces, fresh, keys):
            behind = torch.from_numpy(piece["places"][: piece["count"]] >= context)
            if not bool(behind.any()):
                continue
            ids, places, few = self._tensors(piece)
            with torch.no_grad():
                found = self.beside(input_ids=ids[:, context:], **{argument: former}, use_cache=True).logits[0]
                mixed = compare(self.loss, found[places[behind] - context].float(), few[behind]).alpha.cpu()
            gains.append(alpha[behind] - mixed)
            yield True
        self.buffer["again"] = float(torch.cat(gains).mean()) if gains else 0.0

    def _publish(self, weights: dict[str, Tensor]) -> None:
        self.version = max(self.versions.numbers()[-1], self.buffer["published"], self.buffer["unusable"]) + 1
        self.versions.save(self.version, weights)
        self.buffer["published"] = self.version
        self.published, self._refusals = weights, 0

    def _refuse(self, *, finite: bool) -> None:
        self.buffer["refused"] += 1
        self._refusals += 1
        if self._refusals >= BACK or not finite:
            self._speed, self._refusals = max(SLOWEST, self._speed / 2), 0
            self._go_back()

    def _go_back(self) -> None:
        """Begin again at the published weights."""
        _copy(self.model, self.published)
        self.mean = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self._taken = 0

    def _load(self, version: int) -> dict[str, Tensor]:
        with suppress(ValueError):
            return self.versions.load(version)
        return self.first

    @torch.no_grad()
    def _alphas(self, model: nn.Module, piece: Piece) -> Tensor:
        """``[D, M]`` at the places of ``piece``, of what is drafted one token ahead, two, and so on; infinite where that is not known."""
        lines = []
        for rows, each in self._compared(model, piece):
            lines.append(torch.full((int(piece["count"]),), torch.inf))
            lines[-1][rows.cpu()] = each.alpha.float().cpu()
        return torch.stack(lines)

    def _compared(self, model: nn.Module, piece: Piece) -> Iterator[tuple[Tensor, Compared]]:
        """What ``model`` drafts one token ahead, two, and so on: at which of the places of ``piece``, and how it compares with the target
        there. A draft model's tokens are all drafted alike: they are one token ahead."""
        ids, places, few = self._tensors(piece)
        if not isinstance(model, Head):
            yield torch.arange(len(places)), compare(self.loss, logits_at(model, ids, places), few)
            return
        count, length = len(places), ids.shape[1]
        numbers = torch.full((length,), -1, device=self.device).index_copy(0, places, torch.arange(count, device=self.device))
        counted = torch.zeros_like(ids, dtype=torch.bool)
        counted[0, places[places < length - 1] + 1] = True
        for logits, ends in model.said(Batch(ids, torch.ones_like(counted), counted, self._hidden(model, piece, length), torch.empty(0))):
            rows = numbers[ends]
            yield rows, compare(self.loss, logits.float(), few[rows])

    def _hidden(self, head: Head, piece: Piece, length: int) -> Tensor:
        """``[1, L, F, d]``, zeros at the last token."""
        if not self.buffer.layout.width:
            return torch.empty(0)
        states = torch.from_numpy(piece["states"][:length]).view(torch.bfloat16)
        return states.to(self.device).float().view(1, length, len(head.features), -1)

    def _tensors(self, piece: Piece) -> tuple[Tensor, Tensor, Few]:
        """The text ``[1, L]``, the places ``[M]``, and the target's distributions there."""
        count = int(piece["count"])
        ids, places, tokens, logs = (
            torch.from_numpy(piece[name][:end].astype(kind)).to(self.device)
            for name, end, kind in (("tokens", piece["length"], "i8"), ("places", count, "i8"), ("ids", count, "i8"), ("logs", count, "f4"))
        )
        return ids.clamp(max=vocabulary_of(self.model) - 1)[None], places, Few(tokens, logs)


def gained(before: Tensor, after: Tensor, share: Tensor) -> tuple[float, float, float]:
    """What part of the tokens that are looked at the target accepts ``before``, how much more ``after``, and the standard error of that.

    A token further ahead is looked at where all in front of it were accepted: it counts as often as the former weights get there.

    Args:
        before, after: ``[D, M]`` α of the tokens so far ahead at M places; infinite where it is not known.
        share: ``[M]`` what each place counts.
    """
    known = before != torch.inf
    before, gain = torch.where(known, before, 0.0), torch.where(known, after - before, 0.0)
    means = before @ share / (known.float() @ share).clamp(min=1e-9)
    reached = torch.cat([torch.ones(1), means[:-1]]).cumprod(0)
    looked, was, more = (reached @ each for each in (known.float(), before, gain))
    whole = (share * looked).sum()
    mean = (share * more).sum() / whole
    error = (share * (more - mean * looked)).square().sum().sqrt() / whole
    return float((share * was).sum() / whole), float(mean), float(error)


def build(about: dict[str, Any], frozen: dict[str, Tensor]) -> PreTrainedModel | Head:
    """A model or a head like the draft, in float32, with any weights."""
    if "kind" in about:
        made: Any = heads.find(about["kind"])
        head: Head = made(made.config_class.from_dict(about["config"])).to_empty(device="cpu").float()
        head.attach_frozen(frozen)
        return head
    kind = resolve_name(about["class"])
    return kind(kind.config_class.from_dict(about["config"])).float()


def logits_at(model: nn.Module, ids: Tensor, places: Tensor) -> Tensor:
    """``[M, V]``, float32, of a draft model at the ``places`` ``[M]`` of a text ``[1, L]``."""
    takes = "logits_to_keep" in inspect.signature(model.forward).parameters
    found = model(input_ids=ids, use_cache=False, **({"logits_to_keep": places} if takes else {})).logits[0]
    return (found if takes else found[places]).float()


def vocabulary_of(model: PreTrainedModel | Head) -> int:
    if isinstance(model, Head):
        return model.config.target.vocab_size
    return model.get_output_embeddings().weight.shape[0]


@torch.no_grad()
def _copy(model: nn.Module, weights: dict[str, Tensor]) -> None:
    for name, value in model.named_parameters():
        value.copy_(weights[name])


# -- the process --------------------------------------------------------------------------------------------------------


def humble(cores: str) -> None:
    """Give way to everybody else on this machine, the first to go where memory is short."""
    with suppress(AttributeError, OSError):
        os.nice(NICE)
    if hasattr(os, "getsid") and os.getsid(0) == os.getpid():  # Linux may divide time among sessions first, and this process leads one
        with suppress(OSError):
            AUTOGROUP.write_text(str(NICE), encoding="ascii")
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
    for name, kind, default in (("device", str, "cpu"), ("loss", str, "lk"), ("rate", float, None), ("keep", int, 3), ("cores", str, "")):
        parser.add_argument(f"--{name}", type=kind, default=default)
    given = parser.parse_args(arguments)
    humble(given.cores)
    end_with(given.parent)
    work(OnlineLearner(given.folder, device=given.device, loss=given.loss, rate=given.rate, keep=given.keep))


def work(learner: OnlineLearner) -> None:
    """Compute while the server grants it."""
    buffer, turns = learner.buffer, learner.turns()
    while True:
        begin = time.monotonic()
        buffer["heartbeat"] = begin
        granted = begin < buffer["granted"]
        buffer["busy"] = granted  # before the turn, which may take longer than what was granted
        buffer["busy"] = granted and next(turns)
        if buffer["busy"]:
            buffer["seconds"] += time.monotonic() - begin
        else:
            time.sleep(POLL)


if __name__ == "__main__":
    main()

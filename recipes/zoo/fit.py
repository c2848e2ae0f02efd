"""Trains one small causal language model on a CPU: the loop behind `python -m recipes.zoo target` and `draft`.

What makes an hour on two cores count:

- bfloat16 matrix products under autocast, float32 master weights;
- compiled layers, one graph for all of them, and attention in query blocks small enough for the cache (`blocked_attention`): twice as
  fast as the library's flash kernel at these sizes;
- parallel over micro-batches, not inside operators: each worker thread takes the next micro-batch when it is free. Alone on the
  machine that is as fast as parallel operators, and on a shared machine nobody waits for the slower core;
- Muon for the matrices (Jordan et al. 2024) and AdamW for embeddings and norms;
- a warm-up, stable, decay schedule (Hägele et al. 2024): the stable phase has no horizon, so a run can be stopped and
  resumed with another budget, and only the cool-down needs to know where the end is. The cool-down also reads longer
  sequences, which is where the model learns to use its whole context.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from foredraft.training import layerskip
from recipes.zoo.recipe import CONTEXT, SEED, Batch, Rates

QUERY_BLOCK = 256
CHECKPOINT = "checkpoint.pt"
VALIDATED = 512, 64  # tokens of a held-out text, and how many texts


@dataclass(frozen=True)
class Schedule:
    """When to stop and how fast to learn, in tokens, so that it does not depend on the shape of a batch."""

    budget: int
    warmup: int = 500_000
    cooldown: float = 0.2  # share of the budget

    @property
    def cooldown_start(self) -> int:
        return int(self.budget * (1 - self.cooldown))

    def cooled(self, tokens: int) -> float:
        """How much of the cool-down is over, from 0 to 1."""
        return min(max(tokens - self.cooldown_start, 0) / (self.budget - self.cooldown_start), 1.0)

    def rate(self, tokens: int) -> float:
        """The learning rate after this many tokens, relative to its peak."""
        return min((tokens + 1) / self.warmup, 1.0 - self.cooled(tokens) ** 0.5)


@dataclass(frozen=True)
class Progress:
    """Where a run stands; `groups` counts [rows, CONTEXT] groups of the shuffled stream that were read."""

    tokens: int = 0
    groups: int = 0
    seconds: float = 0.0


def blocked_attention(
    module: object, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **_: object
) -> tuple[Tensor, None]:
    """Causal attention over queries [B, H, S, D], one block of queries at a time; never looks at keys that are masked anyway."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    outputs = []
    for start in range(0, query.shape[2], QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, query.shape[2])
        scores = query[:, :, start:end] @ key[:, :, :end].transpose(-1, -2)  # [B, H, block, end]
        visible = torch.ones(end - start, end, dtype=torch.bool).tril(start)
        weights = (scores.float() * scaling).masked_fill(~visible, -torch.inf).softmax(-1)
        outputs.append(weights.to(value.dtype) @ value[:, :, :end])
    return torch.cat(outputs, 2).transpose(1, 2), None


AttentionInterface.register("zoo_blocked", blocked_attention)


def build(config: LlamaConfig) -> LlamaForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = LlamaForCausalLM(config)
    depth = config.num_hidden_layers
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):  # residual branches start small (GPT-2)
            weight.data.div_((2 * depth) ** 0.5)
    model.set_attn_implementation("zoo_blocked")
    return model.train()


def load_weights(folder: Path) -> LlamaForCausalLM:
    """The model of a run's last checkpoint, in float32, with the library's own attention."""
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    model.load_state_dict(torch.load(Path(folder) / CHECKPOINT, weights_only=True)["model"])
    return model.eval()


def groups(tokens: np.ndarray, rows: int, first: int) -> Iterator[Tensor]:
    """Endless [rows, CONTEXT + 1] groups from a stream of tokens, reshuffled every epoch; `first` groups are skipped.

    Each group can be read as one step of length CONTEXT or as several shorter ones; either way a token is seen once per epoch
    and the rows of a batch come from unrelated places.
    """
    blocks = (len(tokens) - 1) // CONTEXT
    per_epoch = blocks // rows
    offsets = np.arange(CONTEXT + 1)
    epoch, start = divmod(first, per_epoch)
    while True:
        order = np.random.default_rng((SEED, epoch)).permutation(blocks)
        for index in range(start, per_epoch):
            chosen = order[index * rows : (index + 1) * rows]
            yield torch.from_numpy(tokens[chosen[:, None] * CONTEXT + offsets].astype(np.int64))
        epoch, start = epoch + 1, 0


def optimizers(model: PreTrainedModel, rates: Rates) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    made = [
        torch.optim.Muon(matrices, lr=rates.matrices, weight_decay=rates.weight_decay),
        torch.optim.AdamW(rest, lr=rates.rest, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
    for optimizer in made:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return made


def behind(model: LlamaForCausalLM, states: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """The cross-entropies of labels [B, S] behind states [k, B, S, d], summed with weights [k]."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.lm_head(model.model.norm(states))
    nats = F.cross_entropy(logits.float().flatten(0, 2), labels.repeat(len(weights), 1).flatten(), reduction="none")
    return (nats.view(len(weights), -1).mean(1) * weights).sum()


def early_cross_entropy(
    model: LlamaForCausalLM, ids: Tensor, kept: Tensor, exits: Sequence[int], weights: Tensor, *, behind: Callable[..., Tensor] = behind
) -> Tensor:
    """The loss of the LayerSkip recipe for ids [B, S + 1]: ``kept`` [L, B] is 0 where a row leaves a layer out, and ``weights`` [k] are
    what the cross-entropies behind the layers ``exits`` count."""
    decoder = model.model
    with torch.autocast("cpu", torch.bfloat16):
        hidden = decoder.embed_tokens(ids[:, :-1])
        places = torch.arange(hidden.shape[1])[None]
        rotation = decoder.rotary_emb(hidden, places)
        states = []
        for layer, keep in zip(decoder.layers, kept):
            after = layer(hidden, attention_mask=None, position_ids=places, position_embeddings=rotation)
            hidden = hidden + keep[:, None, None] * (after - hidden)
            states.append(hidden)
    return behind(model, torch.stack([states[each] for each in exits]), ids[:, 1:], weights)


def cross_entropy(model: LlamaForCausalLM, ids: Tensor, **options: Any) -> Tensor:  # [B, S + 1] -> mean nats per token
    layers = len(model.model.layers)
    return early_cross_entropy(model, ids, torch.ones(layers, len(ids)), [layers - 1], torch.ones(1), **options)


class Run:
    """A resumable training run whose whole state lives in one file of its folder."""

    def __init__(self, config: LlamaConfig, folder: Path, *, batch: Batch, rates: Rates, early: layerskip.Recipe | None = None):
        self.folder, self.batch, self.rates, self.early = Path(folder), batch, rates, early
        self.folder.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(self.folder)
        self.model = self._built(config)
        self.optimizers = self._optimizers()
        self.progress = Progress()
        self._compiled: set[tuple[torch.Size, ...]] = set()  # what the loss was compiled for
        self._stop = False

    # What another kind of model does otherwise.

    def _built(self, config: Any) -> Any:
        return build(config)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return optimizers(self.model, self.rates)

    def _loss(self) -> Callable[..., Tensor]:
        """The compiled loss of one part of a step."""
        for layer in self.model.model.layers:
            layer.compile(dynamic=False)  # one graph for all of them
        return partial(early_cross_entropy if self.early else cross_entropy, self.model, behind=torch.compile(behind, dynamic=False))

    def _groups(self, data: Any) -> Iterator[Any]:
        return groups(data, self.batch.rows, self.progress.groups)

    def _steps(self, group: Any, schedule: Schedule) -> Iterator[Any]:
        """The steps of a group: ids [rows, S + 1] each."""
        length = self.batch.length(schedule.cooled(self.progress.tokens))
        return (group[:, column : column + length + 1] for column in range(0, CONTEXT, length))

    def _parts(self, ids: Any, schedule: Schedule) -> tuple[list[tuple[Any, ...]], int]:
        """The loss's arguments for each part of a step, and the tokens of the step."""
        length = ids.shape[1] - 1
        rows = max(1, self.batch.micro_tokens // length)
        parts: list[tuple[Any, ...]] = [(part.contiguous(),) for part in torch.split(ids, rows)]
        if self.early:
            kept, exits, weights = self._early(len(ids), schedule)
            parts = [(part, keep, exits, weights) for (part,), keep in zip(parts, torch.split(kept, rows, 1))]
        return parts, ids.shape[0] * length

    @property
    def checkpoint(self) -> Path:
        return self.folder / CHECKPOINT

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": asdict(self.progress),
        }
        unfinished = self.checkpoint.with_suffix(".partial")
        torch.save(state, unfinished)
        unfinished.replace(self.checkpoint)

    def resume(self) -> None:
        state = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"])

    def train(
        self,
        data: Any,
        validation: Any,
        schedule: Schedule,
        *,
        report_every: float = 20.0,
        save_every: float = 150.0,
    ) -> None:
        """Trains until the schedule's budget is spent, or until SIGTERM or Ctrl-C; saves either way."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
        loss = self._loss()
        previous = [signal.signal(number, self._request_stop) for number in (signal.SIGTERM, signal.SIGINT)]
        start = reported = saved = time.monotonic()
        already, since = self.progress.seconds, self.progress.tokens
        recent: list[float] = []
        try:
            for group in self._groups(data):
                recent.extend(self._step(pool, loss, *self._parts(step, schedule), schedule) for step in self._steps(group, schedule))
                now = time.monotonic()
                self.progress = replace(self.progress, groups=self.progress.groups + 1, seconds=already + now - start)
                done = self._stop or self.progress.tokens >= schedule.budget
                if done or now - reported > report_every:
                    speed = (self.progress.tokens - since) / (now - reported)
                    self._report(recent, speed, schedule)
                    reported, since, recent = now, self.progress.tokens, []
                if done or now - saved > save_every:
                    self.save()
                    self._validate(validation)
                    saved = now
                if done:
                    return
        finally:
            pool.shutdown()
            torch.set_num_threads(threads)
            for number, handler in zip((signal.SIGTERM, signal.SIGINT), previous):
                signal.signal(number, handler)

    def _step(
        self, pool: ThreadPoolExecutor, loss: Callable[..., Tensor], parts: list[tuple[Any, ...]], tokens: int, schedule: Schedule
    ) -> float:
        """One optimizer step over the mean of the parts' losses; returns it."""
        parameters = list(self.model.parameters())

        def backward(part: tuple[Any, ...]) -> tuple[float, tuple[Tensor, ...]]:
            value = loss(*part)
            return value.item(), torch.autograd.grad(value, parameters)

        graph = tuple(each.shape for each in parts[-1] if isinstance(each, Tensor))
        first = [backward(parts.pop())] if graph not in self._compiled else []  # compilation is not for several threads
        self._compiled.add(graph)
        losses, gradients = zip(*first, *pool.map(backward, parts))
        for parameter, *shares in zip(parameters, *gradients):
            parameter.grad = torch.stack(shares).mean(0)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        rate = schedule.rate(self.progress.tokens)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * rate
            optimizer.step()
            optimizer.zero_grad()
        self.progress = replace(self.progress, tokens=self.progress.tokens + tokens)
        return float(np.mean(losses))

    def _early(self, rows: int, schedule: Schedule) -> tuple[Tensor, list[int], Tensor]:
        """What the LayerSkip recipe asks of this step: kept [L, rows], and the exits that learn with their weights."""
        assert self.early is not None
        layers, tokens = self.model.config.num_hidden_layers, self.batch.rows * self.batch.lengths[0]
        when = layers, self.progress.tokens // tokens, schedule.budget // tokens
        random = torch.rand(layers, rows, generator=torch.Generator().manual_seed(SEED + self.progress.tokens))
        kept = (random >= torch.tensor(self.early.dropped(*when))[:, None]).float()
        weights = torch.tensor(self.early.weights(*when))
        exits = weights.nonzero().flatten().tolist()
        return kept, exits, weights[exits]

    def _report(self, losses: list[float], speed: float, schedule: Schedule) -> None:
        left = (schedule.budget - self.progress.tokens) / max(speed, 1.0)
        print(
            f"{self.progress.tokens / 1e6:8.2f} M of {schedule.budget / 1e6:.1f} M tokens  "
            f"loss {np.mean(losses):.3f}  rate {schedule.rate(self.progress.tokens):.2f}  {speed:,.0f} tokens/s  "
            f"{left / 60:.0f} min left",
            flush=True,
        )

    @torch.no_grad()
    def _validate(self, validation: Any) -> None:
        length, rows = VALIDATED
        spread = np.linspace(0, len(validation) - length - 1, rows).astype(np.int64)
        ids = torch.from_numpy(validation[spread[:, None] + np.arange(length + 1)].astype(np.int64))
        values = [cross_entropy(self.model, part).item() for part in torch.split(ids, 8)]
        line = {**asdict(self.progress), "held_out_nats_per_token": float(np.mean(values))}
        with open(self.folder / "validation.jsonl", "a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")
        print(f"{'':8} held out: {line['held_out_nats_per_token']:.4f} nats per token", flush=True)

    def _request_stop(self, *_: object) -> None:
        self._stop = True

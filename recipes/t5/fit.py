"""Trains one small encoder-decoder model on a CPU: the loop of :mod:`recipes.zoo.fit` over pairs of unequal lengths.

Pairs of a pool are sorted by length and cut into micro-batches, so that little is padding; a step takes micro-batches of any lengths.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration

from recipes.t5.recipe import SEED, Recipe
from recipes.t5.tokenization import Encoded
from recipes.zoo import fit
from recipes.zoo.fit import CHECKPOINT, Schedule
from recipes.zoo.recipe import Batch

POOL = 8192  # pairs that are sorted by length together
VALIDATED = 200  # held-out pairs, while it trains
NEIGHBOUR = 5.0  # the bias of heads that begin by looking at one
EMBEDDING_SCALE = 0.5  # of the library's initial embeddings, whose logits are large for a tied head


def build(config: T5Config) -> T5ForConditionalGeneration:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = T5ForConditionalGeneration(config)
    model.shared.weight.data.mul_(EMBEDDING_SCALE)
    for stack in (model.encoder, model.decoder):  # a quarter of the heads begins by looking at each neighbour: copying needs such heads
        first = stack.block[0].layer[0].SelfAttention
        for place, offset in enumerate((-1,) if stack.is_decoder else (-1, 1)):
            bucket = first._relative_position_bucket(torch.tensor(offset), not stack.is_decoder).item()
            share = max(1, config.num_heads // 4)
            first.relative_attention_bias.weight.data[bucket, place * share : (place + 1) * share] = NEIGHBOUR
    for stack, branches in ((model.encoder, 2), (model.decoder, 3)):
        for name, weight in stack.named_parameters():
            if name.endswith((".o.weight", ".wo.weight")):  # residual branches start small (GPT-2)
                weight.data.div_((branches * len(stack.block)) ** 0.5)
    model.set_attn_implementation("eager")
    return model.train()


def load_weights(folder: Path) -> T5ForConditionalGeneration:
    """The model of a run's last checkpoint, in float32, with the library's own attention."""
    model = T5ForConditionalGeneration(T5Config.from_pretrained(folder))
    model.load_state_dict(torch.load(Path(folder) / CHECKPOINT, weights_only=True)["model"])
    return model.eval()


def logits(model: T5ForConditionalGeneration, source: Tensor, text: Tensor) -> Tensor:
    """[B, S], [B, T] padded with 0 -> [B, T, V]: behind the start token and each token of the text but its last."""
    least = torch.finfo(torch.float32).min
    seen = (torch.zeros(source.shape).masked_fill(source == model.config.pad_token_id, least))[:, None, None]  # [B, 1, 1, S]
    later = torch.full((text.shape[1], text.shape[1]), least).triu(1)
    with torch.autocast("cpu", torch.bfloat16):
        encoder, decoder = model.encoder, model.decoder
        hidden = model.shared(source)
        bias = encoder.block[0].layer[0].SelfAttention.compute_bias(source.shape[1], source.shape[1]) + seen
        for block in encoder.block:
            hidden = block(hidden, position_bias=bias)[0]
        states = encoder.final_layer_norm(hidden)
        hidden = model.shared(F.pad(text[:, :-1], (1, 0), value=model.config.decoder_start_token_id))
        bias = decoder.block[0].layer[0].SelfAttention.compute_bias(text.shape[1], text.shape[1]) + later
        for block in decoder.block:
            hidden = block(hidden, position_bias=bias, encoder_hidden_states=states, encoder_decoder_position_bias=seen)[0]
        return model.lm_head(decoder.final_layer_norm(hidden) * model.config.d_model**-0.5)


def cross_entropy(model: T5ForConditionalGeneration, source: Tensor, text: Tensor, tokens: float) -> Tensor:
    """The nats of texts [B, T], over `tokens`: a step's texts may be of unequal lengths."""
    pad = model.config.pad_token_id
    return F.cross_entropy(logits(model, source, text).float().flatten(0, 1), text.flatten(), reduction="sum", ignore_index=pad) / tokens


def by_length(data: Encoded, indices: np.ndarray, micro: int) -> list[list[int]]:
    """Micro-batches of pairs of about equal lengths, of at most `micro` tokens with their padding."""
    lengths = data.lengths[indices]
    batches: list[list[int]] = [[]]
    longest = np.zeros(2, dtype=np.int64)
    for place in np.lexsort((lengths[:, 0], lengths[:, 1] // 8)):
        longest = np.maximum(longest, lengths[place])
        if batches[-1] and (len(batches[-1]) + 1) * longest.sum() > micro:
            batches.append([])
            longest = lengths[place]
        batches[-1].append(int(indices[place]))
    return batches


def groups(data: Encoded, step: int, micro: int, first: int) -> Iterator[list[list[int]]]:
    """Endless steps of micro-batches of pairs, of `step` tokens or a little more, reshuffled every epoch; `first` of them are skipped."""
    lengths, count, epoch = data.lengths, 0, 0
    while True:
        random = np.random.default_rng((SEED, epoch))
        order = random.permutation(len(data))
        for start in range(0, len(order), POOL):
            batches = by_length(data, order[start : start + POOL], micro)
            found: list[list[int]] = []
            for which in random.permutation(len(batches)):
                found.append(batches[which])
                if lengths[np.concatenate(found)].sum() >= step:
                    count += 1
                    if count > first:
                        yield found
                    found = []
        epoch += 1


def padded(data: Encoded, indices: list[int]) -> tuple[Tensor, Tensor]:
    """Sources [B, S] and texts [B, T], padded on the right to multiples of eight."""
    pairs = [data.pair(index) for index in indices]

    def block(rows: list[np.ndarray]) -> Tensor:
        ids = np.zeros((len(rows), -(-max(map(len, rows)) // 8) * 8), dtype=np.int64)
        for line, row in zip(ids, rows):
            line[: len(row)] = row
        return torch.from_numpy(ids)

    return block([source for source, _ in pairs]), block([text for _, text in pairs])


class Run(fit.Run):
    """A resumable training run of an encoder-decoder model."""

    def __init__(self, recipe: Recipe, folder: Path):
        self.recipe = recipe
        super().__init__(recipe.config(), folder, batch=Batch(), rates=recipe.rates)

    def _built(self, config: T5Config) -> T5ForConditionalGeneration:
        return build(config)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """T5 does not divide scores by the root of a head's size: its queries are that much smaller, and learn that much slower."""
        rates, scale = self.rates, self.model.config.d_kv**-0.5
        named = list(self.model.named_parameters())
        matrices = [p for name, p in named if p.ndim == 2 and not name.endswith((".q.weight", "_bias.weight", "shared.weight"))]
        queries = [p for name, p in named if name.endswith(".q.weight")]
        biases = [p for name, p in named if name.endswith("_bias.weight")]
        norms = [p for _, p in named if p.ndim == 1]
        muon = [
            {"params": matrices, "lr": rates.matrices, "weight_decay": rates.weight_decay},
            {"params": queries, "lr": rates.matrices * scale, "weight_decay": rates.weight_decay / scale},
        ]
        adam = [
            {"params": [self.model.shared.weight], "lr": rates.rest},
            {"params": biases, "lr": rates.rest * 5},
            {"params": norms, "lr": rates.rest / 3},
        ]
        made = [torch.optim.Muon(muon), torch.optim.AdamW(adam, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]
        for optimizer in made:
            for group in optimizer.param_groups:
                group["peak"] = group["lr"]
        return made

    def _loss(self) -> Callable[..., Tensor]:
        return partial(cross_entropy, self.model)  # compiled layers were not faster: lengths differ from step to step

    def _groups(self, data: Encoded) -> Iterator[list[tuple[Tensor, Tensor]]]:
        for batches in groups(data, self.recipe.step_tokens, self.recipe.micro_tokens, self.progress.groups):
            yield [padded(data, batch) for batch in batches]

    def _steps(self, group: Any, schedule: Schedule) -> Iterator[Any]:
        return iter([group])

    def _parts(self, step: list[tuple[Tensor, Tensor]], schedule: Schedule) -> tuple[list[tuple[Any, ...]], int]:
        predicted = sum(int((text != 0).sum()) for _, text in step)
        tokens = predicted + sum(int((source != 0).sum()) for source, _ in step)
        return [(source, text, predicted / len(step)) for source, text in step], tokens

    @torch.no_grad()
    def _validate(self, validation: Encoded) -> None:
        nats = tokens = 0.0
        for batch in by_length(validation, np.arange(min(VALIDATED, len(validation))), self.recipe.micro_tokens):
            source, text = padded(validation, batch)
            nats += cross_entropy(self.model, source, text, 1.0).item()
            tokens += int((text != 0).sum())
        line = {**asdict(self.progress), "held_out_nats_per_token": nats / tokens}
        with open(self.folder / "validation.jsonl", "a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")
        print(f"{'':8} held out: {line['held_out_nats_per_token']:.4f} nats per token", flush=True)

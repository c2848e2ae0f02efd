"""Bits per byte on the held-out packages, for models and for the n-gram baseline.

Bits per byte do not depend on the tokenizer: all the bits a model needs for all tokens of a text, over the bytes of that text.
Model and baseline score the same tokens of the same documents; the end-of-text token before each document is given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from transformers import LlamaForCausalLM, PreTrainedModel

from foredraft.drafters.ngram_model import NGramModel
from recipes.zoo.tokenization import Encoded

WINDOW = 1024  # tokens a model sees at once
ROUNDING_SAMPLE = 8  # float32 and bfloat16 weights are compared on every eighth document: float32 is six times slower
OVERLAP = 128  # of which the first so many were scored in the window before, and only give context
BASELINE = (
    "interpolated Witten-Bell token n-gram of order {order}, unpruned, counted on the same training tokens, "
    "scored on the same held-out tokens"
)


@dataclass(frozen=True)
class Score:
    bits_per_byte: float
    nats_per_token: float
    accuracy: float  # how often the most likely token is the true one


def score_model(model: PreTrainedModel, held_out: Encoded, *, rows: int = 8) -> Score:
    nats = hits = count = 0.0
    with torch.inference_mode():
        for batch, first in _batches(held_out, rows):
            ids = torch.from_numpy(batch)
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()[:, first:]
            labels = ids[:, first + 1 :]
            nats += F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").item()
            hits += (logits.argmax(-1) == labels).sum().item()
            count += labels.numel()
    return Score(_bits_per_byte(nats, held_out), nats / count, hits / count)


def score_exits(model: LlamaForCausalLM, held_out: Encoded, *, rows: int = 8) -> list[float]:
    """How often the most likely token behind each layer is that of the last one."""
    hits, count = torch.zeros(model.config.num_hidden_layers), 0
    with torch.inference_mode():
        for batch, first in _batches(held_out, rows):
            read = model.model(input_ids=torch.from_numpy(batch)[:, :-1], use_cache=False, output_hidden_states=True)
            states = [*(model.model.norm(each) for each in read.hidden_states[1:-1]), read.hidden_states[-1]]
            likeliest = [model.lm_head(each[:, first:]).argmax(-1) for each in states]
            hits += torch.stack([(each == likeliest[-1]).sum() for each in likeliest])
            count += likeliest[-1].numel()
    return (hits / count).tolist()


def score_ngram(model: NGramModel, held_out: Encoded) -> Score:
    nats = hits = count = 0.0
    for document in held_out.documents():
        ids = document.astype(np.int64)
        for end in range(1, len(ids)):
            context = ids[max(0, end - model.order + 1) : end]
            nats -= math.log(model.distribution(context)[ids[end]])
            hits += model.predict(context) == ids[end]
        count += len(ids) - 1
    return Score(_bits_per_byte(nats, held_out), nats / count, hits / count)


def _bits_per_byte(nats: float, held_out: Encoded) -> float:
    return nats / math.log(2) / float(held_out.sizes.sum())


def _batches(held_out: Encoded, rows: int) -> Iterator[tuple[NDArray[np.int64], int]]:
    """([rows, S + 1] ids, index of the first prediction that counts): every token but the separators counts exactly once."""
    groups: dict[tuple[int, int], list[NDArray[np.int64]]] = {}
    for document in held_out.documents():
        for start in range(0, max(len(document) - 1 - OVERLAP, 1), WINDOW - OVERLAP):
            window = document[start : start + WINDOW + 1].astype(np.int64)
            groups.setdefault((len(window), OVERLAP if start else 0), []).append(window)
    for (_, first), windows in sorted(groups.items(), key=lambda item: item[0]):
        for start in range(0, len(windows), rows):
            yield np.stack(windows[start : start + rows]), first

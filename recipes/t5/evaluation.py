"""Exact match and nats per token on pairs of held-out packages, for models and for two baselines.

- **copy**: the next token is one that stands in the source behind the token just written, wherever that stands there; one in so many is
  any token, as often as texts have it. As a text it is the source's statement.
- **n-gram**: what texts of the training half have behind the last tokens; it knows no source.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import T5ForConditionalGeneration

from foredraft.drafters.ngram_model import NGramModel
from recipes.t5.fit import by_length, padded
from recipes.t5.recipe import NGRAM_ORDER, VOCABULARY
from recipes.t5.tokenization import Encoded

JUDGED = 500  # pairs of each kind
SHARES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7)  # of any token, in the copy baseline; the best on training pairs is taken


@dataclass(frozen=True)
class Score:
    pairs: int
    exact_match: float  # of greedy texts
    nats_per_token: float
    accuracy: float  # how often the most likely token is the true one


def sample(kinds: Sequence[str], count: int = JUDGED) -> dict[str, list[int]]:
    """The first pairs of each kind; pairs are in a random order."""
    found: dict[str, list[int]] = {}
    for index, kind in enumerate(kinds):
        if len(found.setdefault(kind, [])) < count:
            found[kind].append(index)
    return found


@torch.inference_mode()
def score_model(model: T5ForConditionalGeneration, data: Encoded, indices: Sequence[int], *, tokens: int = 4096) -> Score:
    nats = hits = count = exact = 0.0
    for batch in by_length(data, np.asarray(indices), tokens):
        source, text = padded(data, batch)
        mask, true = source != 0, text != 0
        start = torch.zeros_like(text[:, :1])
        logits = model(input_ids=source, attention_mask=mask, decoder_input_ids=torch.cat([start, text[:, :-1]], 1)).logits.float()
        nats -= logits.log_softmax(-1).gather(-1, text[..., None])[..., 0][true].sum().item()
        hits += (logits.argmax(-1) == text)[true].sum().item()
        count += int(true.sum())
        longest = text.shape[1]  # a longer text is not the true one
        written = model.generate(input_ids=source, attention_mask=mask, max_new_tokens=longest, do_sample=False)[:, 1:]
        width = max(written.shape[1], text.shape[1])
        same = [torch.nn.functional.pad(each, (0, width - each.shape[1])) for each in (written, text)]
        exact += (same[0] == same[1]).all(1).sum().item()
    return Score(len(indices), exact / len(indices), nats / count, hits / count)


def ngram_model(data: Encoded) -> NGramModel:
    return NGramModel.from_tokens((_begun(data.pair(index)[1]) for index in range(len(data))), NGRAM_ORDER, vocab_size=VOCABULARY)


def score_ngram(model: NGramModel, data: Encoded, indices: Sequence[int], longest: int) -> Score:
    only = [0]  # what it writes, whatever the source
    while len(only) <= longest and (len(only) == 1 or only[-1] != 1):
        only.append(model.predict(np.array(only[-NGRAM_ORDER + 1 :])) or 0)
    nats = hits = count = exact = 0.0
    for index in indices:
        text = _begun(data.pair(index)[1])
        for end in range(1, len(text)):
            context = text[max(0, end - NGRAM_ORDER + 1) : end]
            nats -= math.log(model.distribution(context)[text[end]])
            hits += model.predict(context) == text[end]
        count += len(text) - 1
        exact += text.tolist() == only
    return Score(len(indices), exact / len(indices), nats / count, hits / count)


def score_copy(train: Encoded, data: Encoded, indices: Sequence[int]) -> Score:
    texts = np.concatenate([train.pair(index)[1] for index in range(min(len(train), 50_000))])
    anything = (np.bincount(texts, minlength=VOCABULARY) + 1) / (len(texts) + VOCABULARY)
    learnt = _copied(train, range(0, len(train), max(1, len(train) // JUDGED)))
    share = min(SHARES, key=lambda share: _nats(learnt, anything, share))
    found = _copied(data, indices)
    hits = float(np.mean([most == token for _, token, most in found]))
    exact = 0
    for index in indices:  # a source ends with its statement
        source, text = data.pair(index)
        exact += np.array_equal(source[-len(text) :], text)
    return Score(len(indices), exact / len(indices), _nats(found, anything, share), hits)


def _copied(data: Encoded, indices: Sequence[int]) -> list[tuple[float, int, int]]:
    """Of every token of the texts: the probability that copying gives it, the token, and the one that copying has most often."""
    found = []
    for index in indices:
        source, text = data.pair(index)
        for last, token in zip(_begun(text), text):
            behind = source[1:][source[:-1] == last]
            behind = behind if len(behind) else source
            found.append((float(np.mean(behind == token)), int(token), int(np.bincount(behind).argmax())))
    return found


def _nats(found: Sequence[tuple[float, int, int]], anything: np.ndarray, share: float) -> float:
    return -float(np.mean([math.log((1 - share) * copied + share * anything[token]) for copied, token, _ in found]))


def _begun(text: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], text])

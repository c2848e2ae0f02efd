"""The tokenizer of the encoder-decoder models, and their pairs as token ids.

A byte-level BPE, learnt from the training half only. A name is the same tokens wherever it stands: spaces are never part of it. So
whatever a text takes from its source is copied token by token. The opening of a node, ``(Call``, is one token with its spaces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from recipes.t5.pairs import Pair
from recipes.t5.recipe import END, PAD, VOCABULARY, Task

PIECES = r""" ?\([A-Z][A-Za-z]* |\n *|[A-Za-z_][A-Za-z_0-9]*|[0-9]{1,3}|["']| ?[^\s\w"']+ ?| +|\s|."""


def train(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PIECES), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, tokenizer.token_to_id(END))])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False)


@dataclass(frozen=True)
class Encoded:
    """Pairs as one stream: source, text, source, text; each with its end."""

    tokens: NDArray[np.uint16]
    starts: NDArray[np.int64]  # [2 * pairs + 1]

    def __len__(self) -> int:
        return len(self.starts) // 2

    @property
    def lengths(self) -> NDArray[np.int64]:  # [pairs, 2]: of source and text
        return np.diff(self.starts).reshape(-1, 2)

    def pair(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        first, middle, last = self.starts[2 * index : 2 * index + 3]
        return self.tokens[first:middle].astype(np.int64), self.tokens[middle:last].astype(np.int64)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, tokens=self.tokens, starts=self.starts)

    @classmethod
    def load(cls, path: Path) -> Encoded:
        with np.load(path) as arrays:
            return cls(arrays["tokens"], arrays["starts"])


def encode(tokenizer: PreTrainedTokenizerFast, pairs: Sequence[Pair], limits: Task) -> tuple[Encoded, list[Pair]]:
    """The pairs that are short enough."""
    ids, kept = [], []
    for start in range(0, len(pairs), 1024):
        part = pairs[start : start + 1024]
        sources = tokenizer.backend_tokenizer.encode_batch([pair.source for pair in part])
        texts = tokenizer.backend_tokenizer.encode_batch([pair.text for pair in part])
        for pair, source, text in zip(part, sources, texts):
            if len(source.ids) <= limits.source and len(text.ids) <= limits.text:
                ids += [source.ids, text.ids]
                kept.append(pair)
    flat = np.fromiter((token for each in ids for token in each), dtype=np.uint16)
    return Encoded(flat, np.cumsum([0, *map(len, ids)])), kept

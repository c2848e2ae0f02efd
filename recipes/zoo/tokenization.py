"""The zoo's tokenizer, and the corpus as token ids.

A byte-level BPE with GPT-2's pre-tokenizer, learnt from the training half only. Any text can be encoded and comes back
unchanged; other engines know the format.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from recipes.zoo.corpus import SourceFile
from recipes.zoo.recipe import CONTEXT, END_OF_TEXT, FOREIGN_VOCABULARY, PAD, VOCABULARY


def train(files: Sequence[SourceFile]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, PAD],  # ids 0 and 1, as recipe.llama_config says
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((file.text for file in files), trainer)
    return _wrapped(tokenizer)


def train_foreign(files: Sequence[SourceFile], size: int = FOREIGN_VOCABULARY) -> PreTrainedTokenizerFast:
    """A Unigram in the manner of SentencePiece: spaces are written as ▁, digits stand alone, a piece may hold punctuation and letters, and
    what no piece covers is written in bytes. The library asks for an unknown token all the same."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"▁?[^▁\n0-9]+|▁+|[0-9]|\n+"), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special, spelt = [END_OF_TEXT, PAD], [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.UnigramTrainer(vocab_size=size - len(spelt), special_tokens=special, show_progress=False, max_piece_length=12)
    tokenizer.train_from_iterator((file.text for file in files), trainer)
    pieces = [(piece, score) for piece, score in json.loads(tokenizer.to_str())["model"]["vocab"] if piece not in special]
    least = min(score for _, score in pieces) - 10.0
    tokenizer.model = models.Unigram(
        [*((each, 0.0) for each in special), *((each, least) for each in spelt), *pieces], special.index(PAD), True
    )
    return _wrapped(tokenizer)


def _wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


@dataclass(frozen=True)
class Encoded:
    """Documents as one stream; each begins with the end-of-text token, which separates it from the one before."""

    tokens: NDArray[np.uint16]
    starts: NDArray[np.int64]  # [documents + 1]
    sizes: NDArray[np.int64]  # [documents]: bytes of text

    def documents(self) -> Iterator[NDArray[np.uint16]]:
        for start, end in zip(self.starts[:-1], self.starts[1:]):
            yield self.tokens[start:end]

    def sample(self, every: int) -> Encoded:
        """Every so-many-th document."""
        chosen = [document for index, document in enumerate(self.documents()) if index % every == 0]
        return Encoded(np.concatenate(chosen), np.cumsum([0, *map(len, chosen)]), self.sizes[::every])

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, tokens=self.tokens, starts=self.starts, sizes=self.sizes)

    @classmethod
    def load(cls, path: Path) -> Encoded:
        with np.load(path) as arrays:
            return cls(arrays["tokens"], arrays["starts"], arrays["sizes"])


def encode(tokenizer: PreTrainedTokenizerFast, files: Sequence[SourceFile]) -> Encoded:
    separator = tokenizer.eos_token_id
    documents = []
    for start in range(0, len(files), 64):
        for encoding in tokenizer.backend_tokenizer.encode_batch([file.text for file in files[start : start + 64]]):
            documents.append(np.array([separator, *encoding.ids], dtype=np.uint16))
    starts = np.cumsum([0, *map(len, documents)])
    return Encoded(np.concatenate(documents), starts, np.array([file.size for file in files]))

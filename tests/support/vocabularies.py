"""Small tokenizers of the usual kinds, and tiny models for them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXTS = [
    "def area(width, height):\n    return width * height\n\nclass Shape:\n    def __init__(self, name):\n        self.name = name\n",
    "The quick brown fox jumps over the lazy dog. Numbers: 12, 345 and 6789; words such as caf\u00e9, na\u00efve, \u00fcber.",
    "for index in range(10):\n    print(index, 'hello world', \"and more\")\nimport os, sys  # the end",
] * 3


@cache
def tokenizer(kind: str) -> Any:
    """``byte-level`` BPE, ``unigram`` as SentencePiece has it, with bytes to fall back on, or ``wordpiece``, which lowers case."""
    if kind == "byte-level":
        made, trainer = Tokenizer(models.BPE()), trainers.BpeTrainer
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        options = {"special_tokens": ["<|endoftext|>", "<|im_end|>"], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
        names = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    elif kind == "unigram":
        made, trainer = Tokenizer(models.Unigram()), trainers.UnigramTrainer
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
        spelt = [f"<0x{byte:02X}>" for byte in range(256)]
        options = {"special_tokens": ["<unk>", "<s>", "</s>", "<|im_end|>"], "unk_token": "<unk>"}
        names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    else:
        made, trainer = Tokenizer(models.WordPiece(unk_token="[UNK]")), trainers.WordPieceTrainer
        made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
        made.decoder = decoders.WordPiece()
        options = {"special_tokens": ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]}
        names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    made.train_from_iterator(TEXTS, trainer(vocab_size=400, show_progress=False, **options))
    if kind == "unigram":
        pieces = sorted(set(made.get_vocab()) - set(options["special_tokens"]))  # the trainer's own order changes from run to run
        scores = [(piece, -8.0) for piece in pieces]
        made.model = models.Unigram(
            [*((each, 0.0) for each in options["special_tokens"]), *((each, -20.0) for each in spelt), *scores], 0, True
        )
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False, **names)


KINDS = ("byte-level", "unigram", "wordpiece")


@cache
def model(kind: str, seed: int = 0, spread: float = 0.35) -> Any:
    """A tiny random model for the tokenizer of this kind."""
    own = tokenizer(kind)
    config = LlamaConfig(
        vocab_size=len(own), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, bos_token_id=None, eos_token_id=own.eos_token_id, pad_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    made = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in made.parameters():
            if weight.ndim > 1:
                weight.normal_(0, spread, generator=generator)
    return made.eval()


@cache
def letters(which: str) -> Any:
    """Two tokenizers for laws by enumeration: the ``target`` knows a, b and ab; the ``draft`` b, a, the same a written as a byte, and c."""
    if which == "target":
        made = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
        made.decoder = decoders.ByteLevel()
    else:
        made = Tokenizer(models.Unigram([("b", -1.0), ("a", -1.0), ("<0x61>", -9.0), ("c", -1.0)], None, True))
        made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=made)

"""The grammars suite: what a grammar costs at each node of a draft tree, beside the same library in plain decoding.

No model runs. A JSON text is read token by token. *Plain* is what the library's users write: accept the token, fill the mask, apply it;
for xgrammar that is its own processor for transformers. Foredraft is timed from the scores to the masked scores of a whole tree, reading
the tree's tokens included, once per round; the tokens of the text are accepted, and other nodes hold tokens that the grammar allows.
"""

from __future__ import annotations

import json
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import suite
from benchmarks.report import Table
from benchmarks.suite import Suite, option
from foredraft.estimates import Spread, turned
from foredraft.grammars import MODULES, Compiled, Grammar, xgrammar_vocabulary
from foredraft.loading import load_tokenizer
from foredraft.logits.grammar_masks import Walk, forbid, mask_nodes
from foredraft.logits.histories import NodeHistories
from foredraft.shapes import StaticShape, TreeShape
from foredraft.tree import TokenTree

PLAIN, SHAPES = "plain", ("chain(0)", "chain(5)", "product(4,2,1)")
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}}},
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
}
PEOPLE = [("Ada", 36, ["analysis", "poetry"]), ("Alan", 41, []), ("Grace", 85, ["compilers"]), ("Edsger", 72, ["structure", "tea"])]
TEXT = json.dumps([dict(zip(("name", "age", "tags"), person)) for person in PEOPLE * 2])


@dataclass(frozen=True)
class Settings(suite.Settings):
    threads: int = option(1, "Threads.", least=1)
    vocab_size: int = option(50_000, "Of the second vocabulary, a BPE of Python's own library; 0 leaves it out.", least=0)
    repeats: int = option(5, "Measured repeats, after the warm-up.", least=1)


@dataclass(frozen=True)
class Measurement:
    """One pass through the text: ``seconds`` per node."""

    library: str
    vocab_size: int
    way: str
    repeat: int
    nodes: int
    seconds: float


class Grammars(Suite[Settings]):
    """What a grammar costs at each node of a draft tree, beside the library's own use in plain decoding."""

    name = "grammars"
    title = "Grammars: masks at the nodes of a tree"
    settings_type = Settings
    measurements: list[Measurement]
    versions: dict[str, str]

    @property
    def libraries(self) -> list[str]:
        return [name for name, module in MODULES.items() if find_spec(module)]

    @property
    def steps(self) -> int:
        return (self.settings.repeats + 1) * len(self.libraries) * (2 if self.settings.vocab_size else 1)

    @torch.inference_mode()
    def run(self) -> None:
        from importlib.metadata import version

        torch.set_num_threads(self.settings.threads)
        self.versions = {name: version(MODULES[name].replace("_", "-")) for name in self.libraries}
        tokenizers = [load_tokenizer("zoo:python-8m"), *([trained(self.settings.vocab_size)] if self.settings.vocab_size else [])]
        for tokenizer in tokenizers:
            text = tokenizer(TEXT)["input_ids"]
            for repeat in range(self.settings.repeats + 1):
                for library in turned(self.libraries, repeat):
                    own = Grammar(tokenizer, json_schema=SCHEMA, backend=library)
                    ways = {PLAIN: plain(own, tokenizer, text), **{shape: rounds(own, shape, text) for shape in SHAPES}}
                    for way, calls in ways.items():
                        taken = list(calls)
                        if repeat:  # the first is the warm-up
                            nodes, seconds = sum(count for count, _ in taken), sum(each for _, each in taken)
                            self.measurements.append(Measurement(library, len(tokenizer), way, repeat - 1, nodes, seconds / nodes))
                    self.advance()

    def tables(self) -> list[Table]:
        def cell(library: str, size: int, way: str) -> str:
            taken = [each.seconds for each in self.measurements if (each.library, each.vocab_size, each.way) == (library, size, way)]
            return Spread.of(taken).text(0, 1e6)

        groups = dict.fromkeys((each.library, each.vocab_size) for each in self.measurements)
        columns = ("library", "vocabulary", "plain decoding", "one node", *SHAPES[1:])
        rows = [
            (f"{name} {self.versions[name]}", f"{size:,}", *(cell(name, size, way) for way in (PLAIN, *SHAPES))) for name, size in groups
        ]
        return [Table("Microseconds per node", columns, rows)]

    def notes(self, environment: Mapping[str, Any]) -> list[str]:
        return [
            f"A JSON schema, a text of {len(TEXT)} characters, float32 scores, {self.settings.repeats} interleaved repeats after a "
            "warm-up. Figures are medians of the means over the text, with the smallest and largest in brackets. Plain decoding is the "
            "library alone, a token at a time; the other columns are Foredraft, per node of the tree.",
        ]


def plain(own: Grammar, tokenizer: Any, text: list[int]) -> Iterator[tuple[int, float]]:
    """Nodes and seconds of each token: accept the one before, fill, apply."""
    compiled, scores = own.compiled, torch.randn(1, len(tokenizer))
    step = processor(compiled, tokenizer) if own.backend == "xgrammar" else stepper(compiled)
    for length in range(len(text)):
        ids, given = torch.tensor([text[:length] or [0]]), scores.clone()
        begin = time.perf_counter()
        step(ids, given)
        yield 1, time.perf_counter() - begin


def processor(compiled: Compiled, tokenizer: Any) -> Callable[[Tensor, Tensor], Any]:
    """xgrammar's own, for one call of ``generate``."""
    import xgrammar
    from xgrammar.contrib.hf import LogitsProcessor

    compiler = xgrammar.GrammarCompiler(xgrammar_vocabulary(tokenizer, compiled.width, compiled.ends), max_threads=1)
    return LogitsProcessor(compiler.compile_json_schema(json.dumps(SCHEMA), any_whitespace=False))


def stepper(compiled: Compiled) -> Callable[[Tensor, Tensor], Any]:
    """The library's own interface, for libraries without a processor."""
    matcher, first = compiled.start(), True

    def step(ids: Tensor, scores: Tensor) -> None:
        nonlocal first
        if not first:
            assert compiled.accept(matcher, int(ids[0, -1]))
        first = False
        mask = np.zeros((1, compiled.words), np.int32)
        compiled.fill([matcher], mask)
        forbid(scores, [0], mask, compiled.width)

    return step


def rounds(own: Grammar, shape: str, text: list[int]) -> Iterator[tuple[int, float]]:
    """Nodes and seconds of each round, in which the first path of the tree is accepted."""
    chosen = TreeShape.parse(shape)
    assert isinstance(chosen, StaticShape)
    compiled, parents = own.compiled, chosen.parents
    walk, matcher = Walk.begin(own, 1), compiled.start()
    committed, start = torch.tensor([[0, *text]]), 0
    while start + chosen.depth < len(text):
        tree, accepted = planted(compiled, matcher, text[start : start + chosen.depth], parents, int(committed[0, start]))
        flat = torch.randn(len(parents), compiled.width)
        begin = time.perf_counter()
        histories = NodeHistories(committed, [start + 1], tree)
        mask_nodes([(walk, range(len(parents)))], histories, flat)
        yield len(parents), time.perf_counter() - begin
        start += accepted + 1
        for token in text[start - 1 - accepted : start]:
            assert compiled.accept(matcher, token)


def planted(compiled: Compiled, matcher: Any, true: list[int], parents: tuple[int, ...], root: int) -> tuple[TokenTree, int]:
    """A tree whose first path is ``true``; other nodes have the least tokens that the grammar allows there."""
    tokens, paths, used = [root], [tuple[int, ...]()], {0: set[int]()}
    for node, parent in enumerate(parents[1:], 1):
        path = paths[parent]
        on_path = path == tuple(true[: len(path)]) and true[len(path)] not in used[parent]
        token = true[len(path)] if on_path else other(compiled, matcher, path, used[parent])
        used[parent].add(token)
        used[node] = set()
        tokens.append(token)
        paths.append((*path, token))
    return TokenTree.from_parents(torch.tensor([tokens]), parents), len(true)


def other(compiled: Compiled, matcher: Any, path: tuple[int, ...], used: set[int]) -> int:
    taken = 0
    for token in path:
        taken += compiled.accept(matcher, token)
    mask = np.zeros((1, compiled.words), np.int32)
    if taken == len(path):
        compiled.fill([matcher], mask)
    compiled.rollback(matcher, taken)
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return next((token for token in allowed if token not in used and token not in compiled.ends), next(iter(used), 5))


@cache
def trained(size: int) -> Any:
    """A byte-level BPE of ``size`` tokens, of Python's own library."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    files = sorted(path for path in Path(sysconfig.get_paths()["stdlib"]).rglob("*.py") if "site-packages" not in path.parts)
    texts = (path.read_text(encoding="utf-8", errors="ignore") for path in files)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")

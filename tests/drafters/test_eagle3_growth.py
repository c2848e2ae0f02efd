"""Drafts of an EAGLE-3 head in one call of a kernel against the same drafts made level by level, and the cache that is left behind."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from cover import covered
from head_cases import shaken
from helpers import generate
from kernel_cases import needs_kernels

from benchmarks.prompts import PYTHON
from foredraft import Speculator, zoo
from foredraft.backends.native_growth import MISSED
from foredraft.drafters.draft_loops.eagle3 import Eagle3Growth, Eagle3Step
from foredraft.drafters.eagle3 import Eagle3
from foredraft.heads import checkpoints
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.tree import TokenTree

pytestmark = needs_kernels
SHAPES = ["chain(1)", "chain(5)", "product(3,2,1)", "paths(0,1,0.0,0.1,1.0,0.0.0)", "dynamic(depth=4,k=3,total=9)",
          "opt(total=10,depth=6,delta=0.05)", "opt(total=10,depth=6,delta=0.2,floor=0.05,k=3)"]  # fmt: skip
VARIANTS = {
    "residual normed": {"norm_before_residual": True},
    "output normed": {"norm_output": True},
    "biased": {"attention_bias": True},
    "one feature": {"aux_layers": (3,)},
    "few tokens": {"draft_vocab_size": 300},
    "other positions": {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16},
    },
}  # fmt: skip


@cache
def model(dtype=torch.float32):
    return zoo.load("python-8m", dtype=dtype)


@cache
def prompt() -> list[int]:
    return zoo.load_tokenizer("python-8m")(PYTHON[0])["input_ids"]


def head(variant) -> Eagle3Head:
    if variant == "embedded":
        return checkpoints.load("zoo:python-8m-eagle3", model())
    options = VARIANTS[variant]
    counts = {"counts": torch.arange(4096) * 37 % 4096} if "draft_vocab_size" in options else {}
    return shaken(Eagle3Head.for_target(model(), **options, **counts))


class Watched(Eagle3):
    """Notes its trees, and how many of them the kernel made; ``level_by_level`` leaves the kernel out."""

    def __init__(self, source, *, level_by_level=False, **options):
        super().__init__(source, **options)
        self.level_by_level, self.trees, self.by_kernel = level_by_level, [], 0

    def draft(self, request):
        tree = super().draft(request)
        for index, row in enumerate(request.rows):
            real = [node for node in range(tree.nodes) if tree.valid is None or tree.valid[index, node]]
            above = tree.parents.expand(tree.rows, tree.nodes)[index]
            self.trees.append((len(row.ids), tree.tokens[index, real].tolist(), above[real].tolist(), self.expected_accepted))
        return tree

    def bind(self, target):
        super().bind(target)
        if self.level_by_level:
            self._step = None  # torch's own operations

    def _by_kernel(self, request):
        grown = None if self.level_by_level else super()._by_kernel(request)
        self.by_kernel += grown is not None
        return grown


def texts_of(drafter, shape, rows=None, rule="auto", new=40, **options):
    speculator = Speculator(model(drafter.dtype), drafter=drafter, shape=shape, rule=rule, execution="native")
    text = generate(speculator, rows or [prompt()], max_new_tokens=new, eos_token_id=None, **options)
    lengths = [len(row) for row in text]
    speculator.close()
    return text, lengths


def both(source, shape, dtype=torch.float32, rows=None, **options):
    found = []
    for level_by_level in (False, True):
        drafter = Watched(source, level_by_level=level_by_level)
        drafter.dtype = dtype
        found.append((drafter, *texts_of(drafter, shape, rows, **options)))
    (kernel, text, _), (levels, expected, _) = found
    assert text == expected
    return kernel, levels


def alike(one, other):
    """The trees of both, whose order may differ where a tree's nodes are as likely."""
    assert [each[:3] for each in one.trees] == [each[:3] for each in other.trees]
    for (*_, mine), (*_, theirs) in zip(one.trees, other.trees):
        assert (mine is None) == (theirs is None) and (mine is None or mine == pytest.approx(theirs, rel=1e-3))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_trees_round_by_round(shape):
    """A wrong key in the cache, a wrong mask, state or position shows in the trees of the rounds that follow."""
    kernel, levels = both("zoo:python-8m-eagle3", shape)
    assert kernel.by_kernel == len(kernel.trees) > 8 and levels.by_kernel == 0
    assert [each[:3] for each in kernel.trees] == [each[:3] for each in levels.trees]


@pytest.mark.parametrize(("variant", "shape"), covered(list(VARIANTS), ["product(3,2,1)", "opt(total=10,depth=6,delta=0.05,k=3)"], ways=1))
def test_every_kind_of_head(variant, shape):
    kernel, levels = both(head(variant), shape, new=24)
    assert kernel.by_kernel == len(kernel.trees) > 8
    alike(kernel, levels)


def test_bfloat16():
    kernel, levels = both("zoo:python-8m-eagle3", "product(3,2,1)", torch.bfloat16)
    same = sum(a[:3] == b[:3] for a, b in zip(kernel.trees, levels.trees))
    assert kernel.by_kernel and same > 0.6 * len(kernel.trees)  # near ties fall either way


class Seldom(Watched):
    """Drafts in every ``pause``-th round only."""

    rounds, pause = 0, 1

    def draft(self, request):
        self.rounds += 1
        if self.rounds % self.pause:
            self.expected_accepted = None
            return TokenTree.root(request.roots())
        return super().draft(request)


@pytest.mark.parametrize(("pause", "by_kernel"), [(3, True), (MISSED + 4, False)])
def test_rounds_without_a_draft_are_read_first_up_to_a_point(pause, by_kernel, monkeypatch):
    monkeypatch.setattr(Seldom, "pause", pause)
    found = []
    for level_by_level in (False, True):
        drafter = Seldom("zoo:python-8m-eagle3", level_by_level=level_by_level)
        drafter.dtype = torch.float32
        found.append((drafter, texts_of(drafter, "chain(3)")[0]))
    (kernel, text), (levels, expected) = found
    assert text == expected and [each[:3] for each in kernel.trees] == [each[:3] for each in levels.trees]
    assert kernel.trees and kernel.by_kernel == (len(kernel.trees) if by_kernel else 0)


@pytest.mark.parametrize(
    ("sampled", "variant", "shape"),
    covered(
        [True, False],
        ["embedded", "residual normed", "few tokens"],
        ["chain(4)", "product(3,2,1)", "dynamic(depth=3,k=3,total=8)"],
        ways=1,
    ),
)
def test_steps_of_batches_and_of_sampled_rows(sampled, variant, shape):
    """One call per level for all rows, that are as long or not, and lack as much or not."""
    options = {"do_sample": True, "temperature": 0.8, "seed": 3, "rule": "match"} if sampled else {}
    rows = [prompt(), prompt()[:20], prompt()[:20], prompt()[5:]]
    kernel, levels = both(head(variant) if variant != "embedded" else "zoo:python-8m-eagle3", shape, rows=rows, new=26, **options)
    assert len(kernel.trees) > 20 and kernel._step is not None and kernel.by_kernel < len(kernel.trees) / 2
    same = sum(a[:3] == b[:3] for a, b in zip(kernel.trees, levels.trees))
    assert same == len(kernel.trees) == len(levels.trees)


def test_a_step_of_one_sampled_row_in_bfloat16():
    kernel, levels = both("zoo:python-8m-eagle3", "chain(4)", torch.bfloat16, do_sample=True, seed=1, rule="match")
    same = sum(a[:3] == b[:3] for a, b in zip(kernel.trees, levels.trees))
    assert kernel.by_kernel == 0 and same > 0.6 * len(kernel.trees)


def test_heads_that_the_kernel_is_not_made_for():
    for options in ({"norm_before_fc": True}, {"fc_norm": True}, {"head_dim": 48, "num_attention_heads": 4, "num_key_value_heads": 4}):
        layer = Eagle3Head.for_target(model(), **options).layer().to(torch.device("cpu"), torch.float32).packed()
        assert Eagle3Growth.of(layer) is None and (Eagle3Step.of(layer) is None) == ("head_dim" in options)
    layer = Eagle3Head.for_target(model()).layer().to(torch.device("cpu"), torch.float32)
    assert Eagle3Growth.of(layer) is None and Eagle3Growth.of(layer.packed()) is not None

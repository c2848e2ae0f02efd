"""Decoders behind an encoder in one call of the kernels against the model's own layers."""

from __future__ import annotations

import copy

import pytest
import torch
from cover import nightly_but
from encoder_decoders import texts
from kernel_cases import DTYPES, TOLERANCE, needs_kernels
from kernel_cases import always as always  # a fixture
from sourced_cases import MODELS, build, read_by
from torch import nn

from foredraft import Source, Speculator, TokenTree
from foredraft.backends import native as kernels
from foredraft.backends import sourced_pass
from foredraft.backends.native_growth import NativeGrowth
from foredraft.backends.products import NATIVE, Product
from foredraft.drafters.draft_model import DraftModel
from foredraft.models.encoder_decoder import some_source
from foredraft.target import Target

pytestmark = [needs_kernels, pytest.mark.usefixtures("always")]
TREE = (-1, 0, 0, 1, 1, 2, 3, 3, 6)
ALWAYS = ("t5 v1.1", "bart", "mbart", "pegasus", "m2m_100", "marian", "blenderbot-small", "whisper")


def native(name, dtype, **options):
    return Target(copy.deepcopy(build(name, dtype)), execution="native", owned=True, **options)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "dtype"), nightly_but({(name, torch.float32) for name in ALWAYS}, [(name, dtype) for name in MODELS for dtype in DTYPES])
)
def test_ragged_prefills_chains_trees_and_commits(name, dtype):
    """Behind sources of unequal lengths, beyond the last distance that is told from others, and with rows that leave."""
    prompts, read = texts((40, 3, 17), seed=4), read_by(name, dtype, 70, 9, 33)
    plain, kernels = Target(build(name, dtype), execution="eager"), native(name, dtype)
    assert kernels.execution == "native" and kernels.backend.direct is not None and kernels.chains_only is None
    chain, nodes = (torch.randint(0, 128, (3, count), generator=torch.Generator().manual_seed(count)) for count in (4, len(TREE)))
    valid = torch.ones_like(nodes, dtype=torch.bool)
    valid[1, 5:] = False  # filler
    found = []
    for target in (plain, kernels):
        target.open(prompts, sources=read)
        steps = [target.prefill(prompts, first=0), target.score(TokenTree.from_chain(chain))]
        target.commit(None, [4, 2, 1])
        steps.append(target.score(TokenTree(nodes, torch.tensor([TREE] * 3), valid))[valid])
        target.commit(torch.tensor([[0, 2, 5], [0, 1, 3], [0, 1, 4]]), [3, 1, 2])
        steps.append(target.advance(chain[:, 0]))
        target.compact([0, 2])
        steps += [target.score(TokenTree.from_chain(chain[:2, :1])), target.score(TokenTree.from_chain(chain[:2]))]
        target.open(prompts[:1], sources=read[2:])
        steps.append(target.prefill(prompts[:1], first=2))
        target.compact([1, 2])
        steps.append(target.score(TokenTree.from_chain(chain[:2])))
        found.append(steps)
    for wanted, got in zip(*found):
        assert (got.float() - wanted.float()).abs().max() <= 2 * TOLERANCE[dtype] * wanted.float().abs().max()


SHAPES = ("product(3,2)", "chain(5)", "dynamic(depth=4,k=3,total=9)")


BANS = {"suppress_tokens": list(range(4, 128, 2)), "begin_suppress_tokens": [5, 8], "min_new_tokens": 20}
ROUNDS = [(name, each, bans) for name in ("t5 v1.1", "bart", "m2m_100") for each in SHAPES for bans in (False, True)]


@pytest.mark.parametrize(("name", "shape", "bans"), nightly_but({("t5 v1.1", SHAPES[0], False), ("bart", SHAPES[0], True)}, ROUNDS))
def test_drafts_in_one_call_are_those_made_level_by_level(name, shape, bans, monkeypatch):
    """A wrong position in the draft's cache shows in the trees of the rounds that follow."""
    made, seen, draft, ends = [], [], DraftModel.draft, NativeGrowth._end
    monkeypatch.setattr(NativeGrowth, "_end", lambda self, *given: made.append(given) or ends(self, *given))
    noted = lambda self, request: seen.append(draft(self, request)) or seen[-1]  # noqa: E731
    monkeypatch.setattr(DraftModel, "draft", noted)
    given, trees, found = {"max_new_tokens": 24, "do_sample": False, **(BANS if bans else {})}, [], []
    for alone in (False, True):
        drafter = DraftModel(copy.deepcopy(build(name, torch.float32, 4)), execution="native")
        speculator = Speculator(build(name, torch.float32), drafter, shape=shape)
        drafter._loops = () if alone else drafter._loops
        found.append(speculator.generate(torch.tensor(texts((30,))), **given).sequences.tolist())
        trees.append([(tree.tokens.tolist(), tree.parents.tolist()) for tree in seen])
        assert bool(made) != alone
        made.clear(), seen.clear()
    assert trees[0] == trees[1] and len(trees[0]) >= 5
    assert found[0] == found[1] == build(name, torch.float32).generate(torch.tensor(texts((30,))), **given).tolist()


@pytest.mark.parametrize("name", nightly_but({("whisper",)}, [(name,) for name in MODELS]))
def test_keyed_text_is_that_of_plain_decoding(name):
    """By trees of a draft, beside plain decoding by the kernels."""
    ways = ("none", "auto"), (DraftModel(copy.deepcopy(build(name, torch.float32, 4))), "product(2,2)")
    given = torch.cat([next(iter(some_source(build(name, torch.float32), 30, seed).inputs.values())) for seed in (1, 2)])
    found = []
    for drafter, shape in ways:
        speculator = Speculator(copy.deepcopy(build(name, torch.float32)), drafter, shape=shape, execution="native")
        assert speculator.target.execution == "native"
        found.append(speculator.generate(given, max_new_tokens=16, do_sample=True, seed=5).sequences.tolist())
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_model_whose_own_attention_adds_its_masks(name):
    """The kernels read masks of bools, also where those of the model are numbers."""
    model = copy.deepcopy(build(name, torch.float32))
    model.set_attn_implementation("eager")
    target = Target(model, execution="native", owned=True)
    assert target.execution == "native" and target.chains_only is None


def test_kernels_that_differ_are_left_out(monkeypatch):
    monkeypatch.setattr(sourced_pass, "by_distance", lambda attention: torch.zeros(4, 21))
    target = native("t5 v1.1", torch.float32)
    assert target.execution == "packed" and "the kernels gave states that differ" in target.reasons["fused"]
    assert "forward" not in vars(target.model.get_decoder())


def test_the_exact_gelu_is_within_its_bound():
    """By an MLP that reads and writes without change: x + gelu(x)."""
    linears = [nn.Linear(64, 64, bias=False) for _ in range(2)]
    for each in linears:
        each.weight.data = torch.eye(64)
    up, down = (Product([each], NATIVE) for each in linears)
    about = kernels.Layer(hidden=64, inner=64, gate_up=up.matrix, down=down.matrix, activation=kernels.EXACT | kernels.ALONE)
    x = torch.cat([torch.linspace(-12, 12, 64 * 400), torch.logspace(-30, 2, 64 * 40), -torch.logspace(-30, 2, 64 * 40)]).view(-1, 64)
    scratch = {name: torch.empty(len(x), 64) for name in ("states", "wide", "thin")}
    about_pass = kernels.Pass(threads=1, tokens=len(x), **{name: each.data_ptr() for name, each in scratch.items()})
    out = x.clone()
    kernels.library(torch.float32).layer(about, about_pass, None, out.data_ptr(), None, None, kernels.MLP)
    wanted = x.double() + nn.functional.gelu(x.double())
    assert ((out - wanted).abs() <= 3e-7 * x.abs() + 1.2e-7 * wanted.abs()).all()


def test_layers_of_others_run_as_they_are():
    """A subclass, as adapters put one in."""

    class Other(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    model = copy.deepcopy(build("whisper", torch.float32))
    model.model.decoder.layers[1].fc1.__class__ = Other
    target, plain = Target(copy.deepcopy(model), execution="native", owned=True), Target(model, execution="eager")
    assert target.execution == "packed" and "T5, BART or Whisper" in target.reasons["fused"]
    with torch.inference_mode():
        found = [
            (each.open([[2, 5]], sources=read_by("whisper", torch.float32, 9)), each.prefill([[2, 5]], first=0)) for each in (target, plain)
        ]
    torch.testing.assert_close(*(each for _, each in found), rtol=1e-4, atol=1e-4)


def test_whoever_watches_the_model_is_called():
    target, calls = native("t5 v1.1", torch.float32), []
    block = target.model.get_decoder().block[1]
    with torch.inference_mode():
        assert target.backend.direct is not None
        handle = block.register_forward_hook(lambda *given: calls.append(given))
        assert target.backend.direct is None
        target.open([[2, 5]], sources=[Source.of(texts((9,))[0])])
        watched = target.prefill([[2, 5]], first=0)
        handle.remove()
        target.reset()
        target.open([[2, 5]], sources=[Source.of(texts((9,))[0])])
        torch.testing.assert_close(target.prefill([[2, 5]], first=0), watched, rtol=1e-4, atol=1e-4)
    assert len(calls) == 1
    target.close()
    assert "forward" not in vars(target.model.get_decoder())

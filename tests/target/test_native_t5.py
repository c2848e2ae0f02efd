"""Decoders of the T5 family in one call of the kernels against the model's own layers."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
import transformers
from cover import nightly_but
from encoder_decoders import texts
from kernel_cases import DTYPES, TOLERANCE, needs_kernels
from kernel_cases import always as always  # a fixture

from foredraft import Source, Speculator, TokenTree
from foredraft.backends import t5_pass
from foredraft.backends.native_growth import NativeGrowth
from foredraft.drafters.draft_model import DraftModel
from foredraft.target import Target

pytestmark = [needs_kernels, pytest.mark.usefixtures("always")]
TREE = (-1, 0, 0, 1, 1, 2, 3, 3, 6)
SIZES = {
    "vocab_size": 128, "d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 4,
    "feed_forward_proj": "gated-gelu", "dropout_rate": 0.0, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
    "pad_token_id": 1, "decoder_start_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
MODELS = {
    "t5 v1.1": ("T5", {"tie_word_embeddings": False}),
    "t5": ("T5", {"feed_forward_proj": "relu"}),
    "mt5": ("MT5", {}),
    "umt5": ("UMT5", {"feed_forward_proj": "gated-silu"}),
}


@cache
def build(name, dtype, seed=3):
    kind, options = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{kind}ForConditionalGeneration")(getattr(transformers, f"{kind}Config")(**{**SIZES, **options}))
        for part, weight in model.named_parameters():
            weight.data = (
                1 + 0.3 * torch.randn(weight.shape) if weight.ndim == 1 else torch.randn(weight.shape) * (1 if "bias" in part else 0.1)
            )
    model.generation_config.eos_token_id = None
    return model.to(dtype).eval()


def native(name, dtype, **options):
    return Target(copy.deepcopy(build(name, dtype)), execution="native", owned=True, **options)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "dtype"), nightly_but({("t5 v1.1", torch.float32)}, [(name, dtype) for name in MODELS for dtype in DTYPES])
)
def test_ragged_prefills_chains_trees_and_commits(name, dtype):
    """Behind sources of unequal lengths, beyond the last distance that is told from others, and with rows that leave."""
    prompts, read = texts((40, 3, 17), seed=4), [Source.of(ids) for ids in texts((70, 9, 33))]
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


@pytest.mark.parametrize("shape", nightly_but({("product(3,2)",)}, [("product(3,2)",), ("chain(5)",), ("dynamic(depth=4,k=3,total=9)",)]))
def test_drafts_in_one_call_are_those_made_level_by_level(shape, monkeypatch):
    """A wrong position in the draft's cache shows in the trees of the rounds that follow."""
    made, seen, draft, ends = [], [], DraftModel.draft, NativeGrowth._end
    monkeypatch.setattr(NativeGrowth, "_end", lambda self, *given: made.append(given) or ends(self, *given))
    noted = lambda self, request: seen.append(draft(self, request)) or seen[-1]  # noqa: E731
    monkeypatch.setattr(DraftModel, "draft", noted)
    trees, found = [], []
    for alone in (False, True):
        drafter = DraftModel(copy.deepcopy(build("t5 v1.1", torch.float32, 4)), execution="native")
        speculator = Speculator(build("t5 v1.1", torch.float32), drafter, shape=shape)
        drafter._loops = () if alone else drafter._loops
        found.append(speculator.generate(torch.tensor(texts((30,))), max_new_tokens=24, do_sample=False).sequences.tolist())
        trees.append([(tree.tokens.tolist(), tree.parents.tolist()) for tree in seen])
        assert bool(made) != alone
        made.clear(), seen.clear()
    assert trees[0] == trees[1] and len(trees[0]) > 5
    assert found[0] == found[1] == build("t5 v1.1", torch.float32).generate(torch.tensor(texts((30,))), max_new_tokens=24).tolist()


def test_kernels_that_differ_are_left_out(monkeypatch):
    monkeypatch.setattr(t5_pass, "by_distance", lambda attention: torch.zeros(4, 21))
    target = native("t5 v1.1", torch.float32)
    assert target.execution == "packed" and "fused layers gave logits that differ" in target.reasons["fused"]
    assert "forward" not in vars(target.model.get_decoder())


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

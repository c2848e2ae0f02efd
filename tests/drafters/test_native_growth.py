"""Draft trees grown in one call of a kernel against the same trees grown level by level, and the cache that is left behind."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
import transformers as hf
from cover import covered
from helpers import generate
from kernel_cases import DTYPES, build, needs_kernels
from kernel_cases import always as always  # a fixture

from foredraft import ConfigurationError, RowParameters, Speculator, TreeShape
from foredraft.backends import native
from foredraft.backends.native_growth import MISSED, MOST_KEPT, Draws, NativeGrowth, laid_out
from foredraft.drafters import growth
from foredraft.drafters.draft_loops.kernels import KernelLoop
from foredraft.drafters.draft_model import DraftModel
from foredraft.drafters.growth import UNSEEN
from foredraft.logits.noise import Noise
from foredraft.logits.processors import Pipeline, Warping
from foredraft.shapes import DynamicShape
from foredraft.target import Target

pytestmark = [needs_kernels, pytest.mark.usefixtures("always")]
PRICED = DynamicShape(5, 3, 12, 0.0, 0.0, (0.0, 0.3, 0.32, 0.34, 0.36, 0.9, 0.92, 0.94, 1.2, 1.25, 1.3, 1.4, 1.5))
SHAPES = [
    "chain(1)", "chain(6)", "product(3,2,1)", "paths(0,1,2,0.0,0.1,1.0,0.0.0)", "dynamic(depth=4,k=3,total=9)",
    "dynamic(depth=1,k=4,total=4)", "opt(total=10,depth=6,delta=0.05)", "opt(total=10,depth=6,delta=0.2,floor=0.05,k=3)", PRICED,
]  # fmt: skip
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


@pytest.fixture
def no_draws(monkeypatch):
    """Drafts that are made level by level are drawn by tensor operations."""
    monkeypatch.setattr(growth, "draws_for", lambda request: None)


def speculators(shape, dtype, name="llama", draft="qwen2", **options):
    """With the kernel, and level by level, for a target of its own each."""
    found = []
    for _ in range(2):
        drafter = DraftModel(build(draft, dtype), execution="native")
        found.append(Speculator(build(name, dtype), drafter=drafter, shape=shape, **options))
    found[1].drafter._loops = ()
    return found


@pytest.fixture
def drafts(monkeypatch):
    """Every tree that a draft model makes, with whether the kernel made it."""
    seen = []
    draft, by_kernel = DraftModel.draft, KernelLoop.draft

    def noted(self, request):
        tree = draft(self, request)
        real = slice(None) if tree.valid is None else tree.valid[0]
        seen.append((tree.tokens[0, real].tolist(), tree.parents[0, real].tolist(), tree.static_parents))
        return tree

    def counted(self, request, *, chain):
        grown = by_kernel(self, request, chain=chain)
        kernel.append(grown is not None)
        return grown

    kernel = []
    monkeypatch.setattr(DraftModel, "draft", noted)
    monkeypatch.setattr(KernelLoop, "draft", counted)
    return seen, kernel


@pytest.mark.parametrize(("shape", "dtype"), covered(SHAPES, DTYPES, ways=1))
def test_the_same_trees_round_by_round(shape, dtype, drafts):
    """A wrong key in the draft's cache, a wrong mask or position shows in the trees of the rounds that follow."""
    seen, kernel = drafts
    by_kernel, by_level = speculators(shape, dtype)
    first = generate(by_kernel, [PROMPT], max_new_tokens=26)
    trees, made = list(seen), list(kernel)
    seen.clear()
    second = generate(by_level, [PROMPT], max_new_tokens=26)
    assert first == second
    assert sum(made) >= len(made) - 1 and len(trees) > 5  # but for the round that reads the prompt
    alike = sum(a == b for a, b in zip(trees, seen))
    assert alike == len(trees) == len(seen) if dtype == torch.float32 else alike > 0.6 * len(trees)  # near ties fall either way


@pytest.mark.parametrize(
    ("rule", "dtype", "shape", "how"),
    [
        ("rejection", torch.float32, "chain(6)", {"top_k": 0}),
        ("match", torch.float32, "chain(4)", {"temperature": 0.7, "top_k": 0}),
        ("block", torch.bfloat16, "chain(1)", {"temperature": 1.3, "top_k": 0}),
        ("rejection", torch.float32, "chain(5)", {"temperature": 1.6, "top_k": 20, "top_p": 0.9}),
        ("match", torch.float32, "chain(5)", {"top_k": 1000, "min_p": 0.2}),
        ("block", torch.float32, "chain(3)", {"temperature": 1.5, "top_k": 7, "top_p": 0.8, "min_p": 0.1}),
        ("match", torch.float32, "product(3,2,1)", {"temperature": 0.8, "top_k": 0}),
        ("match", torch.float32, "paths(0,1,2,0.0,0.1,1.0,0.0.0,0.0.1,0.0.0.0)", {"top_k": 2}),
        ("match", torch.float32, "paths(0,1,2,0.0,1.0,1.1,1.2,1.1.0)", {"temperature": 1.3, "min_p": 0.3, "top_k": 0}),
        ("match", torch.float32, "product(12,1)", {"temperature": 1.4, "top_k": 20, "top_p": 0.9}),
        ("match", torch.bfloat16, "product(4,2,1)", {"top_k": 0}),
        ("match", torch.float32, "dynamic(depth=4,k=3,total=7)", {"temperature": 0.8, "top_k": 0}),
        ("match", torch.float32, "dynamic(depth=3,k=5,total=9)", {"top_k": 2}),
        ("match", torch.float32, "opt(total=8,depth=5,delta=0.05)", {"temperature": 1.4, "top_k": 20, "top_p": 0.9}),
        ("match", torch.float32, PRICED, {"temperature": 1.2, "top_k": 0, "min_p": 0.02}),
        ("match", torch.bfloat16, "dynamic(depth=1,k=4,total=4)", {"top_k": 0}),
    ],
)
def test_what_is_drawn_in_one_call_is_what_is_drawn_level_by_level(rule, dtype, shape, how, drafts, no_draws):
    """A wrong word of noise, or a distribution of another temperature, shows in the tokens; in bfloat16 near ties may fall either way."""
    seen, kernel = drafts
    how = {"max_new_tokens": 32, "do_sample": True, "seed": 5, **how}
    by_kernel, by_level = speculators(shape, dtype, rule=rule)
    first = generate(by_kernel, [PROMPT], **how)
    trees, made = list(seen), list(kernel)
    seen.clear()
    second = generate(by_level, [PROMPT], **how)
    assert sum(made) >= len(made) - 1 and len(trees) > 5
    if dtype == torch.float32:
        assert first == second and trees == seen
    else:
        assert sum(a == b for a, b in zip(trees, seen)) > 0.6 * len(trees)


@pytest.mark.parametrize(("rule", "dtype"), [("rejection", torch.float32), ("match", torch.float32), ("block", torch.bfloat16)])
def test_chains_of_several_rows_are_drawn_as_tensor_operations_draw_them(rule, dtype, monkeypatch):
    """Rows of other temperatures and limits; the q handed on is that of the draft's logits."""
    drafter, trees = DraftModel(build("qwen2", dtype), execution="native"), []
    speculator = Speculator(build("llama", dtype), drafter=drafter, shape="chain(4)", rule=rule)
    draft = drafter.draft
    monkeypatch.setattr(drafter, "draft", lambda request: trees.append(draft(request)) or trees[-1])
    used, draws = [], growth.draws_for
    ways = {"kernel": lambda request: used.append(draws(request)) or used[-1], "tensors": lambda request: None}
    warpers = [
        [hf.TemperatureLogitsWarper(0.8)],
        [hf.TemperatureLogitsWarper(1.5), hf.TopKLogitsWarper(7), hf.TopPLogitsWarper(0.8)],
        [hf.TopKLogitsWarper(90), hf.MinPLogitsWarper(0.1)],
    ]
    found = {}
    for way, chosen in ways.items():
        monkeypatch.setattr(growth, "draws_for", chosen)
        session, trees[:] = speculator.session(), []
        for number, each in enumerate(warpers):
            pipeline = Pipeline.alone(each, prompt_length=len(PROMPT) - number)
            session.add(PROMPT[number:], RowParameters(max_new_tokens=20 - 6 * number, do_sample=True, pipeline=pipeline, seed=(number, 0)))
        texts = {slot: [] for slot in range(3)}
        while session.live:
            for commit in session.step():
                texts[commit.slot] += commit.tokens
        found[way] = texts, list(trees)
    (ours, mine), (theirs, other) = found.values()
    assert len([each for each in used if each is not None]) > 4 and max(tree.rows for tree in mine) == 3
    if dtype == torch.float32:
        assert ours == theirs and len(mine) == len(other)
    alike = 0
    for a, b in zip(mine, other):
        if a.tokens.shape == b.tokens.shape and torch.equal(a.tokens, b.tokens):
            alike += 1
            assert (a.q is None) == (b.q is None) == (rule == "match")
            if a.q is not None and dtype == torch.float32:  # of equal logits at the edge of a nucleus kernels keep all
                torch.testing.assert_close(a.q, b.q, rtol=1e-4, atol=1e-6)
                assert torch.equal(a.q == 0, b.q == 0)
    assert alike == len(mine) if dtype == torch.float32 else alike > 2


def test_rows_that_are_greedy_are_not_drawn(monkeypatch):
    """Next to a row that samples, their q is one token."""
    drafter = DraftModel(build("qwen2", torch.float32), execution="native")
    session = Speculator(build("llama", torch.float32), drafter=drafter, shape="chain(3)", rule="rejection").session()
    for sampled in (True, False):
        session.add(PROMPT, RowParameters(max_new_tokens=6, do_sample=sampled, seed=(1, 0)))
    trees, draft = [], drafter.draft
    monkeypatch.setattr(drafter, "draft", lambda request: trees.append(draft(request)) or trees[-1])
    while session.live:
        session.step()
    assert any(tree.rows == 2 for tree in trees)
    assert all((tree.q[1].amax(-1) == 1).all() for tree in trees if tree.rows == 2)


@pytest.mark.parametrize("top_k", [0, 20])
@pytest.mark.parametrize("spoilt", [[3], [0, 49], range(50)])
def test_a_draft_that_says_nan_somewhere_has_no_distribution(spoilt, top_k):
    """As with tensor operations: the check of what a drafter proposes reports it."""
    native.library(torch.float32)
    logits = torch.randn(2, 64)[:, :50]
    logits[0, list(spoilt)] = torch.nan
    noise = Noise(torch.arange(2), torch.arange(2))
    draws = Draws(noise.chain_words(1, keyed=False), noise.hashes(50), [Warping(top_k=top_k)] * 2)
    tokens = draws.draw(logits, 0)
    assert draws.q[0].isnan().all() and not draws.q[1].isnan().any() and int(tokens[0]) == 0


def test_top_p_counts_where_top_k_is_more_than_the_draft_has():
    native.library(torch.float32)
    logits = torch.randn(1, 112, generator=torch.Generator().manual_seed(2))[:, :100]
    noise = Noise(torch.arange(1), torch.arange(1))
    draws = Draws(noise.chain_words(1, keyed=False), noise.hashes(300), [Warping(top_k=120, top_p=0.8)])
    draws.draw(logits, 0)
    kept = int((draws.q > 0).sum())
    assert kept == int((hf.TopPLogitsWarper(0.8)(None, logits) > -math.inf).sum()) < 100


@pytest.mark.parametrize("keep", [True, False])
def test_q_is_kept_where_it_is_wanted(keep):
    native.library(torch.float32)
    logits, noise = 3 * torch.randn(3, 64), Noise(torch.arange(3), torch.arange(3))
    draws = Draws(noise.chain_words(4, keyed=False), noise.hashes(64), [Warping()] * 3, keep=keep)
    for i in range(4):
        draws.draw(logits * i, i)
        assert torch.allclose(draws.q[:, i if keep else 0], torch.softmax(logits * i, -1), atol=1e-6)
    assert draws.q.shape == (3, 4 if keep else 1, 64)


def test_logits_may_lie_anywhere():
    """Kernels read 16 values at a time: behind the last logits there may be no memory, or what would be likely."""
    native.library(torch.float32)
    wide = torch.full((3, 130), 50.0)
    wide[:, 7:107] = 3 * torch.randn(3, 100, generator=torch.Generator().manual_seed(3))
    noise, found = Noise(torch.arange(3), torch.arange(3)), []
    exact = wide[:, 7:107].contiguous()
    for logits in (wide[:, 7:107], exact, exact.t().contiguous().t(), torch.cat([exact.flatten(), torch.ones(64)])[:300].view(3, 100)):
        draws = Draws(noise.chain_words(1, keyed=False), noise.hashes(100), [Warping()] * 3)
        found.append((draws.draw(logits, 0), draws.q))
        torch.testing.assert_close(draws.q[:, 0], torch.softmax(exact, -1))
    assert all(torch.equal(tokens, found[0][0]) and torch.equal(q, found[0][1]) for tokens, q in found)
    assert Draws.read(exact) and not Draws.read(exact.double()) and not Draws.read(exact.to("meta"))


@pytest.mark.parametrize("threads", [1, 3])
def test_rows_are_drawn_apart(threads):
    """Each with its own noise, and as if it were alone."""
    library, before = native.library(torch.float32), torch.get_num_threads()
    assert library is not None
    logits = 3 * torch.randn(5, 64, generator=torch.Generator().manual_seed(1))[:, :50]
    noise = Noise(torch.arange(5), torch.arange(5))
    words, hashes = noise.chain_words(2, keyed=False), noise.hashes(60)
    warpings = [Warping(), Warping(0.5), Warping(top_k=3), Warping(1.7, 20, 0.7), Warping(min_p=0.2)]
    torch.set_num_threads(threads)
    try:
        together = Draws(words, hashes, warpings)
        tokens = [together.draw(logits, i) for i in range(2)]
        for row in range(5):
            alone = Draws(words[row : row + 1], hashes, warpings[row : row + 1])
            assert [int(alone.draw(logits[row : row + 1], i)) for i in range(2)] == [int(each[row]) for each in tokens]
            assert torch.equal(alone.q[0], together.q[row])
    finally:
        torch.set_num_threads(before)
    assert not together.q[..., 50:].any() and torch.allclose(together.q.sum(-1), torch.ones(5, 2))
    assert (together.q[2] > 0).sum(-1).tolist() == [3, 3]


@pytest.mark.parametrize("temperature", [0.6, pytest.param(1.0, marks=pytest.mark.nightly)])
def test_chains_are_drawn_from_the_q_that_is_handed_on(temperature):
    """Over many seeds the first token has the distribution q, which is the softmax of the draft's logits."""
    drafter = DraftModel(build("qwen2", torch.float32), execution="native")
    speculator = Speculator(build("llama", torch.float32), drafter=drafter, shape="chain(3)", rule="rejection")
    found = []
    draft = drafter.draft

    def noted(request):
        tree = draft(request)
        if tree.q is not None and len(request.rows[0].ids) == len(PROMPT) + 1:
            found.append(tree)
        return tree

    drafter.draft = noted
    for seed in range(250):
        generate(speculator, [PROMPT], max_new_tokens=3, do_sample=True, temperature=temperature, top_k=0, seed=seed)
    assert all(torch.allclose(tree.q.sum(-1), torch.ones(()), atol=1e-5) for tree in found)
    q = torch.stack([tree.q[0, 0] for tree in found])
    drawn = torch.nn.functional.one_hot(torch.stack([tree.tokens[0, 1] for tree in found]), q.shape[1])
    variance = (q * (1 - q)).sum(0)
    scores = (drawn - q).sum(0) / variance.clamp(min=1e-9).sqrt()
    assert len(drawn) > 200 and float(scores[variance > 1].abs().max()) < 4.5


@pytest.mark.parametrize(("spoilt", "top_k", "nodes"), [([], 0, 6), ([], 1, 2), ([50], 0, 0)])
def test_a_tree_has_what_has_a_probability(spoilt, top_k, nodes):
    """Of fewer tokens than a node may have children, and of none where a logit is NaN."""
    target = Target(build("qwen2", torch.float32), execution="native", owned=True)
    noise = Noise(torch.arange(1), torch.arange(1))
    target.open([PROMPT], reserve=[100])
    with torch.inference_mode():
        target.prefill([PROMPT[:-1]], first=0)
        draws = Draws(noise.chain_words(2, keyed=True), noise.hashes(64), [Warping(top_k=top_k)], keep=False)
        kernel = NativeGrowth.of(target.backend.direct, target.cache, target.context)
        kernel.ban((0,))
        kernel._bias[spoilt] = torch.nan
        grown = kernel.grow(PROMPT, DynamicShape(2, 3, 6), depth=2, vocab_size=64, draws=draws)
    assert len(grown.tokens) == nodes and (nodes == 0) == (grown.expected == 0.0)


def test_nothing_is_made_for_draws_where_no_kernel_draws(monkeypatch):
    """On a GPU, noise for the kernels would have to come from there."""
    for where in ("growth", "draft_loops.kernels"):
        monkeypatch.setattr(f"foredraft.drafters.{where}.draws_for", lambda request: pytest.fail("there is no kernel"))
    monkeypatch.setattr(native, "loaded", lambda dtype: None)
    drafter = DraftModel(build("qwen2", torch.float32), execution="eager")
    speculator = Speculator(build("llama", torch.float32), drafter=drafter, shape="chain(3)", rule="rejection")
    generate(speculator, [PROMPT], max_new_tokens=4, do_sample=True, seed=1)


def test_what_else_changes_scores_is_drawn_level_by_level(drafts):
    _, kernel = drafts
    by_kernel, by_level = speculators("chain(4)", torch.float32, rule="rejection")
    for more in ({"top_k": 5, "repetition_penalty": 1.1}, {"top_k": 0, "top_p": 0.9}, {"top_k": MOST_KEPT + 1, "top_p": 0.9}):
        how = {"max_new_tokens": 20, "do_sample": True, "seed": 3, **more}
        assert generate(by_kernel, [PROMPT], **how) == generate(by_level, [PROMPT], **how)
    assert not any(kernel)


@pytest.mark.parametrize("draft", ["llama", "llama-biases", "llama-one-key-head", "qwen3"])
def test_every_kind_of_layer(draft, drafts):
    seen, kernel = drafts
    by_kernel, by_level = speculators("opt(total=10,depth=6,delta=0.0,k=3)", torch.float32, draft=draft)
    generate(by_kernel, [PROMPT], max_new_tokens=24)
    trees = list(seen)
    assert any(kernel)
    seen.clear()
    generate(by_level, [PROMPT], max_new_tokens=24)
    assert trees == seen


@pytest.mark.parametrize("missed", [1, 2, MISSED])
def test_what_was_missed_is_read_first(missed):
    target, model = Target(build("llama", torch.float32), execution="native", owned=True), build("llama", torch.float32)
    text = [*PROMPT, 11, 12, 13, 14, 15, 16, 17, 18][: 20 + missed]
    target.open([text[:-missed]], reserve=[100])
    with torch.inference_mode():
        target.prefill([text[:-missed]], first=0)
        kernel = NativeGrowth.of(target.backend.direct, target.cache, target.context)
        grown = kernel.fill(text, TreeShape.chain(4), vocab_size=100)
        expected = list(text)
        for _ in range(4):
            expected.append(int(model(input_ids=torch.tensor([expected])).logits[0, -1].argmax()))
    assert grown.tokens == expected[len(text) :]
    assert grown.own == [1, 2, 3, -1] and grown.fed == 4 and target.lengths == [len(text) - 1]


def test_angles_that_are_replaced_meanwhile_last_as_long_as_a_draft():
    """Another thread that reads a longer text makes the table anew."""
    target = Target(build("llama", torch.float32), execution="native", owned=True)
    target.open([PROMPT], reserve=[100])
    with torch.inference_mode():
        target.prefill([PROMPT], first=0)
        kernel = NativeGrowth.of(target.backend.direct, target.cache, target.context)
        kernel._begin([*PROMPT, 1], 1, 4, 100)
        table = weakref.ref(target.backend.direct.decoder._lines[0][0])
        target.backend.direct.decoder._lines.clear()
        assert table() is not None and table().data_ptr() == native.Kind.from_address(kernel._pass.kinds).cos


def test_what_it_does_not_do_is_left_to_others():
    target = Target(build("llama", torch.float32), execution="native", owned=True)
    target.open([PROMPT], reserve=[100])
    with torch.inference_mode():
        target.prefill([PROMPT], first=0)
        kernel = NativeGrowth.of(target.backend.direct, target.cache, target.context)
        chain = TreeShape.chain(3)
        assert kernel.fill(PROMPT, chain, vocab_size=100) is None  # nothing is missing, so there is no root to go on from
        assert kernel.fill([*PROMPT, *range(MISSED + 1)], chain, vocab_size=100) is None
        assert kernel.fill([*PROMPT, 1], TreeShape.product(4), vocab_size=3) is None
        within = NativeGrowth.of(target.backend.direct, target.cache, 64)
        assert within.fill([*PROMPT, 1], TreeShape.chain(64), vocab_size=100) is None  # beyond the context
        assert kernel.grow([*PROMPT, 1], TreeShape.dynamic(2, 17, 20), depth=2, vocab_size=100) is None
        assert target.lengths == [len(PROMPT)]
        assert kernel.fill([*PROMPT, 1], chain, vocab_size=100) is not None
    assert laid_out(TreeShape.product(17, 1)) is None and laid_out(TreeShape.product(16, 2)).read == 16


def test_prices_keep_what_is_worth_most():
    """Brute force over how many of the best nodes to keep."""
    target = Target(build("llama", torch.float32), execution="native", owned=True)
    text = [*PROMPT, 7]
    target.open([PROMPT], reserve=[100])
    with torch.inference_mode():
        target.prefill([PROMPT], first=0)
        kernel = NativeGrowth.of(target.backend.direct, target.cache, target.context)
        free = DynamicShape(3, 3, 12)
        everything = kernel.grow(text, free, depth=3, vocab_size=100)
        model, scores = build("llama", torch.float32), [0.0]
        for node, (token, parent) in enumerate(zip(everything.tokens, everything.parents), 1):
            path, up = [], parent
            while up:
                path.insert(0, everything.tokens[up - 1])
                up = everything.parents[up - 1]
            logits = model(input_ids=torch.tensor([[*text, *path]])).logits[0, -1]
            scores.append(scores[parent] + float(logits.log_softmax(-1)[token]))
            assert node == len(scores) - 1
        order = sorted(range(1, 13), key=lambda node: -scores[node])
        seen = set()
        for price in (0.001, 0.02, 0.05, 0.1, 0.3, 2.0):
            prices = tuple(0.0 if count == 0 else price * (1 + count) for count in range(13))
            values = [sum(math.exp(scores[node]) for node in order[:count]) - prices[count] for count in range(13)]
            best = max(range(13), key=lambda count: values[count])
            target.rewind([len(PROMPT)])
            grown = kernel.grow(text, DynamicShape(3, 3, 12, prices=prices), depth=3, vocab_size=100)
            assert grown.tokens == [everything.tokens[node - 1] for node in sorted(order[:best])]
            seen.add(best)
        assert len(seen) > 3 and 0 in seen


def test_a_hook_on_the_draft_is_called(drafts):
    _, kernel = drafts
    (speculator, _) = speculators("chain(4)", torch.float32)
    passes = []
    speculator.drafter.model.model.register_forward_hook(lambda *_: passes.append(1))
    generate(speculator, [PROMPT], max_new_tokens=12)
    assert passes and not any(kernel)


def test_processors_and_several_rows_go_level_by_level(drafts):
    _, kernel = drafts
    (speculator, _) = speculators("chain(4)", torch.float32)
    generate(speculator, [PROMPT], max_new_tokens=12, repetition_penalty=1.3)
    generate(speculator, [PROMPT, PROMPT[:7]], max_new_tokens=12)
    assert kernel and not any(kernel)


def test_own_numbers_are_where_nodes_were_read():
    (speculator, _) = speculators("product(2,2)", torch.float32)
    found = []
    by_kernel = speculator.drafter._loops[0]
    draft = by_kernel.draft
    by_kernel.draft = lambda request, *, chain: found.append(draft(request, chain=chain)) or found[-1]
    generate(speculator, [PROMPT], max_new_tokens=8)
    (grown, *_) = [each for each in found if each is not None]
    assert grown.seen == 3 and grown.own.tolist() == [[0, 1, 2, UNSEEN, UNSEEN, UNSEEN, UNSEEN]]


def test_unknown_tokens_are_not_read(monkeypatch):
    """A target whose vocabulary is larger than the draft's may have committed a token that the draft has no embedding for."""
    speculator, _ = speculators("chain(4)", torch.float32)
    assert isinstance(speculator.drafter, DraftModel)
    generate(speculator, [PROMPT], max_new_tokens=4)
    speculator.drafter._smaller = True
    calls = []
    monkeypatch.setattr(NativeGrowth, "fill", lambda self, ids, shape, **others: calls.append(ids[self.cache.lengths[0] :]))
    speculator.drafter.model.vocab_size = 50
    generate(speculator, [[60, 61, 62, 63, 64]], max_new_tokens=12)
    assert calls and all(max(missed) < 50 for missed in calls)


def test_a_bad_shape_is_refused_as_ever():
    with pytest.raises(ConfigurationError):
        speculators("product(0)", torch.float32)

"""Logits have the same bits whatever else is in a pass: other rows, a draft tree, pieces of a prompt. And so has a text."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from cover import covered
from helpers import random_tree, tiny
from kernel_cases import DTYPES, build, needs_kernels

from foredraft import RowParameters, Speculator, TokenTree
from foredraft.backends import invariance
from foredraft.backends.eager import Eager
from foredraft.drafters.base import Drafter, DrafterInfo
from foredraft.quantization import quantize
from foredraft.target import Target

pytestmark = needs_kernels
NAMES = ["llama", "llama-one-key-head", "mistral-window"]
LENGTHS = [(60, 3), (61, 64), (62, 130), (50, 128), (63, 5)]  # of rows: their trees end on another block of 64 slots, or do not
NODES = 18


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@cache
def target(name, dtype):
    return Target(build(name, dtype), execution="native", owned=True, reuse_prefix=False)


def texts(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 100, (length,), generator=generator).tolist() for length in lengths]


def forest(rows, seed):
    tree = random_tree(rows, NODES, seed)
    return TokenTree(tree.tokens % 100, tree.parents)


@torch.inference_mode()
def plainly(target, text, tokens, chunk=1024):
    """``[len(tokens), V]`` by plain decoding, behind a prompt that is read in pieces."""
    target.prefill_chunk = chunk
    target.open([text])
    target.prefill([text], first=0)
    found = torch.stack([target.advance(torch.tensor([token]))[0] for token in tokens])
    target.reset()
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_every_node_of_a_tree_has_the_logits_of_plain_decoding(name, dtype, threads):
    model = target(name, dtype)
    for seed, lengths in enumerate(LENGTHS[:: 1 if threads == 1 else 3]):
        prompts, tree = texts(lengths, seed), forest(len(lengths), seed)
        model.open(prompts)
        model.prefill(prompts, first=0)
        found = model.score(tree)
        model.reset()
        for row, prompt in enumerate(prompts):
            leaves = set(range(NODES)).difference(tree.parents[row].tolist())
            for path in (tree.path(row, leaf) for leaf in leaves):
                expected = plainly(model, prompt, tree.tokens[row, path].tolist(), chunk=17 + 30 * seed)
                assert torch.equal(found[row, path], expected)


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_what_is_kept_of_a_tree_is_that_of_plain_decoding(dtype):
    """Of paths that lie scattered, in rows that keep unequal numbers of nodes, and of trees that are read level by level."""
    model = target("llama", dtype)
    prompts, kept = texts((61, 40), 7), [[0, 2, 5], [0, 1]]
    tree = TokenTree(torch.arange(5, 17).view(2, 6), torch.tensor([[-1, 0, 0, 1, 1, 2]] * 2))
    model.open(prompts)
    model.prefill(prompts, first=0)
    for first, last in ((0, 1), (1, 3), (3, 6)):
        model.score(TokenTree(tree.tokens[:, :last], tree.parents[:, :last]), first=first)
    model.commit(torch.tensor([path + [5] * (3 - len(path)) for path in kept]), [len(path) for path in kept])
    after = forest(2, 9)
    found = model.score(after)
    model.reset()
    for row, path in enumerate(kept):
        text = prompts[row] + tree.tokens[row, path].tolist()
        for leaf in set(range(NODES)).difference(after.parents[row].tolist()):
            nodes = after.path(row, leaf)
            assert torch.equal(found[row, nodes], plainly(model, text, after.tokens[row, nodes].tolist()))


# -- what a target says of itself -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_a_target_on_the_kernels_says_that_it_is_invariant(name, dtype):
    model = target(name, dtype)
    lengths, passes = list(model.lengths), model.passes
    assert model.batch_invariant and model.batch_invariant, model.reasons
    assert model.lengths == lengths and model.passes == passes


def test_others_say_why_not():
    mine = Target(tiny())
    assert not mine.batch_invariant and "passes are eager" in mine.reasons["batch_invariant"]
    packed = Target(build("llama", torch.float32), execution="packed", owned=True)
    assert not packed.batch_invariant and "passes are packed" in packed.reasons["batch_invariant"]


def test_the_check_sees_sums_by_slot(monkeypatch):
    """As they were before positions were told."""
    monkeypatch.setattr(Eager, "_place", lambda self, where: None)
    model = Target(build("llama", torch.float32), execution="native", owned=True)
    assert not model.batch_invariant and "nodes of a tree" in model.reasons["batch_invariant"]


def test_the_check_sees_other_products(monkeypatch):
    """torch's own, of which nothing is known."""
    monkeypatch.setattr(invariance, "refusal", lambda backend: None)
    model = Target(build("llama", torch.float32), execution="eager")
    assert not model.batch_invariant and "bit for bit" in model.reasons["batch_invariant"]


# -- texts ------------------------------------------------------------------------------------------------------------------


class Bushy(Drafter):
    """Another tree in every round, with the plain text on some path of it."""

    name, info = "bushy", DrafterInfo(branches=True)

    def __init__(self, known):
        self.known, self.rounds = known, 0

    def draft(self, request):
        self.rounds += 1
        tree = forest(len(request.rows), self.rounds)
        for line, parents, row in zip(tree.tokens, tree.parents.tolist(), request.rows):
            line[0] = row.ids[-1]
            text = self.known.get(tuple(row.ids[: row.prompt_length]), [])[len(row.ids) - row.prompt_length :]
            node = 0
            for token in text:
                below = [child for child, parent in enumerate(parents) if parent == node]
                if not below:
                    break
                node = below[-1]
                line[node] = token
        return tree


def written(speculator, prompts, joins):
    """By number of those ``prompts`` that join at a step: the tokens, and log-probabilities."""
    session, slots, found, step = speculator.session(), {}, {}, 0
    while session.live or len(slots) < len(joins):
        for number in (number for number, join in joins.items() if join == step):
            parameters = RowParameters(max_new_tokens=14, do_sample=True, seed=(number, 1), logprobs=3)
            slots[session.add(prompts[number], parameters)] = number
        for commit in session.step():
            found.setdefault(slots[commit.slot], []).append(commit)
        step += 1
    return {
        number: (
            [token for commit in commits for token in commit.tokens],
            torch.cat([commit.logprobs.chosen for commit in commits]),
            torch.cat([commit.logprobs.values for commit in commits]),
        )
        for number, commits in found.items()
    }


KERNELS = [
    "llama",
    "llama-int4",
    "gemma3",
    "qwen3_moe",
    "mixtral-int4",
    "gpt_oss",
    "deepseek_v3",
]  # between them, all that passes are made of


def built(name, dtype):
    model = build(name.removesuffix("-int4"), dtype)
    if name.endswith("-int4"):
        quantize(model, "int4")
    return model


@pytest.mark.parametrize(("name", "dtype"), covered(KERNELS, DTYPES, ways=1))
def test_texts_and_log_probabilities_do_not_depend_on_the_load(name, dtype):
    prompts = texts((61, 40, 30, 100), 11)
    plain = Speculator(built(name, dtype), "none", execution="native")
    assert plain.target.execution == "native" and plain.target.batch_invariant, plain.target.reasons
    alone = {}
    for number in range(len(prompts)):
        alone |= written(plain, prompts, {number: 0})
    drafter = Bushy({tuple(prompt): alone[number][0] for number, prompt in enumerate(prompts)})
    drafted = Speculator(built(name, dtype), drafter, execution="native", shape="product(2,1)")
    together = written(drafted, prompts, {0: 0, 1: 0, 2: 2, 3: 3})
    assert 0 < drafter.rounds < 14, "what was drafted was kept now and then"
    for number, (tokens, *logprobs) in alone.items():
        assert together[number][0] == tokens
        assert all(torch.equal(mine, own) for mine, own in zip(together[number][1:], logprobs))

"""Targets whose keys and values are in pages, beside such whose are not, and the same rounds on both."""

from __future__ import annotations

import copy

import torch
from architectures import ARCHITECTURES
from helpers import random_tree

from foredraft import TokenTree
from foredraft.models.page_stores import GONE
from foredraft.models.paged_cache import PagedCache
from foredraft.models.pages import PAGE
from foredraft.target import Target


def wide(name, dtype=torch.float32, size=16, how=None, **options):
    """A tiny model with heads of so many numbers."""
    make = ARCHITECTURES[name].build
    given = {**make.args[-1], "hidden_size": 4 * size, **options}
    if "n_embd" in given:
        given["n_embd"] = given.pop("hidden_size")
    if "num_key_value_heads" in given:
        given["head_dim"] = size
    if "num_local_experts" in given:
        given["num_experts_per_tok"] = given["num_local_experts"]  # rounding does not choose others
    return make.func(*make.args[:-1], given, how or ARCHITECTURES[name].implementations[0]).to(dtype)


def pair(model):
    """Targets with pages and without; in bfloat16 also one of the same weights in float32."""
    paged = Target(model, execution="eager")
    assert isinstance(paged.cache, PagedCache), paged.reasons
    models = [model] if model.dtype == torch.float32 else [model, copy.deepcopy(model).float()]
    others = [Target(each, execution="eager", test=False) for each in models]
    assert not any(isinstance(each.cache, PagedCache) for each in others)
    return [paged, *others]


def text(length, seed=0):
    return [(7 * i * i + 3 * seed * i + seed) % 100 for i in range(length)]


def close(got, wanted, exact=None):
    """In bfloat16, ``got`` is as near to what is ``exact`` as what is ``wanted``."""
    if exact is None:
        assert (got - wanted).abs().max() <= 2e-5 * wanted.abs().max()
    else:
        error, allowed = ((each.float() - exact).square().mean().sqrt() for each in (got, wanted))
        assert error <= 1.5 * allowed


@torch.inference_mode()
def read(target, texts):
    first = len(target.lengths)
    target.open(texts)
    return target.prefill(texts, first=first)


@torch.inference_mode()
def through(targets, texts, seeds=range(3)):
    """The same rounds on both: prefills, trees of which a path is kept, chains, and rows that leave."""
    for found in zip(*(read(target, list(map(list, texts))) for target in targets)):
        close(*found)
    for seed in seeds:
        rows = len(targets[0].lengths)
        tree = random_tree(rows, 9, seed)
        tree = TokenTree(tree.tokens % 100, tree.parents)
        close(*(target.score(tree) for target in targets))
        leaf = tree.parents.tolist()[0].index(0) if 0 in tree.parents.tolist()[0] else 1
        for target in targets:
            target.commit(torch.tensor([[0, leaf]] * rows), [2 if row == 0 else 1 for row in range(rows)])
        committed(targets)
        chain = TokenTree.from_chain(tree.tokens[:, :5])
        close(*(target.score(chain) for target in targets))
        for target in targets:
            target.commit(None, [5 - row % 2 for row in range(rows)])
        committed(targets)
        if rows > 1:
            for target in targets:
                target.compact(list(range(1, rows)))
    one = torch.tensor([7] * len(targets[0].lengths))
    close(*(target.advance(one) for target in targets))


def committed(targets):
    """What the pages of the first target hold of its rows, apart from those that windows gave back, is what the other caches hold."""
    paged, others = targets[0].cache, [target.cache for target in targets[1:]]
    assert len({tuple(each.lengths) for each in (paged, *others)}) == 1
    for row, length in enumerate(paged.lengths):
        for index, layer in enumerate(paged.layers):
            if not len(layer.keys):
                continue
            table = paged._store(index).tables[row]
            there = [slot for slot in range(length) if table[slot // PAGE] != GONE]
            pages, slots = torch.tensor([table[slot // PAGE] for slot in there]), torch.tensor(there)
            assert there[-1] == length - 1
            for name in ("keys", "values"):
                mine = getattr(layer, name)[pages, :, slots % PAGE].transpose(0, 1)
                close(mine, *(getattr(each.layers[index], name)[row, :, slots] for each in others))


def stored(cache, row, length):
    """Keys and values of the first ``length`` tokens of a row, layer by layer, ``[heads, length, size]``, wherever they lie."""
    found = []
    for index, layer in enumerate(cache.layers):
        for held in (layer.keys, layer.values) if len(layer.keys) else ():
            if isinstance(cache, PagedCache):
                table = cache._store(index).tables[row]
                assert min(table) >= 0, "its windows have given pages back"
                found.append(held[table].transpose(0, 1).flatten(1, 2)[:, :length])
            else:
                found.append(held[row, :, :length])
    return found


def texts_of(session, prompts, parameters):
    """What each row writes when all are added at once."""
    slots = [session.add(prompt, each) for prompt, each in zip(prompts, parameters)]
    found = {slot: [] for slot in slots}
    while session.live:
        for commit in session.step():
            found[commit.slot] += commit.tokens
    return list(found.values())

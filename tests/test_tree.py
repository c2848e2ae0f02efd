"""TokenTree and the walk down it, against the definitions spelled out node by node, on random trees."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foredraft.tree import KEPT, TokenTree, check_static_parents, reach, static_ancestors
from foredraft.verification import Verdict
from foredraft.verification.match import follow

VOCAB = 4
trees_per_property = settings(max_examples=100, deadline=None)


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    """Well-formed trees; siblings may repeat a token, and filler may lie anywhere below the valid nodes."""
    rows, nodes = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    tokens = [draw(st.lists(st.integers(0, VOCAB - 1), min_size=nodes, max_size=nodes)) for _ in range(rows)]
    parents = [[-1, *(draw(st.integers(0, node - 1)) for node in range(1, nodes))] for _ in range(rows)]
    valid = None
    if draw(st.booleans()):
        valid = [[True] for _ in range(rows)]
        for row in range(rows):
            for node in range(1, nodes):
                valid[row].append(valid[row][parents[row][node]] and draw(st.booleans()))
        valid = torch.tensor(valid)
    return TokenTree(torch.tensor(tokens), torch.tensor(parents), valid)


@st.composite
def chains(draw: st.DrawFn) -> TokenTree:
    rows, nodes = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    tokens = [draw(st.lists(st.integers(0, VOCAB - 1), min_size=nodes, max_size=nodes)) for _ in range(rows)]
    valid = None
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(1, nodes), min_size=rows, max_size=rows))
        valid = torch.arange(nodes)[None] < torch.tensor(lengths)[:, None]
    return TokenTree.from_chain(torch.tensor(tokens), valid=valid)


def choices_for(tree: TokenTree) -> st.SearchStrategy[Tensor]:
    """``[R, N]`` the target's choice at every node."""
    line = st.lists(st.integers(0, VOCAB - 1), min_size=tree.nodes, max_size=tree.nodes)
    return st.lists(line, min_size=tree.rows, max_size=tree.rows).map(torch.tensor)


def naive_path(tree: TokenTree, row: int, node: int) -> list[int]:
    parent = int(tree.parents[row, node])
    return [node] if parent < 0 else [*naive_path(tree, row, parent), node]


def general(tree: TokenTree) -> TokenTree:
    """The same tree without the promise that it is a chain."""
    return TokenTree(tree.tokens, tree.parents, tree.valid)


@trees_per_property
@given(trees() | chains())
def test_ancestors_depths_and_paths_are_those_of_the_walk_to_the_root(tree: TokenTree):
    ancestors, depths = tree.ancestors, tree.depths
    assert ancestors.shape == (tree.rows, tree.nodes, tree.nodes) and depths.shape == tree.tokens.shape
    for row in range(tree.rows):
        for node in range(tree.nodes):
            path = naive_path(tree, row, node)
            assert ancestors[row, node].nonzero()[:, 0].tolist() == path
            assert int(depths[row, node]) == len(path) - 1
            assert tree.path(row, node) == path


def test_ancestors_of_trees_deeper_than_one_doubling():
    """A path of 130 nodes with a second one beside it: pointer doubling must take all its steps."""
    parents = torch.tensor([[-1, 0, *range(129)]])
    tree = TokenTree(torch.zeros_like(parents), parents)
    assert tree.depths[0].tolist() == [len(naive_path(tree, 0, node)) - 1 for node in range(tree.nodes)]
    assert tree.ancestors[0, -1].nonzero()[:, 0].tolist() == naive_path(tree, 0, tree.nodes - 1)


@trees_per_property
@given(trees() | chains())
def test_drafted_counts_the_nodes_that_are_no_filler(tree: TokenTree):
    real = torch.ones_like(tree.tokens) if tree.valid is None else tree.valid.long()
    assert tree.drafted.tolist() == [int(line.sum()) - 1 for line in real]


@trees_per_property
@given(chains(), st.data())
def test_a_chain_is_the_tree_in_which_each_node_hangs_below_the_one_before(chain: TokenTree, data: st.DataObject):
    tree = general(chain)
    assert chain.chain and not tree.chain
    assert chain.parents.tolist() == [[node - 1 for node in range(chain.nodes)]] * chain.rows
    assert torch.equal(chain.ancestors, tree.ancestors) and torch.equal(chain.depths, tree.depths)
    assert torch.equal(chain.drafted, tree.drafted)
    choices = data.draw(choices_for(chain))
    assert_same(chain, follow(chain, choices), follow(tree, choices))


def test_the_root_alone():
    tree = TokenTree.root(torch.tensor([3, 1]))
    assert tree.tokens.tolist() == [[3], [1]] and tree.parents.tolist() == [[-1], [-1]] and tree.chain
    assert tree.drafted.tolist() == [0, 0] and tree.valid is None and tree.q is None
    for each in (tree, general(tree)):
        verdict = follow(each, torch.tensor([[2], [0]]))
        assert verdict.accepted.tolist() == [0, 0] and verdict.next_token.tolist() == [2, 0]


# -- following the target's choices --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Walk:
    path: list[int]
    next_token: int


def naive_walk(tree: TokenTree, choices: Tensor, row: int) -> Walk:
    """From the root along valid nodes that carry their parent's choice, to the deepest of them, the first of several."""
    reached = [0]
    for node in range(1, tree.nodes):
        parent = int(tree.parents[row, node])
        valid = tree.valid is None or bool(tree.valid[row, node])
        if valid and parent in reached and int(tree.tokens[row, node]) == int(choices[row, parent]):
            reached.append(node)
    paths = [naive_path(tree, row, node) for node in reached]
    path = max(paths, key=len)
    return Walk(path, int(choices[row, path[-1]]))


def assert_same(tree: TokenTree, first: Verdict, second: Verdict) -> None:
    assert first.accepted.tolist() == second.accepted.tolist()
    assert first.next_token.tolist() == second.next_token.tolist()
    for row, accepted in enumerate(first.accepted.tolist()):
        assert first.path[row, : accepted + 1].tolist() == second.path[row, : accepted + 1].tolist()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_follow_is_the_walk_along_the_targets_choices(data: st.DataObject):
    tree = data.draw(trees() | chains())
    choices = data.draw(choices_for(tree))
    verdict = follow(tree, choices)
    assert verdict.path.shape[0] == tree.rows and int(verdict.path.min()) >= 0 and int(verdict.path.max()) < tree.nodes
    for row in range(tree.rows):
        walk = naive_walk(tree, choices, row)
        assert int(verdict.accepted[row]) == len(walk.path) - 1
        assert int(verdict.next_token[row]) == walk.next_token
        assert verdict.path[row, : len(walk.path)].tolist() == walk.path


# -- what check refuses --------------------------------------------------------------------------------------------------


@trees_per_property
@given(trees() | chains())
def test_check_passes_what_is_well_formed(tree: TokenTree):
    tree.check(VOCAB)


def tree_of(tokens: list[int], parents: list[int], **rest) -> TokenTree:
    return TokenTree(torch.tensor([[0] * len(tokens), tokens]), torch.tensor([[-1] + [0] * (len(parents) - 1), parents]), **rest)


def valid_of(*line: bool) -> Tensor:
    return torch.tensor([[True] * len(line), line])


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (tree_of([0, 1, 2], [-1, 2, 1]), "row 1: node 1 names parent 2, which does not come before it"),  # a cycle
        (tree_of([0, 1], [-1, 1]), "row 1: node 1 names parent 1"),  # its own parent
        (tree_of([0, 1, 2], [-1, 2, 0]), "row 1: node 1 names parent 2"),  # after its child
        (tree_of([0, 1, 2], [-1, 0, -1]), "row 1: node 2 has parent -1; node 0 must be the only root"),
        (tree_of([0, 1], [0, 0]), "row 1: node 0 has parent 0; node 0 must be the only root"),  # none
        (tree_of([0, 1], [-1, -2]), "row 1: node 1 has parent -2; node 0 must be the only root"),
        (tree_of([0, VOCAB], [-1, 0]), f"row 1, node 1: token {VOCAB} is outside the target's vocabulary of {VOCAB}"),
        (tree_of([0, -1], [-1, 0]), "row 1, node 1: token -1 is outside"),
        (tree_of([0, 1, 2], [-1, 0, 1], valid=valid_of(True, False, True)), "a valid node hangs below a filler node"),
        (tree_of([0, 1], [-1, 0], valid=valid_of(False, False)), "the root must be valid"),
        (tree_of([0, 1], [-1, 0], proposal="sampled"), "unknown proposal 'sampled'; one of deterministic, iid"),
        (tree_of([0, 1], [-1, 0], q=torch.zeros(2, 1, VOCAB + 1)), "q must be"),
        (tree_of([0, 1], [-1, 0], q=torch.zeros(1, 1, VOCAB)), "q must be"),
        (TokenTree.from_chain(torch.zeros(2, 3, dtype=torch.long), q=torch.zeros(2, 1, VOCAB)), "q must be [B=2, M >= 2, V=4]"),
        (tree_of([0, 1], [-1, 0], valid=valid_of(True)), "valid must be [2, 2] like tokens"),
        (TokenTree(torch.zeros(1, 1), torch.tensor([[-1]])), "tokens and parents must be int64"),
        (TokenTree(torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 2, dtype=torch.long)), "tokens and parents must both be"),
        (TokenTree(torch.zeros(2, 0, dtype=torch.long), torch.zeros(2, 0, dtype=torch.long)), "tokens and parents must both be"),
    ],
)
def test_check_names_what_is_wrong(tree: TokenTree, message: str):
    with pytest.raises(ValueError) as error:
        tree.check(VOCAB)
    assert message in str(error.value)


def test_filler_may_hold_any_token():
    tree_of([0, VOCAB, -7], [-1, 0, 0], valid=valid_of(True, False, False)).check(VOCAB)


@settings(max_examples=50, deadline=None)
@given(trees(), st.data())
def test_check_finds_a_single_broken_parent_anywhere(tree: TokenTree, data: st.DataObject):
    row, node = data.draw(st.integers(0, tree.rows - 1)), data.draw(st.integers(0, tree.nodes - 1))
    wrong = data.draw(st.sampled_from([-2, *range(node, tree.nodes + 1), *([-1] if node else [])]))
    parents = tree.parents.clone()
    parents[row, node] = wrong
    with pytest.raises(ValueError, match=r"only root|come before"):
        TokenTree(tree.tokens, parents, tree.valid).check(VOCAB)


@pytest.mark.parametrize("promise", [{"static_parents": (-1, 0, 0)}, {"chain": True}])
@pytest.mark.parametrize("real", [None, torch.tensor([[True, True, False]] * 4)])
def test_parents_that_break_a_promise_are_not_read_at(promise, real):
    """Neither where the host can look at them nor on a device, where reading out of bounds is the end of it."""
    kept = [-1, 0, 1 if "chain" in promise else 0]
    parents = torch.tensor([[-1, 0, 99], [-1, -99, 0], [7, 0, 0], kept])
    tree = TokenTree(torch.zeros_like(parents), parents, real, **promise)
    tree.__dict__["parent_lists"] = None  # as on a device
    assert tree.with_safe_parents().parents.tolist() == [kept] * 4
    assert tree.malformed.tolist() == [True, True, True, False]
    with pytest.raises(ValueError, match=r"row 0: node 2 has parent 99; (static_parents says 0|a chain says 1)"):
        tree.check(VOCAB)


def test_ancestors_are_found_on_a_device_as_they_are_on_the_host():
    parents = [[-1, 0, 1, 2, 3, 4, 5, 6, 7], [-1, 0, 0, 1, 1, 3, 5, 6, 2]]
    tree = TokenTree(torch.zeros(2, 9, dtype=torch.long), torch.tensor(parents))
    assert tree.parent_lists == parents and torch.equal(reach(tree.parents), tree.ancestors)


def test_ancestors_of_prompts_are_not_kept():
    before = static_ancestors.cache_info()
    for nodes in (KEPT + 1, KEPT + 2):
        tree = TokenTree.from_chain(torch.zeros(2, nodes, dtype=torch.long))
        assert torch.equal(tree.ancestors, torch.ones(2, nodes, nodes, dtype=torch.bool).tril())
    assert static_ancestors.cache_info() == before


@pytest.mark.parametrize(("limit", "kept"), [(1, [1, 1, 0, 0]), (2, [1, 1, 1, 0]), (3, [1, 1, 1, 1])])
def test_truncating_keeps_what_is_no_deeper_than_the_limit(limit, kept):
    tree = TokenTree(torch.arange(4)[None], torch.tensor([[-1, 0, 1, 2]])).truncate([limit])
    assert (tree.valid is None and all(kept)) or tree.valid.tolist() == [list(map(bool, kept))]


def test_a_node_below_filler_makes_a_row_malformed():
    tree = TokenTree(torch.zeros(2, 3, dtype=torch.long), torch.tensor([[-1, 0, 1]] * 2), torch.tensor([[1, 0, 1], [1, 1, 0]]).bool())
    assert tree.malformed.tolist() == [True, False]


def test_a_node_that_is_its_own_parent_is_refused():
    with pytest.raises(ValueError, match="node 2 has parent 2"):
        check_static_parents((-1, 0, 2))

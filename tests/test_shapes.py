"""Tree shapes: what they hold, how they are written, and what is refused before a pass is made."""

from __future__ import annotations

import pytest
from helpers import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft import ConfigurationError, Speculator, TreeShape
from foredraft.drafters.base import Drafter
from foredraft.drafters.draft_model import DraftModel
from foredraft.shapes import DynamicShape, StaticShape, depths_of

WRITTEN = [
    "chain(5)",
    "chain(0)",
    "product(4,2,1)",
    "paths(0,1,0.0,0.1,1.0)",
    "dynamic(depth=5,k=4,total=16)",
    "opt(total=16,depth=8,delta=0.05)",
    "opt(total=16,depth=8,delta=1e-05)",
    "opt(total=24,depth=8,delta=0.05,floor=0.02,k=4)",
]


@pytest.mark.parametrize("text", WRITTEN)
def test_a_shape_reads_as_it_prints(text: str):
    assert str(TreeShape.parse(text)) == text
    assert TreeShape.parse(TreeShape.parse(text)) == TreeShape.parse(text)


def test_the_shapes_are_what_their_names_say():
    assert TreeShape.chain(3) == TreeShape.parse("chain(3)") and TreeShape.chain(3).parents == (-1, 0, 1, 2) and TreeShape.chain(3).is_chain
    product = TreeShape.product(2, 2)
    assert product.parents == (-1, 0, 0, 1, 1, 2, 2) and (product.depth, product.nodes, product.is_chain) == (2, 6, False)
    assert TreeShape.product(1, 1).is_chain
    assert TreeShape.paths([(1, 0), (0,), (0, 0), (1,), (0, 0, 0)]).parents == (-1, 0, 0, 1, 2, 3)
    assert TreeShape.parse("dynamic(5,4,16)") == TreeShape.dynamic(depth=5, k=4, total=16) == DynamicShape(5, 4, 16)
    assert not TreeShape.dynamic().static and TreeShape.dynamic().nodes == 16


@st.composite
def static(draw: st.DrawFn) -> StaticShape:
    """Any tree of ranks: every node added below an earlier one."""
    paths: list[tuple[int, ...]] = [()]
    children = {(): 0}
    for _ in range(draw(st.integers(1, 12))):
        above = draw(st.sampled_from(paths))
        path = (*above, children[above])
        children[above] += 1
        children[path] = 0
        paths.append(path)
    return TreeShape.paths(paths[1:])


@settings(max_examples=50, deadline=None)
@given(static(), st.integers(0, 6))
def test_levels_cut_and_print(shape: StaticShape, depth: int):
    assert TreeShape.parse(str(shape)) == shape
    depths = depths_of(shape.parents)
    assert depths == sorted(depths), "level by level"
    for number, level in enumerate(shape.levels, 1):
        assert all(depths[node] == number for node in range(level.first, level.last)) and depths[level.above] == number - 1
        assert level.parents == shape.parents[level.first : level.last]
        for parent in set(level.parents):
            ranks = [rank for rank, above in zip(level.ranks, level.parents) if above == parent]
            assert ranks == list(range(len(ranks))), "siblings follow each other in the order of their ranks"
    cut = shape.truncate(depth)
    assert cut.parents == tuple(parent for parent, at in zip(shape.parents, depths) if at <= depth) and cut.depth == min(depth, shape.depth)


def test_a_dynamic_shape_is_cut_to_what_it_can_hold():
    assert TreeShape.dynamic(depth=4, k=3, total=20).truncate(2) == DynamicShape(2, 3, 12)
    assert TreeShape.dynamic(depth=4, k=3, total=20).truncate(1) == DynamicShape(1, 3, 3)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("chian(3)", "unknown shape 'chian(3)', did you mean 'chain'? Write chain(5), product"),
        ("chain", "unknown shape 'chain'"),
        ("chain(-1)", "length must be a whole number of at least 0, got -1"),
        ("chain(x)", "cannot parse shape"),
        ("chain(5000)", "may have 4096 at most"),
        ("product()", "needs a sibling count per level"),
        ("product(4,0)", "at least 1, got 0"),
        ("product(2.5)", "at least 1, got 2.5"),
        ("product(20,20,20)", "may have 4096 at most"),
        ("paths()", "at least one path"),
        ("paths(0.0)", "hold 0.0 without its beginning, 0"),
        ("paths(1)", "hold 1 without the sibling ranked before it, 0"),
        ("paths(-1)", "a rank must be a whole number of at least 0"),
        ("dynamic(deep=3)", "unexpected keyword"),
        ("dynamic(depth=1,k=2,total=5)", "grows 2 nodes; total=5 must not be above that"),
        ("dynamic(k=0)", "k must be a whole number of at least 1"),
        ("opt(delta=1.5)", "delta must be a number from 0 to 1"),
        ("opt(floor=1)", "floor must be a number from 0 to 1"),
        ("opt(k=0)", "k must be a whole number of at least 1"),
        (5, "unknown shape 5"),
    ],
)
def test_what_makes_no_shape(shape, message: str):
    with pytest.raises(ConfigurationError) as error:
        Speculator(tiny(), drafter="none", shape=shape)
    assert message in str(error.value)


# -- what does not fit, when a Speculator is built -------------------------------------------------------------------------


def speculator(shape: str, drafter: str | Drafter | None = None, **options) -> Speculator:
    return Speculator(tiny(), drafter=drafter or DraftModel(tiny()), shape=shape, **options)


class ChainsAlone(Drafter):
    name = "chains-alone"
    summary = "nothing, in chains"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": "product(2,2)", "drafter": ChainsAlone()}, "drafter 'chains-alone' drafts chains only; use shape='chain(2)'"),
        ({"shape": "product(2,2)", "rule": "rejection"}, "rule 'rejection' verifies chains only"),
        ({"shape": "product(2,2)", "rule": "block"}, "rule 'block' verifies chains only"),
        (
            {"shape": "dynamic(depth=2,k=2,total=4)", "rule": "traversal", "drafter": DraftModel(tiny(), siblings="iid")},
            "dropped by their probability",
        ),
        ({"shape": "product(2,2)", "rule": "k-seq", "drafter": DraftModel(tiny(), siblings="without-replacement")}, "'k-seq' is not exact"),
        (
            {"shape": "product(2,2)", "rule": "multi-candidate", "drafter": DraftModel(tiny(), siblings="top-k")},
            "not exact for deterministic",
        ),
        ({"shape": "chain(3)", "rule": "traversal", "drafter": "prompt-lookup"}, "not exact for deterministic proposals"),
        ({"shape": "product(2000)"}, "context holds"),
        ({"shape": "product(130)"}, "130 different siblings, but the vocabulary has only"),
        ({"shape": "chain(2)", "draft_length": 2}, "pass either draft_length or shape"),
    ],
)
def test_what_does_not_fit(options: dict, message: str):
    with pytest.raises(ConfigurationError) as error:
        speculator(**options)
    assert message in str(error.value)


def test_a_lossy_rule_needs_consent():
    with pytest.raises(ConfigurationError, match="rule 'typical' is lossy: it changes the output distribution; pass lossless=False"):
        speculator("product(2,2)", rule="typical")
    assert not speculator("product(2,2)", rule="typical", lossless=False).rule.lossless


@pytest.mark.parametrize(
    ("shape", "siblings", "rule", "proposal"),
    [
        ("chain(3)", "auto", "block", "iid"),
        ("chain(3)", "without-replacement", "traversal", "without-replacement"),
        ("product(3,1)", "auto", "traversal", "without-replacement"),
        ("product(3,1)", "iid", "traversal", "iid"),
        ("product(3,1)", "keyed", "match", "keyed"),
        ("product(3,1)", "top-k", "match", "deterministic"),
        ("dynamic(depth=3,k=2,total=5)", "auto", "match", "keyed"),
        ("dynamic(depth=3,k=2,total=5)", "without-replacement", "match", "without-replacement"),
    ],
)
def test_auto_picks_the_exact_rule_that_accepts_most(shape: str, siblings: str, rule: str, proposal: str):
    built = speculator(shape, DraftModel(tiny(), siblings=siblings))
    assert (built.rule.name, built.proposal) == (rule, proposal)


@pytest.mark.parametrize(
    ("rule", "proposal"),
    [("match", "keyed"), ("k-seq", "iid"), ("multi-candidate", "without-replacement"), ("traversal", "without-replacement")],
)
def test_the_draft_model_chooses_siblings_as_the_rule_wants_them(rule: str, proposal: str):
    assert speculator("product(3,1)", rule=rule).proposal == proposal

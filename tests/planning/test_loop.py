"""The planner in the loop: it never changes what is generated, only how fast.

With the match rule the text is compared token for token with plain decoding. For rules that compare with q the law of whole
continuations is computed, with planners that change the shape from round to round, also by what was accepted before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from cover import covered
from helpers import PAD, Oracle, generate, make_drafter, padded, perturbed, plainly, prompts, repetitive, tiny

from foredraft import Session, Speculator, verification
from foredraft.cli.figures import combine, figures_line
from foredraft.drafters.base import Drafter
from foredraft.drafters.draft_model import DraftModel
from foredraft.drafters.several import Several
from foredraft.errors import ConfigurationError
from foredraft.planning import AutomaticPlanner, CostModel, FixedPlanner, Round, make_planner
from foredraft.planning.largest import largest_shape
from foredraft.rows import RowParameters
from foredraft.shapes import TreeShape
from foredraft.stats import Stats
from foredraft.testing import ProbabilityTable, ScriptedDrafter, TableTarget, continuation_law, continuations, distance, plain_law

NEW = 24


@dataclass
class Changing:
    """A planner that goes through ``shapes`` by turns, and on to the next but one after a round that accepted something."""

    shapes: Sequence[TreeShape]
    learns: bool = True
    turn: int = 0
    resting: int = 0
    rounds: list[Round] = field(default_factory=list)

    @property
    def shape(self) -> TreeShape:
        return max(self.shapes, key=lambda shape: shape.nodes)

    def prepare(self, target: Any, drafter: Drafter, rows: int) -> float:
        return 0.0

    def plan(self, rows: Sequence[Any], *, greedy: bool, together: bool = True) -> TreeShape:
        return self.shapes[self.turn % len(self.shapes)]

    def limits(self, rows: Sequence[Any]) -> list[int] | None:
        return None if self.turn % 2 == 0 else [(self.turn // 2 + row.slot + 1) % 3 for row in rows]

    def passes_over(self, rows: int, passes: int) -> bool:
        return False

    def plain_seconds(self, rows: int, context: float) -> tuple[float, bool] | None:
        return None

    def observe(self, rows: Sequence[Any], done: Round) -> None:
        self.turn += 2 if any(done.accepted) else 1
        self.rounds.append(done)


CHAINS = [TreeShape.chain(length) for length in (2, 0, 1, 3)]
TREES = [TreeShape.product(2, 1), TreeShape.chain(0), TreeShape.chain(2), TreeShape.paths([(0,), (1,), (2,), (1, 0)]), TreeShape.chain(1)]


class Timeless(AutomaticPlanner):
    """Does not learn how long a round took: worlds are replayed, and a round that the machine delays would be planned differently."""

    def observe(self, rows: Sequence[Any], done: Round) -> None:
        super().observe(rows, replace(done, draft=0.0, target=0.0, rest=0.0))


def planner_of(seconds: Callable[[int], float], largest: Any, *, level: float = 1e-4, grows: Sequence[bool] = ()) -> AutomaticPlanner:
    """An automatic planner that believes in these costs, whatever the machine takes."""
    costs = CostModel()
    for size in (1, 2, 5, 13, 25):
        costs.target.measured(1, size, seconds(size))
    costs.level.measured(1, 1, level)
    costs.fixed[1] = costs.catch_up[1] = 0.0
    costs.observe = lambda *_, **__: None  # type: ignore[method-assign]
    return Timeless(largest, grows=grows, costs=costs, budget=0, clock=lambda: 0.0)


def flat(nodes: int) -> float:
    return 1e-2 * (1 + 0.01 * nodes)


# -- the same text --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "sampled"), covered(["prompt-lookup", "ngram", "draft-model", "several"], [False, True], ways=1))
def test_with_match_the_text_is_the_same_with_the_planner_on_and_off(name: str, sampled: bool):
    rows = repetitive()
    options = {"max_new_tokens": NEW, "do_sample": sampled, "seed": 5}
    expected = plainly(tiny(), rows, **options)
    assert generate(Speculator(tiny(), make_drafter(name), rule="match", shape="chain(4)"), rows, **options) == expected
    auto = Speculator(tiny(), make_drafter(name), rule="match", shape="auto")
    assert generate(auto, rows, **options) == expected
    auto.planner = Changing(TREES if name in ("draft-model", "several") else CHAINS)
    assert generate(auto, rows, **options) == expected
    assert len({str(done.shape) for done in auto.planner.rounds}) > 1


@pytest.mark.parametrize("greedy", [True, False])
def test_a_planner_that_grows_trees_keeps_the_text(greedy):
    """Cheap nodes, and a draft that is nearly the target: trees are grown, and greedy or seeded text stays what it is."""
    options = {"max_new_tokens": 3 * NEW, "do_sample": not greedy, **({} if greedy else {"seed": 5})}
    expected = plainly(tiny(), repetitive()[:1], **options)
    speculator = Speculator(tiny(), make_drafter("draft-model"), shape="auto")
    speculator.planner = planner_of(flat, largest_shape(branches=True), level=1e-5, grows=[greedy])
    assert generate(speculator, repetitive()[:1], **options) == expected
    assert speculator.planner.forecaster.grown[greedy].rounds > 0


@pytest.mark.parametrize(("rule", "rounds"), [("match", {True, False}), ("traversal", {True}), ("block", set())])
def test_trees_are_grown_where_the_rule_is_exact_for_them(rule, rounds):
    """Nodes that were dropped for their tokens are no draws from q; greedy rounds use ``match``."""
    speculator = Speculator(tiny(), make_drafter("draft-model"), rule=rule, shape="auto")
    assert set(speculator.planner.forecaster.grown) == rounds


@pytest.mark.parametrize("shapes", [CHAINS, TREES], ids=["chains", "trees"])
def test_rows_that_come_and_go_get_the_text_they_get_alone(shapes):
    texts, drafter = prompts((30, 21, 26)), make_drafter("draft-model")
    alone = [generate(Speculator(tiny(), "none"), [text], max_new_tokens=NEW)[0] for text in texts]
    speculator = Speculator(tiny(), drafter, rule="match", shape="auto")
    session = speculator.session()
    session.planner = Changing(shapes)
    got: dict[int, list[int]] = {}
    for text in texts:
        got[session.add(text, RowParameters(max_new_tokens=NEW))] = []
        for _ in range(4):
            for commit in session.step():
                got[commit.slot] += commit.tokens
    while session.live:
        for commit in session.step():
            got[commit.slot] += commit.tokens
    assert list(got.values()) == alone


def test_a_draft_model_that_sat_out_rounds_drafts_as_if_it_had_not():
    """Its cache catches up: after plain rounds it accepts everything again, being the target itself."""
    speculator = Speculator(tiny(), DraftModel(tiny()), rule="match", shape="auto")
    plan = Changing([TreeShape.chain(3), TreeShape.chain(0), TreeShape.chain(0), TreeShape.product(2, 1, 1), TreeShape.chain(0)])
    speculator.planner = plan
    generate(speculator, prompts((20, 33)), max_new_tokens=40)
    drafted = [done for done in plan.rounds if done.shape.nodes]
    assert len(drafted) > 3 and all(min(done.accepted) == done.shape.depth or min(done.asked) < 3 for done in drafted)


# -- the same law ----------------------------------------------------------------------------------------------------------------


TABLES = ProbabilityTable.random(3, seed=1), ProbabilityTable.random(3, seed=2)


@pytest.mark.parametrize(
    ("rule", "proposal", "shapes"),
    [
        ("block", "iid", CHAINS),
        pytest.param("rejection", "iid", CHAINS, marks=pytest.mark.nightly),
        ("traversal", "without-replacement", [TreeShape.chain(2), TreeShape.chain(0), TreeShape.product(2)]),
        pytest.param(
            "traversal",
            "iid",
            [TreeShape.product(2), TreeShape.chain(1), TreeShape.chain(0), TreeShape.chain(2)],
            marks=pytest.mark.nightly,
        ),
        ("multi-candidate", "without-replacement", [TreeShape.product(2), TreeShape.chain(2), TreeShape.chain(0)]),
        ("match", "keyed", [TreeShape.product(2), TreeShape.chain(0), TreeShape.chain(2)]),
    ],
)
def test_shapes_that_change_from_round_to_round_keep_the_law(rule: str, proposal: Any, shapes):
    p, q = TABLES
    planners: list[Changing] = []

    law = law_of(lambda planner, randomness: Session(
        TableTarget(p), ScriptedDrafter(q, proposal=proposal), verification.create(rule), proposal=proposal, planner=planner, randomness=randomness  # type: ignore[arg-type] # noqa: E501
    ), lambda: Changing(shapes), planners)  # fmt: skip
    assert distance(law, plain_law(p, [0, 1], 4)) < 1e-9
    assert len({str(done.shape) for planner in planners for done in planner.rounds}) > 1
    assert any(any(done.accepted) for planner in planners for done in planner.rounds)


def law_of(make: Callable[[Any, Any], Session], planner: Callable[[], Any], planners: list[Any], count: int = 4) -> dict[Any, float]:
    """The law of whole continuations. Worlds run one by one: a planner's state is part of the world that it saw."""
    from foredraft.testing import enumerate_law

    def run(enumeration: Any) -> list[Any]:
        planners.append(planner())
        parameters = [RowParameters(max_new_tokens=count, do_sample=True, seed=seed) for seed in enumeration.seeds]
        return continuations(make(planners[-1], enumeration), [[0, 1]], parameters)

    with torch.inference_mode():
        return enumerate_law(run, batch=1)


def test_a_planner_that_looks_ahead_would_be_found():
    """The law is not kept by a shape that depends on what is drawn in the round itself."""
    p, q = TABLES

    class Cutting(ScriptedDrafter):
        def draft(self, request: Any) -> Any:
            tree = super().draft(request)
            return tree if int(tree.tokens[0, -1]) == 0 else type(tree).from_chain(tree.tokens[:, :-1], proposal=tree.proposal, q=tree.q[:, :-1] if tree.nodes > 2 else None)  # fmt: skip # noqa: E501

    law = continuation_law(
        lambda randomness: Session(TableTarget(p), Cutting(q), verification.create("block"), proposal="iid", planner=FixedPlanner("chain(2)"), randomness=randomness),  # type: ignore[arg-type] # noqa: E501
        [0, 1],
        3,
    )  # fmt: skip
    assert distance(law, plain_law(p, [0, 1], 3)) > 1e-3


@pytest.mark.parametrize("rule", ["block", "traversal", "rejection"])
def test_the_automatic_planner_keeps_the_law(rule: str):
    """With costs under which it drafts in some worlds and not in others, as acceptance goes."""
    p, q = TABLES
    proposal: Any = "without-replacement" if rule == "traversal" else "iid"
    planners: list[AutomaticPlanner] = []

    def planner() -> AutomaticPlanner:
        return planner_of(
            lambda nodes: 1e-2 * (1 + 0.22 * (nodes - 1)), largest_shape(branches=rule == "traversal", vocab_size=3, depth=3, nodes=6)
        )

    def make(planner: Any, randomness: Any) -> Session:
        target: Any = TableTarget(p)
        session = Session(
            target,
            ScriptedDrafter(q, proposal=proposal),
            verification.create(rule),
            proposal=proposal,
            planner=planner,
            randomness=randomness,
        )
        stats.append(session.stats)
        return session

    stats: list[Stats] = []
    law = law_of(make, planner, planners)
    assert distance(law, plain_law(p, [0, 1], 4)) < 1e-9
    assert len({shape for each in stats for shape in each.shapes}) > 1


# -- what it picks, in the loop ------------------------------------------------------------------------------------------------


def test_hopeless_text_is_decoded_plainly():
    class Wrong(Oracle):
        def _next(self, ids: list[int], limit: int, vocabulary: int) -> list[int]:
            return [(token + 1) % vocabulary for token in super()._next(ids, limit, vocabulary)]

    text = prompts((30,))
    whole = [text[0] + generate(Speculator(tiny(), "none"), text, max_new_tokens=300)[0]]
    speculator = Speculator(tiny(), Wrong(whole, wrong=10**9), shape="auto")
    speculator.planner = planner_of(lambda nodes: 1e-2 * nodes**0.7, largest_shape(branches=False))
    output = speculator.generate(**padded(text), max_new_tokens=300, pad_token_id=PAD)
    assert output.stats.accepted == 0 and output.stats.shapes["chain(0)"] > 290 > output.stats.row_passes - 10
    speculator = Speculator(tiny(), Oracle(whole, wrong=10**9), shape="auto")
    speculator.planner = planner_of(flat, largest_shape(branches=False))
    output = speculator.generate(**padded(text), max_new_tokens=300, pad_token_id=PAD)
    assert output.stats.acceptance_length > 6


def test_acceptance_is_tracked_from_the_rounds_of_a_batch_and_of_trees():
    speculator = Speculator(tiny(), DraftModel(perturbed()), rule="match", shape="auto")
    speculator.planner = planner_of(flat, largest_shape(branches=True))
    stats = speculator.generate(**padded(prompts()), max_new_tokens=60, pad_token_id=PAD).stats
    tracked = speculator.planner.acceptance[True]
    true = stats.accepted_by_depth[0] / sum(stats.shapes[shape] for shape in stats.shapes if shape != "chain(0)") / 3
    first, second = tracked.by_rank(1, 2)[0]
    assert 0.3 < true < 1 and first + second == pytest.approx(true, abs=0.2)
    assert tracked.rounds > 10


def test_paths_of_trees_reach_the_planner_as_they_were_kept():
    speculator = Speculator(tiny(), DraftModel(tiny()), rule="match", shape="auto")
    speculator.planner = plan = Changing([TreeShape.product(2, 2)])
    generate(speculator, prompts((20, 33)), max_new_tokens=20)
    whole = [done for done in plan.rounds if min(done.asked) >= 2]
    assert whole and all(list(path) == [0, 1, 3] for done in whole for path in done.paths)  # the target's own choice is ranked first
    assert all(done.static_parents == (-1, 0, 0, 1, 1, 2, 2) and done.drafted == [[2, 4]] * 2 for done in whole)


# -- how it is asked for ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafter", "rule", "picked", "proposal", "chain"),
    [
        ("prompt-lookup", "auto", "match", "deterministic", True),
        ("draft-model", "auto", "traversal", "without-replacement", False),
        ("draft-model", "block", "block", "iid", True),
        ("draft-model", "rejection", "rejection", "iid", True),
        ("draft-model", "match", "match", "keyed", False),
        ("draft-model", "multi-candidate", "multi-candidate", "without-replacement", False),
        ("several", "auto", "match", "mixed", False),
    ],
)
def test_auto_is_the_default_and_its_rule_fits_every_shape_it_may_pick(drafter, rule, picked, proposal, chain):
    speculator = Speculator(tiny(), make_drafter(drafter), rule=rule)
    assert (str(speculator.shape), speculator.shape.is_chain) == ("auto", chain)
    assert (speculator.rule.name, speculator.proposal) == (picked, proposal)


def test_a_target_that_verifies_chains_only_gets_chains():
    speculator = Speculator(tiny("mamba2", "eager"), DraftModel(tiny("mamba2", "eager")), shape="auto")
    assert speculator.target.chains_only and speculator.shape.is_chain
    assert (speculator.rule.name, speculator.proposal) == ("block", "iid")


def test_plain_decoding_has_nothing_to_plan():
    speculator = Speculator(tiny(), "none")
    assert str(speculator.shape) == "chain(0)" and not speculator.planner.learns


def test_a_session_alone_plans_too():
    target: Any = TableTarget(TABLES[0])
    drafter, rule = ScriptedDrafter(TABLES[1]), verification.create("block")
    session = Session(target, drafter, rule, proposal="iid", planner=make_planner(target, drafter, rule, "iid"))
    assert str(session.shape) == "auto" and session.shape.is_chain
    session.add([0, 1], RowParameters(max_new_tokens=20, do_sample=True))
    while session.live:
        session.step()
    assert session.stats.new_tokens == 20


def test_statistics_say_which_shapes_were_asked_for():
    fixed = Speculator(tiny(), "prompt-lookup", shape="chain(3)").generate(**padded(repetitive()), max_new_tokens=8, pad_token_id=PAD).stats
    assert fixed.shape == "chain(3)" and fixed.shapes.keys() <= {"chain(3)", "chain(0)"} and fixed.shapes["chain(3)"] > 0
    auto = Speculator(tiny(), make_drafter("draft-model"), shape="auto")
    stats = auto.generate(**padded(repetitive()), max_new_tokens=8, pad_token_id=PAD).stats
    assert stats.shape == "auto" and sum(stats.shapes.values()) >= stats.row_passes / 3
    assert stats.to_dict()["shapes"] == stats.shapes and sum(stats.seconds[part] for part in stats.seconds if part != "total") == pytest.approx(stats.seconds["total"])  # fmt: skip # noqa: E501
    both = combine([fixed, fixed], seed=None)
    assert both.shapes == {shape: 2 * rounds for shape, rounds in fixed.shapes.items()}
    assert "shape auto, mostly " in figures_line(stats, drafter="draft-model", sampled=False)


def test_a_merged_tree_of_several_drafters_can_be_planned():
    speculator = Speculator(tiny(), Several([DraftModel(perturbed()), "prompt-lookup"]), shape="auto")
    speculator.planner = planner_of(flat, largest_shape(branches=True))
    expected = plainly(tiny(), repetitive(), max_new_tokens=NEW)
    assert generate(speculator, repetitive(), max_new_tokens=NEW) == expected


@pytest.mark.parametrize("name", ["prompt-lookup", "draft-model"])
def test_an_audit_takes_a_configuration_that_plans(name: str):
    from foredraft.auditing import exact

    part = exact.check(Speculator(tiny(), make_drafter(name), shape="auto"))
    assert part.error < part.bound and part.cut


def test_shape_and_draft_length_are_refused_together_and_auto_is_a_shape():
    with pytest.raises(ConfigurationError, match="either draft_length or shape"):
        Speculator(tiny(), "prompt-lookup", shape="auto", draft_length=3)
    with pytest.raises(ConfigurationError, match="unknown shape 'automatic'"):
        Speculator(tiny(), "prompt-lookup", shape="automatic")

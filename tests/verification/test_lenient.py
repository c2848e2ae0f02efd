"""Lenient acceptance: its law is the formula's, between rejection (epsilon = 1) and the draft's own (epsilon near 0); lossy by consent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from laws import law_of

from foredraft import Speculator, zoo
from foredraft.drafters.draft_model import DraftModel
from foredraft.errors import ConfigurationError
from foredraft.logits.noise import Noise
from foredraft.testing import Law, ProbabilityTable, ScriptedDrafter, distance, plain_law
from foredraft.tree import TokenTree
from foredraft.verification import create
from foredraft.verification.lenient import Lenient

PROMPT, COUNT, DEPTH = (0, 1), 4, 2
P, Q = ProbabilityTable.random(3, seed=1), ProbabilityTable.random(3, seed=2)


def zeroed(table: ProbabilityTable) -> ProbabilityTable:
    """``table`` with probability 0 for one token of each context."""

    def without(context: tuple[int, ...]) -> list[float]:
        weights = table(context)
        weights[sum(context) % 3] = 0
        return (weights / weights.sum()).tolist()

    return ProbabilityTable(without, 3, order=table.order)


def enumerated(rule: str, p: ProbabilityTable, q: ProbabilityTable) -> Law:
    return law_of(p, ScriptedDrafter(q, proposal="iid"), rule, f"chain({DEPTH})", prompt=PROMPT, count=COUNT)


def at_a_drafted_position(p: list[float], q: list[float], epsilon: float) -> Iterator[tuple[int, bool, float]]:
    """Token, whether the draft goes on below it, and probability."""
    accepted = [min(b, a / epsilon) for a, b in zip(p, q)]
    left = [max(0.0, a - epsilon * b) for a, b in zip(p, q)]
    for token, kept in enumerate(accepted):
        yield token, True, kept
        yield token, False, (1 - sum(accepted)) * left[token] / sum(left)


def by_the_formula(p: ProbabilityTable, q: ProbabilityTable, epsilon: float) -> Law:
    """Texts token by token: the first from p, then rounds of up to two drafted tokens, each followed by one from p if both were kept."""
    texts: Law = {}

    def go_on(text: tuple[int, ...], weight: float, depth: int, room: int) -> None:
        if weight == 0 or len(text) == COUNT:
            texts[text] = texts.get(text, 0.0) + weight
            return
        p_here, q_here = p([*PROMPT, *text]).tolist(), q([*PROMPT, *text]).tolist()
        if depth == min(DEPTH, room):
            for token, mass in enumerate(p_here):
                begin((*text, token), weight * mass)
            return
        for token, kept, mass in at_a_drafted_position(p_here, q_here, epsilon):
            if kept:
                go_on((*text, token), weight * mass, depth + 1, room)
            else:
                begin((*text, token), weight * mass)

    def begin(text: tuple[int, ...], weight: float) -> None:
        go_on(text, weight, 0, COUNT - len(text) - 1)

    for token, mass in enumerate(p(list(PROMPT)).tolist()):
        begin((token,), mass)
    return texts


@pytest.mark.parametrize("epsilon", [0.9, 0.5, 0.1, 1e-3])
@pytest.mark.parametrize("tables", [(P, Q), (zeroed(P), zeroed(Q)), (P, zeroed(Q))], ids=["dense", "zeros in both", "zeros in q"])
def test_the_law_is_the_formulas(tables: tuple[ProbabilityTable, ProbabilityTable], epsilon: float):
    found = enumerated(f"lenient(epsilon={epsilon})", *tables)
    assert distance(found, by_the_formula(*tables, epsilon)) < 1e-9
    assert distance(found, plain_law(tables[0], list(PROMPT), COUNT)) > (0.01 if epsilon > 0.5 else 0.05)


def test_the_law_of_a_drafted_token_is_the_formulas_and_no_token_gets_much_likelier():
    for text in ([0], [1, 2], [2, 2, 0]):
        for p, q in [(P, Q), (zeroed(P), zeroed(Q))]:
            expected = torch.zeros(3, dtype=torch.float64)
            for token, _, mass in at_a_drafted_position(p(text).tolist(), q(text).tolist(), 0.4):
                expected[token] += mass
            law = Lenient(epsilon=0.4).law(p(text)[None].double(), q(text)[None].double())[0]
            torch.testing.assert_close(law, expected)
            assert bool((law <= p(text).double() / 0.4 + 1e-12).all())


def test_epsilon_1_is_rejection_bit_for_bit():
    generator = torch.Generator().manual_seed(3)
    for temperature in (0.2, 1.0, 5.0):
        p, q = (torch.softmax(torch.randn(64, width, 50, generator=generator) / temperature, -1) for width in (5, 4))
        drawn = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(64, 4)
        noise = Noise(torch.arange(64), torch.full((64,), 9))
        tree = TokenTree.from_chain(torch.cat([drawn[:, :1], drawn], 1), proposal="iid", q=q)
        mine, theirs = (create(rule).verify(tree, p, noise) for rule in ("lenient(epsilon=1)", "rejection"))
        assert torch.equal(mine.accepted, theirs.accepted) and torch.equal(mine.next_token, theirs.next_token)
        assert 0 < int(theirs.accepted.sum()) < 4 * 64 or temperature == 5.0
    assert enumerated("lenient(epsilon=1)", P, Q) == enumerated("rejection", P, Q)


def test_epsilon_near_0_draws_from_q():
    """But for the tokens that follow a whole draft, and a token that the target never says."""
    law = Lenient(epsilon=1e-6).law(P([0])[None], Q([0])[None])[0]
    torch.testing.assert_close(law, Q([0]))
    law = Lenient(epsilon=1e-6).law(torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.25, 0.25, 0.5]]))[0]
    torch.testing.assert_close(law, torch.tensor([0.5, 0.5, 0.0]))
    drafted = enumerated("lenient(epsilon=1e-6)", P, Q)
    by_hand = {
        (a, b, c, d): float(P(PROMPT)[a] * Q([0, 1, a])[b] * Q([0, 1, a, b])[c] * P([0, 1, a, b, c])[d])
        for a in range(3)
        for b in range(3)
        for c in range(3)
        for d in range(3)
    }
    assert distance(drafted, by_hand) < 1e-9


def test_consent_chains_and_options():
    models = zoo.load("python-1m"), DraftModel(zoo.load("python-1m"), execution="eager")
    for rule in ("lenient", "lenient(epsilon=0.2)", Lenient(epsilon=1.0)):
        with pytest.raises(ConfigurationError, match=r"rule 'lenient' is lossy.*lossless=False"):
            Speculator(*models, rule=rule, shape="chain(2)")
    with pytest.raises(ConfigurationError, match="chains only"):
        Speculator(*models, rule="lenient", shape="product(2,2)", lossless=False)
    with pytest.raises(ConfigurationError, match="not exact for deterministic"):
        Speculator(models[0], "prompt-lookup", rule="lenient", shape="chain(2)", lossless=False)
    speculator = Speculator(*models, rule="lenient( epsilon = 0.2 )", shape="chain(2)", lossless=False, execution="eager")
    assert str(speculator.rule) == "lenient(epsilon=0.2)" and str(create("typical(delta=0.2)")) == "typical(epsilon=0.09,delta=0.2)"
    output = speculator("def f(", max_new_tokens=12, do_sample=True)
    assert not output.stats.lossless


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("lenient(epsilon=0)", "epsilon must lie between 1e-06 and 1, got 0.0"),
        ("lenient(epsilon=1.5)", "epsilon must lie"),
        ("lenient(epsilon=nan)", "epsilon must lie"),
        ("lenient(epsilon=half)", "epsilon must be a number, got 'half'"),
        ("lenient(lenience=0.5)", "has no option 'lenience'; it has epsilon"),
        ("lenient(0.5)", "has no option '0.5'"),
        ("rejection(epsilon=1)", "it has none"),
        ("linient(epsilon=1)", "unknown rule 'linient.*did you mean 'lenient'"),
        ("lenient(epsilon=1", "unknown rule"),
    ],
)
def test_rules_that_cannot_be(rule: str, message: str):
    with pytest.raises(ConfigurationError, match=message):
        create(rule)

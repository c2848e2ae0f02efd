"""The search for skip sets: toy models whose best set is known, the share of chance, costs, and interruptions."""

from __future__ import annotations

import json
import math
from random import Random
from statistics import median

import pytest

from foredraft.drafters.sublayer_costs import SublayerCosts
from foredraft.errors import ConfigurationError
from foredraft.models.skips import SkipSet
from foredraft.planning.skip_costs import read_costs
from foredraft.planning.skip_search import SkipSearch, Trial

NEEDS_OPTUNA = "the search needs optuna (pip install 'foredraft[search]')"


def sublayers(layers):
    return [(kind, layer) for kind in ("attention", "mlp") for layer in range(layers)]


def toy(layers, seed):
    """Sublayers that lose agreement by amounts drawn at random, alone and in pairs."""
    random, names = Random(seed), sublayers(layers)
    alone = {each: 0.2 * random.expovariate(1) for each in names}
    pairs = [(*random.sample(names, 2), random.gauss(0, 0.1)) for _ in names]

    def agreement(skip):
        out = {("attention", layer) for layer in skip.attention} | {("mlp", layer) for layer in skip.mlp}
        lost = sum(alone[each] for each in out) + sum(more for one, other, more in pairs if {one, other} <= out)
        return math.exp(-max(0.0, lost))

    spent = tuple(1e-3 if kind == "attention" else 1.5e-3 for kind, _ in names)
    passes = tuple((sum(spent) + 2e-3) * (1 + 0.03 * more) for more in range(9))
    return SkipSearch(names, SublayerCosts(spent, 2e-3, passes), agreement)


def test_the_planted_best_set_is_found():
    pytest.importorskip("optuna", reason=NEEDS_OPTUNA)
    planted, needed = SkipSet((1, 3), (0, 2, 3)), 0.5
    search = toy(4, 0)

    def agreement(skip):
        """Any other sublayer is needed, and the planted attention only while the planted MLPs are there and the other way round."""
        wrong = set(skip.attention) - set(planted.attention), set(skip.mlp) - set(planted.mlp)
        halves = 0.0 if bool(skip.attention) == bool(skip.mlp) else 0.04
        return max(0.0, 1 - needed * sum(map(len, wrong)) - halves)

    search.agreement = agreement
    trials = list(search.run(24, seed=1))
    assert len(trials) == len(search.judged) == 24
    assert search.set_of(search.ranked[0].skipped) == planted


@pytest.mark.nightly
def test_it_beats_random_search_at_equal_trials():
    pytest.importorskip("optuna", reason=NEEDS_OPTUNA)
    gains = []
    for seed in range(10):
        search, chance, random = toy(8, seed), toy(8, seed), Random(seed)
        list(search.run(60, seed=seed))
        while len(chance.judged) < 60:
            share = random.random()
            proposed = tuple(random.random() < share for _ in chance.sublayers)
            if chance.fresh(proposed):
                chance.judge(proposed, "random")
        gains.append(search.ranked[0].rate / chance.ranked[0].rate)
    assert median(gains) > 1.02


def test_sets_that_are_timed_differ_and_hold_eliminations_best():
    search, random = toy(8, 3), Random(3)
    for skipped in search.eliminate():
        search.judge(skipped, "greedy")
    best = search.ranked[0]
    for number in range(40):  # a crowd of nearly the same sets that look a little better
        near = tuple(out ^ (random.random() < 0.1) for out in best.skipped)
        if search.fresh(near):
            search.judged[near] = Trial(near, best.agreement, (1.01 + 1e-4 * number) * best.rate, best.length, "bayesian")
    assert {trial.stage for trial in search.ranked[:10]} == {"bayesian"}
    found = search.finalists(10)
    assert len(set(found)) == 10 and found[:2] == [search.ranked[0], best]
    assert max(trial.agreement for trial in found) > best.agreement + 0.1 > min(trial.agreement for trial in found) + 0.2
    assert search.finalists(1) == search.ranked[:1] and set(search.finalists(10**6)) == set(search.ranked)


def test_the_same_seed_makes_the_same_trials():
    pytest.importorskip("optuna", reason=NEEDS_OPTUNA)
    one, other = (list(toy(3, 3).run(14, seed=7)) for _ in range(2))
    assert one == other and {trial.stage for trial in one} >= {"spread", "greedy", "bayesian"}


def test_a_search_ends_where_all_sets_were_judged():
    pytest.importorskip("optuna", reason=NEEDS_OPTUNA)
    search = toy(2, 0)
    assert len(list(search.run(100))) == 2**4 - 2
    assert not {(False,) * 4, (True,) * 4} & set(search.judged)


def test_what_was_judged_stays_when_a_search_is_interrupted():
    pytest.importorskip("optuna", reason=NEEDS_OPTUNA)
    search = toy(4, 0)
    inner, calls = search.agreement, iter(range(100))

    def agreement(skip):
        if next(calls) == 9:
            raise KeyboardInterrupt
        return inner(skip)

    search.agreement = agreement
    with pytest.raises(KeyboardInterrupt):
        list(search.run(50))
    assert len(search.judged) == 9 and search.ranked[0].rate == max(trial.rate for trial in search.judged.values())


def test_elimination_leaves_out_what_costs_least_per_second():
    """Sublayers lose 0.01, 0.02, … each, and the cheapest per second are left out first; all of them are judged only once."""
    names, lost, steps = sublayers(3), [0.01, 0.02, 0.03, 0.04, 0.05, 0.06], []
    costs = SublayerCosts((1e-3, 1e-3, 1e-3, 10e-3, 1e-3, 1e-3), 1e-3, (20e-3, 20e-3))
    search = SkipSearch(
        names, costs, lambda skip: 1 - sum(lost[layer] for layer in skip.attention) - sum(lost[3 + each] for each in skip.mlp)
    )
    for skipped in search.eliminate():
        search.judge(skipped, "greedy")
        steps.append([index for index, left_out in enumerate(skipped) if left_out])
    assert steps[:6] == [[index] for index in range(6)]  # 3 costs 0.04 of agreement and saves ten times as much
    assert steps[6:] == [[0, 3], [0, 1, 3], [0, 1, 2, 3], [0, 1, 2, 3, 4]]


def test_rates_of_chains():
    """Of two tokens with agreement a half: 1.75 tokens in twice the draft and a pass over three."""
    costs = SublayerCosts((1.0, 3.0), 2.0, (10.0, 10.5, 11.0))
    assert costs.rate((False, True), 1.0) == (3 / (2 * 3 + 11), 2)
    assert costs.rate((False, True), 0.5)[0] == pytest.approx(max(1.5 / (3 + 10.5), 1.75 / (6 + 11)))
    assert costs.plain == 0.1


@pytest.mark.parametrize(
    ("held", "why"),
    [
        ("[", "not hold seconds"),
        ({"rest": 1}, "it has no 'passes'"),
        ({"attention": [1, 1], "mlp": [1, 0], "rest": 1, "passes": [1, 1]}, "must be above 0"),
        ({"attention": [1, 1], "mlp": [1], "rest": 1, "passes": [1, 1]}, "has seconds of 1 mlp sublayers, and 2"),
    ],
)
def test_costs_that_do_not_fit_are_refused(tmp_path, held, why):
    path = tmp_path / "costs.json"
    path.write_text(held if isinstance(held, str) else json.dumps(held))
    with pytest.raises(ConfigurationError, match=why):
        read_costs(path, sublayers(2))


def test_costs_are_read_as_they_are_written(tmp_path):
    path, costs = tmp_path / "costs.json", SublayerCosts((1.0, 2.0, 3.0, 4.0), 5.0, (6.0, 7.0))
    for held in (costs.to_dict(sublayers(2)), {"costs": costs.to_dict(sublayers(2))}):
        path.write_text(json.dumps(held))
        assert read_costs(path, sublayers(2)) == costs

"""Rolls are real rounds: recording changes nothing, what is said to be expected comes, and requests are bounded."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from itertools import product

import httpx
import pytest
import torch
from helpers import tiny
from served import served

import foredraft
from foredraft import ConfigurationError, Speculator
from foredraft.choices import choose_rule
from foredraft.drafters.draft_model import DraftModel
from foredraft.drafters.several import Several
from foredraft.logits.processors import Pipeline
from foredraft.planning import FixedPlanner
from foredraft.rows import RowParameters
from foredraft.serving.engine import Engine
from foredraft.serving.roll import UNTRAINED, RollRequest, fitting, known_drafters
from foredraft.serving.roll import rolled as rolled_alone
from foredraft.serving.rolling import Roll, Rounds, Tally, play
from foredraft.session import Session
from foredraft.shapes import TreeShape

IDS = [12, 7, 30, 5, 9]
CHAINS = ["match", "rejection", "block", "multi-candidate", "k-seq", "traversal", "lenient", "typical"]


@pytest.fixture(scope="module")
def speculator():
    """Tiny models of a small vocabulary, so that a few hundred draws say something."""
    from architectures import build

    torch.manual_seed(0)
    target, draft = build("llama"), build("llama")
    with torch.no_grad():
        target.lm_head.weight.mul_(2.5)
        draft.lm_head.weight.copy_(target.lm_head.weight + 0.25 * torch.randn_like(draft.lm_head.weight))
    return foredraft.Speculator(target, draft, execution="eager", self_test=False)


def rolled(speculator, rule: str, shape: str = "chain(3)", *, seed: int = 1, first: int = 0, rolls: int = 1) -> Rounds:
    parsed = TreeShape.parse(shape)
    made, proposal = choose_rule(rule, speculator.drafter, parsed, lossless=False)
    how = {"pipeline": Pipeline(), "seed": seed, "first": first, "rolls": rolls, "isolation": None}
    return play(speculator.target, speculator.drafter, made, proposal, parsed, IDS, **how)


@pytest.mark.parametrize(
    ("rule", "shape"), [*((rule, "chain(3)") for rule in CHAINS), ("traversal", "product(2,2)"), ("match", "product(2,2)")]
)
def test_recording_changes_nothing(speculator, rule, shape):
    """The same rows in a session that records nothing keep the same tokens. Had the recording drawn noise of its own, they would not."""
    parsed = TreeShape.parse(shape)
    made, proposal = choose_rule(rule, speculator.drafter, parsed, lossless=False)
    for index in range(4):
        session = Session(speculator.target, speculator.drafter, made, proposal=proposal, planner=FixedPlanner(parsed))
        session.add(IDS[:-1], RowParameters(parsed.depth + 2, do_sample=True, seed=(1, index)))
        session.waiting[-1].ids.append(IDS[-1])
        (commit,) = session.step()
        session.close()
        roll = rolled(speculator, rule, shape, first=index).roll
        assert [*(roll.tokens[node] for node in roll.path[1:]), roll.bonus] == commit.tokens
        assert len(roll.path) - 1 == commit.accepted
        consistent(roll)


def consistent(roll: Roll) -> None:
    """What is said of a round fits together."""
    kept = set(roll.path)
    assert roll.path[0] == 0 and all(roll.parents[node] == above for above, node in zip(roll.path, roll.path[1:]))
    assert all(p is not None and 0 <= p <= 1 for p in roll.p[1:])
    if roll.ended == "end of draft":
        assert roll.path[-1] not in roll.parents
    if roll.thresholds is not None:
        assert all((roll.p[node] > roll.thresholds[node]) for node in kept - {0})
    if roll.residual is not None:
        assert any(each.token == roll.bonus for each in roll.residual)


@pytest.mark.parametrize("seed", range(6))
def test_the_coins_of_rejection_decide(speculator, seed):
    """A guess stays exactly if its coin lies below min(1, p / q), and none is thrown after the first that fails."""
    roll = rolled(speculator, "rejection", seed=seed).roll
    assert [coin.node for coin in roll.coins] == list(range(1, len(roll.path) + (roll.ended == "mismatch")))
    for coin in roll.coins:
        assert coin.probability == pytest.approx(min(1, roll.p[coin.node] / roll.q[coin.node]), rel=1e-4)
        assert (coin.coin < coin.probability) == (coin.node in roll.path)


TREES = [(rule, "product(2,2)") for rule in ("match", "multi-candidate", "k-seq", "traversal")]


@pytest.mark.parametrize(("rule", "shape"), [*((rule, "chain(3)") for rule in CHAINS), *TREES])
def test_as_many_land_as_are_expected(speculator, rule, shape):
    """400 rolls: the mean lies within four standard errors of the sum of the chances that the drafts had."""
    tally_fits(rolled(speculator, rule, shape, rolls=400, seed=3).tally)


def tally_fits(tally: Tally) -> None:
    assert sum(tally.landed) == 400 and sum(tally.expected) == pytest.approx(400, rel=1e-4)
    mean = sum(kept * count for kept, count in enumerate(tally.landed)) / 400
    wanted = sum(kept * count for kept, count in enumerate(tally.expected)) / 400
    spread = (sum(kept**2 * count for kept, count in enumerate(tally.expected)) / 400 - wanted**2) ** 0.5
    assert 0.2 < wanted < 2.8  # there is something to get wrong
    assert abs(mean - wanted) <= 4 * spread / 20 + 1e-6


@pytest.mark.parametrize("shape", ["chain(3)", "product(2,2)"])
def test_as_many_land_as_are_expected_of_several(speculator, shape):
    """One that copies, and finds nothing in this text, and one that draws with the target's noise."""
    several = foredraft.Speculator(
        speculator.target.model, Several(["prompt-lookup", DraftModel(speculator.drafter.draft_models[0].model)])
    )
    made = rolled(several, "match", shape, rolls=400, seed=3)
    assert made.proposal == "mixed" and None not in made.roll.q[1:]
    tally_fits(made.tally)
    several.close()


@pytest.mark.parametrize("seed", range(4))
def test_what_block_is_expected_to_keep_is_what_its_coins_allow(speculator, seed):
    """All ways that the coins may fall, each with its probability: block keeps up to the last that passes."""
    done = rolled(speculator, "block", seed=seed)
    chances = {coin.node: coin.probability for coin in done.roll.coins}
    wanted = [0.0] * 4
    for falls in product([False, True], repeat=3):
        probability = 1.0
        for node, passes in enumerate(falls, 1):
            probability *= chances.get(node, 0) if passes else 1 - chances.get(node, 0)
        wanted[max((node for node, passes in enumerate(falls, 1) if passes), default=0)] += probability
    assert done.tally.expected == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("rule", ["match", "rejection", "traversal", "lenient", "typical"])
def test_first_tokens_follow_p_unless_the_rule_is_lossy(speculator, rule):
    tally = rolled(speculator, rule, rolls=400, seed=5).tally
    assert sum(tally.first.values()) == 400
    assert (tally.distance < tally.chance + 2 * tally.spread) == (rule in ("match", "rejection", "traversal"))


def test_rolls_are_numbered_and_repeat(speculator):
    """Four rolls are the same as one and three: each has noise of its own, by its number."""
    four, one, three = (rolled(speculator, "rejection", first=first, rolls=rolls) for first, rolls in [(0, 4), (0, 1), (1, 3)])
    assert (four.roll.tokens, four.roll.path, four.roll.bonus) == (one.roll.tokens, one.roll.path, one.roll.bonus)
    assert [a + b for a, b in zip(one.tally.landed, three.tally.landed)] == four.tally.landed
    assert [coin.coin for coin in three.roll.coins] != [coin.coin for coin in one.roll.coins]


def test_requests_are_bounded(speculator):
    """Over HTTP: what cannot be rolled is refused in words; nothing is drafted for it."""
    from served import tiny_chat

    with served(tiny_chat()) as url, httpx.Client(base_url=url, timeout=60) as client:
        known = client.get("/rounds").json()
        assert [each["id"] for each in known["drafters"]] == ["own", *UNTRAINED] and not known["rules"]["typical"]["lossless"]
        good = {"prompt": "one two three", "rule": "match", "shape": "chain(3)"}
        answer = client.post("/rounds", json=good)
        assert answer.status_code == 200, answer.text
        assert (
            answer.json()["round"]["texts"] and client.post("/rounds", json={**good, "seed": answer.json()["seed"]}).json() == answer.json()
        )
        for wrong, word in [
            ({"rolls": 501}, "500"),
            ({"rolls": 0}, "rolls"),
            ({"temperature": 9}, "temperature"),
            ({"prompt": "x" * 8001}, "prompt"),
            ({"prompt": ""}, "prompt"),
            ({"prompt": "\ud800 half"}, "surrogate"),
            ({"shape": "product(9,9)"}, "64"),
            ({"shape": "dynamic()"}, "chain"),
            ({"shape": "ring(3)"}, "ring"),
            ({"shape": "chain(65)"}, "64"),
            ({"shape": "chain(17)", "drafter": "layer-skip"}, "16 levels"),
            ({"shape": "paths(" + "0," * 300 + "0)"}, "shape"),
            ({"rule": "luck"}, "luck"),
            ({"rule": "rejection", "drafter": "prompt-lookup"}, "rejection"),
            ({"drafter": "medusa"}, "drafter is one of own, prompt-lookup, suffix"),
            ({"colour": "red"}, "colour"),
        ]:
            refused = client.post("/rounds", content=json.dumps({**good, **wrong}), headers={"content-type": "application/json"})
            assert refused.status_code == 400 and word in refused.json()["error"]["message"], (wrong, refused.text)


def test_tokens_are_called_as_in_the_rounds_of_a_text():
    """A token that is no text alone is told from others of its kind."""
    from served import tiny_chat

    with served(tiny_chat()) as url, httpx.Client(base_url=url, timeout=60) as client:
        asked = {"prompt": "caf\N{LATIN SMALL LETTER E WITH ACUTE}", "rule": "match", "shape": "chain(1)"}
        found = client.post("/rounds", json=asked).json()
    assert found["root"]["text"] == found["round"]["texts"][0] == "bytes:\\xa9"


def test_bodies_are_read_as_everywhere():
    """The content type, what is too large without having said so, and null as left out."""
    from served import tiny_chat

    with served(tiny_chat(), max_body=1000) as url, httpx.Client(base_url=url, timeout=60) as client:
        assert client.post("/rounds", content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
        chunks = (b" " * 100 for _ in range(20))
        assert client.post("/rounds", content=chunks, headers={"content-type": "application/json"}).status_code == 413
        good = {"prompt": "one two three", "rule": "match", "shape": "chain(3)", "seed": None}
        assert client.post("/rounds", json=good).status_code == 200
        schemas = client.get("/openapi.json").json()["components"]["schemas"]
        assert "rolls" in schemas["RollRequest"]["properties"]


def test_a_fault_of_the_server_is_told_as_everywhere(monkeypatch, caplog):
    from served import tiny_chat

    def broken(*arguments, **options):
        raise RuntimeError("a planted fault")

    monkeypatch.setattr("foredraft.serving.roll.rolled", broken)
    caplog.set_level(logging.INFO, "foredraft.serving")
    with served(tiny_chat()) as url, httpx.Client(base_url=url, timeout=60) as client:
        answer = client.post("/rounds", json={"prompt": "one two three", "rule": "match"}, headers={"x-request-id": "mine"})
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
    assert answer.headers["x-request-id"] == "mine" and "mine POST /rounds 500 " in caplog.text


def test_a_roll_waits_no_longer_than_its_client(monkeypatch):
    from served import tiny_chat

    gone = threading.Event()

    async def alone(self, function):
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()

    monkeypatch.setattr(Engine, "alone", alone)
    with served(tiny_chat()) as url, httpx.Client(base_url=url) as client:
        with pytest.raises(httpx.ReadTimeout):
            client.post("/rounds", json={"prompt": "one two three", "rule": "match"}, timeout=0.5)
        assert gone.wait(10)


def test_without_the_page_there_are_no_rolls():
    from served import tiny_chat

    with served(tiny_chat(), page=False) as url, httpx.Client(base_url=url) as client:
        assert [client.get("/rounds").status_code, client.post("/rounds", json={}).status_code] == [404, 404]


def test_a_drafter_that_learns_takes_no_part(speculator, monkeypatch):
    monkeypatch.setattr(type(speculator.drafter), "learnt", {"steps": 1})
    request = RollRequest(prompt="x", rule="match")
    with pytest.raises(ConfigurationError, match="draft-verify, got 'own': it keeps texts"):
        rolled_alone(speculator, request, IDS, 1)
    for name in ("ngram", "token-recycling", "several:prompt-lookup,ngram"):
        assert list(known_drafters(Speculator(tiny(), name, self_test=False))) == list(UNTRAINED)


@pytest.mark.parametrize("drafter", UNTRAINED)
def test_what_needs_nothing_but_the_model_is_rolled_beside_the_servers_own(speculator, drafter):
    """In a chain and in a tree, under every rule that is said to fit; the server's own then drafts as before."""
    ids = [12, 7, 30, 5, 12, 7, 30, 9, 12, 7]
    before = speculator.generate(torch.tensor([ids]), max_new_tokens=8).sequences
    rules = fitting(known_drafters(speculator)[drafter])
    for shape, kind in [("chain(3)", "chain"), ("product(2,2)", "tree")]:
        for rule in rules[kind]:
            done, name, _ = rolled_alone(speculator, RollRequest(prompt="x", drafter=drafter, rule=rule, shape=shape, rolls=3), ids, 1)
            assert name == drafter and sum(done.tally.landed) == 3 and len(done.roll.tokens) > 1
            consistent(done.roll)
    assert speculator.generate(torch.tensor([ids]), max_new_tokens=8).sequences.equal(before)


def test_each_of_several_drafters_can_be_rolled_alone(monkeypatch):
    several = Speculator(tiny(), "several", drafter_options={"source": ["prompt-lookup", ("draft-model", {"source": tiny()}), "ngram"]})
    several.drafter.drafters[2].learn = False
    known = known_drafters(several)
    assert [name for name in known if name.startswith("own")] == ["own", "own:draft-model", "own:ngram"]
    monkeypatch.setattr(type(several.drafter.drafters[1]), "close", lambda self: pytest.fail("it is still the server's"))
    before = several.generate(torch.tensor([IDS]), max_new_tokens=8).sequences
    request = RollRequest(prompt="x", drafter="own:draft-model", rule="block", shape="chain(3)", rolls=3)
    done, name, _ = rolled_alone(several, request, IDS, 1)
    assert name == "draft-model" and done.roll.q is not None and sum(done.tally.landed) == 3
    assert several.generate(torch.tensor([IDS]), max_new_tokens=8).sequences.equal(before)
    monkeypatch.undo()
    several.close()


def test_two_drafters_of_one_name_are_both_offered():
    models = [("draft-model", {"source": tiny()}), ("draft-model", {"source": tiny("gpt_neox")})]
    several = Speculator(tiny(), "several", drafter_options={"source": models})
    known = known_drafters(several)
    assert [known["own:draft-model"], known["own:draft-model 2"]] == several.drafter.drafters
    assert rolled_alone(several, RollRequest(prompt="x", drafter="own:draft-model 2"), IDS, 1)[1] == "draft-model"
    several.close()


def test_layers_are_not_offered_where_they_cannot_be_run_in_part(speculator, monkeypatch):
    monkeypatch.setattr(type(speculator.target), "chains_only", "a planted reason")
    assert not {"layer-skip", "draft-verify"} & set(known_drafters(speculator))

"""``POST /rounds``: one round of speculative decoding in full, or many in numbers, for the page.

A roll runs in the engine's thread while no other row is live, and only there. Everything that a request may ask for is bounded.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from foredraft import drafters, verification
from foredraft.choices import check_shape, choose_rule
from foredraft.drafters.base import Drafter
from foredraft.drafters.several import Several
from foredraft.errors import ConfigurationError
from foredraft.logits.known_processors import warpers
from foredraft.logits.processors import Pipeline
from foredraft.serving.engine import Engine
from foredraft.serving.failures import guarded
from foredraft.serving.openapi import described
from foredraft.serving.protect import read_json
from foredraft.serving.rolling import Likely, Rounds, play
from foredraft.serving.sse import unless_left
from foredraft.serving.writers import TokenNames, round_json
from foredraft.shapes import TreeShape
from foredraft.speculator import Speculator
from foredraft.text import encode

ROLLS, NODES, CHARACTERS, TOKENS = 500, 64, 8000, 1024  # most of each
LEVELS = 16  # most of a draft by the model's own layers, each of which costs nearly a pass
SECONDS = 3.0  # that everybody else waits for one request, about
OWN, COPIES = "own", "prompt-lookup"
UNTRAINED = (COPIES, "suffix", "lookahead", "layer-skip", "draft-verify")  # need nothing but the model
SHAPES = ("chain(5)", "chain(3)", "chain(8)", "product(3,2,1)", "product(4,2,1)", "paths(0,1,0.0,0.1,0.0.0)")  # suggestions


class RollRequest(BaseModel):
    """What to roll. ``drafter`` is the server's own, one of its several, or one that needs nothing but the model; rolls are numbered from
    ``first`` on, and each has noise of its own, which ``seed`` and the number determine."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: Annotated[str, Field(min_length=1, max_length=CHARACTERS)]
    drafter: Annotated[str, Field(max_length=200)] = OWN
    rule: Annotated[str, Field(max_length=60)] = "rejection"
    shape: Annotated[str, Field(max_length=500)] = "chain(5)"
    temperature: Annotated[float, Field(ge=0.1, le=2)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**53)] | None = None
    first: Annotated[int, Field(ge=0, lt=2**31)] = 0
    rolls: Annotated[int, Field(ge=1, le=ROLLS)] = 1


def router(engine: Engine, speculator: Speculator, names: TokenNames) -> APIRouter:
    """The routes of the page's Roll."""
    routes = APIRouter()

    async def choices(http: Request) -> dict[str, Any]:
        """What can be rolled: drafters, shapes, and the rules that verify each exactly, or lossily."""
        known_rules = {name: verification.describe(name) for name in verification.names()}
        return {
            "drafters": [
                {"id": name, "name": made.name, "served": name.startswith(OWN), "rules": fitting(made)}
                for name, made in known_drafters(speculator).items()
            ],
            "rules": {name: {"summary": known.summary, "lossless": known.lossless} for name, known in known_rules.items()},
            "shapes": [shape for shape in SHAPES if not speculator.target.chains_only or TreeShape.parse(shape).is_chain],
            "most": {"rolls": ROLLS, "nodes": NODES, "characters": CHARACTERS, "tokens": TOKENS},
        }

    async def roll(http: Request) -> dict[str, Any]:
        """Draft, verify and correct after the prompt, as often as asked for; less often if that takes long, ``rolls`` says how often."""
        request = await read_json(http, RollRequest)
        known = verification.describe(request.rule)
        ids = await run_in_threadpool(read, speculator, request.prompt)
        seed = secrets.randbits(52) if request.seed is None else request.seed
        key = None if engine.settings.share else http.scope.get("state", {}).get("key")  # what is kept of one key's texts is not for others
        work = engine.alone(partial(rolled, speculator, request, ids, seed, isolation=key))
        done, drafter, shape = await unless_left(http.receive, work)
        body = await run_in_threadpool(written, names, done)
        return {"seed": seed, "drafter": drafter, "rule": request.rule, "lossless": known.lossless, "shape": shape, **body}

    routes.add_api_route("/rounds", guarded(choices), methods=["GET"], **described("/rounds", choices, None))
    routes.add_api_route("/rounds", guarded(roll), methods=["POST"], **described("/rounds", roll, RollRequest))
    return routes


def known_drafters(speculator: Speculator) -> dict[str, Drafter]:
    """The server's own if it drafts anything, each of them if it has several, and those that need nothing but the model. One that
    keeps texts is left out: it would keep rolls, which are not what the server is for."""
    own, target = speculator.drafter, speculator.target
    members = own.named if isinstance(own, Several) else {}
    served = {OWN: own, **{f"{OWN}:{name}": each for name, each in members.items() if each.info.features in ((), own.info.features)}}
    known = {name: each for name, each in served.items() if each.name not in ("none", COPIES)}
    known |= {name: drafters.create(name) for name in UNTRAINED}
    whole = target.sourced or target.chains_only  # whose layers cannot be run in part
    return {name: each for name, each in known.items() if not (each.keeps_texts or (whole and each.info.shares_target))}


def fitting(drafter: Drafter) -> dict[str, list[str]]:
    """The rules that can verify the chains of ``drafter``, and its trees."""
    shapes = {"chain": TreeShape.chain(5), **({"tree": TreeShape.product(3, 2, 1)} if drafter.info.branches else {})}
    found: dict[str, list[str]] = {}
    for kind, shape in shapes.items():
        for name in verification.names():
            try:
                choose_rule(name, drafter, shape, lossless=False)
            except ConfigurationError:
                continue
            found.setdefault(kind, []).append(name)
    return found


def read(speculator: Speculator, prompt: str) -> list[int]:
    """The tokens of ``prompt``, of which the last is the root of the tree.

    Raises:
        ConfigurationError: too few or too many.
    """
    ids = encode(speculator.tokenizer, prompt)
    if len(ids) < 2:
        raise ConfigurationError("the prompt is a single token; write a little more, so that there is something to go on")
    if len(ids) > TOKENS:
        raise ConfigurationError(f"the prompt has {len(ids)} tokens; a roll takes {TOKENS} at most")
    return ids


def rolled(
    speculator: Speculator, request: RollRequest, ids: Sequence[int], seed: int, *, isolation: str | None = None
) -> tuple[Rounds, str, str]:
    """The rounds, and what drafted them in which shape; in the engine's thread.

    Raises:
        ConfigurationError: no such drafter, rule or shape, or they do not go together; the message says what would.
    """
    known, shape = known_drafters(speculator), TreeShape.parse(request.shape)
    if request.drafter not in known:
        why = ": it keeps texts, and rolls are none" if request.drafter == OWN and speculator.drafter.keeps_texts else ""
        raise ConfigurationError(f"drafter is one of {', '.join(known)}, got {request.drafter!r}{why}")
    if not shape.static or not 1 <= shape.nodes <= NODES:
        raise ConfigurationError(f"shape {request.shape!r}: a roll takes a chain, product or paths of 1 to {NODES} nodes")
    drafter, target = known[request.drafter], speculator.target
    if drafter.info.shares_target and shape.depth > LEVELS:
        raise ConfigurationError(
            f"shape {request.shape!r}: {drafter.name} drafts with the model's own layers; a roll takes {LEVELS} levels"
        )
    rule, proposal = choose_rule(request.rule, drafter, shape, lossless=False)
    if target.context is not None and len(ids) + shape.depth + 2 > target.context:
        raise ConfigurationError(f"the prompt has {len(ids)} tokens, which leaves no room in the model's context of {target.context}")
    with ExitStack() as undo:
        if not request.drafter.startswith(OWN):
            drafter.bind(target)
            undo.callback(drafter.close)
        check_shape(shape, target, drafter)
        pipeline = Pipeline.alone(warpers(float(request.temperature)), prompt_length=len(ids) - 1)
        how: dict[str, Any] = {"seed": seed, "first": request.first, "rolls": request.rolls, "isolation": isolation, "seconds": SECONDS}
        return play(target, drafter, rule, proposal, shape, ids, pipeline=pipeline, **how), drafter.name, str(shape)


def written(names: TokenNames, done: Rounds) -> dict[str, Any]:
    """``done`` with the texts of its tokens, as JSON."""

    def shown(tokens: Sequence[Likely]) -> list[dict[str, Any]]:
        return [{**asdict(each), "text": names.text(each.token)} for each in tokens]

    roll, tally = done.roll, done.tally
    return {
        "proposal": done.proposal,
        "root": {"token": done.root, "text": names.text(done.root)},
        "round": {
            **round_json(roll, names),
            "coins": [asdict(coin) for coin in roll.coins],
            "thresholds": roll.thresholds,
            "residual": roll.residual and shown(roll.residual),
        },
        "rolls": sum(tally.landed),
        "landed": tally.landed,
        "expected": tally.expected,
        "first": [{"token": token, "text": names.text(token), "count": count, "p": tally.p[token]} for token, count in tally.first.items()],
        "distance": tally.distance,
        "chance": tally.chance,
        "spread": tally.spread,
    }

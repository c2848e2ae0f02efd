"""A tiny model that can draft with some of its own layers, and what holds of every drafter that does so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from helpers import PAD, generate, padded, prompts
from paging import stored
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft import Speculator
from foredraft.drafters.base import Drafter
from foredraft.planning import FixedPlanner
from foredraft.rows import RowParameters
from foredraft.session import Session
from foredraft.shapes import TreeShape
from foredraft.target import Target
from foredraft.testing import ProbabilityTable, TableTarget, continuation_law, distance, plain_law
from foredraft.verification import create

LAYERS = 5
NEW = 17
SHAPES = ["chain(4)", "product(2,2,1)", "dynamic(3,2,5)"]
ROWS = prompts((12, 5, 9))
SAMPLED = {"do_sample": True, "seed": 7, "temperature": 1.0, "top_k": 0}


def model(seed: int = 0, **options: Any) -> LlamaForCausalLM:
    """A tiny llama of five layers, whose lower layers guess some tokens: the upper ones add little."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1, **options}
    torch.manual_seed(seed)
    sizes = {"vocab_size": 128, "num_hidden_layers": LAYERS, **sizes}
    made = LlamaForCausalLM(LlamaConfig(eos_token_id=None, bos_token_id=None, **sizes)).eval()
    with torch.no_grad():
        made.model.embed_tokens.weight.normal_(0, 1)
        for index, layer in enumerate(made.model.layers):
            for weight in layer.parameters():
                if weight.ndim > 1:
                    weight.normal_(0, 0.12 if index < 2 else 0.09)
    return made


def counted(subject: LlamaForCausalLM) -> list[int]:
    """Tokens that each decoder layer is called with from now on."""
    counts = [0] * LAYERS

    def count(index: int, given: Any, named: Any) -> None:
        states: Tensor = given[0] if given else named["hidden_states"]
        counts[index] += states.shape[0] * states.shape[1]

    for index, layer in enumerate(subject.model.layers):
        layer.register_forward_pre_hook(lambda module, given, named, index=index: count(index, given, named), with_kwargs=True)
    return counts


def tokens_read(make: Callable[[], Drafter], shape: str, options: dict) -> list[list[int]]:
    """By each layer, for one row and for several, as the statistics have it; on kernels it is the same."""
    subject = model()
    counts, found = counted(subject), []
    speculator = Speculator(subject, make(), shape=shape, execution="eager", reuse_prefix=False)
    before = list(counts)
    for rows in (ROWS[:1], ROWS):
        stats = speculator.generate(**padded(rows), max_new_tokens=NEW, pad_token_id=PAD, **options).stats
        found.append([after - earlier for after, earlier in zip(counts, before)])
        before = list(counts)
        assert stats.layer_tokens == found[-1]
        assert stats.accepted > 0 and (stats.accepted < stats.drafted or len(rows) == 1)
        if len(rows) == 1:  # without filler: the prompt, a root in every pass after the prefill, and every drafted token
            assert found[0][0] == len(rows[0]) + stats.row_passes + stats.drafted
    for execution in ("packed", "native"):
        other = Speculator(model(), make(), shape=shape, execution=execution, reuse_prefix=False)
        assert other.generate(**padded(ROWS), max_new_tokens=NEW, pad_token_id=PAD, **options).stats.layer_tokens == found[-1]
    return found


def check_text(drafter: Drafter, shape: str, execution: str, change: Callable[[int], None]) -> None:
    """It is plain decoding's, with a ``change`` of the drafter before each round."""
    plain = Speculator(model(), "none", rule="match", execution="eager")
    speculator = Speculator(model(), drafter, rule="match", shape=shape, execution=execution)
    for options in ({"do_sample": False}, SAMPLED):
        expected = generate(plain, ROWS, max_new_tokens=NEW, **options)
        session = speculator.session()
        texts: dict[int, list[int]] = {}
        for index, row in enumerate(ROWS):
            texts[session.add(row, RowParameters(max_new_tokens=NEW, do_sample=bool(options["do_sample"]), seed=(7, index)))] = []
        rounds = 0
        while session.live:
            change(rounds)
            rounds += 1
            for commit in session.step():
                texts[commit.slot] += commit.tokens
        session.close()
        assert list(texts.values()) == expected


def check_cache(speculator: Speculator, rows: Sequence[Sequence[int]], changes: Sequence[Callable[[], object]]) -> None:
    """After rounds with ``changes`` before them it holds what a fresh prefill would."""
    session = speculator.session()
    for row in rows:
        session.add(row, RowParameters(max_new_tokens=12))
    for change in changes:
        change()
        session.step()
    cache, fresh = speculator.target.cache, Target(speculator.model, test=False, execution="eager")
    texts = [row.ids[:length] for row, length in zip(session.rows, cache.lengths)]
    fresh.open(texts)
    fresh.prefill(texts, first=0)
    for row, text in enumerate(texts):
        for ours, theirs in zip(stored(cache, row, len(text)), stored(fresh.cache, row, len(text)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    session.close()


def error(drafter: Drafter, rule: str, shape: str, *, early: Sequence[ProbabilityTable] = (), count: int = 3) -> float:
    """How far the law of a text that is drafted with ``drafter`` is from the target's."""
    p, whole = ProbabilityTable.random(3, seed=1), TreeShape.parse(shape)

    def session(randomness: Any) -> Session:
        target: Any = TableTarget(p, early=early or [ProbabilityTable.random(3, seed=2)])
        target.sublayers = SimpleNamespace(check=lambda skip: None)
        drafter.bind(target)
        proposal = drafter.proposals_for(whole)[0]
        return Session(target, drafter, create(rule), proposal=proposal, planner=FixedPlanner(whole), randomness=randomness)

    with torch.inference_mode():
        return distance(continuation_law(session, [0, 1], count), plain_law(p, [0, 1], count))

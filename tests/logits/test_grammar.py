"""Constrained decoding in trees: the grammar masks q before it is drawn from, with a public library and by exact enumeration."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from architectures import VOCABULARY
from cover import covered
from grammar_cases import CONFIGURATIONS, LIST, NEW, STRINGS, DropsForbidden, constrained, speculator
from helpers import LENGTHS, PAD, alone, generate, padded, prompts, tiny
from laws import law_of
from outlines_core import Index, Vocabulary
from transformers import LogitsProcessor

from foredraft import ConfigurationError, Speculator
from foredraft.logits.processors import Pipeline, row_pipelines
from foredraft.testing import (
    ProbabilityTable,
    ScriptedDrafter,
    distance,
    plain_law,
)

RECIPE = Path(__file__).parents[2] / "docs" / "constrained-decoding.md"
EOS = 1
TOKENS = dict(enumerate(STRINGS[: VOCABULARY - 3], 3))


def recipe():
    """The processor that the documentation tells users to write."""
    names = {}
    exec(next(code for code in re.findall(r"```python\n(.*?)```", RECIPE.read_text(), re.DOTALL) if "class Follows" in code), names)

    class Follows(names["Follows"]):
        def state(self, history):
            state = super().state(history)
            assert state is not None and history[-1] != EOS, "asked what decoding cannot reach"
            return state

    return Follows


INDEX = Index(LIST, Vocabulary(EOS, {text: [token] for token, text in TOKENS.items()}))
Follows = recipe()


def run(speculator, rows, **options):
    return generate(speculator, rows, max_new_tokens=NEW, eos_token_id=EOS, logits_processor=[Follows(INDEX, in_batch(rows))], **options)


def in_batch(rows):
    return padded(rows)["input_ids"].tolist()


def text_of(tokens):
    assert tokens[-1] == EOS
    return "".join(TOKENS[token] for token in tokens[:-1])


@pytest.fixture(scope="module")
def rows():
    """Prompts of tokens the grammar knows, so that copying from them breaks it."""
    return prompts(LENGTHS, vocabulary=3 + len(TOKENS))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_greedy_as_transformers_alone(name, rows):
    wanted = [alone(tiny(), row, max_new_tokens=NEW, eos_token_id=EOS, logits_processor=[Follows(INDEX, [row])]) for row in rows]
    decoder = speculator(name)
    got = run(decoder, rows)
    assert got == wanted
    stats = decoder.generate(
        **padded(rows), pad_token_id=PAD, max_new_tokens=NEW, eos_token_id=EOS, logits_processor=[Follows(INDEX, in_batch(rows))]
    ).stats
    assert stats.drafted > stats.accepted and (name == "lookup" or stats.accepted > 0)
    for tokens in got:
        assert 4 <= len(json.loads(text_of(tokens))) <= 6


@pytest.mark.parametrize("name", ["lookup", "top-k", "keyed", "grown"])
def test_the_same_seed_the_same_text(name, rows):
    options = {"do_sample": True, "temperature": 1.5, "top_k": 0, "seed": 11}
    wanted = run(Speculator(tiny(), "none"), rows, **options)
    assert run(speculator(name, rule="match"), rows, **options) == wanted
    assert len({text_of(tokens) for tokens in wanted}) == len(rows)


@pytest.mark.parametrize(
    ("name", "rule"),
    [("chain", "rejection"), ("chain", "block"), ("without-replacement", "multi-candidate"), ("without-replacement", "traversal")],
)
def test_every_sampled_text_parses(name, rule, rows):
    decoder = speculator(name, rule=rule)
    for seed in range(3):
        for tokens in run(decoder, rows, do_sample=True, temperature=1.2, top_k=0, seed=seed):
            assert re.fullmatch(LIST, text_of(tokens))


@pytest.mark.parametrize(("name", "sampled"), covered([name for name in CONFIGURATIONS if name != "lookup"], [False, True], ways=1))
def test_the_draft_is_masked_before_it_is_drawn(name, sampled, rows, monkeypatch):
    """No proposed node breaks the grammar, and none was dropped for it: a draft that is masked first has no such draws."""
    decoder, seen = speculator(name), []
    draft = decoder.drafter.draft

    def watched(request):
        tree = draft(request)
        seen.append((tree, [tuple(row.ids) for row in request.rows]))
        return tree

    monkeypatch.setattr(decoder.drafter, "draft", watched)
    run(decoder, rows, do_sample=sampled, **({"seed": 2, "temperature": 1.2, "top_k": 0} if sampled else {}))
    nodes, grammar = 0, Follows(INDEX, rows)
    for tree, texts in seen:
        assert not tree.pruned or name == "grown"
        for row, text in enumerate(texts):
            for node in range(1, tree.nodes):
                if tree.valid is None or tree.valid[row, node]:
                    path = [int(tree.tokens[row, above]) for above in tree.path(row, node)[1:]]
                    if EOS not in path[:-1]:
                        assert path[-1] in INDEX.get_allowed_tokens(grammar.state((*text, *path[:-1])))
                        nodes += 1
    assert nodes > 20


# --- the law


def may_follow(history, token):
    """A toy grammar: after 1 never 0, and a token never twice after an even sum."""
    return not (history[-1] == 1 and token == 0) and not (sum(history) % 2 == 0 and token == history[-1])


class Toy(LogitsProcessor):
    def __call__(self, input_ids, scores):
        mask = [[may_follow(history, token) for token in range(scores.shape[1])] for history in input_ids.tolist()]
        return scores.masked_fill(~torch.tensor(mask), -torch.inf)


TARGET, DRAFT = ProbabilityTable.random(3, seed=1), ProbabilityTable.random(3, seed=2)
LAWS = [
    ("rejection", "iid", "chain(2)"),
    ("block", "iid", "chain(2)"),
    ("multi-candidate", "iid", "product(2,1)"),
    ("traversal", "iid", "product(2,1)"),
    ("k-seq", "iid", "product(2,1)"),
    ("multi-candidate", "without-replacement", "product(2,1)"),
    ("traversal", "without-replacement", "product(2,1)"),
]


def error(drafter, rule, shape):
    law = law_of(TARGET, drafter, rule, shape, prompt=[0], pipeline=Pipeline.alone([Toy()], prompt_length=1))
    return distance(law, plain_law(constrained(TARGET, may_follow), [0], 3))


@pytest.mark.parametrize(("rule", "proposal", "shape"), LAWS)
def test_the_law_under_a_grammar(rule, proposal, shape):
    assert error(ScriptedDrafter(DRAFT, proposal=proposal), rule, shape) < 1e-9


@pytest.mark.parametrize(("rule", "proposal", "shape"), LAWS)
def test_dropping_forbidden_draws_is_found(rule, proposal, shape):
    assert error(DropsForbidden(DRAFT, may_follow, proposal=proposal), rule, shape) > 0.01


@pytest.mark.parametrize("module", ["xgrammar.contrib.hf", "outlines.processors.base_logits_processor"])
def test_a_processor_that_counts_calls_is_refused_by_name(module):
    """As xgrammar's own: it keeps a matcher per batch index and feeds it a token per call."""
    cls = type("LogitsProcessor", (LogitsProcessor,), {"__module__": module, "__call__": lambda self, ids, scores: scores})
    for own in (cls(), type("Derived", (cls,), {})()):
        with pytest.raises(ConfigurationError, match=module.partition(".")[0] + r".*batch index.*constrained-decoding"):
            row_pipelines([own], prompt_lengths=[2], padded_length=2)

"""OpenAI's penalties and biases: at every node what a loop over texts gives, and the same text however it is drafted."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from helpers import make_drafter, repetitive, tiny
from processor_cases import PARENTS, committed_rows, random_logits, random_prompts, random_tree
from transformers import TemperatureLogitsWarper

from foredraft import ConfigurationError, RowParameters, Speculator
from foredraft.logits.histories import NodeHistories
from foredraft.logits.penalties import LogitBias, PresenceFrequencyPenalty
from foredraft.logits.processors import Pipeline, process

SETTINGS = [(0.7, 0.4), (0.0, -0.9), (1.5, 0.0)]


@pytest.mark.parametrize("new", [(0, 0, 0), (1, 3, 2)], ids=["prefill", "later"])
@pytest.mark.parametrize("shape", ["root", "chain", "tree"])
def test_every_node_counts_its_own_path(shape, new):
    prompts = random_prompts()
    committed, lengths = committed_rows(prompts, new)
    tree = random_tree(committed, lengths, PARENTS if shape == "tree" else None, nodes=1 if shape == "root" else 6)
    logits = random_logits(tree)
    pipelines = [
        Pipeline.alone([PresenceFrequencyPenalty(*each)], prompt_length=len(prompt)).begun(len(prompt))
        for each, prompt in zip(SETTINGS, prompts)
    ]
    scores = process(pipelines, logits, NodeHistories(committed, lengths, tree))
    for row, (presence, frequency) in enumerate(SETTINGS):
        for node in range(tree.nodes):
            path = [int(tree.tokens[row, each]) for each in tree.path(row, node)]
            text = [*committed[row, : lengths[row] - 1].tolist(), *path][len(prompts[row]) :]
            expected = logits[row, node].clone()
            for token, count in Counter(text).items():
                expected[token] -= frequency * count + presence * (count > 0)
            torch.testing.assert_close(scores[row, node], expected)
            if text:
                assert not torch.equal(scores[row, node], logits[row, node])


def test_a_bias_is_added_everywhere_and_must_name_tokens():
    logits = torch.randn(2, 3, 8)
    biased = process([Pipeline.alone([LogitBias({2: 5.0, 7: -100.0})], prompt_length=1), Pipeline()], logits)
    expected = logits.clone()
    expected[0, :, 2] += 5.0
    expected[0, :, 7] -= 100.0
    assert torch.equal(biased, expected)
    with pytest.raises(ConfigurationError, match="token 9, and the vocabulary has 8"):
        process([Pipeline.alone([LogitBias({9: 1.0})], prompt_length=1)] * 2, logits)
    for wrong in ({-1: 1.0}, {1: float("inf")}, {"a": 1.0}):
        with pytest.raises(ConfigurationError, match="logit bias maps token ids"):
            LogitBias(wrong)


def texts(drafter, **options):
    prompts = repetitive((30, 17, 3))
    speculator = Speculator(tiny(), drafter=drafter, **options)
    session = speculator.session()
    for index, prompt in enumerate(prompts):
        processors = [LogitBias({3: 2.0}), PresenceFrequencyPenalty(*SETTINGS[index]), TemperatureLogitsWarper(0.8)]
        pipeline = Pipeline.alone(processors, prompt_length=len(prompt))
        session.add(prompt, RowParameters(24, do_sample=index != 1, seed=(index, 5), pipeline=pipeline))
    found: dict[int, list[int]] = {}
    accepted = 0
    while session.live:
        for commit in session.step():
            found.setdefault(commit.slot, []).extend(commit.tokens)
            accepted += commit.accepted
    speculator.close()
    return found, accepted


@cache
def plainly():
    return texts("none")[0]


@pytest.mark.parametrize("shape", ["chain(4)", "product(3,2,1)"])
@pytest.mark.parametrize("drafter", ["draft-model", "ngram"])
def test_the_text_is_that_of_plain_decoding(drafter, shape):
    found, accepted = texts(make_drafter(drafter), shape=shape, rule="match")
    assert found == plainly()
    assert accepted > 0 or drafter == "ngram"

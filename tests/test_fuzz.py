"""Calls and sessions with options drawn at random, over a model that changes between them: the text is that of plain decoding.

Greedy text is compared with transformers' own; sampled text with the loop that drafts nothing, packs nothing and keeps no cache, which
has the same noise.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from helpers import alone, padded, prompts, repetitive
from kernel_cases import build
from model_changes import CHANGES, add_adapter, tuners
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopPLogitsWarper

from foredraft import RowParameters, Speculator
from foredraft.backends import native, packing
from foredraft.drafters.draft_model import DraftModel
from foredraft.logits.processors import Pipeline

pytestmark = pytest.mark.nightly
TEXTS = repetitive((23, 9, 15)) + prompts((30, 5, 1), seed=4)
PROMPTS = [[token % 97 + 3 for token in text] for text in TEXTS]
DRAFTERS = ["none", "prompt-lookup", "ngram", "token-recycling", "suffix", "draft-model", "several:prompt-lookup,ngram"]
SHAPES = ["chain(1)", "chain(4)", "auto"]
STEPS = 14


class Twins:
    """A model that is served, and a copy that is changed alike and decoded plainly."""

    def __init__(self, draw: random.Random):
        self.draw = draw
        self.model, self.plain = build("llama", torch.float32), build("llama", torch.float32)
        self.adapted = draw.random() < 0.5
        if self.adapted:
            self.both(add_adapter)
        executions = ["eager", "packed"] + ["native"] * (native.refusal(torch.float32) is None)
        drafter, shape = draw.choice(DRAFTERS), draw.choice(SHAPES)
        self.execution = draw.choice(executions)
        self.setting = (drafter, shape, self.execution, self.adapted)
        made = DraftModel(build("llama", torch.float32), execution=draw.choice(executions)) if drafter == "draft-model" else drafter
        self.speculator = Speculator(self.model, made, shape=shape, execution=self.execution, rule="match")
        self.reference = Speculator(self.plain, "none", execution="eager", reuse_prefix=False)
        self.undo: dict[str, list[Callable[[], None]]] = {}

    def both(self, change):
        return [change(model) for model in (self.model, self.plain)]

    def change(self):
        """One that is taken back later, or one of the adapter."""
        if self.adapted and self.draw.random() < 0.4:
            scale, method = self.draw.choice((0.5, 1.0, 3.0)), self.draw.choice(("scale", "disable_adapters", "enable_adapters"))
            if method == "scale":
                self.both(lambda model: [each.set_scale("default", scale) for each in tuners(model)])
            else:
                self.both(lambda model: getattr(model, method)())
        elif self.undo and self.draw.random() < 0.5:
            for each in self.undo.pop(self.draw.choice(sorted(self.undo))):
                each()
        else:
            fitting = [name for name in CHANGES if name not in self.undo and not (self.adapted and ("product" in name or "weight" in name))]
            name = self.draw.choice(fitting)
            self.undo[name] = self.both(CHANGES[name])

    def call(self):
        draw, rows = self.draw, self.draw.choices(PROMPTS, k=self.draw.randint(1, 4))
        if draw.random() < 0.1:
            self.speculator.release()
        options = {"max_new_tokens": draw.randint(1, 12), "pad_token_id": 0}
        if draw.random() < 0.5:
            options |= {"do_sample": True, "seed": draw.randint(0, 9), "temperature": draw.choice((0.5, 1.0, 1.7))}
            options |= draw.choice(({"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 0}))
        if draw.random() < 0.4:
            options |= draw.choice(({"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"bad_words_ids": [[7], [8, 9]]}))
        given = padded(rows, draw.choice(("left", "right")))
        found, expected = (each.generate(**given, **options).sequences.tolist() for each in (self.speculator, self.reference))
        assert found == expected, (self.setting, options)
        if options.keys() == {"max_new_tokens", "pad_token_id"}:
            width = given["input_ids"].shape[1]
            assert [row[width:] for row in found] == [alone(self.plain, row, max_new_tokens=options["max_new_tokens"]) for row in rows]

    def session(self):
        """Rows join, leave and end, and the model changes under them."""
        draw, session = self.draw, self.speculator.session()
        begun: dict[int, tuple[list[int], RowParameters]] = {}  # what a row held at the last change
        live = {}

        def check():
            for slot, row in live.items():
                ids, parameters = begun[slot]
                assert row.ids == self.continued(ids, parameters, len(row.ids) - len(ids)), self.setting
                begun[slot] = list(row.ids), parameters

        for _ in range(draw.randint(4, 12)):
            if draw.random() < 0.5:
                prompt, parameters = draw.choice(PROMPTS), self.parameters()
                slot = session.add(prompt, parameters)
                live[slot], begun[slot] = session.waiting[-1], (list(prompt), parameters)
            if live and draw.random() < 0.15:
                slot = draw.choice(sorted(live))
                if live[slot].stats.finish_reason is None:
                    session.remove(slot)
            if draw.random() < 0.25:
                check()
                self.change()
            session.step()
        while session.live:
            session.step()
        check()

    def parameters(self):
        processors, draw = LogitsProcessorList(), self.draw
        if draw.random() < 0.4:
            processors.append(RepetitionPenaltyLogitsProcessor(1.3))
        if sampled := draw.random() < 0.5:
            processors += [TemperatureLogitsWarper(1.2), TopPLogitsWarper(0.95)]
        pipeline = Pipeline.alone(processors, prompt_length=1)
        return RowParameters(max_new_tokens=draw.randint(1, 20), do_sample=sampled, pipeline=pipeline, seed=(draw.randint(0, 9), 0))

    def continued(self, ids, parameters, count):
        """``ids`` and so many tokens more, decoded plainly."""
        if not count:
            return ids
        session = self.reference.session()
        session.add(ids, replace(parameters, max_new_tokens=count))
        row = session.waiting[0]
        while session.live:
            session.step()
        return row.ids


@pytest.mark.parametrize("seed", range(24))
def test_options_changes_and_rows_at_random(seed, monkeypatch):
    def chosen(groups, hints):
        return hints[-1] if groups[0][0].in_features % packing.UNIT == 0 else None

    monkeypatch.setattr(packing, "preferred_hint", chosen)
    twins = Twins(random.Random(seed))
    for _ in range(STEPS):
        getattr(twins, twins.draw.choice(("change", "change", "call", "call", "session")))()

"""Every family that Foredraft takes, on a GPU: greedy text is transformers', and the text of a seed is that of plain decoding there."""

from __future__ import annotations

import encoder_decoders
import pytest
import torch
from architectures import ARCHITECTURES
from helpers import added, alone, clone, padded, perturbed, prompts, tiny

from foredraft import Speculator
from foredraft.drafters.draft_model import DraftModel

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NEW = 24
SAMPLED = {"do_sample": True, "temperature": 1.2, "seed": 5, "max_new_tokens": NEW}
FAMILIES = [name for name, family in ARCHITECTURES.items() if family.support != "refused"]
SOURCED = [name for name, family in encoder_decoders.FAMILIES.items() if family.support != "refused"]


def shapes(support: str) -> tuple[str, ...]:
    return ("chain(4)", "product(2,2)") if support == "tree" else ("chain(4)",)


def on_gpu(model):
    return clone(model).cuda()


@cuda
@pytest.mark.cuda
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu_texts_are_those_of_plain_decoding(family):
    how, rows = ARCHITECTURES[family].implementations[0], prompts()
    model, draft = on_gpu(tiny(family, how)), on_gpu(perturbed(family, how))
    batch = {name: each.cuda() for name, each in padded(rows).items()}
    greedy = [alone(model, row, max_new_tokens=NEW) for row in rows]
    sampled = added(Speculator(model, "none").generate(**batch, pad_token_id=0, **SAMPLED), max(map(len, rows)))
    for shape in shapes(ARCHITECTURES[family].support):
        speculator = Speculator(model, DraftModel(draft), shape=shape, rule="match")
        for expected, options in ((greedy, {"max_new_tokens": NEW, "do_sample": False}), (sampled, SAMPLED)):
            output = speculator.generate(**batch, pad_token_id=0, **options)
            assert added(output, max(map(len, rows))) == expected
            assert 0 < output.stats.accepted < output.stats.drafted


@cuda
@pytest.mark.cuda
@pytest.mark.parametrize("family", SOURCED)
def test_on_a_gpu_texts_behind_a_source_are_those_of_plain_decoding(family):
    model, draft = on_gpu(encoder_decoders.build(family)), on_gpu(encoder_decoders.perturbed(family))
    given = {name: each.cuda() for name, each in encoder_decoders.sources(family).items()}
    options = {"max_new_tokens": NEW, "do_sample": False, "repetition_penalty": 1.6}
    greedy = model.generate(**given, **options)
    sampled = Speculator(model, "none").generate(**given, **SAMPLED).sequences
    for shape in shapes(encoder_decoders.FAMILIES[family].support):
        speculator = Speculator(model, DraftModel(draft), shape=shape, rule="match")
        for expected, asked in ((greedy, options), (sampled, SAMPLED)):
            output = speculator.generate(**given, **asked)
            assert torch.equal(output.sequences, expected)
            assert 0 < output.stats.accepted < output.stats.drafted

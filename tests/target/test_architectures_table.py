"""The table of tiny models is fit to test with: varied text, live windows, repeatable weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, CONTEXT, VOCABULARY, build
from cover import by_turns

NAMES = list(ARCHITECTURES)
PROMPT = torch.randint(3, VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(1))
WINDOW_OPTIONS = ("sliding_window", "attention_chunk_size")


@torch.inference_mode()
def greedy(model, new_tokens):
    """The continuation of PROMPT and its logits.  # [T], [T, V]"""
    output = model.generate(
        PROMPT,
        max_new_tokens=new_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return output.sequences[0, -new_tokens:].tolist(), torch.cat(output.logits)


def test_names_are_keys_and_support_is_known():
    assert all(name == ARCHITECTURES[name].name for name in NAMES)
    assert {entry.support for entry in ARCHITECTURES.values()} == {"tree", "chain", "refused"}


def test_importing_the_table_imports_no_model_library():
    code = "import sys, architectures; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1] / "support", check=True)


@pytest.mark.parametrize("name", by_turns(NAMES, 0))
def test_greedy_text_is_finite_and_varied(name):
    model = build(name, ARCHITECTURES[name].implementations[0])
    tokens, logits = greedy(model, new_tokens=20)
    assert torch.isfinite(logits).all()
    assert len(set(tokens)) > 3
    best, second = logits.topk(2).values.unbind(-1)
    assert (best - second > 1e-3).float().mean() > 0.9


@pytest.mark.nightly  # it asks transformers alone
@pytest.mark.parametrize("name", [name for name in NAMES if len(ARCHITECTURES[name].implementations) > 1])
def test_every_implementation_writes_the_same_text(name):
    first, *others = (greedy(build(name, implementation), new_tokens=8)[0] for implementation in ARCHITECTURES[name].implementations)
    if name == "falcon_alibi":  # eager adds the slot distances a second time
        assert others != [first]
    else:
        assert others == [first] * len(others)


@pytest.mark.parametrize(
    "name",
    [name for name in NAMES if ARCHITECTURES[name].window and ARCHITECTURES[name].support == "tree"],
)
def test_the_window_hides_part_of_the_prompt(name):
    architecture = ARCHITECTURES[name]
    model = build(name, architecture.implementations[0])
    with torch.inference_mode():
        narrow = model(PROMPT, use_cache=False).logits[0, -1]
        widths = [option for option in WINDOW_OPTIONS if getattr(model.config, option, None)]
        assert [getattr(model.config, option) for option in widths] == [architecture.window]
        setattr(model.config, widths[0], CONTEXT)
        wide = model(PROMPT, use_cache=False).logits[0, -1]
    assert (narrow - wide).abs().max() > 0.1


def test_building_is_repeatable_and_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    first, second = build("llama"), build("llama", "eager")
    assert torch.equal(before, torch.get_rng_state())
    weights = second.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in first.state_dict().items())
    assert first.dtype == torch.float32 and not first.training


def test_an_unknown_name_or_implementation_is_refused():
    with pytest.raises(KeyError, match="choose from llama"):
        build("lama")
    with pytest.raises(ValueError, match="eager"):
        build("gemma2", "sdpa")

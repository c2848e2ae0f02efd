"""Models are called with their cache under the name that they take it as, whichever that is in the transformers installed."""

from __future__ import annotations

import logging

import pytest
import torch
from architectures import ARCHITECTURES
from encoder_decoders import FAMILIES
from encoder_decoders import build as build_sourced
from helpers import generate, padded, prompts, tiny, watched
from kernel_cases import always as always  # a fixture
from transformers import LlamaForCausalLM, MambaForCausalLM, RwkvForCausalLM, T5ForConditionalGeneration

from foredraft import Speculator
from foredraft.auditing.reference import Reference
from foredraft.models.cache_names import CACHE_NAMES, cache_argument, cache_of

pytestmark = pytest.mark.filterwarnings("error::FutureWarning")
LLAMA = cache_argument(LlamaForCausalLM)
ROWS = prompts((9, 5), vocabulary=97)


class Remote(LlamaForCausalLM):
    """As remote code written for older versions names its arguments."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None, **others):
        others |= {"attention_mask": attention_mask, "position_ids": position_ids, LLAMA: past_key_values}
        return super().forward(input_ids, use_cache=use_cache, **others)


class Unnamed(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


@pytest.fixture(autouse=True)
def old_names(monkeypatch):
    """That outputs are read under old names is logged rather than warned of, once in a process."""
    said = []
    monkeypatch.setattr(logging.Logger, "warning_once", lambda self, message, *given: said.append(message))
    yield
    assert not [message for message in said if "`cache`" in message]


@pytest.mark.parametrize("model", [LlamaForCausalLM, MambaForCausalLM, RwkvForCausalLM, T5ForConditionalGeneration, Remote, Unnamed])
def test_the_name_is_an_argument_of_the_model(model):
    name = cache_argument(model)
    assert name in CACHE_NAMES
    assert name == {Remote: "past_key_values", RwkvForCausalLM: "state", Unnamed: LLAMA}.get(model, name)


def test_remote_code_is_served_under_the_name_it_has():
    remote = Remote(tiny().config).eval()
    remote.load_state_dict(tiny().state_dict())
    wanted = generate(Speculator(tiny(), "none", self_test=False), ROWS, max_new_tokens=8)
    assert generate(Speculator(remote, "ngram", self_test=False), ROWS, max_new_tokens=8) == wanted


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "rwkv", "mamba2"])
def test_no_pass_warns(name):
    model, seen = tiny(name, ARCHITECTURES[name].implementations[0]), []
    with watched(model, seen.append):
        generate(Speculator(model, "ngram", self_test=False), ROWS, max_new_tokens=6)
        Reference.of(model, ROWS[0], {}).decode(3, (0, 0))
    assert seen and all(given.keys() & set(CACHE_NAMES) == {cache_argument(type(model))} for given in seen)


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_no_pass_behind_a_source_warns(name):
    model = build_sourced(name)
    features = torch.randn(1, 8, 60) if FAMILIES[name].reads == "features" else None
    given = padded(ROWS[:1]) if features is None else {"input_features": features}
    Speculator(model, "ngram", self_test=False).generate(**given, max_new_tokens=6)


def test_an_output_holds_one_cache():
    ids = torch.tensor([ROWS[0]])
    assert cache_of(tiny()(ids, use_cache=True)).get_seq_length() == len(ROWS[0])
    assert cache_of(tiny()(ids, use_cache=False)) is None

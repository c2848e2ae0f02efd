"""What the program around may have set or may do: default device and dtype, autocast, copies, odd arguments."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from architectures import VOCABULARY
from helpers import PAD, clone, make_drafter, padded, repetitive, tiny
from kernel_cases import needs_kernels
from transformers.generation.streamers import BaseStreamer

import foredraft
from foredraft import ConfigurationError, Speculator, UnsupportedModelError, hub
from foredraft.backends import native
from foredraft.backends.kernel_pass import NativePass
from foredraft.backends.native_growth import Draws
from foredraft.backends.products import NATIVE, ONEDNN, Product
from foredraft.errors import notice
from foredraft.logits.penalties import LogitBias
from foredraft.logits.processors import Warping

ROWS = repetitive((23, 9, 15))
GREEDY = {"max_new_tokens": 14, "pad_token_id": PAD, "do_sample": False}


class Collector(BaseStreamer):
    def __init__(self):
        self.got, self.ended = [], 0

    def put(self, value):
        self.got += value.flatten().tolist()

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("drafter", ["ngram", "prompt-lookup", "token-recycling"])
def test_another_default_device(drafter):
    model, batch, one, streamer = tiny(), padded(ROWS), padded(ROWS[:1]), Collector()
    expected = model.generate(**batch, **GREEDY)
    drawn = {**GREEDY, "do_sample": True, "seed": 3}
    reference = Speculator(model, drafter, shape="chain(4)").generate(**batch, **drawn)
    with torch.device("meta"):
        speculator = Speculator(model, drafter, shape="chain(4)")
        found, sampled = speculator.generate(**batch, **GREEDY), speculator.generate(**batch, **drawn)
        streamed = speculator.generate(**one, **GREEDY, streamer=streamer)
        speculator.release()
        again = speculator.generate(**batch, **GREEDY)
        speculator.close()
    assert torch.equal(found.sequences, expected) and torch.equal(again.sequences, expected)
    assert torch.equal(sampled.sequences, reference.sequences)
    assert streamer.got == streamed.sequences[0].tolist()


@pytest.fixture
def narrow():
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def test_kernels_get_all_the_scratch_they_write_to_under_another_default_dtype(narrow):
    layer, about = native.Layer(hidden=64, inner=96, heads=4, key_heads=2, size=32), native.Pass(threads=2)
    native.make_room_for_segments(about, layer, 3, 4 * native.KEY_SEGMENT)
    draws = Draws(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(5, dtype=torch.int32), [Warping()])
    scratch = NativePass().room(layer, torch.zeros(3, 64, dtype=torch.float32), 3, 2)[-1]
    assert {each.dtype for each in (about.sums, draws.q, scratch)} == {torch.float32}
    logits = torch.arange(60, dtype=torch.float32).view(3, 20)
    values, ids = native.likeliest(logits, 4)
    assert ids.tolist() == [[19, 18, 17, 16]] * 3 and values.dtype == torch.float32
    assert torch.allclose(values, logits.log_softmax(-1).topk(4).values, atol=1e-5)


def test_texts_and_biases_under_another_default_dtype(narrow):
    speculator = Speculator(tiny(), "ngram", shape="chain(4)")
    assert torch.equal(speculator.generate(**padded(ROWS), **GREEDY).sequences, tiny().generate(**padded(ROWS), **GREEDY))
    pages = speculator.target.backend.pages
    assert pages is None or pages._scratch.dtype == torch.float32
    assert LogitBias({3: 1.3}).values.tolist() == pytest.approx([1.3], rel=1e-6)


def test_autocast_around_some_of_the_calls(monkeypatch):
    """With ``monkeypatch`` the self-test is really made."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        speculator = Speculator(tiny(), "ngram", shape="chain(4)")
    inputs = padded(ROWS)
    expected = tiny().generate(**inputs, **GREEDY)
    assert torch.equal(speculator.generate(**inputs, **GREEDY).sequences, expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        speculator.generate(**inputs, **GREEDY)
        assert speculator.target.version == 1
        speculator.generate(**inputs, **GREEDY)
        assert speculator.target.version == 1
    assert torch.equal(speculator.generate(**inputs, **GREEDY).sequences, expected)
    assert speculator.target.version == 2, "nothing that was cached in the other dtype is used"


@pytest.mark.parametrize("hint", [ONEDNN, pytest.param(NATIVE, marks=needs_kernels)])
def test_packed_layers_read_what_autocast_made(hint):
    layer, x = torch.nn.Linear(64, 64), torch.randn(2, 64)
    product = Product([layer], hint)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = product(x.bfloat16())
    assert torch.allclose(found.float(), layer(x), atol=0.05)


def test_a_speculator_is_not_copied():
    speculator = Speculator(tiny(), "ngram", shape="chain(4)")
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            attempt(speculator)


@pytest.mark.parametrize("drafter", ["prompt-lookup", "draft-model", "eagle3", "medusa", "layer-skip", "several"])
def test_a_speculator_that_was_closed_is_gone_with_its_last_reference(drafter):
    """Not only when the garbage collector comes, which may be gigabytes later."""
    speculator = Speculator(tiny(), make_drafter(drafter), shape="chain(3)", execution="native")
    speculator.generate(**padded(ROWS), **GREEDY)
    speculator.close()
    found = [weakref.ref(each) for each in (speculator.target, speculator.drafter, speculator)]
    gc.collect()
    gc.disable()
    try:
        del speculator
        assert [each() for each in found] == [None] * 3
    finally:
        gc.enable()


def test_a_model_given_by_name_goes_to_a_gpu_if_there_is_one(monkeypatch):
    devices = []

    def load(source, *, device, **others):
        devices.append(device)
        raise ConfigurationError("enough")

    monkeypatch.setattr("foredraft.speculator.load_model", load)
    for there in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        for given in ({}, {"device": "cpu"}):
            with pytest.raises(ConfigurationError, match="enough"):
                Speculator("zoo:python-1m", **given)
    assert devices == ["cuda", "cpu", "cpu", "cpu"]


def test_adapters_that_act_from_certain_tokens_on_are_refused_in_the_model_inside_too():
    """PEFT leaves its configuration there."""
    model = clone(tiny())
    model.peft_config = {"one": SimpleNamespace(alora_invocation_tokens=[5, 6])}
    with pytest.raises(UnsupportedModelError, match="activated LoRA"):
        foredraft.attach(model)


def test_a_streamer_ends_however_its_call_does():
    collector, speculator = Collector(), Speculator(tiny(), "ngram", shape="chain(4)")
    stream = speculator.stream(**padded(ROWS[:1]), **GREEDY, streamer=collector)
    stream.close()  # before anything was read
    assert collector.ended == 1
    with pytest.raises(ConfigurationError):
        tiny().generate(**padded(ROWS), **GREEDY, custom_generate=foredraft.custom_generate("ngram", streamer=collector))
    assert collector.ended == 2
    for _ in speculator.stream(**padded(ROWS[:1]), **GREEDY, streamer=collector):
        pass
    assert collector.ended == 3


def test_where_warnings_are_errors_no_round_ends_by_one(caplog):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        notice("this machine is busy")
    assert "this machine is busy" in caplog.text
    with pytest.warns(UserWarning, match="busy"):
        notice("this machine is busy")


def test_a_padding_token_beyond_the_vocabulary():
    """As of a tokenizer that got one more token than the model has."""
    options = {**GREEDY, "pad_token_id": VOCABULARY + 1, "output_scores": True, "return_dict_in_generate": True}
    speculator = Speculator(tiny(), "ngram", shape="chain(4)")
    found, expected = speculator.generate(**padded(ROWS[:1]), **options), tiny().generate(**padded(ROWS[:1]), **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert torch.allclose(torch.stack(found.scores), torch.stack(expected.scores), atol=1e-4)


def test_a_wrapper_that_hands_on_every_argument():
    model = clone(tiny())
    expected = model.generate(**padded(ROWS), **GREEDY)
    foredraft.attach(model, "ngram", shape="chain(4)")
    assert torch.equal(model.generate(**padded(ROWS), **GREEDY, custom_generate=None, assistant_model=None, streamer=None), expected)


def test_what_is_no_model_is_not_attached():
    with pytest.raises(UnsupportedModelError, match="expected a transformers causal language model"):
        foredraft.attach(object())


def test_a_path_in_the_home_folder():
    assert hub.named("~/model") == hub.named(Path("~/model")) == str(Path.home() / "model")

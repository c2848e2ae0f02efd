"""Models that read images as well, and others of whose class a published checkpoint has another make-up: text goes in and out as it does
in transformers."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import PAD, padded, repetitive
from kernel_cases import always as always  # a fixture
from kernel_cases import needs_kernels
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralVisionConfig,
    SiglipVisionConfig,
)

from foredraft import ConfigurationError, Speculator
from foredraft.loading import load_model
from foredraft.target import Target

ROWS = repetitive((23, 9, 15))
NEW = 12
TEXT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": None,
}
SIGLIP = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}


def made(cls, config):
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return cls(config).eval()


def gemma3():
    ids = {"image_token_id": 99, "boi_token_index": 97, "eoi_token_index": 98, "mm_tokens_per_image": 4}
    text = {**TEXT, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
    return made(Gemma3ForConditionalGeneration, Gemma3Config(text_config=text, vision_config=SiglipVisionConfig(**SIGLIP), **ids))


def mistral3():
    vision = PixtralVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    text = {**TEXT, "model_type": "mistral"}
    return made(Mistral3ForConditionalGeneration, Mistral3Config(text_config=text, vision_config=vision, image_token_id=99))


def gemma4(**changed):
    """Its last two layers attend over the keys of the first two."""
    own = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
    size = {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8, "global_head_dim": 16}
    return made(Gemma4ForCausalLM, Gemma4TextConfig(**{**TEXT, **own, **size, **changed}))


def granite():
    """Granite 4 without a recurrent layer."""
    sizes = {name: TEXT[name] for name in TEXT if name != "head_dim"}
    return made(GraniteMoeHybridForCausalLM, GraniteMoeHybridConfig(**sizes, layer_types=["attention"] * 4, shared_intermediate_size=96))


MODELS = {"gemma3": gemma3, "mistral3": mistral3, "gemma4": gemma4, "granite": granite}


@pytest.mark.parametrize("execution", ["eager", "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_is_transformers_own(name, execution):
    model = MODELS[name]()
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD}
    wanted = [model.generate(torch.tensor([row]), **options)[0, len(row) :].tolist() for row in ROWS]
    speculator = Speculator(model, "ngram", shape="product(2,2,1)", execution=execution)
    alone = speculator.generate(torch.tensor([ROWS[0]]), **options)  # one prompt, of which transformers computes the last logits alone
    assert alone.sequences[0, len(ROWS[0]) :].tolist() == wanted[0]
    found = speculator.generate(**padded(ROWS), **options)
    width = max(map(len, ROWS))
    assert [line[width:].tolist() for line in found.sequences] == wanted
    assert found.stats.drafted > 0


@needs_kernels
@pytest.mark.parametrize("execution", ["auto", "native"])
def test_layers_that_share_keys_keep_packed_products_and_say_why(execution, always):
    found = Target(gemma4(), execution=execution, owned=True)
    assert found.execution == "packed" and "forward" not in vars(found.model.get_decoder())
    assert "some of its layers attend over the keys and values of earlier ones" in found.reasons["fused"]
    assert "attend over" not in Target(gemma4(num_kv_shared_layers=0), execution=execution, owned=True).reasons["fused"]


@needs_kernels
@pytest.mark.parametrize("name", ["gemma3", "mistral3"])
def test_its_decoder_runs_on_the_kernels(name, tmp_path):
    """Whatever class of models it stands in."""
    model = MODELS[name]()
    model.save_pretrained(tmp_path)
    speculator = Speculator(str(tmp_path), "ngram", shape="product(2,2,1)", dtype="float32")
    assert speculator.target.execution == "native", speculator.target.reasons
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD}
    wanted = [model.generate(torch.tensor([row]), **options)[0, len(row) :].tolist() for row in ROWS]
    assert [line[max(map(len, ROWS)) :].tolist() for line in speculator.generate(**padded(ROWS), **options).sequences] == wanted


def llava(**text):
    config = LlavaConfig(text_config={**TEXT, **text}, vision_config=SiglipVisionConfig(**SIGLIP), image_token_index=99)
    return made(LlavaForConditionalGeneration, config)


@needs_kernels
@pytest.mark.parametrize(
    ("text", "execution", "why"),
    [
        ({"model_type": "llama"}, "native", None),
        ({"model_type": "granite", "logits_scaling": 4.0}, "packed", "whether LlavaForConditionalGeneration does so is not known"),
    ],
    ids=["llama", "granite"],
)
def test_another_head_is_not_taken_to_scale_logits(text, execution, why, tmp_path):
    llava(**text).save_pretrained(tmp_path)
    target = Speculator(str(tmp_path), "none", dtype="float32").target
    assert target.execution == execution and (why is None or why in target.reasons["fused"])


@needs_kernels
def test_a_forward_of_somebodys_own_is_not_passed_over():
    class Own(LlamaForCausalLM):
        def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, logits_to_keep=0, **named):
            names = {"position_ids": position_ids, "past_key_values": past_key_values, "logits_to_keep": logits_to_keep}
            return super().forward(input_ids, attention_mask, **names, **named)

    target = Target(made(Own, LlamaConfig(**TEXT)), execution="native", owned=True)
    assert target.execution == "packed" and target.reasons["fused"] == "Own has a forward of its own"
    model = made(LlamaForCausalLM, LlamaConfig(**TEXT))
    assert Target(copy.deepcopy(model), execution="native", owned=True).execution == "native"
    model.model.layers[1].forward = model.model.layers[1].forward  # it may do something later
    target = Target(model, execution="native", owned=True)
    assert target.execution == "packed" and target.reasons["fused"] == "somebody has overridden a module of it"


def test_granite_without_a_recurrent_layer_takes_trees():
    assert Speculator(granite(), "none").target.chains_only is None


def test_a_checkpoint_of_text_and_images_is_loaded_by_name(tmp_path):
    mistral3().save_pretrained(tmp_path)
    found = load_model(tmp_path)
    assert type(found) is type(AutoModelForImageTextToText.from_pretrained(tmp_path)) is Mistral3ForConditionalGeneration


def test_a_checkpoint_with_code_of_its_own_says_what_to_do(tmp_path, monkeypatch):
    """And nobody is asked whether to run it."""
    monkeypatch.setattr("builtins.input", lambda *given: pytest.fail("asked"))
    (tmp_path / "config.json").write_text('{"model_type": "my_own", "auto_map": {"AutoConfig": "mine.Config"}}')
    with pytest.raises(ConfigurationError, match="trust_remote_code=True yourself, and pass the object"):
        load_model(tmp_path)
    quantized = '"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}'
    for quantization in (None, "int4"):
        rest = quantized if quantization is None else '"torch_dtype": "float32"'
        (tmp_path / "config.json").write_text('{"model_type": "my_own", "auto_map": {"AutoConfig": "mine.Config"}, ' + rest + "}")
        with pytest.raises(ConfigurationError, match="trust_remote_code=True yourself, and pass the object"):
            load_model(tmp_path, quantization=quantization)

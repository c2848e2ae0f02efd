"""Heads in files: every format there and back, and everything that is not whole refused by its name."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from architectures import VOCABULARY, build
from head_cases import HEADS, make, says
from helpers import tiny
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from foredraft import ConfigurationError, heads, zoo
from foredraft.heads import checkpoints, formats

PAIRS = [
    (name, format)
    for name, (made, _) in HEADS.items()
    for format in formats.names()
    if not formats.find(format).kinds or made.kind in formats.find(format).kinds
]


def exactly(head) -> bool:
    """Whether a format that writes LM heads out says what ``head`` says, but for rounding."""
    return getattr(head.config, "lm_head", "") != "low-rank"


def weights(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def changed(folder: Path, change) -> None:
    """Rewrite the weights after ``change(tensors)``."""
    tensors = load_file(weights(folder))
    change(tensors)
    save_file(tensors, weights(folder))


def configured(folder: Path, change) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def foreign(folder: Path) -> None:
    """Without what we wrote for ourselves, as somebody else's file."""
    configured(folder, lambda config: config.pop("foredraft"))


# -- there and back -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "format"), PAIRS)
def test_a_head_read_back_says_the_same(tmp_path: Path, name: str, format: str):
    head = make(name)
    checkpoints.save(head, tmp_path / "one", format=format)
    back = checkpoints.load(tmp_path / "one", tiny())
    assert type(back) is type(head) and not back.training
    if format == "foredraft" or exactly(head):
        assert torch.equal(says(back), says(head))
    else:
        assert torch.allclose(says(back), says(head), atol=1e-5)
    if format in ("foredraft", formats.usual(head)):
        assert back.config == head.config
        assert {name: each.shape for name, each in back.state_dict().items()} == {
            name: each.shape for name, each in head.state_dict().items()
        }


@pytest.mark.parametrize(("name", "format"), [pair for pair in PAIRS if pair[1] != "foredraft" and "low-rank" not in pair[0]])
def test_somebody_elses_head_says_the_same(tmp_path: Path, name: str, format: str):
    head = make(name)
    checkpoints.save(head, tmp_path, format=format)
    foreign(tmp_path)
    assert torch.equal(says(checkpoints.load(tmp_path, tiny())), says(head))
    with pytest.raises(ConfigurationError, match=r"does not say which target.*--target"):
        checkpoints.load(tmp_path)


@pytest.mark.parametrize(("name", "format"), PAIRS)
def test_the_same_head_makes_the_same_bytes(tmp_path: Path, name: str, format: str):
    for folder in ("one", "two"):
        checkpoints.save(make(name), tmp_path / folder, format=format, about={"texts": 3})
    files = sorted(each.name for each in (tmp_path / "one").iterdir())
    assert files == sorted(each.name for each in (tmp_path / "two").iterdir()) and len(files) == 2
    for each in files:
        assert (tmp_path / "one" / each).read_bytes() == (tmp_path / "two" / each).read_bytes()


def test_the_usual_formats_and_what_is_written_about_a_head(tmp_path: Path):
    usual = {name: formats.usual(make(name)) for name in HEADS}
    assert usual["medusa"] == "vllm" and usual["eagle3"] == "speculators"
    assert {usual[name] for name in ("medusa-shared", "medusa-low-rank", "hydra", "rnn")} == {"foredraft"}
    checkpoints.save(make("medusa"), tmp_path, about={"steps": 7})
    assert checkpoints.describe(tmp_path)["about"] == {"steps": 7} and checkpoints.describe(tmp_path)["kind"] == "medusa"
    with pytest.raises(ConfigurationError, match="JSON"):
        checkpoints.save(make("medusa"), tmp_path / "other", about={"path": tmp_path})
    assert not (tmp_path / "other").exists()


def test_dtypes(tmp_path: Path):
    checkpoints.save(make("medusa", dtype=torch.bfloat16), tmp_path)
    assert {tensor.dtype for tensor in load_file(weights(tmp_path)).values()} == {torch.bfloat16}
    assert checkpoints.load(tmp_path).dtype == torch.bfloat16
    assert checkpoints.load(tmp_path, tiny()).dtype == torch.float32  # the target's
    assert checkpoints.load(tmp_path, tiny(), dtype="float16").dtype == torch.float16
    assert checkpoints.load(tmp_path, dtype=torch.float64).dtype == torch.float64
    head = checkpoints.load(tmp_path)
    assert torch.equal(head.lm_heads[0].weight, make("medusa", dtype=torch.bfloat16).lm_heads[0].weight)
    changed(tmp_path, lambda tensors: tensors.update({"lm_heads.0.weight": tensors["lm_heads.0.weight"].float()}))
    assert checkpoints.load(tmp_path).dtype == torch.float32  # mixed files lose nothing


def test_names_and_fields_that_others_read(tmp_path: Path):
    """As vLLM's loaders, speculators and the published files spell them; a change here breaks readers that no test runs."""
    checkpoints.save(make("medusa-biased"), tmp_path / "vllm", format="vllm", target="org/model")
    config = json.loads((tmp_path / "vllm" / "config.json").read_text())
    assert {
        "model_type": "medusa",
        "num_heads": 2,
        "num_hidden_layers": 2,
        "medusa_fc_bias": True,
        "original_lm_head": False,
    }.items() <= config.items()
    assert config["vocab_size"] == config["truncated_vocab_size"] == VOCABULARY and config["base_model_name_or_path"] == "org/model"
    blocks = {f"blocks.{h}.layers.{layer}.{what}" for h in range(2) for layer in range(2) for what in ("weight", "bias")}
    assert set(load_file(weights(tmp_path / "vllm"))) == blocks | {"lm_heads.0.weight", "lm_heads.1.weight"}

    checkpoints.save(make("medusa"), tmp_path / "medusa", format="medusa", target="org/model")
    config = json.loads((tmp_path / "medusa" / "config.json").read_text())
    assert {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "org/model"}.items() <= config.items()
    names = {f"{h}.0.linear.{what}" for h in range(3) for what in ("weight", "bias")} | {f"{h}.1.weight" for h in range(3)}
    assert set(load_file(tmp_path / "medusa" / "medusa_lm_head.safetensors")) == names

    layer = {f"self_attn.{each}_proj.weight" for each in "qkvo"} | {f"mlp.{each}_proj.weight" for each in ("gate", "up", "down")}
    layer |= {f"{each}.weight" for each in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    rest = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    head = make("eagle3")
    checkpoints.save(head, tmp_path / "published", format="eagle3")
    tensors = load_file(weights(tmp_path / "published"))
    assert set(tensors) == rest | {f"midlayer.{each}" for each in layer}
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    config = json.loads((tmp_path / "published" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["draft_vocab_size"] == 50
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [layer - 1 for layer in head.config.aux_layers]

    checkpoints.save(head, tmp_path / "speculators", target="org/model")
    assert set(load_file(weights(tmp_path / "speculators"))) == rest | {f"layers.0.{each}" for each in layer}
    config = json.loads((tmp_path / "speculators" / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3" and config["speculators_config"]["verifier"]["name_or_path"] == "org/model"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert config["transformer_layer_config"]["num_hidden_layers"] == 1 and config["transformer_layer_config"]["model_type"] == "llama"
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "eagle_aux_hidden_state_layer_ids", "target_hidden_size")
    assert all(each in config for each in flags) and config["norm_before_residual"] is False


def test_formats_that_repeat_the_targets_lm_head(tmp_path: Path):
    head = make("medusa-shared")
    checkpoints.save(head, tmp_path / "own")
    assert "lm_head.weight" not in load_file(weights(tmp_path / "own"))
    checkpoints.save(head, tmp_path / "vllm", format="vllm")
    assert torch.equal(load_file(weights(tmp_path / "vllm"))["lm_head.weight"], tiny().get_output_embeddings().weight)
    assert json.loads((tmp_path / "vllm" / "config.json").read_text())["original_lm_head"] is True
    back = checkpoints.load(tmp_path / "vllm", tiny())
    assert back.config == head.config and "lm_heads.0.weight" not in back.state_dict()
    foreign(tmp_path / "vllm")  # whoever wrote it: it is the target's, and not held twice
    assert checkpoints.load(tmp_path / "vllm", tiny()).config.lm_head == "target"
    alone = checkpoints.load(tmp_path / "own")
    with pytest.raises(ConfigurationError, match=r"LM head.*--target"):
        checkpoints.save(alone, tmp_path / "alone", format="vllm")

    other = build("llama", "sdpa")
    with torch.no_grad():
        other.get_output_embeddings().weight.mul_(1.5)
    checkpoints.save(head, tmp_path / "again", format="vllm")
    with pytest.raises(ConfigurationError, match="not that of"):
        checkpoints.load(tmp_path / "again", other)
    foreign(tmp_path / "again")
    assert checkpoints.load(tmp_path / "again", other).config.lm_head == "own"


# -- somebody else's files ------------------------------------------------------------------------------------------------------


def test_published_medusa_heads_with_prefix_and_with_fewer_heads_in_the_configuration(tmp_path: Path):
    head = make("medusa-biased")
    checkpoints.save(head, tmp_path, format="medusa")
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 1, "medusa_num_layers": 2, "base_model_name_or_path": "x"}))
    tensors = load_file(weights(tmp_path))
    save_file({f"medusa_head.{name}": tensor for name, tensor in tensors.items()}, weights(tmp_path))
    assert torch.equal(says(checkpoints.load(tmp_path, tiny())), says(head))
    configured(tmp_path, lambda config: config.update(medusa_num_heads=3))
    with pytest.raises(ConfigurationError, match="describes 3 heads of 2 layers, the tensors are 2 heads of 2"):
        checkpoints.load(tmp_path, tiny())


@pytest.mark.parametrize("format", ["speculators", "eagle3"])
def test_both_names_of_the_decoder_layer_are_read(tmp_path: Path, format: str):
    head = make("eagle3")
    checkpoints.save(head, tmp_path, format=format)
    tensors = load_file(weights(tmp_path))
    swapped = {
        name.replace("layers.0.", "#").replace("midlayer.", "layers.0.").replace("#", "midlayer."): each for name, each in tensors.items()
    }
    assert swapped.keys() != tensors.keys()
    save_file(swapped, weights(tmp_path))
    assert torch.equal(says(checkpoints.load(tmp_path, tiny())), says(head))


def test_what_a_missing_field_means_depends_on_the_format(tmp_path: Path):
    for format in ("speculators", "eagle3"):
        checkpoints.save(make("eagle3"), tmp_path / format, format=format)
        foreign(tmp_path / format)
        configured(tmp_path / format, lambda config: config.pop("norm_before_residual"))
    assert checkpoints.load(tmp_path / "speculators", tiny()).config.norm_before_residual is True
    assert checkpoints.load(tmp_path / "eagle3", tiny()).config.norm_before_residual is False


def test_hidden_states_are_outputs_to_specforge_and_inputs_to_vllm(tmp_path: Path):
    head = make("eagle3")
    checkpoints.save(head, tmp_path, format="eagle3")
    foreign(tmp_path)
    assert checkpoints.load(tmp_path, tiny()).config.aux_layers == head.config.aux_layers
    configured(tmp_path, lambda config: config.update(eagle_aux_hidden_state_layer_ids=list(head.config.aux_layers)))
    assert checkpoints.load(tmp_path, tiny()).config.aux_layers == head.config.aux_layers


def test_the_older_fields_of_rotary_positions(tmp_path: Path):
    checkpoints.save(make("eagle3"), tmp_path, format="eagle3")
    foreign(tmp_path)
    scaling = {"type": "linear", "factor": 2.0}
    configured(tmp_path, lambda config: config.pop("rope_parameters") and config.update(rope_theta=5000.0, rope_scaling=scaling))
    found = checkpoints.load(tmp_path, tiny()).config.rope_parameters
    assert found == {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}


def test_embeddings_are_the_targets_or_refused(tmp_path: Path):
    checkpoints.save(make("eagle3"), tmp_path, format="eagle3")
    own = tiny().get_input_embeddings().weight.detach().clone()
    changed(tmp_path, lambda tensors: tensors.update({"embed_tokens.weight": own}))
    assert torch.equal(says(checkpoints.load(tmp_path, tiny())), says(make("eagle3")))
    with pytest.raises(ConfigurationError, match=r"embed_tokens.weight.*--target"):
        checkpoints.load(tmp_path)
    changed(tmp_path, lambda tensors: tensors["embed_tokens.weight"].mul_(2))
    with pytest.raises(ConfigurationError, match=r"embed_tokens.weight.*differ"):
        checkpoints.load(tmp_path, tiny())


def test_a_whole_draft_vocabulary_may_be_spelled_out(tmp_path: Path):
    checkpoints.save(make("eagle3-whole"), tmp_path, format="eagle3")
    spelled = {"d2t": torch.zeros(VOCABULARY, dtype=torch.long), "t2d": torch.ones(VOCABULARY, dtype=torch.bool)}
    changed(tmp_path, lambda tensors: tensors.update(spelled))
    assert torch.equal(says(checkpoints.load(tmp_path, tiny())), says(make("eagle3-whole")))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t["d2t"].fill_(VOCABULARY), "d2t names tokens twice or outside"),
        (lambda t: t["d2t"].sub_(torch.arange(50)), "d2t names tokens twice"),
        (lambda t: t.update(t2d=~t["t2d"]), "d2t and t2d name different tokens"),
        (lambda t: t.pop("d2t"), "lacks d2t"),
    ],
)
def test_a_draft_vocabulary_that_contradicts_itself(tmp_path: Path, change, match):
    checkpoints.save(make("eagle3"), tmp_path)
    changed(tmp_path, change)
    with pytest.raises(ConfigurationError, match=match):
        checkpoints.load(tmp_path, tiny())


@pytest.mark.parametrize(
    ("name", "format", "change", "match"),
    [
        ("medusa", "vllm", lambda c: c.update(truncated_vocab_size=9), "truncated_vocab_size"),
        ("medusa", "vllm", lambda c: c.update(logit_scale=0.5), "logit_scale 0.5"),
        ("medusa", "vllm", lambda c: c.update(hidden_size=9), "hidden_size 9"),
        ("medusa", "vllm", lambda c: c.update(num_heads="3"), "num_heads must be a whole number"),
        ("eagle3", "eagle3", lambda c: c.update(num_hidden_layers=2), "num_hidden_layers 2; only 1"),
        ("eagle3", "eagle3", lambda c: c.update(hidden_act="gelu"), "hidden_act 'gelu'"),
        ("eagle3", "eagle3", lambda c: c.update(target_hidden_size=9), "target_hidden_size 9"),
        ("eagle3", "eagle3", lambda c: c.pop("num_attention_heads"), "num_attention_heads"),
        ("eagle3", "speculators", lambda c: c.update(speculators_model_type="dflash"), "type 'dflash'; only 'eagle3'"),
        ("eagle3", "speculators", lambda c: c["transformer_layer_config"].update(model_type="qwen3"), "layer of 'qwen3'"),
        ("eagle3", "speculators", lambda c: c.pop("transformer_layer_config"), "lacks transformer_layer_config"),
        ("eagle3", "speculators", lambda c: c.update(eagle_aux_hidden_state_layer_ids=[3, 1]), "ascending"),
    ],
)
def test_what_somebody_elses_head_has_and_we_do_not(tmp_path: Path, name, format, change, match):
    checkpoints.save(make(name), tmp_path, format=format)
    foreign(tmp_path)
    configured(tmp_path, change)
    with pytest.raises(ConfigurationError, match=match):
        checkpoints.load(tmp_path, tiny())


def test_fields_of_other_readers_are_passed_over_and_unknown_ones_of_ours_refused(tmp_path: Path):
    checkpoints.save(make("medusa"), tmp_path)
    configured(tmp_path, lambda config: config.update(transformers_version="9", max_paths=64))
    checkpoints.load(tmp_path, tiny())
    configured(tmp_path, lambda config: config["foredraft"]["config"].update(hats=2))
    with pytest.raises(ConfigurationError, match="unknown fields 'hats'"):
        checkpoints.load(tmp_path, tiny())
    configured(tmp_path, lambda config: config["foredraft"]["config"].pop("hats") and config["foredraft"].update(more=1))
    with pytest.raises(ConfigurationError, match="unknown or missing: more"):
        checkpoints.load(tmp_path, tiny())
    configured(tmp_path, lambda config: config["foredraft"].pop("more") and config["foredraft"].update(format=2))
    with pytest.raises(ConfigurationError, match="format 2; this Foredraft reads 1"):
        checkpoints.load(tmp_path, tiny())
    configured(tmp_path, lambda config: config["foredraft"].update(format=1, kind="crystal"))
    with pytest.raises(ConfigurationError, match="unknown kind of head 'crystal'"):
        checkpoints.load(tmp_path, tiny())
    configured(tmp_path, lambda config: config["foredraft"].update(json.loads(json.dumps({"kind": "rnn", "config": as_json(make("rnn"))}))))
    with pytest.raises(ConfigurationError, match="another kind of head, RnnConfig"):
        checkpoints.load(tmp_path, tiny())


def as_json(head) -> dict:
    return json.loads(json.dumps(head.config.to_dict()))


# -- damaged ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "format"), [pair for pair in PAIRS if pair[1] != "foredraft" and pair[0] in ("medusa", "eagle3")])
def test_missing_extra_and_misshapen_tensors_are_named_as_the_file_spells_them(tmp_path: Path, name: str, format: str):
    checkpoints.save(make(name), tmp_path, format=format)
    whole = load_file(weights(tmp_path))
    victim = next(each for each in sorted(whole) if each.endswith(("down_proj.weight", "1.weight")))

    save_file({each: tensor for each, tensor in whole.items() if each != victim}, weights(tmp_path))
    with pytest.raises(ConfigurationError, match=f"it lacks {victim}$"):
        checkpoints.load(tmp_path, tiny())
    save_file({**whole, "stowaway": torch.zeros(1)}, weights(tmp_path))
    with pytest.raises(ConfigurationError, match="it holds stowaway, which such a head does not have"):
        checkpoints.load(tmp_path, tiny())
    save_file({**whole, victim: whole[victim][:, 1:].contiguous()}, weights(tmp_path))
    with pytest.raises(ConfigurationError, match=rf"has {victim} of shape \[.*\] instead of \["):
        checkpoints.load(tmp_path, tiny())
    save_file({**whole, victim: whole[victim].long()}, weights(tmp_path))
    with pytest.raises(ConfigurationError, match=f"has {victim} in int64 instead of float32"):
        checkpoints.load(tmp_path, tiny())
    broken = whole[victim].clone()
    broken[0, 0] = float("nan")
    save_file({**whole, victim: broken}, weights(tmp_path))
    with pytest.raises(ConfigurationError, match=f"NaN or infinity in {victim}"):
        checkpoints.load(tmp_path, tiny())


@pytest.mark.parametrize("name", ["medusa", "eagle3", "rnn"])
def test_a_loader_that_forgets_a_tensor_is_found_out(tmp_path: Path, name: str, monkeypatch):
    checkpoints.save(make(name), tmp_path)
    fill = checkpoints.fill
    for forgotten in make(name).state_dict():

        def forgetful(head, tensors, forgotten=forgotten):
            fill(head, {each: tensor for each, tensor in tensors.items() if each != forgotten})

        monkeypatch.setattr(checkpoints, "fill", forgetful)
        with pytest.raises(RuntimeError, match=f'Missing key.*"{forgotten}"'):
            checkpoints.load(tmp_path, tiny())


def test_a_loaded_head_shares_no_memory_with_its_file_nor_do_its_parts(tmp_path: Path):
    """Medusa heads that vLLM stores with one LM head each get their own; a file that is overwritten in place changes no loaded head."""
    checkpoints.save(make("medusa-low-rank"), tmp_path, format="vllm")
    head = checkpoints.load(tmp_path, tiny())
    whole = says(head)
    changed(tmp_path, lambda tensors: [tensor.zero_() for tensor in tensors.values()])
    assert torch.equal(says(head), whole)
    with torch.no_grad():
        head.lm_heads[0].weight.zero_()
    assert head.lm_heads[1].weight.any()


def test_reading_leaves_the_global_generator_alone(tmp_path: Path):
    checkpoints.save(make("eagle3"), tmp_path)
    before = torch.random.get_rng_state()
    checkpoints.load(tmp_path, tiny())
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_head_with_nan_is_not_stored(tmp_path: Path):
    head = make("medusa")
    with torch.no_grad():
        head.lm_heads[1].weight[0, 0] = float("inf")
    with pytest.raises(ConfigurationError, match=r"NaN or infinity in lm_heads.1.weight"):
        checkpoints.save(head, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_another_target_is_refused(tmp_path: Path):
    checkpoints.save(make("medusa"), tmp_path)
    with pytest.raises(ConfigurationError, match="hidden_size"):
        checkpoints.load(tmp_path, zoo.load("python-1m"))


def test_formats_that_can_not_carry_a_head(tmp_path: Path):
    with pytest.raises(ConfigurationError, match="format 'vllm' stores medusa heads, not hydra; choose foredraft"):
        checkpoints.save(make("hydra"), tmp_path / "x", format="vllm")
    with pytest.raises(ConfigurationError, match="unknown format 'gguf'; choose vllm, medusa, speculators, eagle3, foredraft"):
        checkpoints.save(make("hydra"), tmp_path / "x", format="gguf")
    head = make("medusa-shared")
    head.config = replace(head.config, lm_head_bias=True)
    with pytest.raises(ConfigurationError, match="without a bias"):
        checkpoints.save(head, tmp_path / "x", format="vllm")
    assert not (tmp_path / "x").exists()


# -- folders ------------------------------------------------------------------------------------------------------------------


def test_sharded_files(tmp_path: Path):
    head = make("eagle3")
    checkpoints.save(head, tmp_path)
    tensors = load_file(weights(tmp_path))
    weights(tmp_path).unlink()
    placed = {}
    for number, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        save_file({name: tensors[name] for name in names}, tmp_path / f"model-{number}.safetensors")
        placed |= dict.fromkeys(names, f"model-{number}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": placed}))
    assert torch.equal(says(checkpoints.load(tmp_path, tiny())), says(head))
    with pytest.raises(ConfigurationError, match=r"holds other weights, model-0.safetensors"):
        checkpoints.save(head, tmp_path)

    index.write_text(json.dumps({"weight_map": {**placed, "fc.weight": "model-9.safetensors"}}))
    with pytest.raises(ConfigurationError, match=r"names 'model-9.safetensors', which is not there"):
        checkpoints.load(tmp_path, tiny())
    index.write_text(json.dumps({"weight_map": {**placed, "fc.weight": "../model-0.safetensors"}}))
    with pytest.raises(ConfigurationError, match="not a safetensors file beside it"):
        checkpoints.load(tmp_path, tiny())
    index.write_text(json.dumps({"weight_map": {name: each for name, each in placed.items() if name != "fc.weight"}}))
    with pytest.raises(ConfigurationError, match=r"disagree about 'fc.weight'"):
        checkpoints.load(tmp_path, tiny())


def test_folders_that_hold_no_head(tmp_path: Path):
    with pytest.raises(ConfigurationError, match="no such folder"):
        checkpoints.load(tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match=r"it has no config.json"):
        checkpoints.load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigurationError, match="there are no weights"):
        checkpoints.load(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigurationError, match=r"not a readable head: its config.json says 'llama'"):
        checkpoints.load(tmp_path)
    with pytest.raises(ConfigurationError, match="is a file; a head is a folder"):
        checkpoints.load(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{")
    with pytest.raises(ConfigurationError, match="not a readable safetensors file"):
        checkpoints.load(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigurationError, match="not a JSON object"):
        checkpoints.load(tmp_path)


@pytest.mark.parametrize("named", ["folder", "file"])
def test_pickles_are_refused_with_the_command_that_converts_them(tmp_path: Path, named: str):
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 1}')
    torch.save({}, tmp_path / "medusa_lm_head.pt")
    asked = tmp_path if named == "folder" else tmp_path / "medusa_lm_head.pt"
    with pytest.raises(ConfigurationError, match=rf"foredraft convert {tmp_path / 'medusa_lm_head.pt'} --out FOLDER"):
        checkpoints.load(asked, tiny())


@pytest.mark.parametrize("at", ["save_file", "fsync", "replace"])
def test_a_crash_leaves_what_was_there(tmp_path: Path, at: str, monkeypatch):
    checkpoints.save(make("medusa"), tmp_path)
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr({"save_file": "safetensors.torch.save_file"}.get(at, f"foredraft.files.os.{at}"), fail)
    with pytest.raises(ConfigurationError, match=r"cannot write.*No space left"):
        checkpoints.save(make("medusa-biased"), tmp_path)
    monkeypatch.undo()
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before


def test_other_files_in_the_folder_stay(tmp_path: Path):
    (tmp_path / "README.md").write_text("mine")
    checkpoints.save(make("medusa"), tmp_path)
    checkpoints.save(make("medusa-biased"), tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"
    assert torch.equal(says(checkpoints.load(tmp_path, tiny())), says(make("medusa-biased")))
    assert {os.stat(each).st_mode & 0o777 for each in tmp_path.iterdir()} == {os.stat(tmp_path / "README.md").st_mode & 0o777}
    with safe_open(weights(tmp_path), "pt") as file:
        assert file.metadata() == {"format": "pt"}  # which transformers asks for
    with pytest.raises(ConfigurationError, match="is a file; a head is stored in a folder"):
        checkpoints.save(make("medusa"), tmp_path / "README.md")


# -- the hub --------------------------------------------------------------------------------------------------------------------


class Hub:
    """Repositories as folders, by the calls that huggingface_hub has for them."""

    def __init__(self, root: Path):
        self.root, self.calls = root, []

    def snapshot_download(self, repo_id, *, revision=None, allow_patterns=None, local_files_only=False):
        self.calls.append((repo_id, revision, allow_patterns))
        folder = self.root / repo_id / (revision or "main")
        if not folder.is_dir():
            raise ValueError(f"no repository {repo_id} at {revision}")
        return str(folder)

    def create_repo(self, repo_id, *, private=None, exist_ok=False):
        self.calls.append(("create_repo", repo_id, private))

    def create_branch(self, repo_id, *, branch, exist_ok=False):
        self.calls.append(("create_branch", branch))

    def upload_folder(self, *, repo_id, folder_path, revision=None, commit_message):
        target = self.root / repo_id / (revision or "main")
        target.mkdir(parents=True)
        for file in Path(folder_path).iterdir():
            (target / file.name).write_bytes(file.read_bytes())
        return f"https://hub/{repo_id}"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch):
    made = Hub(tmp_path / "hub")
    monkeypatch.setattr("huggingface_hub.snapshot_download", made.snapshot_download)
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: made)
    monkeypatch.setattr("foredraft.heads.checkpoints.on_this_machine", lambda name: False)
    return made


def test_through_a_hub(hub: Hub):
    head = make("eagle3")
    assert checkpoints.push_to_hub(head, "me/head", revision="v1", private=True) == "https://hub/me/head"
    assert ("create_repo", "me/head", True) in hub.calls and ("create_branch", "v1") in hub.calls
    assert torch.equal(says(checkpoints.from_pretrained("me/head", tiny(), revision="v1")), says(head))
    assert hub.calls[-1] == ("me/head", "v1", ["*.json", "*.safetensors"])
    assert checkpoints.describe("me/head", revision="v1")["kind"] == "eagle3"
    with pytest.raises(ConfigurationError, match="'me/head at v2' cannot be had from the hub: no repository"):
        checkpoints.load("me/head", tiny(), revision="v2")


def test_a_hub_that_has_pickles_only(hub: Hub):
    folder = hub.root / "me" / "old" / "main"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"medusa_num_heads": 1}')
    torch.save({}, folder / "medusa_lm_head.pt")
    with pytest.raises(ConfigurationError, match="foredraft convert"):
        checkpoints.load("me/old", tiny())


def test_revisions_belong_to_hubs(tmp_path: Path):
    checkpoints.save(make("medusa"), tmp_path)
    with pytest.raises(ConfigurationError, match="is a folder and has no revision 'v1'"):
        checkpoints.load(tmp_path, tiny(), revision="v1")
    with pytest.raises(ConfigurationError, match="no revision 'v1'"):
        checkpoints.load("zoo:python-8m-medusa", revision="v1")


# -- the zoo --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["medusa", "eagle3"])
def embedded(request, tmp_path: Path, monkeypatch):
    """A package in which a head for python-8m is embedded."""
    for each in zoo.root().iterdir():
        (tmp_path / each.name).symlink_to(each)
    monkeypatch.setattr(zoo, "root", lambda: tmp_path)
    target = zoo.load("python-8m", dtype=torch.float32)
    head = heads.find(request.param).for_target(target)
    folder = tmp_path / f"python-8m-{request.param}"
    if folder.is_symlink():
        folder.unlink()
    checkpoints.save(head, folder)
    (folder / "metrics.json").write_text('{"parameters": 7}')
    return request.param, head, target


def test_embedded_heads(embedded):
    kind, head, target = embedded
    name = f"python-8m-{kind}"
    assert name in zoo.names() and zoo.head_for(target, kind) == f"zoo:{name}" and zoo.head_for(target, "hydra") is None
    back = checkpoints.load(f"zoo:{name}", target)
    assert all(torch.equal(mine, back.state_dict()[each]) for each, mine in head.state_dict().items())
    row = next(row for row in zoo.describe() if row.name == name)
    assert row.kind == "head" and row.parameters == 7 and row.size > 0
    with pytest.raises(ConfigurationError, match=f"is a draft head, not a model; use it as drafter '{kind}:zoo:{name}'"):
        zoo.load(name)
    with pytest.raises(ConfigurationError, match="python-1m is not a draft head; the embedded heads are .*zoo:" + name):
        checkpoints.load("zoo:python-1m", target)
    with pytest.raises(ConfigurationError, match="hidden_size"):
        checkpoints.load(f"zoo:{name}", zoo.load("python-1m"))


def test_embedded_heads_are_inflated_with_their_target(embedded, monkeypatch):
    kind, head, _ = embedded
    entry = zoo.CATALOGUE[zoo.INFLATED]
    monkeypatch.setitem(zoo.CATALOGUE, zoo.INFLATED, replace(entry, inflated=replace(entry.inflated, layers=9)))
    large = zoo.load("python-300m")
    for name in (zoo.head_for(large, kind), f"zoo:python-300m-{kind}"):
        inflated = checkpoints.load(name, large)
        assert inflated.config.target.hidden_size == 1024 and {each.dtype for each in inflated.parameters()} == {torch.bfloat16}
        assert sum(each.numel() for each in inflated.parameters()) > 3 * sum(each.numel() for each in head.parameters())


@pytest.mark.parametrize(("name", "format"), [("hydra", "foredraft"), ("medusa", "vllm"), ("eagle3", "eagle3")])
def test_heads_written_under_the_former_name_load(tmp_path, name, format):
    head = make(name)
    checkpoints.save(head, tmp_path, format=format, about={"steps": 7})
    config = tmp_path / "config.json"
    assert "foredraft" in config.read_text()
    config.write_text(config.read_text().replace("foredraft", "foretoken"))
    assert torch.equal(says(checkpoints.load(tmp_path, tiny())), says(head))
    assert checkpoints.describe(tmp_path)["about"] == {"steps": 7}

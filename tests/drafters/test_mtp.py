"""MTP layers as the drafter, against transformers' own modules of them, which read every text from its beginning."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
import transformers
from cover import covered
from helpers import PAD, alone, generate, padded, prompts, tiny
from kernel_cases import build, needs_kernels
from mtp_cases import mtp_layers, save
from transformers.cache_utils import MtpCache

from foredraft import ConfigurationError, Speculator, UnsupportedModelError, drafters
from foredraft.cli.suggest import suggest
from foredraft.drafters.mtp import Mtp, layers_of, model_of
from foredraft.target import Target

CHECKPOINTS = ["deepseek_v3", "glm4_moe", "glm4_moe_lite"]
LENGTHS = (21, 14, 30)


@torch.no_grad()
def said(model, layers, ids, drafted) -> torch.Tensor:
    """``[1 + len(drafted), V]`` logits after the text ``ids`` and after each of ``drafted``, by transformers' modules without a cache."""
    tokens, found = list(ids[1:]), []
    states = model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states[-1]
    for token in [*drafted, None]:
        positions = torch.arange(1, len(tokens) + 1)[None]
        out = layers.forward_layer(0, states, positions, MtpCache(config=layers.config), input_ids=torch.tensor([tokens]))
        found.append(layers._project_to_logits(out[0, -1]))
        tokens, states = [*tokens, token], torch.cat([states, out[:, -1:]], 1)
    return torch.stack(found)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list:
    """What the drafter says: texts, tree, the first node that is new, logits ``[R, n, V]``."""
    seen: list = []
    expanding = Mtp._expand

    def expand(self, request):
        texts, inner = [list(row.ids) for row in request.rows], expanding(self, request)

        def call(tree, first):
            logits = inner(tree, first)
            seen.append((texts, tree, first, logits.clone()))
            return logits

        return call

    monkeypatch.setattr(Mtp, "_expand", expand)
    return seen


def assert_as_transformers(model, layers, calls) -> None:
    """Along every path of every tree."""
    for texts, tree, first, logits in calls:
        for row, (ids, parents) in enumerate(zip(texts, tree.parents.tolist())):
            for node in range(first, tree.nodes):
                if tree.valid is not None and not tree.valid[row, node]:
                    continue
                path, above = [], node
                while above > 0:
                    path, above = [int(tree.tokens[row, above]), *path], parents[above]
                expected = said(model, layers, ids, path)[-1]
                torch.testing.assert_close(logits[row, node - first], expected, atol=1e-4 * float(expected.abs().max()), rtol=1e-4)


MODELS = ["deepseek_v3", "glm4_moe", "llama", "gemma3", "mellum", "granite"]  # the fourth and the fifth with a window
SHAPES = ["chain(3)", "product(2,2,1)", "dynamic(depth=3,k=2,total=4)"]


@needs_kernels
@pytest.mark.parametrize(("name", "execution", "shape"), covered(MODELS, ["eager", "native"], SHAPES, ways=2))
def test_drafts_are_those_of_transformers_modules_round_after_round(name, execution, shape, calls):
    """Drafts share their noise with the target and p is nearly flat, so that some tokens are kept and others are not."""
    model, rows = build(name, torch.float32), prompts(LENGTHS, vocabulary=99)
    layers = mtp_layers(model)
    reference = mtp_layers(model)
    options = {"do_sample": True, "temperature": 30.0, "max_new_tokens": 14, "pad_token_id": PAD}
    expected = generate(Speculator(model, "none"), rows[:1], seed=7, **options)
    with closing(Speculator(model, Mtp(layers), shape=shape, rule="match", execution=execution, self_test=False)) as speculator:
        found = speculator.generate(**padded(rows), seed=[7, 8, 9], **options)
        assert speculator.drafter._inner.execution == execution
    assert 0 < found.stats.accepted < found.stats.drafted
    assert found.sequences[:1, -14:].tolist() == expected
    assert len(calls) > 12 and {len(texts) for texts, *_ in calls} >= {3}
    assert_as_transformers(model, reference, calls[:4] + calls[4:-4:5] + calls[-4:])


def test_a_layer_that_predicts_as_the_target_does_has_its_drafts_kept():
    """A target that goes by the last token alone, and a layer that looks at nothing else either."""
    model = build("llama", torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_(), layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
    layers = mtp_layers(model)
    first = layers.layers[0]
    with torch.no_grad():
        first.mtp_block.self_attn.o_proj.weight.zero_(), first.mtp_block.mlp.down_proj.weight.zero_()
        first.eh_proj.weight.copy_(torch.eye(64, 128))
        first.enorm.weight.fill_(1.0), first.post_norm.weight.fill_(1.0)
    row = prompts((9,), vocabulary=99)[0]
    expected = alone(model, row, max_new_tokens=25)
    out = Speculator(model, Mtp(layers), shape="chain(4)").generate(**padded([row]), max_new_tokens=25, pad_token_id=PAD)
    assert out.sequences[0, -25:].tolist() == expected
    assert out.stats.accepted == out.stats.drafted == 19 and out.stats.target_passes == 6


# -- checkpoints ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes of these checkpoints expect the layer behind the last one of published sizes; here that is the third."""
    for name in CHECKPOINTS:
        monkeypatch.setattr(type(build(name, torch.float32)), "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.3.*"])


def stored(name: str, folder: Path, dtype=torch.float32, **others):
    """A model and the MTP layer that is stored behind it."""
    model = build(name, dtype, **({"num_nextn_predict_layers": 1} if name == "glm4_moe_lite" else {}), **others)
    layers = mtp_layers(model)
    save(model, layers, folder)
    return model, layers


@needs_kernels
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_layer_of_the_checkpoint_drafts(name, tmp_path, short, calls):
    model, layers = stored(name, tmp_path)
    row = prompts((20,), vocabulary=99)[0]
    with closing(Speculator(str(tmp_path), "mtp", shape="chain(3)", dtype="float32", self_test=False)) as speculator:
        before = vars(speculator.model.config).copy()
        assert speculator.target.execution == speculator.drafter._inner.execution == "native"
        assert speculator.model.lm_head.weight.is_meta  # it is packed, once
        out = speculator.generate(**padded([row]), max_new_tokens=12, pad_token_id=PAD)
        assert vars(speculator.model.config) == before
    assert out.sequences[0, -12:].tolist() == alone(model, row, max_new_tokens=12)
    assert_as_transformers(model, layers, calls[::3])


def test_a_quantized_layer_leaves_the_target_as_it_is(tmp_path, short):
    stored("deepseek_v3", tmp_path, torch.bfloat16, moe_intermediate_size=64)
    row = prompts((20,), vocabulary=99)[0]
    options = {**padded([row]), "max_new_tokens": 12, "pad_token_id": PAD}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    expected = Speculator(model, "none", self_test=False).generate(**options).sequences
    for kind in ("int8", "int4"):
        how = {"shape": "chain(3)", "drafter_options": {"quantization": kind}, "self_test": False}
        with closing(Speculator(model, "mtp", **how)) as speculator:
            weights = dict(speculator.drafter._layers.layers.named_parameters())
            assert "Tensor" in type(weights["0.eh_proj.weight"]).__name__
            assert torch.equal(speculator.generate(**options).sequences, expected)
        assert all(type(each) is torch.nn.Parameter for each in model.parameters())
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    with pytest.raises(ConfigurationError, match="unknown quantization 'int3'"):
        Mtp(quantization="int3")


def test_what_has_no_layers_is_refused_by_name(tmp_path, short):
    with pytest.raises(ConfigurationError, match="transformers knows of none for LlamaForCausalLM; use another drafter"):
        Speculator(tiny(), "mtp")
    build("glm4_moe", torch.float32).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=r"MTP layers of .* cannot be read from its checkpoint: .*missing"):
        Speculator(str(tmp_path), "mtp", dtype="float32")
    with pytest.raises(ConfigurationError, match="cannot be read from its checkpoint"):
        Speculator(build("glm4_moe", torch.float32), "mtp")  # made in memory
    with pytest.raises(ConfigurationError, match="takes no source; write 'mtp' without ':somewhere'"):
        drafters.create("mtp:somewhere")
    with pytest.raises(ConfigurationError, match="takes layers as an MtpModel of transformers, not 'somewhere'; leave layers out"):
        drafters.create("mtp", {"layers": "somewhere"})
    layers = mtp_layers(build("llama", torch.float32))
    for model, had in ((build("llama", torch.bfloat16), "width 64 in bfloat16"), (tiny(), "width 32 in float32")):
        with pytest.raises(
            ConfigurationError, match=rf"LlamaDecoderLayer of width 64 in float32 on cpu, and .* {had} on cpu; make it of this"
        ):
            Speculator(model, Mtp(layers))
    with pytest.raises(ConfigurationError, match=r"has LlamaDecoderLayer .*Glm4MoeDecoderLayer of width 64"):
        Speculator(build("glm4_moe", torch.float32), Mtp(layers))
    with pytest.raises(ConfigurationError, match="leave quantization or layers out"):
        Mtp(layers, quantization="int8")
    model = build("glm4_moe", torch.float32)
    model.model.layers[0].mlp.down_proj.weight = torch.nn.Parameter(torch.zeros(64, 96).to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ConfigurationError, match=r"keeps weights in eight-bit floats.*load it in bfloat16"):
        layers_of(model)


def test_a_model_that_reads_more_than_text_is_refused():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(text_config={**sizes, "vocab_size": 64}, vision_config={**sizes, "image_size": 28, "patch_size": 14})
    )
    layers = mtp_layers(tiny())
    with pytest.raises(ConfigurationError, match=r"takes language models, and .* reads more than text"):
        model_of(layers, layers.layers[0], model)


def test_a_layer_that_cannot_draft_for_its_target_is_refused(monkeypatch):
    """One with a recurrent state, for example. The target keeps its own way of making passes."""
    model = build("llama", torch.float32)
    inner = Target.chains_only.fget
    monkeypatch.setattr(Target, "chains_only", property(lambda self: "it has a state" if self.vocab_size == 128 else inner(self)))
    with pytest.raises(UnsupportedModelError, match=r"cannot use the MTP layer of .*: it has a state; use another drafter"):
        Speculator(model, Mtp(mtp_layers(model)), execution="native", self_test=False)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("execution", ["eager", "native"])
def test_layers_that_are_handed_in_are_copied(execution):
    """What becomes of them changes no draft, and drafting changes nothing about them."""
    model = build("llama", torch.float32)
    layers = mtp_layers(model)
    layers.layers.requires_grad_(True).train()
    before = {name: weight.clone() for name, weight in layers.layers.state_dict().items()}
    speculator = Speculator(model, Mtp(layers), execution=execution, shape="chain(3)", self_test=False)
    assert (speculator.drafter._packing is not None) == (execution == "native")
    assert not any("forward" in vars(module) for module in layers.layers.modules())
    assert all(weight.requires_grad for weight in layers.layers.parameters()) and all(module.training for module in layers.layers.modules())
    assert all(torch.equal(weight, before[name]) for name, weight in layers.layers.state_dict().items())
    row = prompts((12,), vocabulary=99)[0]
    with torch.no_grad():
        layers.layers.to(torch.bfloat16)
    assert generate(speculator, [row], max_new_tokens=8) == [alone(model, row, max_new_tokens=8)]
    speculator.close()
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("execution", ["eager", "native"])
def test_a_target_that_changes_its_dtype_is_drafted_for(execution):
    model, row = build("llama", torch.float32), prompts((12,), vocabulary=99)[0]
    with closing(Speculator(model, Mtp(mtp_layers(model)), execution=execution, shape="chain(3)", self_test=False)) as speculator:
        generate(speculator, [row], max_new_tokens=8)
        model.to(torch.bfloat16)
        found = generate(speculator, [row], max_new_tokens=8)
    with closing(Speculator(model, "none", execution=execution, self_test=False)) as plain:
        assert found == generate(plain, [row], max_new_tokens=8)


def test_layers_may_have_been_made_with_another_attention(calls):
    model, row = build("llama", torch.float32), prompts((12,), vocabulary=99)[0]
    model.set_attn_implementation("eager")
    layers = mtp_layers(model)
    model.set_attn_implementation("sdpa")
    speculator = Speculator(model, Mtp(layers), execution="eager", shape="product(2,2)")
    assert generate(speculator, [row], max_new_tokens=8) == [alone(model, row, max_new_tokens=8)]
    assert_as_transformers(model, mtp_layers(model), calls[-2:])


def test_suggest_names_it_where_the_configuration_has_such_layers(tmp_path):
    for name, named in (("glm4_moe", True), ("llama", False)):
        folder = tmp_path / name
        model = build(name, torch.float32)
        model.config.num_nextn_predict_layers = int(named)
        model.config.save_pretrained(folder)
        lines = "\n".join(suggest(str(folder)))
        assert ("mtp " in lines) == named and ("--drafter mtp" in lines) == named

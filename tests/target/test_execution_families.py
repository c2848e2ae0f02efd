"""Every family through every execution: the logits of the model as it is, within rounding, and the same text.

A family that an execution does nothing for would pass in silence. What is laid out, and what is refused and why, is therefore written
down here, family by family.
"""

from __future__ import annotations

import functools
import itertools
from functools import cache

import pytest
import torch
from architectures import ARCHITECTURES, build_wide
from cover import nightly_but
from helpers import Oracle, clone, generate, repetitive

from foredraft import ConfigurationError, Speculator, TokenTree
from foredraft.backends import compilation, native
from foredraft.backends import packing as packing_module
from foredraft.backends.families import family_of
from foredraft.backends.kernel_pass import NativeModel
from foredraft.backends.packing import preferred_hint
from foredraft.drafters.draft_model import DraftModel
from foredraft.target import Target

pytestmark = pytest.mark.filterwarnings("ignore:.*longrope")

KERNELS = ("llama", "qwen2", "qwen3", "mistral", "qwen2_window", "qwen3_moe", "mixtral")
FAMILIES = [name for name, entry in ARCHITECTURES.items() if entry.support != "refused"] + [f"{name} wide" for name in KERNELS]
TREES = [name for name in FAMILIES if ARCHITECTURES[name.split()[0]].support == "tree"]

# What keeps its layout, of all that is multiplied with: linear layers of a class of their own, routers, and weights of experts, which the
# kernels take where sizes are multiples of 64. All other linear layers are packed.
CONV1D = {"c_attn", "c_proj", "c_fc"}
FALCON = {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}
EXPERTS = {"experts", "gate"}
ROUTED = {"experts", "router"}
KEPT = {
    "gpt2": CONV1D, "falcon": FALCON, "falcon_grouped": FALCON, "falcon_alibi": FALCON, "qwen3_moe": EXPERTS, "olmoe": EXPERTS,
    "minimax_m2": EXPERTS, "glm4_moe": EXPERTS, "mixtral": EXPERTS, "deepseek_v2": EXPERTS, "deepseek_v3": EXPERTS, "qwen3_next": EXPERTS,
    "ernie4_5_moe": EXPERTS | {"moe_statics"},
    "qwen2_moe": EXPERTS, "dots1": EXPERTS, "solar_open": EXPERTS, "glm4_moe_lite": EXPERTS, "exaone_moe": EXPERTS,
    "mellum": EXPERTS, "mistral4": EXPERTS,
    "nemotron_h": EXPERTS, "gpt_oss": ROUTED, "llama4_text": ROUTED, "llama4_tuned": ROUTED, "granitemoehybrid": ROUTED,
}  # fmt: skip
# Linear layers whose rows are no multiple of 32 numbers in the tiny model: the kernels do not read them, oneDNN's layout has them.
NARROW = {
    "deepseek_v2": {"q_b_proj", "kv_b_proj"},
    "deepseek_v3": {"q_b_proj", "kv_b_proj"},
    "glm4_moe_lite": {"q_b_proj", "kv_b_proj"},
    "youtu": {"q_b_proj", "kv_b_proj"},
    "mistral4": {"q_b_proj", "kv_b_proj"},
    "gemma3n_text": {"correction_coefs", "prediction_coefs", "linear_right", "per_layer_projection"},
}
# Whose layers are not compiled, other than those of models that take chains only.
NOT_COMPILED = {
    "llama4_text": "its attention temperature is set anew in every pass",
    "llama4_tuned": "its attention temperature is set anew in every pass",
    "gemma3n_text": "its layers do not take the cache in a way that can be compiled",
}

EXECUTIONS = ("packed", "native", "auto")
LENGTHS = (23, 3, 16)
TREE = (-1, 0, 0, 1, 1, 2, 3)
OTHER = (-1, 0, 1, 1, 2, 0, 5)  # of the same size: whoever takes its mask for that of TREE is found out
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}  # of the largest logit
ROWS = repetitive((23, 9))
NEW = 8


@cache
def tiny(family):
    """The tiny model of ``family``: do not change it."""
    return build_wide(family)


@cache
def draft(family):
    """A model that mostly agrees with ``tiny(family)``."""
    model, generator = clone(tiny(family)), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.06 * weight.std(correction=0) * torch.randn(weight.shape, generator=generator))
    return model


def turns(dtype):
    """Every family in one of the two dtypes, packed or native, by turns, and some in the layouts that ``auto`` mixes. Those that the
    kernels take run in every execution, in one of the dtypes each. The rest is nightly."""
    names = set()
    for (family, name), (how, execution) in itertools.product(enumerate(FAMILIES), enumerate(EXECUTIONS)):
        if "wide" in name:
            now = (family + how) % 2 == dtype
        else:
            now = family % 4 == 2 * how + dtype if how < 2 else family % 10 == 5 * dtype
        if now:
            names.add((name, execution))
    return nightly_but(names, list(itertools.product(FAMILIES, EXECUTIONS)))


@pytest.fixture
def execution(request, monkeypatch):
    """For ``auto`` layers are laid out in every layout in turn."""
    if request.param == "native" and (why := native.refusal(torch.float32) or native.refusal(torch.bfloat16)):
        pytest.skip(f"no kernels here: {why}")
    turns = itertools.count()

    def in_turn(groups, hints):
        fitting = [hint for hint in hints if preferred_hint(groups, (hint,)) is not None]
        return fitting[next(turns) % len(fitting)] if request.param == "auto" and fitting else preferred_hint(groups, hints)

    monkeypatch.setattr(packing_module, "preferred_hint", in_turn)
    return request.param


def steps(target, branches):
    """Logits of ragged prompts, a chain, trees that branch, one with filler, a step, and a chain for the rows that are left."""
    texts = [[3 + (7 * i * i + 5 * row) % 120 for i in range(length)] for row, length in enumerate(LENGTHS)]
    chain = torch.randint(0, 128, (3, 4), generator=torch.Generator().manual_seed(1))
    nodes = torch.randint(0, 128, (3, len(TREE)), generator=torch.Generator().manual_seed(2))
    valid = torch.ones_like(nodes, dtype=torch.bool)
    valid[1, 5:] = False
    target.open(texts)
    found = {"prompts": target.prefill(texts, first=0), "chain": target.score(TokenTree.from_chain(chain))}
    target.commit(None, [4, 2, 1])
    if branches:
        found["other"] = target.score(TokenTree(nodes, torch.tensor([OTHER] * 3)))
        found["tree"] = target.score(TokenTree(nodes, torch.tensor([TREE] * 3), valid))[valid]
        target.commit(torch.tensor([[0, 2, 5], [0, 1, 3], [0, 1, 4]]), [3, 1, 2])
    found["step"] = target.advance(chain[:, 0])
    target.compact([0, 2])
    found["rest"] = target.score(TokenTree.from_chain(nodes[:2, :3]))
    target.release()
    return found


@cache
@torch.inference_mode()
def wanted(family, dtype):
    return steps(Target(clone(tiny(family)).to(dtype), execution="eager"), family in TREES)


@cache
def wanted_text(family):
    return generate(Speculator(tiny(family), drafter="none", execution="eager"), ROWS, max_new_tokens=NEW)


@torch.inference_mode()
def assert_same_logits(target, family, dtype):
    plain, found = wanted(family, dtype), steps(target, family in TREES)
    assert found.keys() == plain.keys()
    for name, logits in found.items():
        apart = (logits.float() - plain[name].float()).abs().max() / plain[name].float().abs().max()
        assert apart <= TOLERANCE[dtype], f"{name}: {apart:.1e} of the largest logit"


def kept(model):
    """The modules with matrices that are still multiplied with as they were."""
    found = set()
    for name, module in model.named_modules():
        own = [each for field, each in module.named_parameters(recurse=False) if each.dim() >= 2 and "time_mix" not in field]
        if own and "forward" not in vars(module) and not isinstance(module, (torch.nn.Embedding, torch.nn.Conv1d)):
            found.add(name.rpartition(".")[2])
    return found


def assert_laid_out(target, family, execution):
    """What of the model runs on other layouts is what the tables above say."""
    name, *wide = family.split()
    kernels = target.backend.overrides
    left = KEPT.get(name, set()) - ({"experts"} if wide and execution != "packed" else set())
    narrow = execution == "native" or not packing_module.onednn_lays_out(target.model.dtype)
    assert kept(target.model) == left | (NARROW.get(name, set()) if narrow else set())
    layers = target.model.config.num_hidden_layers
    assert kernels.native == (layers if wide and execution == "native" else 0)
    assert target.execution == ("native" if kernels.native else "packed")
    whole = isinstance(vars(target.model.base_model).get("forward"), NativeModel)
    assert whole == (kernels.native > 0)
    if kernels.native:
        assert kernels.unfused is None
    elif family_of(target.model, target.model.get_decoder()) is not None:  # sizes of 8 and 16
        assert kernels.unfused.endswith(
            (" are not packed together in the kernels' layout", " outputs, and the kernels take multiples of 64")
        )
    else:
        sharing = getattr(target.model.config, "num_kv_shared_layers", 0) > 0
        assert kernels.unfused.startswith(
            "some of its layers attend over" if sharing else "its decoder layers are none of Llama, Mistral, "
        )


def assert_as_found(model, family):
    assert not any("forward" in vars(module) for module in model.modules())
    before = dict(tiny(family).named_parameters(remove_duplicate=False))
    found = dict(model.named_parameters(remove_duplicate=False))
    assert found.keys() == before.keys()
    for name, parameter in found.items():
        assert torch.equal(parameter, before[name].to(parameter.dtype)) and parameter.requires_grad == before[name].requires_grad
    tied = {name for name in found if found[name] is found["lm_head.weight"]} if "lm_head.weight" in found else set()
    assert tied == {name for name in tied if before[name] is before["lm_head.weight"]}


@pytest.mark.parametrize(("family", "execution"), turns(0), indirect=["execution"])
def test_logits_and_text_are_those_of_the_model_as_it_is(family, execution, monkeypatch):
    model = clone(tiny(family))
    monkeypatch.setattr("foredraft.speculator.load_model", lambda *_, **__: model)
    source = model if execution == "packed" else "loaded by name"  # nobody else holds it, and packed weights replace its own
    if family in TREES:
        speculator = Speculator(source, DraftModel(draft(family)), shape="product(2,1)", execution=execution)
    else:
        texts = [row + text for row, text in zip(ROWS, wanted_text(family))]
        speculator = Speculator(source, Oracle(texts), shape="chain(3)", execution=execution)
    assert speculator.target.backend.overrides.owned == (execution != "packed")
    assert_laid_out(speculator.target, family, execution)
    assert_same_logits(speculator.target, family, torch.float32)
    assert generate(speculator, ROWS, max_new_tokens=NEW) == wanted_text(family)
    speculator.close()
    assert_as_found(model, family)


@pytest.mark.parametrize(("family", "execution"), turns(1), indirect=["execution"])
def test_in_bfloat16(family, execution):
    if execution == "packed" and not packing_module.onednn_lays_out(torch.bfloat16):
        pytest.skip("oneDNN has no layouts for bfloat16 on this CPU")
    model = clone(tiny(family)).to(torch.bfloat16)
    target = Target(model, execution=execution, owned=True)
    assert_laid_out(target, family, execution)
    assert_same_logits(target, family, torch.bfloat16)
    target.close()
    assert_as_found(model, family)


# -- what falls back says so --------------------------------------------------------------------------------------------------


def laid_out(monkeypatch, taken):
    """Targets whose layers of several outputs, and single ones, get the layouts ``taken``."""
    monkeypatch.setattr(packing_module, "preferred_hint", lambda groups, hints: taken[len(groups[0]) > 1])
    return Target(clone(tiny("llama wide")), execution="packed")


def test_layers_that_are_no_kernel_say_why(monkeypatch):
    target = laid_out(monkeypatch, (8, None))
    assert target.execution == "packed" and target.backend.overrides.unfused.endswith(" are not packed together in the kernels' layout")
    assert_same_logits(target, "llama wide", torch.float32)


@pytest.mark.skipif(native.refusal(torch.float32) is not None, reason="no kernels here")
def test_sizes_that_the_kernels_do_not_read_are_refused():
    *shared, options = ARCHITECTURES["llama"].build.args
    model = ARCHITECTURES["llama"].build.func(*shared, {**options, "hidden_size": 40, "intermediate_size": 80}, "sdpa")
    with pytest.raises(ConfigurationError, match=r"cannot be packed: the native kernels read rows of 32 weights.*use execution='auto'"):
        Target(model, execution="native")
    assert not any("forward" in vars(module) for module in model.modules())
    assert Target(model, owned=True).execution == "packed"


# -- compiled -----------------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("family", [name for name in FAMILIES if "wide" not in name])
@torch.inference_mode()
def test_compiled_layers(family, monkeypatch):
    """As torch traces them; what compiles the traces is torch's affair, and test_compiled.py lets it for some."""
    torch._dynamo.reset()
    monkeypatch.setattr(compilation.torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(compilation, "_no_compiler", lambda: None)
    model = clone(tiny(family))
    why = NOT_COMPILED.get(family) if family in TREES else "it keeps a cache of its own"
    if why is None:
        target = Target(model, execution="compiled")
        assert target.execution == "compiled" and target.backend.overrides.graphs == 4
        assert_same_logits(target, family, torch.float32)
        target.close()
    else:
        with pytest.raises(ConfigurationError, match=f"cannot be compiled: {why}.*use execution='auto'"):
            Target(model, execution="compiled")
    assert_as_found(model, family)

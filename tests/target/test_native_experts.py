"""Mixtures of experts on the kernels against the model's own code: logits, who takes which expert, bits, and weights that change."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from architectures import ARCHITECTURES
from cover import covered
from helpers import alone, generate, random_tree
from kernel_cases import DTYPES, MIXTURES, TOLERANCE, build, config_of, needs_kernels, rounded
from kernel_cases import always as always  # a fixture
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from foredraft import ConfigurationError, Speculator, TokenTree
from foredraft.backends import experts, native
from foredraft.backends.base import Part
from foredraft.backends.described_pass import DescribedModel
from foredraft.backends.experts import Mixture
from foredraft.backends.kernel_pass import NativeModel, Places
from foredraft.backends.rounding import explained
from foredraft.drafters.draft_model import DraftModel
from foredraft.models.cache import TreeCache, Window
from foredraft.models.skips import SkipSet
from foredraft.models.support import tolerance
from foredraft.planning import AutomaticPlanner
from foredraft.shapes import TreeShape
from foredraft.target import Target

pytestmark = [needs_kernels, pytest.mark.usefixtures("always")]
TREE = (-1, 0, 0, 1, 1, 2, 3, 3, 6)
SUMS = ["grouped_mm", "eager"]


def made(name, dtype, sums="grouped_mm", **changes):
    """A model, of a configuration with ``changes``."""
    if not changes:
        return build(name, dtype, experts_implementation=sums)
    config = config_of(name)
    for key, value in changes.items():
        setattr(config, key, value)
    with torch.random.fork_rng():
        torch.manual_seed(4)
        options = {"attn_implementation": "sdpa", "experts_implementation": sums}
        return rounded(AutoModelForCausalLM.from_config(config, **options).eval(), dtype)


def targets(*given, **changes):
    plain = Target(made(*given, **changes), execution="eager")
    kernels = Target(made(*given, **changes), execution="native", owned=True)
    assert kernels.backend.overrides.native == 3, kernels.reasons
    assert isinstance(vars(kernels.model.model)["forward"], NativeModel)
    return plain, kernels


def assert_close(got, wanted, dtype, routed=True):
    """In bfloat16 rounding may choose other experts for a token, where it is ``routed``."""
    errors = (got.float() - wanted.float()).abs().amax(-1).flatten() / wanted.float().abs().max()
    assert errors.quantile(0.75 if routed and dtype == torch.bfloat16 else 1.0, interpolation="lower") <= TOLERANCE[dtype]


def steps(target):
    """Ragged prompts, a chain, a tree with filler, what is kept of it, a step, rows that leave."""
    texts = [[(7 * i + row) % 100 for i in range(length)] for row, length in enumerate((40, 3, 17))]
    chain = torch.randint(0, 100, (3, 4), generator=torch.Generator().manual_seed(1))
    nodes = torch.randint(0, 100, (3, len(TREE)), generator=torch.Generator().manual_seed(2))
    valid = torch.ones_like(nodes, dtype=torch.bool)
    valid[1, 5:] = False
    target.open(texts)
    found = [target.prefill(texts, first=0), target.score(TokenTree.from_chain(chain))]
    target.commit(None, [4, 2, 1])
    found.append(target.score(TokenTree(nodes, torch.tensor([TREE] * 3), valid))[valid])
    target.commit(torch.tensor([[0, 2, 5], [0, 1, 3], [0, 1, 4]]), [3, 1, 2])
    found.append(target.advance(chain[:, 0]))
    target.compact([0, 2])
    found.append(target.score(TokenTree.from_chain(chain[:2])))
    target.reset()
    return found


@torch.inference_mode()
@pytest.mark.parametrize(("name", "dtype", "sums"), covered(list(MIXTURES), DTYPES, SUMS))
def test_logits_are_those_of_the_model(name, dtype, sums):
    for wanted, got in zip(*map(steps, targets(name, dtype, sums))):
        assert_close(got, wanted, dtype)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_prompt(dtype):
    """More tokens of an expert than are computed together."""
    text = [(11 * i * i + 5 * i) % 100 for i in range(400)]
    found = []
    for target in targets("mixtral", dtype, num_local_experts=2, num_experts_per_tok=1):
        target.open([text])
        found.append(torch.stack([target.prefill([text], first=0), target.advance(torch.tensor([7]))]))
    assert_close(found[1], found[0], dtype)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("changes", [{"num_experts_per_tok": 8}, {"num_experts_per_tok": 1}, {"num_experts": 60}, {"hidden_act": "gelu"}])
def test_every_expert_one_and_many(changes, dtype):
    for wanted, got in zip(*map(steps, targets("qwen3_moe", dtype, **changes))):
        assert_close(got, wanted, dtype)


# -- who takes which expert -------------------------------------------------------------------------------------------------


NAMED = {  # what a configuration calls the number of experts, those chosen, and the first layer that has some
    "qwen3_moe": ("num_experts", "num_experts_per_tok", "decoder_sparse_step"),
    "glm4_moe": ("n_routed_experts", "num_experts_per_tok", "first_k_dense_replace"),
    "ernie4_5_moe": ("moe_num_experts", "moe_k", "moe_layer_start_index"),
    "deepseek_v2": ("n_routed_experts", "num_experts_per_tok", "first_k_dense_replace"),
}


def showing(dtype, count, chosen, name="qwen3_moe", **changes):
    """A layer whose output says which experts were chosen: expert e writes into column e. Its router's logits of a one-hot token are
    its weights."""
    numbers = zip(NAMED[name], (count, chosen, int(name == "qwen3_moe")))
    model = made(name, dtype, hidden_size=128, **dict(numbers), **changes)
    layer = model.model.layers[0]
    with torch.no_grad():
        for each in model.model.layers:
            if name != "qwen3_moe":
                each.mlp.shared_experts.down_proj.weight.zero_()
            each.mlp.experts.gate_up_proj.fill_(1.0)
            each.mlp.experts.down_proj.zero_()
            each.mlp.experts.down_proj[torch.arange(count), torch.arange(count), 0] = 1.0
        layer.post_attention_layernorm.weight.fill_(128**-0.5)
    return model, layer


def mixed(model, x):
    """``x`` ``[n, hidden]`` and what the MLP of the first layer adds to it, by the kernels."""
    decoder, cache, window = vars(model.model)["forward"], TreeCache(), Window(0, 1, (0,), len(x))
    cache.open([0])
    cache.enter(window)
    part, out = Part(0, 1, skip=SkipSet(attention=(0,))), x.clone()
    decoder.run_over(out, torch.arange(len(x)), None, None, cache, Places(window, ragged=False), None, part)
    return out


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "chosen"), [(4, 1), (4, 3), (8, 2), (8, 8), (16, 4), (60, 4), (64, 8), (128, 8)])
def test_ties_are_broken_as_torch_breaks_them(count, chosen, dtype):
    model, layer = showing(dtype, count, chosen)
    layer.mlp.gate.weight.copy_(torch.randint(0, 4, (count, 128), generator=torch.Generator().manual_seed(count + chosen)))
    target = Target(model, execution="native")
    x = torch.eye(128, dtype=dtype)
    wanted = type(layer.mlp).forward(layer.mlp, layer.post_attention_layernorm(x)[None])[0]
    got = mixed(model, x) - x
    assert torch.equal(got.abs() > 1e-3, (wanted.abs() > 1e-3)) and ((wanted.abs() > 1e-3).sum(1) == chosen).all()
    assert torch.allclose(got, wanted, atol=2e-2 if dtype == torch.bfloat16 else 1e-5)
    target.close()


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "sizes", "groups", "dtype"),
    covered(["glm4_moe", "deepseek_v2"], [(16, 4), (64, 6), (128, 8)], [(1, 1), (4, 2), (8, 3)], DTYPES),
)
def test_ties_of_scores_and_of_groups(name, sizes, groups, dtype):
    """Corrections are added to the scores, and groups are ordered by their best two; or there are none, and they are by their best one."""
    count, chosen = sizes
    model, layer = showing(dtype, count, chosen, name, n_group=groups[0], topk_group=groups[1])
    generator, gate = torch.Generator().manual_seed(count + groups[0]), layer.mlp.gate
    gate.weight.copy_(torch.randint(0, 3, (count, 128), generator=generator))
    if name == "glm4_moe":
        gate.e_score_correction_bias.copy_(torch.randint(0, 2, (count,), generator=generator) * 0.5)
    target = Target(model, execution="native")
    x = torch.eye(128, dtype=dtype)
    wanted = type(layer.mlp).forward(layer.mlp, layer.post_attention_layernorm(x)[None])[0]
    got = mixed(model, x) - x
    assert torch.equal(got.abs() > 1e-3, (wanted.abs() > 1e-3)) and ((wanted.abs() > 1e-3).sum(1) == chosen).all()
    assert torch.allclose(got, wanted, atol=2e-2 if dtype == torch.bfloat16 else 1e-5)
    target.close()


@torch.inference_mode()
@pytest.mark.parametrize("name", ["glm4_moe", "ernie4_5_moe"])
def test_logits_of_routers_in_float32_are_not_rounded(name):
    """Rounded to bfloat16, many of them would be equal."""
    model, layer = showing(torch.bfloat16, 128, 4, name)
    generator, gate = torch.Generator().manual_seed(3), layer.mlp.gate
    assert gate.weight.dtype == (torch.float32 if name == "ernie4_5_moe" else torch.bfloat16)
    gate.weight.copy_(1.0 + 0.01 * torch.randn(128, 128, generator=generator))
    for each in (*gate.buffers(), *gate.moe_statics.parameters()) if name == "ernie4_5_moe" else gate.buffers():
        each.zero_()
    target = Target(model, execution="native")
    x = (0.1 * torch.randn(300, 128, generator=generator) + 1.0).bfloat16()
    chosen = gate(layer.post_attention_layernorm(x))[2].sort(-1).values
    written = (mixed(model, x) - x).abs().topk(4).indices.sort(-1).values
    assert (chosen == written).float().mean() > 0.98
    target.close()


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_that_are_nearly_zero(dtype):
    """The classes add 1e-20 to the sum that scores are divided by; corrections choose the experts."""
    model, layer = showing(dtype, 16, 4, "glm4_moe", n_group=1, topk_group=1)
    layer.mlp.gate.weight.copy_(torch.linspace(-60, -44, 128).expand(16, 128))
    layer.mlp.gate.e_score_correction_bias.copy_(torch.arange(16) % 4 == 0)
    target = Target(model, execution="native")
    x = torch.eye(128, dtype=dtype)
    wanted = type(layer.mlp).forward(layer.mlp, layer.post_attention_layernorm(x)[None])[0]
    assert wanted[0].max() < 1e-5 and wanted[-1].max() > 0.2
    assert torch.allclose(mixed(model, x) - x, wanted, atol=2e-2 if dtype == torch.bfloat16 else 1e-5)
    target.close()


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_expert_that_nobody_takes_is_not_read(dtype):
    model, layer = showing(dtype, 8, 3)
    layer.mlp.gate.weight.copy_(torch.randint(0, 4, (8, 128), generator=torch.Generator().manual_seed(5)))
    layer.mlp.gate.weight[5] = -1.0
    target = Target(model, execution="native")
    mixture = vars(layer.mlp.experts)["forward"]
    before = mixed(model, torch.eye(128, dtype=dtype))
    mixture.gate_up.packed[5], mixture.down.packed[5] = torch.nan, torch.nan
    assert torch.equal(mixed(model, torch.eye(128, dtype=dtype)), before)
    mixture.down.packed[0] = torch.nan
    assert mixed(model, torch.eye(128, dtype=dtype)).isnan().any()
    target.close()


# -- bits -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MIXTURES)
def test_a_target_says_that_it_is_invariant(name, dtype):
    model = Target(made(name, dtype), execution="native", owned=True)
    assert model.batch_invariant, model.reasons


@torch.inference_mode()
@pytest.mark.parametrize(("name", "dtype", "threads"), covered(["qwen3_moe", "qwen2_moe", "glm4_moe", "deepseek_v3"], DTYPES, [1, 2]))
def test_every_node_of_a_tree_has_the_bits_of_plain_decoding(name, dtype, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        target = Target(made(name, dtype), execution="native", owned=True, reuse_prefix=False)
        prompts = [[(7 * i * i + row) % 100 for i in range(length)] for row, length in enumerate((62, 130))]
        tree = random_tree(2, 18, 1)
        tree = TokenTree(tree.tokens % 100, tree.parents)
        target.open(prompts)
        target.prefill(prompts, first=0)
        found = target.score(tree)
        target.reset()
        for row, prompt in enumerate(prompts):
            for leaf in set(range(18)).difference(tree.parents[row].tolist()):
                path = tree.path(row, leaf)
                target.open([prompt])
                target.prefill([prompt], first=0)
                expected = [target.advance(torch.tensor([token]))[0] for token in tree.tokens[row, path].tolist()]
                target.reset()
                assert torch.equal(found[row, path], torch.stack(expected))
    finally:
        torch.set_num_threads(before)


def test_mixtures_whose_work_is_divided_in_different_ways_are_not_run_together():
    model = made("qwen3_moe", torch.float32)
    model.model.layers[1].mlp.gate.top_k = 2
    target = Target(model, execution="native", owned=True)
    assert "mixtures of experts have different sizes" in target.reasons["fused"]


def test_a_gate_of_a_shared_expert_beside_a_bias_of_the_router_is_not_taken():
    """The gate is computed with the router's logits, and the bias has none for it."""
    model = made("qwen2_moe", torch.float32)
    for layer in model.model.layers:
        layer.mlp.gate.bias = torch.nn.Parameter(torch.zeros(8))
    assert "the kernels do not take both" in Target(model, execution="native", owned=True).reasons["fused"]


# -- texts, and weights that change -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "qwen2_moe", "glm4_moe", "ernie4_5_moe", "deepseek_v2", "deepseek_v3"])
def test_text_is_that_of_the_plain_model(name):
    rows = [[(3 * i + row) % 100 for i in range(length)] for row, length in enumerate((23, 9, 15))]
    expected = [alone(made(name, torch.float32), row, max_new_tokens=12) for row in rows]
    for drafter in ("none", "prompt-lookup", "draft-model"):
        given = made(name, torch.float32) if drafter == "draft-model" else drafter
        speculator = Speculator(made(name, torch.float32), given, execution="native", shape="chain(3)" if drafter != "none" else None)
        assert generate(speculator, rows, max_new_tokens=12) == expected
        speculator.close()
        assert not any("forward" in vars(module) for module in speculator.model.modules())


@torch.inference_mode()
@pytest.mark.parametrize("owned", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_weights_are_given_back(dtype, owned):
    model = made("qwen3_moe", dtype)
    before = {name: each.clone() for name, each in model.named_parameters()}
    held = sum(each.nbytes for each in model.parameters())
    target = Target(model, execution="native", owned=owned)
    assert [each.is_meta for each in (model.model.layers[0].mlp.experts.gate_up_proj, model.model.layers[0].mlp.gate.weight)] == [
        owned,
        False,
    ]
    if owned:
        assert sum(each.nbytes for each in model.parameters() if not each.is_meta) < held / 4
        weights = {id(each): name for name, each in model.named_parameters()}
        named = {weights[id(each)]: numbers for each, numbers in target.backend.overrides.originals()}
        assert {name for name in named if "experts" in name} == {name for name in before if "experts" in name}
        assert all(torch.equal(numbers, before[name]) for name, numbers in named.items())
    target.close()
    assert all(torch.equal(each, before[name]) for name, each in model.named_parameters())


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj", "gate.weight"])
def test_changed_weights_are_followed(name):
    model, plain = made("qwen3_moe", torch.float32), made("qwen3_moe", torch.float32)
    speculator, rows = Speculator(model, "none", execution="native"), [[3, 4, 5, 6, 7]]
    for _ in range(2):
        assert generate(speculator, rows, max_new_tokens=8) == [alone(plain, rows[0], max_new_tokens=8)]
        before = generate(speculator, rows, max_new_tokens=8)
        with torch.no_grad():
            for each in (model, plain):
                weights = [weight for key, weight in each.named_parameters() if key.endswith(name)]
                for weight in weights:
                    weight.copy_(weight.flip(-1))
        assert generate(speculator, rows, max_new_tokens=8) != before


@pytest.mark.parametrize("name", ["glm4_moe", "ernie4_5_moe"])
def test_changed_corrections_are_followed(name):
    model, plain = made(name, torch.float32), made(name, torch.float32)
    speculator, rows = Speculator(model, "none", execution="native"), [[3, 4, 5, 6, 7]]
    before = generate(speculator, rows, max_new_tokens=8)
    with torch.no_grad():
        for each in (model, plain):
            for correction in (held for key, held in each.state_dict().items() if "correction" in key):
                correction.copy_(correction.flip(-1))
    assert generate(speculator, rows, max_new_tokens=8) == [alone(plain, rows[0], max_new_tokens=8)] != before


@pytest.mark.parametrize("name", ["gate_up_proj", "gate.weight"])
def test_a_model_that_is_called_itself_has_its_weights_as_they_are(name):
    """And gradients."""
    model, plain = made("qwen3_moe", torch.float32), made("qwen3_moe", torch.float32)
    Target(model, execution="native")
    ids, found = torch.tensor([[3, 4, 5, 6, 7]]), []
    for each in (model, plain):
        with torch.no_grad():
            for weight in (weight for key, weight in each.named_parameters() if key.endswith(name)):
                weight.copy_(weight.flip(-1))
            found.append(each(input_ids=ids, use_cache=False).logits)
        each(input_ids=ids, use_cache=False).logits.sum().backward()
    assert torch.allclose(*found, atol=1e-4)
    grads = [
        dict(each.named_parameters())[f"model.layers.1.mlp.{'gate.weight' if 'gate.' in name else 'experts.gate_up_proj'}"].grad
        for each in (model, plain)
    ]
    assert torch.allclose(*grads, atol=1e-4)


def test_hooks_within_experts_are_called():
    model = made("qwen3_moe", torch.float32)
    Target(model, execution="native")
    mixture = model.model.layers[0].mlp.experts
    assert isinstance(vars(mixture)["forward"], Mixture)
    given = torch.randn(5, 64), torch.tensor([[0, 1, 2]] * 5), torch.full((5, 3), 0.3)
    mixture.act_fn.register_forward_hook(lambda module, given, out: -out)
    with torch.inference_mode():
        assert torch.equal(mixture(*given), type(mixture).forward(mixture, *given))


def test_what_is_written_where_weights_were_is_named(tmp_path):
    made("qwen3_moe", torch.float32).save_pretrained(tmp_path)
    speculator = Speculator(str(tmp_path), "none", execution="native")
    generate(speculator, [[3, 4, 5]], max_new_tokens=2)
    with torch.no_grad():
        speculator.model.model.layers[1].mlp.experts.down_proj.mul_(2.0)
    with pytest.raises(ConfigurationError, match=r"layers\.1\.mlp\.experts\.down_proj was changed"):
        generate(speculator, [[3, 4, 5]], max_new_tokens=2)


# -- faults -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "dtype"),
    covered(
        [
            ("qwen3_moe", "Qwen3MoeTopKRouter", {"normed": False}),
            ("glm4_moe", "Glm4MoeTopkRouter", {"normed": False}),
            ("glm4_moe", "Glm4MoeTopkRouter", {"correction": None}),
            ("glm4_moe", "Glm4MoeTopkRouter", {"routing": native.OF_ALL}),
            ("ernie4_5_moe", "Ernie4_5_MoeTopKRouter", {"normed": False}),
            ("ernie4_5_moe", "Ernie4_5_MoeTopKRouter", {"correction": None}),
            ("deepseek_v2", "DeepseekV2TopkRouter", {"routing": native.OF_EACH}),
        ],
        DTYPES,
        ways=1,
    ),
)
def test_another_router_is_found_out_at_load(case, dtype, monkeypatch):
    """The experts are then packed alone."""
    name, router, instead = case
    monkeypatch.setitem(experts.ROUTERS, router, replace(experts.ROUTERS[router], **instead))
    target = Target(made(name, dtype), execution="native", owned=True)
    assert target.backend.overrides.native == 0
    assert any(
        why in target.reasons["fused"] for why in ("computes something else than its description", "the kernels gave logits that differ")
    )
    for wanted, got in zip(*map(steps, (Target(made(name, dtype), execution="eager"), target))):
        assert_close(got, wanted, dtype)


def swapped(self, rows, turns=Mixture._turns):
    return turns(self, torch.cat(rows.chunk(2)[::-1]))


def of_neighbours(count, matrix, lay=experts.laid_out):
    return lay(count, lambda expert: matrix((expert + 1) % count))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", ["gate and up swapped", "weights of the neighbour"])
def test_other_experts_are_found_out_at_load(fault, dtype, monkeypatch):
    if fault == "gate and up swapped":
        monkeypatch.setattr(Mixture, "_turns", swapped)
    else:
        monkeypatch.setattr(experts, "laid_out", of_neighbours)
    with pytest.raises(ConfigurationError, match="packed weights gave logits that differ"):
        Target(made("qwen3_moe", dtype), execution="native")
    model = made("qwen3_moe", dtype)
    assert Target(model, owned=True).execution == "eager"
    assert not any(isinstance(vars(module).get("forward"), Mixture) for module in model.modules())


OTHERS = ["deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "minimax_m2", "nemotron_h", "olmoe", "qwen3_next"]


@torch.inference_mode()
@pytest.mark.parametrize(("name", "dtype", "sums"), covered(OTHERS, DTYPES, SUMS, ways=1))
def test_experts_of_other_families(name, dtype, sums):
    """Their routers are the model's own. Those of nemotron_h have no gate, and stay as they are."""
    make, how = ARCHITECTURES[name].build, ARCHITECTURES[name].implementations[0]
    *shared, options = make.args
    model = make.func(*shared, {**options, "hidden_size": 64}, how).to(dtype)
    model.set_experts_implementation(sums)
    modules = [module for module in model.modules() if hasattr(module, "down_proj") and type(module).__name__.endswith("Experts")]
    generator = torch.Generator().manual_seed(1)
    x = 9 * torch.randn(9, 64, generator=generator).to(dtype)
    for module in modules:
        for bias in (each for key, each in module.named_parameters() if key.endswith("bias")):
            bias.add_(torch.randn(bias.shape, generator=generator))
    chosen = torch.stack([torch.randperm(len(modules[0].down_proj), generator=generator)[:2] for _ in range(9)])
    scores = torch.rand(9, 2, generator=generator).to(dtype)
    wanted = [module(x, chosen, scores) for module in modules]
    target = Target(model, execution="native", owned=True)
    assert [isinstance(vars(module).get("forward"), Mixture) for module in modules] == [name != "nemotron_h"] * len(modules) != []
    for module, expected in zip(modules, wanted):
        assert_close(module(x, chosen, scores), expected, dtype, routed=False)
        assert_close(module(x[:1], chosen[:1], scores[:1].float()), expected[:1], dtype)
    target.close()
    assert all(torch.equal(module(x, chosen, scores), expected) for module, expected in zip(modules, wanted))


@torch.inference_mode()
@pytest.mark.parametrize("sums", SUMS)
@pytest.mark.parametrize("scores_in", DTYPES)
def test_sums_are_rounded_where_the_class_rounds_them(scores_in, sums):
    """In bfloat16 nearly all numbers are the same to the last bit."""
    model = made("qwen3_moe", torch.bfloat16, sums)
    module, generator = model.model.layers[1].mlp.experts, torch.Generator().manual_seed(1)
    x = torch.randn(50, 64, generator=generator).bfloat16()
    chosen = torch.stack([torch.randperm(8, generator=generator)[:6] for _ in range(50)])
    scores = torch.rand(50, 6, generator=generator).to(scores_in)
    wanted = module(x, chosen, scores)
    Target(model, execution="native")
    assert (module(x, chosen, scores) == wanted).float().mean() > 0.99


@torch.inference_mode()
@pytest.mark.parametrize("number", [-1, 8, 2**40])
def test_experts_that_do_not_exist(number, monkeypatch):
    """The class decides what they mean, unless its weights have been released."""
    kept, released = (made("qwen3_moe", torch.float32) for _ in range(2))
    targets = Target(kept, execution="native"), Target(released, execution="native", owned=True)
    chosen = torch.tensor([[1, 2]] * 5)
    chosen[3, 1] = number
    given = torch.randn(5, 64), chosen, torch.ones(5, 2)
    modules = [each.model.layers[1].mlp.experts for each in (kept, released)]
    assert all(isinstance(vars(module)["forward"], Mixture) for module in modules)
    with pytest.raises(RuntimeError, match=f"expert {number}, and there are 8"):
        modules[1](*given)
    monkeypatch.setattr(type(modules[0]), "forward", lambda self, *given: ("the class", self, given))
    assert modules[0](*given) == ("the class", modules[0], given)
    for target in targets:
        target.close()


def test_others_keep_their_experts_and_say_why():
    """A part that nobody knows: the experts are packed, the layers are no kernels."""
    model = made("qwen3_moe", torch.float32)
    for layer in model.model.layers:
        layer.mlp.extra = nn.Identity()
    target = Target(model, execution="native")
    assert target.backend.overrides.native == 0 and "parts that the kernels do not know: extra" in target.reasons["fused"]
    assert isinstance(vars(model.model.layers[0].mlp.experts)["forward"], Mixture)


def deep(seed):
    """A gpt_oss of 24 layers in bfloat16, whose experts enlarge rounding from layer to layer."""
    sizes = {
        "vocab_size": 300, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 24, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 12,
        "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **sizes)).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, 0, 0.03)
    return model.to(torch.bfloat16)


@pytest.mark.parametrize("seed", [2, 3, 4])
def test_a_deep_mixture_is_not_refused_for_rounding(seed):
    target = Target(deep(seed), execution="native", owned=True)
    assert target.backend.overrides.native == 24, target.reasons
    assert "paged_attention" not in target.reasons


def test_rounding_explains_more_in_a_deep_mixture_than_in_a_dense_model():
    model = deep(3)
    bound = explained(model)
    assert tolerance(model) < bound < 0.5 and explained(model) == bound
    assert not any(layer._forward_pre_hooks for layer in model.model.layers)
    assert explained(build("qwen3", torch.bfloat16)) < tolerance(model)
    assert explained(build("qwen3", torch.float32)) < 1e-5


def test_a_deep_mixture_that_ignores_its_windows_leaves_the_kernel(monkeypatch):
    right = DescribedModel.wrong

    def forgetful(self, model, sample):
        why = right(self, model, sample)  # its text is shorter than the windows
        for kernel in self.kernels:
            kernel.about.window = 0
        return why

    monkeypatch.setattr(DescribedModel, "wrong", forgetful)
    target = Target(deep(3), owned=True)
    assert target.execution == "packed"
    assert "in the self-test the kernels gave logits that differ from a plain pass" in target.reasons["fused"]
    target.backend.overrides.unpack()
    target.backend.overrides.pack()
    assert target.execution == "packed"


@torch.inference_mode()
@pytest.mark.parametrize("name", ["qwen3_moe-some-layers", "gpt_oss"])
def test_the_experts_that_a_pass_touches_are_counted(name):
    plain, kernels = targets(name, torch.float32)
    chosen = []
    mixtures = [layer.mlp.experts for layer in plain.model.model.layers if hasattr(layer.mlp, "experts")]
    for each in mixtures:
        each.register_forward_pre_hook(lambda module, args: chosen.append(len(args[1].unique())))
    routing = kernels.routing
    assert routing is not None and (routing.experts, routing.chosen) == (len(mixtures[0].down_proj), plain.model.config.num_experts_per_tok)
    one = sum(mixture.down_proj[0].nbytes + mixture.gate_up_proj[0].nbytes for mixture in mixtures)
    assert 0.5 < routing.weight * kernels.backend.overrides._packing.nbytes / one < 1.5
    assert plain.routing is None and plain.touched is None
    tree = TokenTree(torch.randint(0, 100, (1, len(TREE)), generator=torch.Generator().manual_seed(2)), torch.tensor([TREE]))
    for target in (plain, kernels):
        target.open([[5, 6, 7]])
        target.prefill([[5, 6, 7]], first=0)
    for scored in (TokenTree.from_chain(torch.tensor([[9]])), TokenTree.from_chain(torch.tensor([[9, 9, 3, 4]])), tree):
        chosen.clear()
        plain.score(scored)
        kernels.score(scored)
        assert kernels.touched == pytest.approx(sum(chosen) / len(mixtures))


def test_the_planner_learns_how_many_experts_chains_touch(monkeypatch):
    monkeypatch.setattr(AutomaticPlanner, "plan", lambda self, rows, **how: TreeShape.chain(3))
    drafter = DraftModel(made("qwen3_moe", torch.float32))
    speculator = Speculator(made("qwen3_moe", torch.float32), drafter=drafter, execution="native")
    generate(speculator, [[5, 6, 7, 8] * 8], max_new_tokens=40)
    experts = speculator.planner.costs.experts
    assert experts.routing is not None and 0 <= experts.sharing["chains"][1][0] < 1


def test_a_pass_over_some_layers_counts_no_experts():
    target = targets("qwen3_moe", torch.float32)[1]
    target.open([[5, 6, 7]])
    with torch.inference_mode():
        target.prefill([[5, 6, 7]], first=0)
        target.score(TokenTree.from_chain(torch.tensor([[9, 3]])))
        assert target.touched is not None
        target.score_early(TokenTree.from_chain(torch.tensor([[9, 3]])), 2)
        assert target.touched is None


def test_packed_weights_that_give_nan_are_refused(monkeypatch):
    monkeypatch.setattr("foredraft.backends.kernels.difference", lambda *given: float("nan"))
    with pytest.raises(ConfigurationError, match="packed weights gave logits that differ by nan"):
        Target(build("qwen3", torch.float32), execution="native")

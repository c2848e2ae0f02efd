"""Packed weights: the same logits within rounding, the model as it was afterwards, memory that does not double."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, build
from cover import covered
from encoder_decoders import build as build_with_encoder
from helpers import alone, clone, generate, perturbed, repetitive, tiny
from kernel_cases import always as always  # a fixture
from torch import nn

from foredraft import ConfigurationError, Speculator, TokenTree
from foredraft.backends import choice
from foredraft.backends import packing as packing_module
from foredraft.backends.kernels import Kernels
from foredraft.backends.packing import (
    HINTS,
    Kind,
    Packing,
    hint_for_texts,
    layers_of_encoder,
    onednn_lays_out,
    preferred_hint,
    refusal,
    sharing,
)
from foredraft.backends.products import NATIVE, ONEDNN, PLAIN, Product
from foredraft.drafters.draft_model import DraftModel
from foredraft.models.encoder_decoder import with_encoder_of
from foredraft.target import Target

ROWS = repetitive((23, 9, 15))
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
FAMILIES = [
    "llama",
    "qwen2",
    "qwen3_moe",
    "gemma2",
    "gpt_neox",
    "opt",
    "phi3",
    "gemma3n_text",
    "bloom",
    "cohere2",
    "deepseek_v2",
    "gpt_oss",
]


def of(family, dtype=torch.float32):
    return copy.deepcopy(build(family, ARCHITECTURES[family].implementations[0])).to(dtype).eval()


def sample(model):
    ids = torch.tensor([[0, 1]])
    return lambda: model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)


@torch.inference_mode()
def logits(model, tokens=5):
    return model(input_ids=torch.arange(3, 3 + tokens)[None], use_cache=False).logits.float()


def packed_bytes(packing):
    return sum(each.packed.nbytes for product, _, _ in packing._products for each in product.pieces or [product])


@pytest.mark.parametrize(("family", "dtype", "owned"), covered(FAMILIES, [torch.float32, torch.bfloat16], [True, False]))
def test_logits_are_the_same_and_the_model_is_given_back(family, dtype, owned, always):
    if not onednn_lays_out(dtype):
        pytest.skip(f"oneDNN has no layouts for {dtype} on this CPU")
    model = of(family, dtype)
    before = {name: (parameter, parameter.detach().clone()) for name, parameter in model.named_parameters()}
    wanted = {tokens: logits(model, tokens) for tokens in (1, 5, 40)}
    packing = Packing(model, sample(model), owned=owned)
    assert packed_bytes(packing) > 0
    for tokens, plain in wanted.items():
        assert (logits(model, tokens) - plain).abs().max() <= TOLERANCE[dtype] * plain.abs().max()
    packing.undo()
    assert not any("forward" in vars(module) for module in model.modules())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name][1]) and parameter.requires_grad == before[name][0].requires_grad
    assert torch.equal(logits(model), wanted[5])


def test_packed_weights_replace_those_of_an_owned_model(always):
    model = of("llama")
    held = sum(each.nbytes for each in model.parameters())
    packing = Packing(model, sample(model), owned=True)
    left = sum(each.nbytes for each in model.parameters() if not each.is_meta)
    assert left + packed_bytes(packing) == held  # untied: nothing is held twice
    assert all(
        module.weight.shape == (module.out_features, module.in_features) for module in model.modules() if isinstance(module, nn.Linear)
    )


def test_a_tied_output_keeps_the_embeddings(always):
    model = of("qwen2")
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    plain = logits(model)
    packing = Packing(model, sample(model), owned=True)
    assert not model.model.embed_tokens.weight.is_meta
    assert (logits(model) - plain).abs().max() <= 1e-5 * plain.abs().max()
    packing.undo()
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_layers_that_read_the_same_input_share_a_product():
    model = of("llama")
    named = {id(module): name for name, module in model.named_modules()}
    groups = [[named[id(layer)].rpartition(".")[2] for layer in group] for group in sharing(model, sample(model))]
    assert groups == [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]] * 2 + [["lm_head"]]


@pytest.mark.parametrize("bias", [(True, True), (True, False), (False, False)])
def test_a_shared_product_hands_out_what_each_layer_would_give(bias):
    layers = [nn.Linear(16, 8 * (index + 1), bias=each) for index, each in enumerate(bias)]
    product = Product(layers, 8)
    parts = [partial(product.part, index=index) for index in range(2)]
    with torch.inference_mode():
        for order in ((0, 1), (1, 0), (0,), (1,), (1, 1), (0, 0, 1)):
            for x in (torch.randn(2, 3, 16), torch.randn(1, 16)):
                for index in order:
                    assert torch.allclose(parts[index](x), layers[index](x), atol=1e-5)
    assert [torch.equal(weight, layer.weight) for weight, layer in zip(product.weights(), layers)] == [True, True]


@pytest.mark.parametrize(
    ("layers", "hints", "best"),
    [
        ([(32, 8)], (*HINTS, NATIVE), NATIVE),
        ([(32, 8), (32, 8)], (*HINTS, NATIVE), NATIVE),
        ([(33, 8)], (*HINTS, NATIVE), ONEDNN),  # rows of 33 weights are not for the kernels
        ([(32, 8)], HINTS, ONEDNN),
        ([(32, 8), (32, 8)], (PLAIN,), PLAIN),
        ([(32, 8)], (PLAIN,), None),  # one layer alone is not joined with anything
    ],
)
def test_which_layout_is_taken_depends_on_no_time(layers, hints, best, monkeypatch):
    monkeypatch.setattr(packing_module, "onednn_lays_out", lambda dtype: True)
    assert preferred_hint([[nn.Linear(*sizes, bias=False) for sizes in layers]], hints) == best
    monkeypatch.setattr(packing_module, "onednn_lays_out", lambda dtype: False)
    expected = best if best != ONEDNN else None
    assert preferred_hint([[nn.Linear(*sizes, bias=False) for sizes in layers]], hints) == expected


def test_a_kind_is_chosen_for_once(monkeypatch):
    asked = []
    monkeypatch.setattr(packing_module, "preferred_hint", lambda groups, hints: asked.append(Kind.of(groups[0])))
    model = of("llama")
    packing = Packing(model, sample(model), owned=True)
    assert len(asked) == len(set(asked)) == len({Kind.of(layers) for layers in sharing(model, sample(model))}) == len(packing.hints)
    assert packed_bytes(packing) == 0 and not any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(("dtype", "best"), [(torch.float32, ONEDNN), (torch.bfloat16, NATIVE)])
def test_layers_of_an_encoder_have_the_layout_for_long_texts(dtype, best, monkeypatch):
    monkeypatch.setattr(packing_module, "onednn_lays_out", lambda dtype: True)
    layers = [[nn.Linear(32, 8, bias=False).to(dtype)]]
    assert hint_for_texts(layers, (*HINTS, NATIVE)) == best
    assert hint_for_texts(layers, (NATIVE,)) == NATIVE
    monkeypatch.setattr(packing_module, "onednn_lays_out", lambda dtype: False)
    assert hint_for_texts(layers, (*HINTS, NATIVE)) == NATIVE


@pytest.mark.parametrize("right", [True, False])
def test_a_layer_of_an_encoder_is_packed_if_it_computes_the_same(right, always, monkeypatch):
    if not right:
        computed = Product.__call__
        monkeypatch.setattr(Product, "__call__", lambda product, x: computed(product, x) + 1)
    model = copy.deepcopy(build_with_encoder("t5"))
    layers = layers_of_encoder(model)
    packing = Packing(model, lambda: None, owned=False)
    assert layers and {"forward" in vars(layer) for layer in layers} == {right}
    assert (packed_bytes(packing) > 0) == right
    packing.undo()
    assert not any("forward" in vars(layer) for layer in layers)


def test_hooks_of_an_encoder_are_not_called_with_inputs_of_another_shape(always):
    """And where its layers are tried does not depend on the default device."""
    model = copy.deepcopy(build_with_encoder("t5"))
    layers, shapes = layers_of_encoder(model), []
    for layer in layers:
        layer.register_forward_hook(lambda layer, given, output: shapes.append(output.shape) or output + 1)
    with torch.device("meta"):
        packing = Packing(model, lambda: None, owned=False)
    assert layers and not shapes and all("forward" in vars(layer) for layer in layers)
    packing.undo()


@pytest.mark.parametrize("owned", [True, False])
def test_an_encoder_of_another_model_is_left_to_it(owned, always):
    """Whether that one is packed already or not, its weights stay as they are."""
    whisper = copy.deepcopy(build_with_encoder("whisper"))
    draft = with_encoder_of(whisper, transformers.WhisperForCausalLM(copy.deepcopy(whisper.config)).eval())
    layers, before = layers_of_encoder(whisper), refusal(draft)
    decode, states = draft.get_decoder(), torch.zeros(1, 3, draft.config.d_model)
    packing = Packing(draft, lambda: None, owned=True)
    assert layers and before is None and not any("forward" in vars(layer) or layer.weight.is_meta for layer in layers)
    packing.undo()
    theirs = Packing(whisper, lambda: None, owned=owned)
    weights = [layer.weight for layer in layers]
    assert {weight.is_meta for weight in weights} == {owned} and refusal(draft) is None
    packing = Packing(draft, lambda: decode(torch.tensor([[0, 1]]), encoder_hidden_states=states, use_cache=False), owned=True)
    assert packing.taken and packing.lost() is None
    packing.undo()
    assert all(layer.weight is weight and "forward" in vars(layer) for layer, weight in zip(layers, weights))
    theirs.undo()
    assert not any(layer.weight.is_meta or "forward" in vars(layer) for layer in layers)


def test_changed_weights_are_packed_anew_under_autocast_as_without_it(always):
    model = of("llama")
    kernels = Kernels(model, lambda: logits(model), owned=False, hints=HINTS)
    with torch.autocast("cpu", torch.float16):
        kernels.follow({"weights"})
    assert kernels.refused is None and "forward" in vars(model.lm_head)
    kernels.undo()


# -- through the Speculator ------------------------------------------------------------------------------------------------


def test_text_is_the_same_with_trees_and_a_packed_draft(always):
    model = clone(tiny())
    speculator = Speculator(model, drafter=DraftModel(perturbed()), shape="product(2,1,1)", execution="packed")
    assert speculator.target.execution == "packed"
    assert generate(speculator, ROWS, max_new_tokens=12) == [alone(tiny(), row, max_new_tokens=12) for row in ROWS]
    speculator.close()
    assert generate(Speculator(model, drafter="none"), ROWS, max_new_tokens=3) == [alone(tiny(), row, max_new_tokens=3) for row in ROWS]


@pytest.mark.parametrize("execution", ["packed", "native"])
def test_a_refused_speculator_leaves_both_models_as_they_were(always, execution):
    model, draft = tiny("llama"), perturbed()
    with pytest.raises(ConfigurationError, match=r"draft model.s context"):  # known only when the target is there
        Speculator(model, drafter=DraftModel(draft, execution=execution), execution=execution, shape="product(4000)")
    assert not [name for each in (model, draft) for name, part in each.named_modules() if "forward" in vars(part)]


def test_weights_changed_behind_a_packed_copy_are_packed_anew(always):
    model = clone(tiny())
    target = Target(model, execution="packed")
    tree = TokenTree.from_chain(torch.tensor([[5, 6, 7]]))

    def scored():
        target.open([ROWS[0]])
        target.prefill([ROWS[0]], first=0)
        found = target.score(tree)
        target.reset()
        return found

    with torch.no_grad():
        first = scored()
        model.model.layers[0].mlp.up_proj.weight.mul_(-1.0)
        second = scored()
        fresh = model(input_ids=torch.tensor([[*ROWS[0], 5, 6, 7]]), use_cache=False).logits[:, -3:]
    assert not torch.allclose(first, second, atol=1e-2) and torch.allclose(second, fresh, atol=1e-4)


def test_auto_packs_what_it_loaded_and_nothing_else():
    mine = Target(tiny())
    assert mine.execution == "eager" and "handed in" in mine.reasons["packed"]
    assert Target(clone(tiny()), owned=True).execution in ("packed", "native")
    assert Speculator("zoo:python-1m", drafter="none").target.execution in ("packed", "native")
    eager = Speculator("zoo:python-1m", drafter="draft-model:zoo:python-1m", execution="eager")
    assert eager.target.execution == "eager"


@pytest.mark.parametrize("light", [True, False])
def test_a_model_that_is_not_large_is_prepared_on_one_thread(light, monkeypatch):
    threads, seen, test, lay_out = torch.get_num_threads(), [], choice.self_test, Kernels._lay_out
    monkeypatch.setattr(choice, "self_test", lambda backend: (seen.append(torch.get_num_threads()), test(backend))[1])
    monkeypatch.setattr(Kernels, "_lay_out", lambda self: (seen.append(torch.get_num_threads()), lay_out(self))[1])
    if not light:
        monkeypatch.setattr(packing_module, "LIGHT", 0)
    torch.set_num_threads(2)
    try:
        Target(clone(tiny()), owned=True)
        assert seen == ([1, 1] if light else [2, 2]) and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_models_that_are_prepared_side_by_side_leave_torch_its_threads():
    """The second thread, a new one, begins while the first is inside, and ends after it."""
    threads, inside, beside = torch.get_num_threads(), threading.Event(), threading.Event()

    def first():
        with packing_module.one_thread():
            inside.set()
            assert beside.wait(10)
        return torch.get_num_threads()

    def second():
        with packing_module.one_thread():
            beside.set()
            assert one.result(10) == 2 and torch.get_num_threads() == 1
        return torch.get_num_threads()

    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor(3) as pool:
            one = pool.submit(first)
            assert inside.wait(10)
            assert pool.submit(second).result(20) == 2
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(torch.get_num_threads).result(10) == 2
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def test_a_layer_that_is_called_alone_reads_its_input_as_it_is():
    """Its neighbours are computed with it; the input may be written to between two calls, and be made under another default device."""
    model = clone(tiny())
    speculator = Speculator(model, "none", execution="packed")
    layer, plain, x = model.model.layers[0].mlp, tiny().model.layers[0].mlp, torch.randn(1, 3, model.config.hidden_size)
    for factor in (1.0, 0.5):
        x *= factor
        for name in ("gate_proj", "up_proj"):
            with torch.device("meta"):
                found = getattr(layer, name)(x)
            assert torch.allclose(found, getattr(plain, name)(x), atol=1e-5)
            x *= 2
    speculator.close()


def test_a_model_that_is_packed_already_says_so():
    model = clone(tiny())
    first = Speculator(model, "none", execution="packed")
    with pytest.raises(ConfigurationError, match="another Speculator has packed it"):
        Speculator(model, "none", execution="packed")
    first.close()
    Speculator(model, "none", execution="packed").close()


def test_what_can_not_be_packed_says_why():
    model = clone(tiny()).double()
    assert refusal(model) == "it has no plain linear layers in float32 or bfloat16"
    with pytest.raises(ConfigurationError, match=r"cannot be packed: it has no plain.*execution='auto'"):
        Target(model, execution="packed")
    assert Target(model, owned=True).execution == "eager"
    with pytest.raises(ConfigurationError, match="unknown execution 'fast'; choose auto, eager, packed"):
        Target(model, execution="fast")
    assert "only those in CPU memory" in refusal(nn.Linear(2, 2, device="meta"))

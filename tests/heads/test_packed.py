"""Heads whose weights are laid out for the kernels say what they said before, and are given back as they were."""

import pytest
import torch
from cover import covered
from head_cases import shaken

from benchmarks.prompts import PYTHON
from foredraft import ConfigurationError, Speculator, drafters, zoo
from foredraft.backends import native
from foredraft.drafters.eagle3 import Eagle3
from foredraft.drafters.medusa import Medusa
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.medusa import MedusaHead

pytestmark = pytest.mark.skipif(native.refusal(torch.bfloat16) is not None, reason="no native kernels here")


@pytest.fixture(scope="module")
def model():
    return zoo.load("python-8m", dtype=torch.float32)


@pytest.mark.parametrize("layers", [1, 2])
def test_medusa_heads_are_packed_with_their_target_and_given_back(model, layers):
    head = shaken(MedusaHead.for_target(model, heads=3, layers=layers))
    hidden, before = torch.randn(2, 256, generator=torch.Generator().manual_seed(1)), head.state_dict()
    with torch.inference_mode():
        expected = head(hidden)
        speculator = Speculator(model, Medusa(head), execution="native", shape="product(2,2,1)")
        assert any("forward" in vars(module) for module in head.modules())
        torch.testing.assert_close(head(hidden), expected, rtol=1e-4, atol=1e-3)
        speculator.close()
        assert not any("forward" in vars(module) for module in head.modules())
        assert torch.equal(head(hidden), expected)
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())


@pytest.mark.parametrize("options", [{}, {"attention_bias": True, "fc_norm": True}], ids=["plain", "biases"])
def test_an_eagle3_layer_computes_the_same_with_packed_weights(model, options):
    head = shaken(Eagle3Head.for_target(model, **options))
    generator = torch.Generator().manual_seed(2)
    features, tokens = torch.randn(2, 5, 768, generator=generator), torch.randint(0, 4096, (2, 5), generator=generator)
    found = []
    with torch.inference_mode():
        plain = head.layer().to(torch.device("cpu"), torch.float32)
        for layer in (plain, plain.packed()):
            entered = layer.enter(tokens, layer.fused(features), slice(0, 5))
            states, normed = layer.read(layer.leave(entered.residual, entered.queries.flatten(-2)))
            found.append((*layer.keys_values(tokens, layer.fused(features), slice(0, 5)), states, layer.full_logits(normed)))
    assert plain.packed().products
    for mine, wanted in zip(*found):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("make", "shape"),
    covered(
        [lambda model: Medusa(shaken(MedusaHead.for_target(model))), lambda model: Eagle3(shaken(Eagle3Head.for_target(model)))],
        ["chain(3)", "product(2,2)", "dynamic(3,2,5)"],
        ways=1,
    ),
)
def test_packed_heads_leave_the_text_alone(model, make, shape):
    tokenizer = zoo.load_tokenizer("python-8m")
    inputs = tokenizer(["def area(radius):\n    ", "class Stack:\n"], return_tensors="pt", padding=True)
    texts = []
    for drafter in ("none", make(model)):
        speculator = Speculator(model, drafter, execution="native", shape="chain(1)" if drafter == "none" else shape, rule="match")
        texts.append(speculator.generate(**inputs, max_new_tokens=12, do_sample=True, seed=4).sequences)
        speculator.close()
    assert torch.equal(*texts)


@pytest.mark.parametrize(
    ("head", "execution"),
    covered([("medusa", "product(3,2,1)"), ("eagle3", "product(3,2,1)"), ("eagle3", "chain(4)")], ["native", "eager"], ways=1),
)
def test_heads_of_eight_bits_draft_nearly_the_same(head, execution):
    name, shape = head
    pytest.importorskip("torchao")
    ids = zoo.load_tokenizer("python-8m")(PYTHON[0], return_tensors="pt")
    kept, texts = [], []
    for quantization in (None, "int8"):
        drafter = drafters.create(f"{name}:zoo:python-8m-{name}", {} if quantization is None else {"quantization": quantization})
        speculator = Speculator("zoo:python-8m", drafter, dtype="float32", shape=shape, execution=execution)
        out = speculator.generate(**ids, max_new_tokens=48, do_sample=False, eos_token_id=None)
        kept.append(out.stats.acceptance_length)
        texts.append(out.sequences.tolist())
        if quantization and execution == "native":
            products = drafter.layer.products.values() if name == "eagle3" else [each for each, *_ in drafter._packing._products]
            assert products and all(product.quantised for product in products)
        speculator.close()
    assert texts[0] == texts[1] and kept[1] > 1.2 and abs(kept[0] - kept[1]) < 0.5


def test_only_heads_that_are_loaded_are_quantised(model):
    pytest.importorskip("torchao")
    with pytest.raises(ConfigurationError, match="by name"):
        Medusa(MedusaHead.for_target(model), quantization="int8")
    with pytest.raises(ConfigurationError, match="unknown quantization 'int3'"):
        Eagle3(quantization="int3")

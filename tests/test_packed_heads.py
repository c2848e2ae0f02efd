"""Heads whose weights are laid out for the kernels say what they said before, and are given back as they were."""

import pytest
import torch

from foretoken import Speculator, zoo
from foretoken.drafters.eagle3 import Eagle3
from foretoken.drafters.medusa import Medusa
from foretoken.heads.eagle3 import Eagle3Head
from foretoken.heads.medusa import MedusaHead
from foretoken.target import native

pytestmark = pytest.mark.skipif(native.refusal(torch.bfloat16) is not None, reason="no native kernels here")


def shaken(head):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in head.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator).to(weight.dtype)
    return head


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


@pytest.mark.parametrize("shape", ["chain(3)", "product(2,2)", "dynamic(3,2,5)"])
@pytest.mark.parametrize(
    "make", [lambda model: Medusa(shaken(MedusaHead.for_target(model))), lambda model: Eagle3(shaken(Eagle3Head.for_target(model)))]
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

"""The losses of distilling against float64 numbers made by hand, and their gradients against differences."""

from __future__ import annotations

import math

import pytest
import torch

from foredraft.errors import ConfigurationError
from foredraft.losses import LOSSES, Few, Loss, compare

P = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64)
Q = torch.tensor([0.25, 0.25, 0.25, 0.25], dtype=torch.float64)
LN2 = math.log(2)
NAMES = [*LOSSES, "0.5*fkl+0.25*tvd", "jsd(0.1)", "lk(0.5)"]
BY_HAND = {  # KL(p‖q) = 0.25 ln 2, TV = 0.25, α = 0.75
    "fkl": 0.25 * LN2,
    "rkl": 0.25 * (math.log(0.25 / 0.5) + 2 * math.log(0.25 / 0.125)),
    "tvd": 0.25,
    "ce": 2 * LN2,
    "lk(2)": math.exp(-1.5) * 0.25 * LN2 + (1 - math.exp(-1.5)) * 0.25,
    "jsd(0.5)": 0.5 * (0.5 * math.log(0.5 / 0.375) + 0.25 * math.log(0.125 / 0.1875))
    + 0.5 * (0.25 * math.log(0.25 / 0.375) + 0.5 * math.log(0.25 / 0.1875)),
    "2*fkl+0.5*tvd": 0.5 * LN2 + 0.125,
}


def random(seed: int, rows: int = 5, size: int = 7, scale: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.randn(2, rows, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return scale * numbers[0], scale * numbers[1]


def few(logits: torch.Tensor, count: int) -> Few:
    values, ids = torch.log_softmax(logits, -1).topk(count)
    return Few(ids, values)


@pytest.mark.parametrize(("text", "value"), BY_HAND.items())
def test_hand_made_cases(text: str, value: float):
    found = compare(Loss.parse(text), Q.log()[None], P.log()[None])
    assert found.loss.dtype == torch.float64 and float(found.loss) == pytest.approx(value, abs=1e-14)
    assert float(found.alpha) == pytest.approx(0.75, abs=1e-14)
    single = compare(Loss.parse(text), Q.log()[None].float(), P.log()[None].float())
    assert float(single.loss) == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("text", NAMES)
def test_gradients_are_those_of_differences(text: str, temperature: float):
    q, p = random(0)
    loss = Loss.parse(text)
    weights = torch.exp(-torch.arange(5.0, dtype=torch.float64))  # every row has a scale of its own
    if any(term.name == "lk" for term in loss.terms):  # w counts as a constant: with α as it is, lk is a sum of two others
        alpha, eta = compare(loss, q, p, temperature).alpha, loss.terms[0].parameter
        w = torch.exp(-eta * alpha)
        numeric = differences(
            lambda x: weights * (w * at(Loss.parse("fkl"), x, p, temperature) + (1 - w) * at(Loss.parse("tvd"), x, p, temperature)), q
        )
    else:
        numeric = differences(lambda x: weights * at(loss, x, p, temperature), q)
    own = q.clone().requires_grad_()
    (weights * at(loss, own, p, temperature)).sum().backward()
    torch.testing.assert_close(own.grad, numeric, rtol=1e-5, atol=1e-7)
    single = q.float().requires_grad_()
    (weights.float() * at(loss, single, p.float(), temperature)).sum().backward()
    torch.testing.assert_close(single.grad.double(), numeric, rtol=1e-3, atol=1e-5)


def at(loss, q, p, temperature):
    return compare(loss, q, p, temperature).loss


def differences(function, x, step=1e-6):
    found = torch.zeros_like(x)
    for place in range(x.numel()):
        moved = torch.zeros_like(x).flatten()
        moved[place] = step
        found.view(-1)[place] = (function(x + moved.view_as(x)) - function(x - moved.view_as(x))).sum() / (2 * step)
    return found


@pytest.mark.parametrize("text", [name for name in NAMES if name != "ce"])
def test_nothing_to_learn_where_both_are_the_same(text: str):
    q, _ = random(1)
    kinked = "tvd" in text or "lk" in text  # total variation has a kink where p = q: rounding decides on which side of it one is
    for target in (q.clone(), q + 3.0, few(q, 3)):  # logits are the same up to a constant
        own = q.clone().requires_grad_()
        found = compare(Loss.parse(text), own, target)
        found.loss.sum().backward()
        torch.testing.assert_close(found.loss, torch.zeros_like(found.loss), atol=1e-12, rtol=0)
        if not kinked or (isinstance(target, torch.Tensor) and torch.equal(target, q)):
            torch.testing.assert_close(own.grad, torch.zeros_like(own), atol=1e-12, rtol=0)
        torch.testing.assert_close(found.alpha, torch.ones_like(found.alpha))
        assert found.agrees.all()


@pytest.mark.parametrize("impossible", [-500.0, -math.inf])
@pytest.mark.parametrize("text", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_overlap_is_finite(text: str, impossible: float, dtype: torch.dtype):
    p = torch.tensor([[0.0, 0.0, impossible, impossible]], dtype=dtype)
    q = torch.tensor([[impossible, impossible, 0.0, 1.0]], dtype=dtype, requires_grad=True)
    for target in (p, few(p.float(), 2)):
        found = compare(Loss.parse(text), q, target)
        (gradient,) = torch.autograd.grad(found.loss.sum(), q)
        assert found.loss.isfinite().all() and gradient.isfinite().all() and gradient.dtype == dtype
        assert float(found.alpha) == pytest.approx(0, abs=1e-6) and not found.agrees.any()
    assert compare(Loss.parse("tvd"), q, p).loss.item() == pytest.approx(1)
    assert compare(Loss.parse("jsd"), q, p).loss.item() == pytest.approx(LN2)
    if impossible == -500.0:  # what pulls the draft over: forward KL does, total variation alone does not
        pull = {name: torch.autograd.grad(compare(Loss.parse(name), q, p).loss.sum(), q)[0][0, 0] for name in ("fkl", "lk", "tvd")}
        assert [float(pull[name]) for name in ("fkl", "lk", "tvd")] == pytest.approx([-0.5, -0.5, 0])


@pytest.mark.parametrize("text", NAMES)
def test_a_few_probabilities_are_the_sum_over_joined_outcomes(text: str):
    q, p = random(2)
    known = few(p, 3)
    joined_p = torch.cat([known.log_probabilities, (1 - known.log_probabilities.exp().sum(-1, keepdim=True)).log()], -1)
    order = q.clone().requires_grad_()
    log_q = torch.log_softmax(order, -1)
    some = log_q.gather(-1, known.ids)
    joined_q = torch.cat([some, (1 - some.exp().sum(-1, keepdim=True)).log()], -1)
    wanted = Loss.parse(text)(joined_p, joined_q, torch.zeros(5, dtype=torch.long))
    own = q.clone().requires_grad_()
    found = compare(Loss.parse(text), own, known)
    torch.testing.assert_close(found.loss, wanted.detach())
    torch.testing.assert_close(torch.autograd.grad(found.loss.sum(), own)[0], torch.autograd.grad(wanted.sum(), order)[0])
    whole = compare(Loss.parse(text), q, p)
    assert text == "ce" or (found.alpha >= whole.alpha - 1e-12).all()
    everything = compare(Loss.parse(text), q, few(p, 7))
    torch.testing.assert_close(everything.loss, whole.loss)


@pytest.mark.parametrize("text", [*LOSSES])
def test_tokens_that_only_the_target_has_count_with_all_others(text):
    """Its vocabulary may be padded further than the draft's."""
    q, p = random(4)
    known = few(p, 3)
    nothing = torch.full((5, 1), -8.0, dtype=torch.float64)
    beyond = Few(torch.cat([known.ids, torch.full((5, 1), q.shape[-1] + 3)], -1), torch.cat([known.log_probabilities, nothing], -1))
    own, other = (q.clone().requires_grad_() for _ in range(2))
    found, expected = compare(Loss.parse(text), own, beyond), compare(Loss.parse(text), other, known)
    torch.testing.assert_close((found.loss, found.alpha, found.agrees), (expected.loss, expected.alpha, expected.agrees))
    for each in found, expected:
        each.loss.sum().backward()
    torch.testing.assert_close(own.grad, other.grad)


def test_the_gradient_of_few_where_a_token_is_there_twice():
    q, p = random(4)
    known = few(p, 3)
    ids = torch.cat([known.ids, known.ids[:, :1]], -1)
    twice = Few(ids, torch.cat([known.log_probabilities, torch.full((5, 1), -math.inf, dtype=torch.float64)], -1))
    own = q.clone().requires_grad_()
    compare(Loss.parse("fkl"), own, twice).loss.sum().backward()
    torch.testing.assert_close(own.grad, differences(lambda x: at(Loss.parse("fkl"), x, twice, 1.0), q), rtol=1e-5, atol=1e-7)


def test_many_rows_are_compared_in_parts(monkeypatch):
    q, p = random(3, rows=9)
    whole = compare(Loss.parse("lk"), q, p)
    monkeypatch.setattr("foredraft.losses.IN_CACHE", 2 * 7)
    own = q.clone().requires_grad_()
    parts = compare(Loss.parse("lk"), own, p)
    parts.loss.sum().backward()
    torch.testing.assert_close(parts.loss, whole.loss)
    assert own.grad.abs().sum(-1).min() > 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kl", "unknown loss 'kl'"),
        ("fkl(2)", "the loss fkl takes no number"),
        ("jsd(1)", "between 0 and 1"),
        ("lk(", "cannot read the loss"),
        ("", "cannot read the loss"),
        ("1.2.3*fkl", "cannot read the loss"),
        ("fkl-tvd", "cannot read the loss"),
    ],
)
def test_losses_that_are_none(text: str, says: str):
    with pytest.raises(ConfigurationError) as found:
        Loss.parse(text)
    assert says in str(found.value)


def test_losses_are_written_as_they_are_read():
    assert str(Loss.parse("jsd + 0.5*lk+ tvd")) == "jsd(0.5)+0.5*lk(3)+tvd"
    with pytest.raises(ConfigurationError, match="temperature 1"):
        compare(Loss.parse("fkl"), *random(0)[:1], few(random(0)[1], 2), 0.7)

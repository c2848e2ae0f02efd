"""The tape that stands in for CUDA graphs refuses and forgets what they do, so that tests with it mean something."""

from __future__ import annotations

import pytest
import torch
from tape import Forbidden, Tape


def test_the_tape_does_again_what_was_recorded():
    x, held = torch.zeros(3), torch.zeros(2, 3)

    def run():
        doubled = x * 2
        held[1] = doubled.view(3) + 1
        return (held.sum(0),)

    replay, (out,) = Tape().capture(run)
    for values in ([1.0, 2.0, 3.0], [5.0, 0.0, -1.0]):
        x.copy_(torch.tensor(values))
        replay()
        assert out.tolist() == [2 * value + 1 for value in values]


def test_the_tape_bakes_numbers_and_new_tensors_in():
    calls, x = [], torch.ones(1)

    def run():
        calls.append(1)
        return (x * len(calls) + torch.full((1,), float(len(calls))),)

    replay, (out,) = Tape().capture(run)
    before = len(calls)
    replay()
    first = out.item()
    replay()
    assert out.item() == first and len(calls) == before


@pytest.mark.parametrize(
    "what",
    [
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x * x[0].item(),
        lambda x: x * 2 if x[0] > 0 else x,
        lambda x: x + torch.tensor([1.0, 2.0]),
        lambda x: x * len(x.tolist()),
        lambda x: x.masked_fill_(x > 0, 1).index_put_((x > 0,), torch.ones(())),
        lambda x: torch.repeat_interleave(x, x.long()),
        lambda x: x.cpu(),
        lambda x: torch.masked_select(x, x > 0),
    ],
)
def test_the_tape_refuses_what_waits_for_a_device(what):
    x = torch.ones(2)
    with pytest.raises(Forbidden):
        Tape().capture(lambda: (what(x),))


def test_the_tape_spoils_what_is_between():
    x, leaked = torch.ones(2), []

    def run():
        leaked.append(x + 1)
        return (leaked[-1] * 2,)

    replay, (out,) = Tape().capture(run)
    replay()
    assert out.tolist() == [4.0, 4.0] and leaked[-1].isnan().all()

"""Small tensor operations of a round keep to one thread: OpenMP's other threads would wait in a loop on the kernels' cores."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers import make_drafter, prompts, tiny

from foredraft import Speculator, device, verification
from foredraft.device import end_waiting, host_threads, one_thread
from foredraft.logits.sampler import widened


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


pytestmark = pytest.mark.skipif(device._openmp() is None, reason="torch's OpenMP library is not found")


def test_few_values_keep_to_one_thread():
    few, many = torch.zeros(8), torch.empty(1).expand(device.SMALL)
    with one_thread(few):
        assert torch.get_num_threads() == 1 and host_threads() == 3
        with one_thread(few):
            assert torch.get_num_threads() == 1 and host_threads() == 3
        assert torch.get_num_threads() == 1 and host_threads() == 3
        with ThreadPoolExecutor(1) as others:  # a thread that begins meanwhile
            assert others.submit(torch.get_num_threads).result() == 3
    assert torch.get_num_threads() == host_threads() == 3
    with one_thread(many):
        assert torch.get_num_threads() == 3
    with pytest.raises(ValueError), one_thread(few):
        raise ValueError
    assert torch.get_num_threads() == host_threads() == 3


def test_threads_that_wait_are_ended_and_started_anew():
    values = torch.randn(1 << 18)
    expected, working = values.exp(), threads_of_this_process()
    end_waiting()
    assert threads_of_this_process() <= working - 2
    assert torch.equal(values.exp(), expected) and threads_of_this_process() == working
    assert torch.get_num_threads() == 3


def threads_of_this_process():
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.parametrize("own", [False, True], ids=["built in", "of the user's own"])
def test_a_round_verifies_on_one_thread_and_the_users_code_has_all(own, monkeypatch):
    seen: dict[str, set[int]] = {"rule": set(), "race": set(), "processor": set()}
    rule = verification.create("rejection")
    verify = type(rule).verify

    def watching(self, *args):
        seen["rule"].add(torch.get_num_threads())
        return verify(self, *args)

    def processor(input_ids, scores):
        seen["processor"].add(torch.get_num_threads())
        return scores

    from foredraft.logits import noise

    monkeypatch.setattr(noise, "kernel", None)
    exponentials = noise._negative_exponentials
    monkeypatch.setattr(noise, "_negative_exponentials", lambda *args: (seen["race"].add(torch.get_num_threads()), exponentials(*args))[1])
    monkeypatch.setattr(type(rule), "verify", watching)
    speculator = Speculator(tiny(), make_drafter("draft-model"), rule=rule, shape="chain(2)")
    more = {"logits_processor": [processor]} if own else {"top_k": 5}
    speculator.generate(torch.tensor(prompts((12,))), do_sample=True, max_new_tokens=8, pad_token_id=0, **more)
    assert seen == {"rule": {1}, "race": {1}, "processor": {3} if own else set()}
    assert torch.get_num_threads() == 3


def test_logits_of_a_large_vocabulary_are_widened_on_one_thread(monkeypatch):
    seen, wide = [], torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda self: (seen.append(torch.get_num_threads()), wide(self))[1])
    assert widened(torch.zeros(60_000, dtype=torch.bfloat16)).dtype == torch.float32
    assert seen == [1]

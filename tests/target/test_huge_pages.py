"""Memory for weights."""

import resource
import threading
from pathlib import Path

import pytest
import torch

from foredraft.backends import huge_pages

STATM = Path("/proc/self/statm")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.uint8])
def test_tensors_are_apart_and_begin_with_a_cache_line(dtype):
    made = [huge_pages.room((size, 3), dtype) for size in (1, 5, 0, 1000, 7)]
    for number, each in enumerate(made):
        each.fill_(number)
    for number, each in enumerate(made):
        assert (each == number).all() and each.is_contiguous() and each.data_ptr() % huge_pages.LINE == 0


def test_a_large_tensor_begins_with_a_page():
    large = huge_pages.room((huge_pages.CHUNK + 1,), torch.uint8)
    large[-1] = 7
    assert large.data_ptr() % huge_pages.PAGE == 0 and large[-1] == 7


def test_an_error_says_that_there_is_no_memory():
    with pytest.raises(MemoryError, match="out of memory: 4611686018427 MB"):
        huge_pages.room((1 << 62,), torch.uint8)


def test_threads_do_not_share_memory():
    made: list[torch.Tensor] = []

    def fill(number):
        for _ in range(50):
            each = huge_pages.room((100_000,), torch.uint8)
            each.fill_(number)
            made.append(each)

    threads = [threading.Thread(target=fill, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 200 and all((each == each[0]).all() for each in made)


@pytest.mark.skipif(not STATM.exists(), reason="reads /proc")
def test_memory_goes_back_to_the_system(monkeypatch):
    """Chunks of which no tensor is left."""
    monkeypatch.setattr(huge_pages, "_free", torch.empty(0, dtype=torch.uint8))
    before, most = resident(), 0
    for _ in range(20):
        made = [huge_pages.room((huge_pages.CHUNK // 8,), torch.uint8).fill_(1) for _ in range(8)]
        most = max(most, resident() - before)
        del made
    assert 0.9 * huge_pages.CHUNK <= most < 4 * huge_pages.CHUNK  # the OS counts roughly


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this OS has no huge pages")
def test_the_system_is_asked_for_huge_pages():
    """``hg`` in the flags of the mapping; memory that an allocator hands out has been used before, and is not asked about."""
    place = huge_pages.room((5,), torch.uint8).data_ptr()
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first:
            begin, end = (int(each, 16) for each in first.split("-"))
        elif first == "VmFlags:" and begin <= place < end:
            assert "hg" in rest.split() and "sh" not in rest.split()  # shared memory has other settings
            return
    pytest.fail("no mapping has the tensor")


def test_a_copy_is_contiguous_and_equal():
    values = torch.arange(12).view(3, 4).T
    moved = huge_pages.moved(values)
    assert moved.is_contiguous() and torch.equal(moved, values) and moved.data_ptr() != values.data_ptr()


def resident() -> int:
    return int(STATM.read_text().split()[1]) * resource.getpagesize()

"""One torch thread: on tiny models, threads that wait for each other cost more than they compute.

Tests of the loop want the same rounds on every machine, however slow: where they name no shape they mean ``chain(5)``. Tests of the
planner are marked ``planned`` and get what users get. Nothing is read from or written to the user's cache.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["FOREDRAFT_CACHE"] = "off"

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def chains_of_five(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("planned") is None:
        monkeypatch.setattr("foredraft.speculator.DEFAULT_SHAPE", "chain(5)")

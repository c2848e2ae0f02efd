"""One torch thread: on tiny models, threads that wait for each other cost more than they compute.

A test that names no shape gets the planner, as users do, and asserts nothing that depends on time. Nothing is read from or written to the
user's cache. What costs the same in every test and is tested elsewhere is done once: see ``pytest_collection_finish``.
"""

import functools
import gc
import os
import shutil
import sys
from pathlib import Path

if all(map(shutil.which, ("sh", "cc", "flock", "sha256sum"))):  # kernels are compiled once, and not in every process
    os.environ.setdefault("CC", str(Path(__file__).with_name("support") / "cc"))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["FOREDRAFT_CACHE"] = "off"

import pytest

if sanitizers := os.environ.get("FOREDRAFT_SANITIZE"):  # make sanitize
    from foredraft.backends import native

    native.LIMIT *= 5  # this code takes longer to compile
    native.FLAGS += (f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g", "-O1")

if os.environ.get("PYTEST_XDIST_WORKER") == "gw1":  # who imports tests compiles kernels, float32 first: so both are compiled at once
    import torch

    from foredraft.backends import native

    native.refusal(torch.bfloat16)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest test comes first: at the end one worker would wait for it alone."""
    items.sort(key=lambda item: item.path.name != "test_soak.py")


def pytest_collection_finish() -> None:
    """The process that hands tests out to others collects none, and so imports nothing of this."""
    import self_tested
    import torch
    import typer.testing

    from foredraft import observer
    from foredraft.backends import choice
    from foredraft.planning import costs, planner

    torch.set_num_threads(1)
    observer.contention.said = True  # what a test sees must not depend on how busy the machine is
    planner.QUIET = 0.0
    costs.REPEATS = 1  # whatever a pass takes
    choice.self_test, choice.attention_test = map(self_tested.once, (choice.self_test, choice.attention_test))
    typer.testing._get_command = functools.cache(typer.testing._get_command)
    gc.freeze()  # hundreds of thousands of objects of the libraries, which stay anyway


@pytest.fixture(autouse=True)
def on_its_own(request):
    """What a test patches is found by the self-test. And accelerate keeps one precision per process: a test that trains in bfloat16 must
    not decide for those that train in float32."""
    sys.modules["self_tested"].patching = "monkeypatch" in request.fixturenames
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state()

"""Plants faults of one line in a copy of the package, one at a time; each must turn its tests red.

    python tests/mutants [--jobs 2] [--only TEXT]

Exit code 1 if a fault survives, or if its line is no longer found. Needs a system that can fork: the libraries are imported once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
SECONDS = 300  # a fault that makes tests run for ever is found as well

from faults import FAULTS, ROOT, Fault, place  # noqa: E402


def planted(fault: Fault | None, folder: Path) -> None:
    """A copy of the package under ``folder``, with the fault. No links: the server gives out no file that is one."""
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    if fault is not None:
        file = place(fault)
        assert isinstance(file, Path)
        copy = folder / file.relative_to(ROOT)
        copy.write_text(file.read_text().replace(fault.line, fault.instead))


def run(fault: Fault | None, tests: list[str]) -> int:
    """In a process of its own: the exit code of pytest with the fault in place."""
    folder = Path(tempfile.mkdtemp())
    try:
        planted(fault, folder)
        sys.path.insert(0, str(folder / "src"))
        os.environ["PYTHONPATH"] = str(folder / "src")
        os.chdir(ROOT)
        terminal, log = os.dup(2), os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        import pytest

        signal.alarm(SECONDS if fault else 0)
        code = pytest.main(["-x", "-p", "no:cacheprovider", "-p", "no:xdist", *tests])
        import foredraft

        assert str(folder) in foredraft.__file__, "the copy was not what was tested"
        if fault is None and code:
            os.write(terminal, (folder / "log").read_bytes()[-3000:])
        return int(code)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fork(fault: Fault | None, tests: list[str]) -> int:
    process = os.fork()
    if process == 0:
        code = 70
        try:
            code = run(fault, tests)
        finally:
            os._exit(code)
    return process


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="faults whose file or line contains this")
    options = parser.parse_args()
    faults = [fault for fault in FAULTS if options.only in fault.file + ": " + fault.line]
    if not faults:
        parser.error(f"no fault has {options.only!r} in its file or line")
    stale = [why for fault in faults if isinstance(why := place(fault), str)]
    import hypothesis  # noqa: F401
    import scipy.stats  # noqa: F401
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    torch.set_num_threads(1)
    waiting: list[Fault | None] = [None, *(fault for fault in faults if isinstance(place(fault), Path))]
    running: dict[int, tuple[Fault | None, float]] = {}
    survived, control = [], 0
    while waiting or running:
        if waiting and len(running) < options.jobs:
            fault = waiting.pop(0)
            tests = sorted({test for each in faults for test in each.tests}) if fault is None else list(fault.tests)
            running[fork(fault, tests)] = fault, time.monotonic()
            continue
        process, status = os.wait()
        fault, begin = running.pop(process)
        code = os.waitstatus_to_exitcode(status)
        if fault is None:
            control = code
            continue
        killed = code in (1, 2, -signal.SIGALRM, -signal.SIGSEGV, -signal.SIGABRT)
        survived += [] if killed else [fault]
        how = f"SURVIVED ({code})" if not killed else "endless" if code == -signal.SIGALRM else "killed "
        print(f"{how} {time.monotonic() - begin:5.1f} s  {fault.file}: {fault.instead.strip()}", flush=True)
    print(f"{len(faults) - len(survived) - len(stale)} of {len(faults)} faults were found")
    for why in stale:
        print(f"STALE {why}")
    if control:
        print("the tests fail without a fault, so what they found says nothing")
    return int(bool(survived or stale or control))


if __name__ == "__main__":
    sys.exit(main())

"""Where a benchmark ran: versions, commit, machine, threads, load and date, as plain values for its document."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import foredraft

PACKAGES = ("foredraft", "torch", "transformers", "numpy", "safetensors")


def describe(device: str | torch.device = "cpu") -> dict[str, Any]:
    """Everything about this process and machine that a reader needs to judge a figure; no paths and no host name."""
    device = torch.device(device)
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        **commit(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "load": load(),
    }


def commit() -> dict[str, Any]:
    """The commit of the checkout that foredraft is imported from, and whether tracked files differ from it; None outside a checkout."""
    here = Path(foredraft.__file__).parent
    head = _git(here, "rev-parse", "HEAD")
    changed = _git(here, "status", "--porcelain", "--untracked-files=no")
    tracked = _git(here, "ls-files", "--error-unmatch", "__init__.py") is not None  # not some other repository around us
    return {"commit": head if tracked else None, "dirty": bool(changed) if tracked else None}


def cpu_model() -> str:
    """The processor's name; Linux keeps it where the platform module does not look."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def load() -> float | None:
    """Processes that wanted to run, over the last minute: well above ``threads`` means that the machine was not quiet."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None

"""Benchmarks: ``python -m benchmarks SUITE``, from the root of a checkout.

A suite measures all of its sides in turns, after a warm-up of each, and writes one document per run: command, versions, commit, settings,
every call. What fails is recorded as a failure and makes the exit code 1; it never borrows another's time.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.suite import Suite

SUITES = {
    "speed": "speed:Speed",
    "drafters": "drafters:DraftersSuite",
    "heads": "heads:Heads",
    "overhead": "overhead:Overhead",
    "trees": "trees:Trees",
    "acceptance": "acceptance:Acceptance",
    "verification": "verification:Verification",
    "kernels": "kernels:Kernels",
    "families": "families:Families",
    "hosts": "hosts:Hosts",
    "busy": "busy:Busy",
    "grammars": "grammars:Grammars",
    "self": "self_speculation:SelfSpeculation",
    "encdec": "encdec:EncDec",
    "online": "online:Online",
    "distill": "distill:Distill",
    "tokenizers": "tokenizers:Tokenizers",
    "memory": "memory:Memory",
    "serve": "serve:Serve",
}


def find(name: str) -> type[Suite[Any]]:
    """The suite of that name."""
    module, _, attribute = SUITES[name].partition(":")
    found: type[Suite[Any]] = getattr(import_module(f"benchmarks.{module}"), attribute)
    return found

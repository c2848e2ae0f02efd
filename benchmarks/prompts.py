"""Beginnings of Python files, written for the benchmarks in the style of ordinary modules.

The embedded models have never seen them, every machine has the same ones, and none begins as another does, so that no cached
beginning can be reused.
"""

from __future__ import annotations

from foredraft import zoo

PYTHON = tuple(zoo.prompts("benchmarks"))

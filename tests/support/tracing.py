"""Compiled layers without a compiler."""

from __future__ import annotations

import functools

import torch

from foredraft.backends import compilation


def trace(monkeypatch):
    """Graphs run as torch's own operations; tracing, guards and recompilation are the real ones."""
    torch._dynamo.reset()
    monkeypatch.setattr(compilation.torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(compilation, "_no_compiler", lambda: None)

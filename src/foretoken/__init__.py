"""Foretoken: text from an unmodified Hugging Face model, faster, with the same output distribution."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretoken import drafters, zoo
    from foretoken import verification as rules
    from foretoken.auditing import AuditReport, ExactnessError, audit
    from foretoken.drafters.base import Drafter, DraftRequest
    from foretoken.errors import (
        CacheMemoryError,
        ConfigurationError,
        DrafterError,
        ForetokenError,
        Interrupted,
        TargetOutputError,
        UnsupportedModelError,
    )
    from foretoken.logprobs import LogProbs
    from foretoken.rows import Commit, RowParameters
    from foretoken.session import Session
    from foretoken.shapes import TreeShape
    from foretoken.speculator import SpeculativeOutput, Speculator, Tokens, custom_generate
    from foretoken.stats import RowStats, Stats
    from foretoken.target import Target, TreeCache
    from foretoken.testing import ScriptedDrafter, TableTarget
    from foretoken.tree import TokenTree
    from foretoken.verification.base import Rule, Verdict

__version__ = "0.1.0"

_HOMES = {
    "audit": "foretoken.auditing:audit",
    "AuditReport": "foretoken.auditing:AuditReport",
    "ExactnessError": "foretoken.auditing:ExactnessError",
    "drafters": "foretoken.drafters:",
    "rules": "foretoken.verification:",
    "zoo": "foretoken.zoo:",
    "Drafter": "foretoken.drafters.base:Drafter",
    "DraftRequest": "foretoken.drafters.base:DraftRequest",
    "CacheMemoryError": "foretoken.errors:CacheMemoryError",
    "ConfigurationError": "foretoken.errors:ConfigurationError",
    "DrafterError": "foretoken.errors:DrafterError",
    "ForetokenError": "foretoken.errors:ForetokenError",
    "Interrupted": "foretoken.errors:Interrupted",
    "TargetOutputError": "foretoken.errors:TargetOutputError",
    "UnsupportedModelError": "foretoken.errors:UnsupportedModelError",
    "LogProbs": "foretoken.logprobs:LogProbs",
    "Commit": "foretoken.rows:Commit",
    "RowParameters": "foretoken.rows:RowParameters",
    "Session": "foretoken.session:Session",
    "TreeShape": "foretoken.shapes:TreeShape",
    "SpeculativeOutput": "foretoken.speculator:SpeculativeOutput",
    "Speculator": "foretoken.speculator:Speculator",
    "Tokens": "foretoken.speculator:Tokens",
    "custom_generate": "foretoken.speculator:custom_generate",
    "RowStats": "foretoken.stats:RowStats",
    "Stats": "foretoken.stats:Stats",
    "Target": "foretoken.target:Target",
    "TreeCache": "foretoken.target:TreeCache",
    "ScriptedDrafter": "foretoken.testing:ScriptedDrafter",
    "TableTarget": "foretoken.testing:TableTarget",
    "TokenTree": "foretoken.tree:TokenTree",
    "Rule": "foretoken.verification.base:Rule",
    "Verdict": "foretoken.verification.base:Verdict",
}
__all__ = [
    "AuditReport",
    "CacheMemoryError",
    "Commit",
    "ConfigurationError",
    "DraftRequest",
    "Drafter",
    "DrafterError",
    "ExactnessError",
    "ForetokenError",
    "Interrupted",
    "LogProbs",
    "RowParameters",
    "RowStats",
    "Rule",
    "ScriptedDrafter",
    "Session",
    "SpeculativeOutput",
    "Speculator",
    "Stats",
    "TableTarget",
    "Target",
    "TargetOutputError",
    "TokenTree",
    "Tokens",
    "TreeCache",
    "TreeShape",
    "UnsupportedModelError",
    "Verdict",
    "__version__",
    "audit",
    "custom_generate",
    "drafters",
    "rules",
    "zoo",
]


def __getattr__(name: str) -> Any:
    """Import on first use, so that ``import foretoken`` is fast and needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'foretoken' has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    found = import_module(module)
    value = getattr(found, attribute) if attribute else found
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

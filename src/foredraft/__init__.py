"""Foredraft: text from an unmodified Hugging Face model, faster, with the same output distribution."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foredraft import drafters, zoo
    from foredraft import verification as rules
    from foredraft.attachment import attach, detach
    from foredraft.auditing import AuditReport, ExactnessError, audit
    from foredraft.drafters.base import Drafter, DrafterInfo, DraftRequest
    from foredraft.errors import (
        BusyError,
        CacheMemoryError,
        ConfigurationError,
        DrafterError,
        ForedraftError,
        GrammarError,
        Interrupted,
        TargetOutputError,
        UnsupportedModelError,
    )
    from foredraft.grammars import Grammar
    from foredraft.inflation import inflate
    from foredraft.logits.logprobs import LogProbs
    from foredraft.models.encoder_decoder import Source
    from foredraft.rows import Commit, RowParameters
    from foredraft.session import Session
    from foredraft.shapes import TreeShape
    from foredraft.speculator import SpeculativeOutput, Speculator, Tokens, custom_generate
    from foredraft.stats import RowStats, Stats
    from foredraft.target import Target, TreeCache
    from foredraft.testing import ScriptedDrafter, TableTarget
    from foredraft.text import Text
    from foredraft.tree import TokenTree
    from foredraft.verification.base import Rule, Verdict

__version__ = "0.1.0"

_NAMES = {
    "attachment": ("attach", "detach"),
    "auditing": ("audit", "AuditReport", "ExactnessError"),
    "drafters.base": ("Drafter", "DrafterInfo", "DraftRequest"),
    "errors": (
        "BusyError",
        "CacheMemoryError",
        "ConfigurationError",
        "DrafterError",
        "ForedraftError",
        "GrammarError",
        "Interrupted",
        "TargetOutputError",
        "UnsupportedModelError",
    ),
    "grammars": ("Grammar",),
    "inflation": ("inflate",),
    "logits.logprobs": ("LogProbs",),
    "models.encoder_decoder": ("Source",),
    "rows": ("Commit", "RowParameters"),
    "session": ("Session",),
    "shapes": ("TreeShape",),
    "speculator": ("SpeculativeOutput", "Speculator", "Tokens", "custom_generate"),
    "stats": ("RowStats", "Stats"),
    "target": ("Target", "TreeCache"),
    "testing": ("ScriptedDrafter", "TableTarget"),
    "text": ("Text",),
    "tree": ("TokenTree",),
    "verification.base": ("Rule", "Verdict"),
}
_HOMES = {
    **{name: f"foredraft.{module}:{name}" for module, names in _NAMES.items() for name in names},
    "drafters": "foredraft.drafters:",
    "rules": "foredraft.verification:",
    "zoo": "foredraft.zoo:",
}
__all__ = [
    "AuditReport",
    "BusyError",
    "CacheMemoryError",
    "Commit",
    "ConfigurationError",
    "DraftRequest",
    "Drafter",
    "DrafterError",
    "DrafterInfo",
    "ExactnessError",
    "ForedraftError",
    "Grammar",
    "GrammarError",
    "Interrupted",
    "LogProbs",
    "RowParameters",
    "RowStats",
    "Rule",
    "ScriptedDrafter",
    "Session",
    "Source",
    "SpeculativeOutput",
    "Speculator",
    "Stats",
    "TableTarget",
    "Target",
    "TargetOutputError",
    "Text",
    "TokenTree",
    "Tokens",
    "TreeCache",
    "TreeShape",
    "UnsupportedModelError",
    "Verdict",
    "__version__",
    "attach",
    "audit",
    "custom_generate",
    "detach",
    "drafters",
    "inflate",
    "rules",
    "zoo",
]


def __getattr__(name: str) -> Any:
    """Import on first use, so that ``import foredraft`` is fast and needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'foredraft' has no attribute {name!r}")
    globals()[name] = value = resolve_name(_HOMES[name])
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

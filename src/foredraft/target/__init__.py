"""The target model and everything that knows transformers' caches and masks."""

from foredraft.models.cache import TreeCache, Window
from foredraft.models.support import unwrap
from foredraft.target.target import Target

__all__ = ["Target", "TreeCache", "Window", "unwrap"]

"""The target model and everything that knows transformers' caches and masks."""

from foredraft.target.cache import TreeCache, Window
from foredraft.target.target import Target
from foredraft.target.weights import unwrap

__all__ = ["Target", "TreeCache", "Window", "unwrap"]

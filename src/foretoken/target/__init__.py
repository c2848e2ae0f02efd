"""The target model and everything that knows transformers' caches and masks."""

from foretoken.target.cache import TreeCache, Window
from foretoken.target.target import Target
from foretoken.target.weights import unwrap

__all__ = ["Target", "TreeCache", "Window", "unwrap"]

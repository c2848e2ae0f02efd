"""The recipe of the embedded models: ``python -m recipes.zoo --help``."""

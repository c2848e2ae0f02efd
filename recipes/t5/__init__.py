"""The recipe of the embedded encoder-decoder models: ``python -m recipes.t5 --help``."""

"""Weights, tokenizers, model cards and figures of Foredraft's embedded models. ``foredraft.zoo`` reads them."""

"""How the embedded models and the screenshots were made. Not part of the distribution; run from a checkout."""

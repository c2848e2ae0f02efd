"""How the embedded models were made. Not part of the distribution; run from a checkout."""

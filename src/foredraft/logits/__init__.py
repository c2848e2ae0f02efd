"""From logits to a choice: processors at every node of a tree, distributions, keyed noise and log-probabilities."""

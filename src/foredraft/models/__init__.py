"""What is known of transformers models: which are supported, their caches, masks, positions, weights and hidden states."""

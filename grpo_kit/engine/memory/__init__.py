"""What fits on a card: weights, moments, activations, keys and values."""

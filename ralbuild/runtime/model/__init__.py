"""The model on torch: weights, key/value cache and one decode step. The only door to torch."""

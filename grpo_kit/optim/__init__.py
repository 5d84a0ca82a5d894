"""Optimizers that keep small updates, and a measurement of how much of an update survives rounding."""

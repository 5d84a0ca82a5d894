"""Optimizers that keep small updates, and how much of an update survives rounding."""

"""Measures a model on a task, before and after training: accuracy, readiness, lengths, with intervals."""

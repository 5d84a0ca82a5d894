"""Names that transformers changed, in the form that the installed version knows.

Before 5.23 activation checkpointing was called gradient checkpointing; before 5.24 a model's `cache` past_key_values.
"""

from __future__ import annotations

import inspect
from typing import Any

from transformers import PreTrainedModel

# Checkpointing, as the argument, and inside the names of a model's property and methods.
NAME = (
    "activation_checkpointing"
    if hasattr(PreTrainedModel, "is_activation_checkpointing")
    else "gradient_checkpointing"
)


def is_checkpointing(model: Any) -> bool:
    """Are activations recomputed in the backward pass?"""
    return getattr(model, f"is_{NAME}")


def cache_name(forward: Any) -> str:
    """The argument of a model's or decoder's forward, and field of its output, that is the cache."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"

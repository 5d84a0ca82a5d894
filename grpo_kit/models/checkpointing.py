"""Activation checkpointing by the name that the installed transformers has for it: "gradient" before 5.23."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

# Of the argument, and inside the names of a model's property and methods.
NAME = (
    "activation_checkpointing"
    if hasattr(PreTrainedModel, "is_activation_checkpointing")
    else "gradient_checkpointing"
)


def is_checkpointing(model: Any) -> bool:
    """Are activations recomputed in the backward pass?"""
    return getattr(model, f"is_{NAME}")


def is_asked(args: Any) -> bool:
    """Do args, a TrainingArguments, want it?"""
    return getattr(args, NAME)


def enable_checkpointing(model: Any, args: Any) -> None:
    """As args, a TrainingArguments, have it."""
    getattr(model, f"{NAME}_enable")(getattr(args, f"{NAME}_kwargs"))

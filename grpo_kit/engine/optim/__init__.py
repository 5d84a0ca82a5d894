"""Optimizers that keep small updates, and a measurement of how much of an update survives rounding."""

from typing import TYPE_CHECKING

from grpo_kit._support.lazy import lazy

if TYPE_CHECKING:
    from grpo_kit.engine.optim.choose import make_optimizer
    from grpo_kit.engine.optim.split_adamw import SplitAdamW8bit

__all__ = lazy(__name__)

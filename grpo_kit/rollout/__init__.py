"""Generates completions."""

from typing import TYPE_CHECKING

from grpo_kit.lazy import lazy

if TYPE_CHECKING:
    from grpo_kit.rollout.engine import RolloutEngine, Rollouts

__all__ = lazy(__name__)

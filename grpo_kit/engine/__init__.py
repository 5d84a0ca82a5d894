"""Sampling and updating fast, with the numbers of the plain ways: for decoders whose only state is keys and values.

`fast.py` gives the loop its `sample` and `update`. Fenced in: `cpu/`, `card/`, `memory/`, `optim/`.
"""

from typing import TYPE_CHECKING

from grpo_kit._support.lazy import lazy

if TYPE_CHECKING:
    from grpo_kit.engine.rollout import RolloutEngine, Rollouts

__all__ = lazy(__name__)

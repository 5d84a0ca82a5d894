"""Rewards that can begin before all completions are there, so that slow ones are judged while others are written.

A reward can where it has two methods more: `begin(completions, *, workers, **columns)`, which takes what its call
takes, starts the work (at most so many processes at a time) and returns at once; and `drop()`, which stops and forgets
what was begun. Its call then gives what it gives anyhow, only sooner. Without completions begin goes on with what was
begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_kit.rewards.parts import all_parts
from grpo_kit.rewards.response import Reward


def that_begin(rewards: Sequence[Reward]) -> list[Any]:
    """Those of the rewards, and of what they are made of, that have begin and drop; each object once.

    >>> from grpo_kit.rewards import CodeFormat, CodeRunner, CodeTests, WeightedSum
    >>> that_begin([WeightedSum([(CodeFormat(), 0.25), (CodeTests(CodeRunner()), 0.75)])])
    [CodeTests(CodeRunner(seconds=2.0, memory_mb=256))]
    """
    asked = [
        getattr(reward, "reward", reward) for reward in rewards
    ]  # a trainer's are wrapped: scoring.PendingScores
    inside = [part for reward in asked for part in (reward, *all_parts(reward))]
    found = [part for part in inside if hasattr(part, "begin") and hasattr(part, "drop")]
    return list({id(part): part for part in found}.values())


def begin(rewards: Sequence[Any], completions: Sequence[Any], /, *, workers: int, **columns: Any) -> None:
    """Begin what judging these will need; rewards are those of that_begin.

    One that cannot says nothing here: its call meets the same error, and names row and completion.
    """
    for reward in rewards:
        try:
            reward.begin(completions, workers=workers, **columns)
        except Exception:
            reward.drop()


def drop(rewards: Sequence[Any]) -> None:
    """Stop and forget whatever was begun and not asked for."""
    for reward in rewards:
        reward.drop()

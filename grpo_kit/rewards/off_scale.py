"""What is said once of a reward with scores outside [0, 1] that states no range."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from grpo_kit.rewards.parts import Reward, range_of
from grpo_kit.rewards.scoring import Scores

_ROUNDING = 1e-6


def off_scale(
    name: str, reward: Reward, scores: Scores, seen: tuple[float, float] | None = None
) -> str | None:
    """One sentence about a reward with scores outside [0, 1]; None if it has none, or states its range.

    seen: the lowest and highest score so far; default those of scores.

    >>> off_scale("points", lambda completions, **columns: [0, 2], [0.0, 2.0])[:72]
    "reward 'points' gave 2 (row 1; so far 0 to 2): any finite scale is fine."
    """
    there = [(row, s) for row, s in enumerate(scores) if s is not None and s == s]
    outside = [(row, s) for row, s in there if not -_ROUNDING <= s <= 1 + _ROUNDING]
    if not outside or range_of(reward) is not None:
        return None
    row, score = outside[0]
    low, high = seen or (min(s for _, s in there), max(s for _, s in there))
    return (
        f"reward {name!r} gave {score:g} (row {row}; so far {low:g} to {high:g}): any finite scale is fine. The kit's "
        "own lie in [0, 1]; charts and flags go by the range seen, or stated as reward.range = (low, high)"
    )


def warn_off_scale(rewards: Sequence[Reward], parts: Mapping[str, Sequence[float | None]]) -> None:
    """Warns once about each reward with scores outside [0, 1]. parts: the result of score_all for these rewards."""
    for (name, scores), reward in zip(parts.items(), rewards, strict=True):
        if said := off_scale(name, reward, scores):
            warnings.warn(said, UserWarning, stacklevel=3)

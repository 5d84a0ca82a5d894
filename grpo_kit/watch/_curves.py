"""Numbers behind the drawing and the flags: the range of scores, moving means, the parts of a reward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

ROUGH = 20  # values; above this number a line shows their moving mean
EPISODES = {
    "episodes/success": "success", "episodes/invalid": "invalid actions", "episodes/unfinished": "not ended",
}  # fmt: skip
_ROUNDING = 1e-6  # of float32


def window_of(values: np.ndarray) -> int:
    """How many values a moving mean covers: 1 up to 20 values, and if all are equal.

    >>> window_of(np.arange(20)), window_of(np.arange(21)), window_of(np.arange(240))
    (1, 5, 21)
    """
    rough = len(values) <= ROUGH or bool((values == values[0]).all())
    return 1 if rough else max(5, len(values) // 12) | 1


def seen_range(low: float, high: float) -> tuple[float, float]:
    """The assumed range of scores from low to high: [0, 1], extended as far as they go.

    If none is above 0 and some are below, they are penalties, and 0 is the highest. NaN: no score was recorded.

    >>> seen_range(0.2, 0.7), seen_range(-1, 0.5), seen_range(0, 5), seen_range(-3, -1)
    ((0.0, 1.0), (-1.0, 1.0), (0.0, 5.0), (-3.0, 0.0))
    """
    low, high = (0.0 if np.isnan(end) or -_ROUNDING <= end <= 0 else float(end) for end in (low, high))
    if low < 0 and high <= 0:
        return low, 0.0
    return min(0.0, low), high if high > 1 + _ROUNDING else 1.0


def range_of_rows(names: Iterable[str], *runs: Mapping[str, Any]) -> tuple[float, float]:
    """seen_range of these measures and their single scores in tables of metrics (a column or an array by name).

    >>> range_of_rows(["reward"], {"reward": [0.5, 1.0], "scale/reward/low": [-2.0, float("nan")]})
    (-2.0, 1.0)
    """
    wanted = [name for measure in names for name in (measure, *scale_columns(measure))]
    values = [np.asarray(run[name], dtype=float) for run in runs for name in wanted if name in run]
    finite = np.concatenate([[np.nan], *(one[np.isfinite(one)] for one in values)])
    return seen_range(np.fmin.reduce(finite), np.fmax.reduce(finite))


def scale_columns(measure: str) -> tuple[str, str]:
    """The columns with the lowest and the highest score of a step, if some lay outside [0, 1]."""
    return f"scale/{measure}/low", f"scale/{measure}/high"


def part_names(columns: Iterable[str]) -> list[str]:
    """The second panel's measures: the parts of the reward; for episodes, whose reward has one, their outcomes.

    >>> part_names(["step", "reward", "reward/exact", "reward/format"])
    ['reward/exact', 'reward/format']
    >>> part_names(["reward/episode_return", "episodes/success", "episodes/turns"])
    ['episodes/success']
    """
    names = list(dict.fromkeys(map(str, columns)))
    return [n for n in EPISODES if n in names] or [n for n in names if n.startswith("reward/")]


def moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of `window` (odd) values around each one; of the existing ones near both ends.

    >>> moving_mean(np.array([0.0, 3.0, 6.0, 0.0]), 3).tolist()
    [1.5, 3.0, 3.0, 3.0]
    """
    place, half = np.arange(len(values)), window // 2
    first, end = np.maximum(place - half, 0), np.minimum(place + half + 1, len(values))
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=float)])
    return (sums[end] - sums[first]) / (end - first)

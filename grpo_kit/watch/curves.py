"""Shared parts of the live drawing and the whole chart: moving means, held-out accuracy, markers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_kit.record.control import read_changes

ROUGH = 20  # values; above this number a line shows their moving mean
ACCURACY, ACCURACY_LOW, ACCURACY_HIGH = "eval/accuracy", "eval/accuracy_low", "eval/accuracy_high"
CONSTANT = "eval/constant"  # accuracy of the best constant strategy on the same rows
NOTHING: Mapping[str, Any] = {}
EPISODES = {
    "episodes/success": "success", "episodes/invalid": "invalid actions", "episodes/unfinished": "not ended",
}  # fmt: skip
_ROUNDING = 1e-6  # of float32
Change = tuple[int, str]  # the first step trained with it, and the changed values


def window_of(values: np.ndarray) -> int:
    """How many values a moving mean covers: 1 up to 20 values, and if all are equal.

    >>> window_of(np.arange(20)), window_of(np.arange(21)), window_of(np.arange(240))
    (1, 5, 21)
    """
    rough = len(values) <= ROUGH or bool((values == values[0]).all())
    return 1 if rough else max(5, len(values) // 12) | 1


def reward_title(runs: Iterable[np.ndarray]) -> str:
    """The reward panel's title: explains its band, and its lines if they are moving means.

    >>> reward_title([np.arange(20)]), reward_title([np.arange(30)])
    ('reward (band: ± reward_std)', 'reward (band: ± reward_std; lines: means of 5 steps)')
    """
    window = max((window_of(rewards[np.isfinite(rewards)]) for rewards in runs), default=1)
    lines = f"; lines: means of {window} steps" * (window > 1)
    return f"reward (band: ± reward_std{lines})"


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


def accuracy_word(low: float, high: float, table: Mapping[str, Any] = NOTHING) -> str:
    """The name of held-out accuracy beside a reward on a scale from low to high; it is drawn from end to end of it.

    table: of metrics (a column or an array by name). If its last accuracy is no better than the best constant
    strategy, the name states that.

    >>> accuracy_word(0, 1), accuracy_word(-1, 2)
    ('held-out accuracy', 'accuracy, 0–100 %: -1 to 2')
    >>> accuracy_word(0, 1, {"eval/accuracy_low": [0.1, 0.3], "eval/constant": [0.4, 0.4]})
    'no better than a constant'
    """
    lows, constants = (
        np.asarray(table[name], dtype=float) if name in table else np.array([])
        for name in (ACCURACY_LOW, CONSTANT)
    )
    lows, constants = lows[np.isfinite(lows)], constants[np.isfinite(constants)]
    if len(lows) > 1 and len(constants) and 0 < constants[-1] and lows[-1] <= constants[-1]:
        return "no better than a constant"
    return "held-out accuracy" if (low, high) == (0, 1) else f"accuracy, 0–100 %: {low:g} to {high:g}"


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


def parts_title(names: Sequence[str]) -> str:
    """The title of a panel with these measures; "" if they are no parts.

    >>> parts_title(["episodes/success"]), parts_title([]), parts_title(["entropy"])
    ('episodes', 'reward parts', '')
    """
    if names and names[0] in EPISODES:
        return "episodes"
    return "reward parts" if not names or names[0].startswith("reward/") else ""


def part_word(name: str) -> str:
    """A part's name in the legend."""
    return EPISODES.get(name, name.removeprefix("reward/"))


def moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of `window` (odd) values around each one; of the existing ones near both ends.

    >>> moving_mean(np.array([0.0, 3.0, 6.0, 0.0]), 3).tolist()
    [1.5, 3.0, 3.0, 3.0]
    """
    place, half = np.arange(len(values)), window // 2
    first, end = np.maximum(place - half, 0), np.minimum(place + half + 1, len(values))
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=float)])
    return (sums[end] - sums[first]) / (end - first)


def labels(marks: Sequence[tuple[int, str]], *, letter: float) -> list[tuple[int, str]]:
    """(step, name) as labels that do not overlap, by step: those too near to an earlier one share its place.

    letter: the width of a letter, in steps. If more than two share a place, the first and the last are named.

    >>> labels([(3, "1"), (9, "3"), (3, "2")], letter=1)
    [(3, '1,2'), (9, '3')]
    >>> labels([(1, "a"), (2, "b"), (3, "c")], letter=1)
    [(1, 'a–c')]
    """
    places: list[tuple[int, list[str]]] = []
    for step, name in sorted(marks, key=lambda mark: mark[0]):
        if places and step < places[-1][0] + letter * (1 + len(_joined(places[-1][1]))):
            places[-1][1].append(name)
        else:
            places.append((step, [name]))
    return [(step, _joined(names)) for step, names in places]


def _joined(names: Sequence[str]) -> str:
    return ",".join(names) if len(names) < 3 else f"{names[0]}–{names[-1]}"


def letter(number: int) -> str:
    """The name of a change in the chart: a, b, ..., z, a2, b2, ...

    >>> letter(0), letter(27)
    ('a', 'b2')
    """
    return "abcdefghijklmnopqrstuvwxyz"[number % 26] + (str(number // 26 + 1) if number >= 26 else "")


def changes_of(folder: str | Path) -> list[Change]:
    """The changes made while a run trained, worded as in the charts; refused changes are left out.

    >>> changes_of("runs/no-such-run")
    []
    """
    made = [line for line in read_changes(folder) if "change" in line]
    return [(int(line["step"]), change_text(line["change"], line.get("was") or {})) for line in made]


def change_text(change: Mapping[str, Any], was: Mapping[str, Any]) -> str:
    """One change in words.

    >>> change_text({"learning_rate": 1e-5, "beta": 0.1}, {"learning_rate": 2e-05})
    'learning_rate 2e-05 → 1e-05, beta → 0.1'
    """
    words = [
        f"{name} {was[name]} → {new}" if name in was else f"{name} → {new}" for name, new in change.items()
    ]
    return ", ".join(words)

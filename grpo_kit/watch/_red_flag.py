"""What red flags are made of: Flag, the steps of a run that they read, and the decorator that raises them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

ACCURACY, REWARD = "eval/accuracy", "eval/reward"  # held-out measures
WINDOW = 5  # steps that a state must last; spikes are raised at once
_ROUNDING = 1e-6  # of float32


@dataclass(frozen=True)
class Flag:
    """A red flag. name; step: the first; saw: the evidence, with numbers; why it matters; first: the first remedy."""

    name: str
    step: int
    saw: str
    why: str
    first: str

    @property
    def brief(self) -> str:
        """The evidence, without reason and remedy."""
        return f"{self.name} since step {self.step}: {self.saw}"

    def __str__(self) -> str:
        return f"{self.brief}. {self.why} First try: {self.first}"


@dataclass(frozen=True)
class Setup:
    """The values of a run.json that flags need; the defaults without one.

    weights: of the rewards by name. parts: names of the rewards, and of the parts of those that are sums. best: the
    highest reward, if rewards lie in [0, 1]. ranges: stated by rewards and parts; see Steps.scale.
    answer: weights, by name, of the parts that judge the answer; empty if unknown.
    constant: the best constant strategy's score on them, in [0, 1]; None if unknown.
    max_tokens of a completion. temperature: NaN if unknown. age: the highest of a rollout, in optimizer steps.
    skips: does the run skip a step whose gradient is not finite, and lower the loss scale (fp16)?
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    parts: tuple[str, ...] = ()
    best: float = 1.0
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    answer: Mapping[str, float] = field(default_factory=dict)
    constant: float | None = None
    max_tokens: int | None = None
    temperature: float = np.nan
    age: int = 0
    skips: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any] | None) -> Setup:
        """From a run's config (run.json, as the trainer writes it)."""
        config = config or {}
        args = arguments_of(config)
        parts = config.get("reward_parts") or []
        weights = [float(weight) for weight in config.get("reward_weights") or ()]
        weight_of = dict(zip(parts, weights, strict=False))

        answer = {name: weight_of.get(name, 1.0) for name in config.get("answer_parts") or ()}
        if not any(answer.values()):  # measured, not trained on
            answer = dict.fromkeys(answer, 1.0)
        answer = {name: weight for name, weight in answer.items() if weight > 0}

        constant = None
        earned = (config.get("best_constant") or {}).get("parts") or {}
        if answer and earned.keys() >= answer.keys():
            total = sum(weight * earned[name] for name, weight in answer.items())
            constant = total / sum(answer.values())

        passes = (args.get("steps_per_generation") or 1) * (args.get("num_iterations") or 1)
        updates = passes // (args.get("gradient_accumulation_steps") or 1)
        ranges = config.get("reward_ranges") or {}
        return cls(
            weights=weight_of,
            parts=tuple(parts),
            best=sum(weight for weight in weights if weight > 0) or 1.0,
            ranges={name: tuple(ends) for name, ends in ranges.items()},
            answer=answer,
            constant=constant,
            max_tokens=args.get("max_completion_length"),
            # a schedule is a text
            temperature=pd.to_numeric([args.get("temperature")], errors="coerce").item(),
            age=max(0, updates - 1),
            skips=bool(args.get("fp16")),
        )


@dataclass(frozen=True)
class Steps:
    """The steps of a run so far: a table with a row each, and the run's Setup. steps["kl"] is a column."""

    table: pd.DataFrame
    setup: Setup

    def __getitem__(self, name: str) -> np.ndarray:
        """A measure at each step; NaN if it is missing."""
        if name not in self.table:
            return np.full(len(self.table), np.nan)
        return self.table[name].to_numpy(float)

    def mean(self, name: str, width: int = WINDOW) -> np.ndarray:
        """Mean of a measure over the last `width` steps; NaN if one is missing."""
        return trailing(self[name], width)

    def scale(self, part: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(lowest, highest) of a part of the reward at each step: its stated range, else the observed one (seen_range).

        part: None for the reward, whose ends are the weighted sums of its parts'.
        """
        if part is None and self.setup.weights:
            lowest = np.zeros(len(self.table))
            highest = np.full(len(self.table), self.setup.best)
            for name, weight in self.setup.weights.items():
                if weight > 0:
                    low, high = self.scale(name)
                    lowest = lowest + weight * low
                    highest = highest + weight * (high - 1)
            return lowest, highest
        if part in self.setup.ranges:
            low, high = self.setup.ranges[part]
            return np.full(len(self.table), low), np.full(len(self.table), high)
        name = "reward" if part is None else f"reward/{part}"
        low_column, high_column = scale_columns(name)
        lowest = np.fmin.accumulate(np.fmin(self[name], self[low_column]))
        highest = np.fmax.accumulate(np.fmax(self[name], self[high_column]))
        ranges = [seen_range(low, high) for low, high in zip(lowest, highest, strict=True)]
        low, high = np.array(ranges).reshape(-1, 2).T
        return low, high

    def share_of_scale(self, name: str, part: str | None = None) -> np.ndarray:
        """A measure of the reward, or of a part, as a share of its scale."""
        low, high = self.scale(part)
        return (self[name] - low) / (high - low)


# A bool for each row of the table, and the evidence in a row; None if it cannot be judged.
Sign = tuple[np.ndarray, Callable[[int], str]] | None
Finder = Callable[..., Flag | None]


def red_flag(
    name: str,
    *,
    why: str,
    first: str | Callable[[Steps, int], str],
    lasted: int = 1,
    before: int = 0,
) -> Callable[[Callable[..., Sign]], Finder]:
    """Turns a function that returns a Sign into one that returns the Flag, or None if the sign is nowhere.

    first: the first remedy, or a function of the steps and the row.
    lasted: rows that the sign covers; the flag's step is the first of them. before: rows that it is compared with.
    Where there are not so many rows, the sign is not looked for.
    """

    def flagged(find_sign: Callable[..., Sign]) -> Finder:
        def find(steps: Steps, *arguments: Any) -> Flag | None:
            if len(steps.table) < before + lasted:
                return None
            sign = find_sign(steps, *arguments)
            if sign is None:
                return None
            rows, evidence = sign
            if not rows.any():
                return None
            row = int(rows.argmax())
            first_row = max(row - lasted + 1, 0)
            step = int(steps.table["step"].iloc[first_row])
            remedy = first if isinstance(first, str) else first(steps, row)
            return Flag(name, step, evidence(row), why, remedy)

        return find

    return flagged


def trailing(values: np.ndarray, width: int) -> np.ndarray:
    """Mean of the last `width` values at each step; NaN if one is missing."""
    return pd.Series(values).rolling(width).mean().to_numpy()


def first_mean(values: np.ndarray) -> float:
    """Mean of the first three values that exist."""
    return pd.Series(values).dropna().head(3).mean()


def usual_before(values: np.ndarray) -> np.ndarray:
    """Median of up to 8 steps before each one, from the fifth on."""
    return pd.Series(values).shift(1).rolling(8, min_periods=4).median().to_numpy()


def scale_columns(measure: str) -> tuple[str, str]:
    """The columns with the lowest and the highest score of a step, if some lay outside [0, 1]."""
    return f"scale/{measure}/low", f"scale/{measure}/high"


def seen_range(low: float, high: float) -> tuple[float, float]:
    """The assumed range of scores from low to high: [0, 1], extended as far as they go.

    If none is above 0 and some are below, they are penalties, and 0 is the highest. NaN: no score was recorded.

    >>> seen_range(0.2, 0.7), seen_range(-1, 0.5), seen_range(0, 5), seen_range(-3, -1)
    ((0.0, 1.0), (-1.0, 1.0), (0.0, 5.0), (-3.0, 0.0))
    """
    lowest = 0.0
    highest = 1.0
    if low < -_ROUNDING:
        lowest = float(low)
        if not high > 0:
            highest = 0.0
    if high > 1 + _ROUNDING:
        highest = float(high)
    return lowest, highest


def range_of_rows(names: Iterable[str], *runs: Mapping[str, Any]) -> tuple[float, float]:
    """seen_range of these measures and their single scores in tables of metrics (a column or an array by name).

    >>> range_of_rows(["reward"], {"reward": [0.5, 1.0], "scale/reward/low": [-2.0, float("nan")]})
    (-2.0, 1.0)
    """
    values = [np.nan]
    for measure in names:
        for name in (measure, *scale_columns(measure)):
            for run in runs:
                if name in run:
                    values.extend(np.asarray(run[name], dtype=float))
    scores = np.array(values)
    scores[np.isinf(scores)] = np.nan
    return seen_range(np.fmin.reduce(scores), np.fmax.reduce(scores))


def arguments_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a run by the names that transformers and trl have for them, from its run.json.

    >>> arguments_of({"config": {"steps": 32, "temperature": 1.0}})["max_steps"]
    32
    """
    if "config" not in settings:
        return settings.get("args") or type(settings)()
    config = settings["config"]
    is_text = isinstance(config.get("learning_rate"), str)
    arguments = type(config)(config)  # that of run.json says which name it lacks
    arguments["lr_scheduler_type"] = "as it says" if is_text else "constant after a warmup"
    arguments["fp16"] = config.get("autocast") == "float16"
    arguments["max_steps"] = config.get("steps")
    arguments["max_completion_length"] = config.get("max_completion_tokens")
    arguments["num_iterations"] = config.get("iterations")
    arguments["steps_per_generation"] = config.get("minibatches")
    return arguments

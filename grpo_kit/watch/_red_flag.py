"""Flag and its page, the Setup that flags need of a run, the decorator that raises flags, and readers of the table."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from grpo_kit._support.display import BADGE, escape
from grpo_kit.watch._curves import scale_columns, seen_range

WINDOW = 5  # steps that a state must last; spikes are raised at once
# A bool for each row of the table, and the evidence in a row; None if it cannot be judged.
Sign = tuple[np.ndarray, Callable[[int], str]] | None


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

    weights: of the rewards by name. inside: part names of the rewards that are sums. best: the highest reward, if
    rewards lie in [0, 1]. ranges: stated by rewards and parts; see scale().
    answer: weights, by name, of the parts that judge the answer; empty if unknown.
    constant: the best constant strategy's score on them, in [0, 1]; None if unknown.
    max_tokens of a completion. age: the highest of a rollout, in optimizer steps.
    skips: does the run skip a step whose gradient is not finite, and lower the loss scale (fp16)?
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    inside: tuple[str, ...] = ()
    best: float = 1.0
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    answer: Mapping[str, float] = field(default_factory=dict)
    constant: float | None = None
    max_tokens: int | None = None
    age: int = 0
    skips: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any] | None) -> Setup:
        """From a run's config (run.json, as the trainer writes it)."""
        config = config or {}
        args = arguments_of(config)
        weights = [float(w) for w in config.get("reward_weights") or ()]
        parts = list(config.get("reward_parts") or ())
        weight_of = dict(zip(parts, weights, strict=False))
        answer = {name: weight_of.get(name, 1.0) for name in config.get("answer_parts") or ()}
        if not any(answer.values()):  # measured, not trained on
            answer = dict.fromkeys(answer, 1.0)
        answer = {name: weight for name, weight in answer.items() if weight > 0}
        earned = (config.get("best_constant") or {}).get("parts") or {}
        known = bool(answer) and all(name in earned for name in answer)
        passes = (args.get("steps_per_generation") or 1) * (args.get("num_iterations") or 1)
        return cls(
            weights=weight_of,
            inside=tuple(parts[len(weights) :]),
            best=sum(w for w in weights if w > 0) or 1.0,
            ranges={name: tuple(ends) for name, ends in (config.get("reward_ranges") or {}).items()},
            answer=answer,
            constant=sum(w * earned[n] for n, w in answer.items()) / sum(answer.values()) if known else None,
            max_tokens=args.get("max_completion_length"),
            age=max(0, passes // (args.get("gradient_accumulation_steps") or 1) - 1),
            skips=bool(args.get("fp16")),
        )


def red_flag(
    name: str, *, why: str, first: str, lasted: int = 1
) -> Callable[[Callable[..., Sign]], Callable[..., Flag | None]]:
    """Turns a function that returns a Sign into one that returns the Flag, or None if the sign is nowhere.

    lasted: rows that the sign covers; the flag's step is the first of them.
    """

    def raising(find: Callable[..., Sign]) -> Callable[..., Flag | None]:
        @functools.wraps(find)
        def raised(table: pd.DataFrame, *given: Any) -> Flag | None:
            sign = find(table, *given)
            if sign is None or not sign[0].any():
                return None
            at = int(sign[0].argmax())
            return Flag(name, int(table["step"].iloc[max(at - lasted + 1, 0)]), sign[1](at), why, first)

        return raised

    return raising


def column(table: pd.DataFrame, name: str) -> np.ndarray:
    """A measure at each step; NaN if it is missing."""
    return table[name].to_numpy(float) if name in table else np.full(len(table), np.nan)


def scale(table: pd.DataFrame, setup: Setup, part: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(lowest, highest) of a part of the reward at each step: its stated range, else the observed one (seen_range).

    part: None for the reward, whose ends are the weighted sums of its parts'.
    """
    n = len(table)
    if part is None and setup.weights:
        used = [(w, scale(table, setup, name)) for name, w in setup.weights.items() if w > 0]
        lowest = sum((w * low for w, (low, _) in used), np.zeros(n))
        return lowest, sum((w * (high - 1) for w, (_, high) in used), np.full(n, setup.best))
    if part in setup.ranges:
        low, high = setup.ranges[part]
        return np.full(n, low), np.full(n, high)
    name = "reward" if part is None else f"reward/{part}"
    mean = column(table, name)
    least = np.fmin.accumulate(np.fmin(mean, column(table, scale_columns(name)[0])))
    most = np.fmax.accumulate(np.fmax(mean, column(table, scale_columns(name)[1])))
    ends = [seen_range(low, high) for low, high in zip(least, most, strict=True)]
    return np.array([low for low, _ in ends]), np.array([high for _, high in ends])


def trailing(values: np.ndarray, width: int) -> np.ndarray:
    """Mean of the last `width` values at each step; NaN if one is missing."""
    return pd.Series(values).rolling(width).mean().to_numpy()


def over_window(table: pd.DataFrame, name: str) -> np.ndarray:
    """Mean of a measure over the last WINDOW steps."""
    return trailing(column(table, name), WINDOW)


def first_mean(values: np.ndarray) -> float:
    """Mean of the first three values that exist."""
    there = values[~np.isnan(values)][:3]
    return float(there.mean()) if len(there) else np.nan


def usual_before(values: np.ndarray) -> np.ndarray:
    """Median of up to 8 steps before each one, from the fifth on."""
    return pd.Series(values).shift(1).rolling(8, min_periods=4).median().to_numpy()


def arguments_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a run by the names that transformers and trl have for them, from its run.json.

    >>> arguments_of({"config": {"steps": 32, "temperature": 1.0}})["max_steps"]
    32
    """
    if "config" not in settings:
        return settings.get("args") or type(settings)()
    config = settings["config"]
    names = {
        "max_steps": "steps",
        "max_completion_length": "max_completion_tokens",
        "num_iterations": "iterations",
        "steps_per_generation": "minibatches",
    }
    schedule = "as it says" if isinstance(config.get("learning_rate"), str) else "constant after a warmup"
    found = {"lr_scheduler_type": schedule, "fp16": config.get("autocast") == "float16"}
    found |= {name: config.get(own) for name, own in names.items()}
    return type(config)(config | found)  # of run.json: it says which name it lacks


def badge(text: str) -> str:
    """Highlighted text in front of a sentence, as HTML."""
    return f'<span style="{BADGE}">{escape(text)}</span> '


def flags_page(flags: Sequence[Flag], *, scrolls: bool) -> str:
    """Each flag in a line that opens to its reason and remedy: the newest on top of three lines that scroll; or, in the
    end, all of them in order and open.
    """
    told = []
    for n, flag in enumerate(flags, 1):
        line = f"{badge(f'red flag {n}')}{escape(flag.brief, 600)}"
        more = escape(f"{flag.why} First try: {flag.first}", 600)
        opened = "" if scrolls else " open"
        told.append(f'<details{opened}><summary style="cursor:pointer">{line}</summary>{more}</details>')
    room = "overflow:auto;height" if scrolls else "min-height"
    told = told[::-1] if scrolls else told
    return f'<div style="line-height:1.4;{room}:4.3em">{"".join(told) or "No red flag."}</div>'

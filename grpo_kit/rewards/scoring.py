"""Scoring: the one place that calls rewards, checks their scores, and makes the weighted total.

Trainer, evaluation, readiness, preferences, check_rewards and the composite rewards all call it.

Longer than 300 lines because the one rule for scores, None and errors is seen in one place.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby
from traceback import format_exception
from typing import Any

from grpo_kit._support.argument_checks import LARGEST_REWARD
from grpo_kit.rewards._parts import (
    Reward,
    bare_name,
    check_column_names,
    range_of,
    reward_names,
)

Scores = list[float | None]
_ROUNDING = 1e-6  # how far a sum of float32 parts may lie outside its range, relative to 1


class RewardError(ValueError):
    """A reward, or what pays in its place, raised or broke its contract; the message names it, row and completion."""

    def _render_traceback_(self) -> list[str]:
        """IPython shows the message first, then the reward's own lines, and not the way to them."""
        from grpo_kit._support.kernel import visible

        lines = [f"{type(self).__name__}: {self}", ""]
        cause = self.__cause__
        if cause:
            traceback = format_exception(None, cause, cause.__traceback__.tb_next)
            lines += visible("".join(traceback)).splitlines()
        return lines


class _Completions(list):
    """A copy of the list for one reward; `row` is the row that it read last, since another call may cost money."""

    row: int | None = None  # None before the first row, and after the last

    def __iter__(self) -> Iterator[Any]:
        for self.row, completion in enumerate(super().__iter__()):
            yield completion
        self.row = None

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, int):
            self.row = place % max(len(self), 1)
        return super().__getitem__(place)

    def place(self, completions: Sequence[Any]) -> str:
        """The row of an error, in words. completions: the originals, which the reward cannot have changed."""
        if not completions:
            return "there was no completion"
        if len(completions) == 1:
            return f"row 0, completion {completions[0]!r}"
        if self.row is None:
            return (
                f"it was not reading a row; the first is row 0, completion {completions[0]!r}"
            )
        return f"row {self.row}, completion {completions[self.row]!r}, the last that it read"


class PendingScores:
    """A reward in the form that a trainer may call: by its name, with its scores checked. See score()."""

    def __init__(self, reward: Reward, name: str) -> None:
        self.reward, self.__name__ = reward, name

    def __call__(self, *, completions: Sequence[Any], **columns: Any) -> Scores:
        return score(self.reward, completions, self.__name__, **columns)


def score(
    reward: Reward,
    completions: Sequence[Any],
    name: str | None = None,
    finite: bool = True,
    /,
    **columns: Any,
) -> Scores:
    """The reward's scores, one a completion, checked against its contract: None ("cannot judge") or a finite number.

    The reward is called by keyword, as in TRL. columns: its data set columns, one entry a completion. A column may
    have any name, `name` and `reward` too. The reward gets copies of the lists. An asynchronous one is waited for.
    name: used in messages; default the reward's own. finite: False allows infinite scores, as before a clipping.
    Called once, after an error too. Raises RewardError, naming the reward, the row and the completion (of an error the
    one that was read last), if it raises, changes the completions in place,
    returns no flat list or another number of values, or a value that is no finite number (at most 1e15 in size,
    as training computes in float32) or lies outside the range that the reward states (`reward.range = (low, high)`).
    ValueError for the columns `self` and `completions`, which no reward can receive.

    >>> score(lambda completions, **columns: [len(text) / 2 for text in completions], ["a", "four"])
    [0.5, 2.0]
    """
    name = name or bare_name(reward)
    check_column_names(
        {"self", "completions"} & columns.keys(), f"what reward {name!r} is given"
    )
    copies = _Completions(_copy(list(completions)))
    try:
        result = reward(
            completions=copies, **{key: _copy(value) for key, value in columns.items()}
        )
        if inspect.iscoroutine(result):
            with ThreadPoolExecutor(1) as thread:  # a notebook's own thread has a running loop
                result = thread.submit(asyncio.run, result).result()
    except RewardError:  # from a part: it names its row already
        raise
    except (Exception, SystemExit) as error:
        from grpo_kit._support.kernel import visible

        message = f"reward {name!r} raised {type(error).__name__}: {visible(error)}"
        if "string ind" in str(error):
            message += "; completions are texts here, not lists of messages"
        raise RewardError(f"{message}\n{copies.place(completions)}") from error
    if copies != list(completions):
        raise RewardError(
            f"reward {name!r} changed the list of completions, whose order its scores must keep; work on a copy, "
            "such as sorted(completions)"
        )
    return _checked(result, completions, reward, name, finite)


def _copy(value: Any) -> Any:
    """A deep copy of lists and dicts; everything else is shared."""
    if type(value) is list:
        return list(map(_copy, value))
    if type(value) is dict:
        return {key: _copy(item) for key, item in value.items()}
    return value


def _checked(
    result: Any, completions: Sequence[Any], reward: Reward, name: str, finite: bool
) -> Scores:
    """The result as a list of float and None."""
    is_flat = (
        getattr(result, "ndim", 1) == 1
        and hasattr(result, "__len__")
        and hasattr(result, "__iter__")
    )
    if not is_flat or isinstance(result, str | bytes | Mapping | Set):
        kind = type(result).__name__
        if hasattr(result, "shape"):
            kind += f" of shape {tuple(result.shape)}"
        raise RewardError(
            f"reward {name!r} returned {kind}; return a flat list, one float or None for each completion"
        )
    scores = result.tolist() if hasattr(result, "tolist") else list(result)
    if len(scores) != len(completions):
        row = min(len(scores), len(completions) - 1)
        raise RewardError(
            f"reward {name!r} returned {len(scores)} scores for {len(completions)} completions\n"
            f"first row without a partner: {row}, completion {completions[row]!r}"
        )
    check_scores(scores, completions, reward, name, finite=finite)
    return [None if score is None else float(score) for score in scores]


def check_scores(
    scores: Scores,
    completions: Sequence[Any],
    reward: Reward,
    name: str,
    *,
    finite: bool = True,
) -> None:
    """Raises RewardError, naming row and completion, for a score that is neither None nor a finite number in the range.

    The range is the one that the reward states, if any. finite: False allows infinite scores.
    """
    stated_range = range_of(reward)
    for row, score in enumerate(scores):
        advice = None if score is None else _advice(score, stated_range, finite)
        if advice:
            raise RewardError(
                f"reward {name!r} gave {score!r} in row {row}, completion {completions[row]!r}; use {advice}, or None "
                "where it cannot judge"
            )


def _advice(score: Any, stated_range: tuple[float, float] | None, finite: bool) -> str | None:
    """A valid score in words; None if this one is valid."""
    value = math.nan
    # float() would take "1" and [1]
    if not isinstance(score, str | bytes) and not getattr(score, "ndim", 0):
        with suppress(TypeError, ValueError, OverflowError):
            value = float(score)
    if math.isnan(value):
        return "a finite number" if finite else "a number"
    if finite and abs(value) > LARGEST_REWARD:
        return "a finite number, from -1e15 to 1e15"
    if stated_range:
        low, high = stated_range
        slack = _ROUNDING * max(1.0, abs(low), abs(high))
        if not low - slack <= value <= high + slack:
            return f"a number in [{low:g}, {high:g}], the range that it states"
    return None


def score_all(
    rewards: Sequence[Reward],
    completions: Sequence[Any],
    names: Sequence[str] | None = None,
    /,
    **columns: Any,
) -> dict[str, Scores]:
    """Every reward's scores by its name (default: reward_names), each called as in score().

    Asynchronous rewards wait beside each other, each in a thread.
    columns: as in score(), of any name. Raises the errors of score().

    >>> from grpo_kit.rewards import ExactAnswer, SoftFormat
    >>> score_all([ExactAnswer(), SoftFormat(think=None)], ["<answer>5</answer>"], answer=["4"])
    {'exact_answer': [0.0], 'soft_format': [1.0]}
    """
    named = dict(zip(names or reward_names(rewards), rewards, strict=True))
    with ThreadPoolExecutor(len(named) or 1) as threads:
        futures = {
            name: threads.submit(score, reward, completions, name, **columns)
            for name, reward in named.items()
            if inspect.iscoroutinefunction(reward)
            or inspect.iscoroutinefunction(type(reward).__call__)
        }
        scores = {}
        for name, reward in named.items():
            if name in futures:
                scores[name] = futures[name].result()
            else:
                scores[name] = score(reward, completions, name, **columns)
    return scores


def total(scores: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """The weighted sum of one completion's parts; None if a part cannot judge the completion.

    Leaving that part out would count it as 0. Rounded to 9 digits, so that equal sums are equal.

    >>> total([1.0, 0.5], [0.75, 0.25]), total([None, 1.0], [0.75, 0.25])
    (0.875, None)
    >>> total([0.1, 0.6], [0.8, 0.2]) == total([0.2, 0.2], [0.8, 0.2])
    True
    """
    if any(score is None or score != score for score in scores):  # tables hold None as NaN
        return None
    try:
        parts = [weight * float(score) for weight, score in zip(weights, scores, strict=True)]
        return round(math.fsum(parts), 9)
    except (OverflowError, ValueError):
        return math.inf


def totals(
    parts: Sequence[Sequence[float | None]], weights: Sequence[float], groups: Sequence[Any]
) -> Scores:
    """The total of each completion, over the rewards that apply to its prompt.

    parts: one list per reward, one score a completion. groups: an id of the prompt, one entry a completion; completions
    of a prompt are adjacent. A reward that judges no completion of a prompt is for other prompts: it is left out there,
    as in TRL. If it judges only some of them, the others have no total (see total): None moves no advantage and enters
    neither a mean nor a training set.

    >>> totals([[1.0, None, None, None], [0.0, 1.0, 0.5, 1.0]], [0.5, 0.5], ["a", "a", "b", "b"])
    [0.5, None, 0.25, 0.5]
    """
    totals: Scores = []
    for _, group in groupby(range(len(groups)), key=lambda row: groups[row]):
        rows = list(group)
        applying = [
            (part, weight)
            for part, weight in zip(parts, weights, strict=True)
            if any(part[row] is not None and part[row] == part[row] for row in rows)
        ]
        for row in rows:
            scores = [part[row] for part, _ in applying]
            weighted = total(scores, [weight for _, weight in applying]) if applying else None
            if weighted is not None and not abs(weighted) <= LARGEST_REWARD:
                raise RewardError(
                    f"row {row}: scores {scores!r:.200} with weights {list(weights)!r:.200} add up to more than "
                    f"{LARGEST_REWARD:g} in size, and at most {LARGEST_REWARD:g} is taken, as training squares it in "
                    "float32: lower the weights"
                )
            totals.append(weighted)
    return totals


def off_scale(
    name: str, reward: Reward, scores: Scores, seen: tuple[float, float] | None = None
) -> str | None:
    """One sentence about a reward with scores outside [0, 1]; None if it has none, or states its range.

    seen: the lowest and highest score so far; default those of scores.

    >>> off_scale("points", lambda completions, **columns: [0, 2], [0.0, 2.0])[:72]
    "reward 'points' gave 2 (row 1; so far 0 to 2): any finite scale is fine."
    """
    numbers = {
        row: score for row, score in enumerate(scores) if score is not None and score == score
    }
    off_range = [
        row for row, score in numbers.items() if not -_ROUNDING <= score <= 1 + _ROUNDING
    ]
    if not off_range or range_of(reward) is not None:
        return None
    row = off_range[0]
    score = numbers[row]
    low, high = seen or (min(numbers.values()), max(numbers.values()))
    return (
        f"reward {name!r} gave {score:g} (row {row}; so far {low:g} to {high:g}): any finite scale is fine. The kit's "
        "own lie in [0, 1]; charts and flags go by the range seen, or stated as reward.range = (low, high)"
    )


def warn_off_scale(
    rewards: Sequence[Reward], parts: Mapping[str, Sequence[float | None]]
) -> None:
    """Warns once about each reward with scores outside [0, 1]. parts: the result of score_all for these rewards."""
    for (name, scores), reward in zip(parts.items(), rewards, strict=True):
        message = off_scale(name, reward, scores)
        if message:
            warnings.warn(message, UserWarning, stacklevel=3)

"""The judge: the one place that asks rewards, checks what they say, and makes the weighted total.

Trainer, evaluation, readiness, preferences, check_rewards and the composite rewards all call it.
"""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any

from grpo_kit.rewards.response import Reward

Scores = list[float | None]
# What TRL hands every reward besides the columns of the data set.
_GIVEN_BY_TRL = frozenset(
    {
        "self",
        "prompts",
        "completions",
        "completion_ids",
        "trainer_state",
        "log_extra",
        "log_metric",
        "environments",
    }
)

_ROUNDING = 1e-6  # what a sum of float32 parts may lie outside [0, 1]


class RewardError(ValueError):
    """A reward raised or broke its contract; the message names the reward, the row and the completion."""


def all_parts(reward: Reward) -> list[Reward]:
    """The parts of a reward made of others (`made_of_others`), and their parts, each object once; [] for any other.

    >>> from grpo_kit.rewards import ExactAnswer, Gated, SoftFormat
    >>> reward_names(all_parts(Gated(ExactAnswer(), on=SoftFormat())))
    ['exact_answer', 'soft_format']
    """
    direct = list(reward.parts) if getattr(reward, "made_of_others", False) else []
    inside = direct + [part for outer in direct for part in all_parts(outer)]
    return list({id(part): part for part in inside}.values())


def reward_names(rewards: Sequence[Reward]) -> list[str]:
    """The names that rewards go by in metrics and tables, as TRL gives them: `__name__`, else the class's name.

    A functools.partial has the name of what it wraps. Of several rewards of one name the later ones get "_2", "_3",
    and a warning says so; the parts of a reward made of others keep theirs.

    >>> def short(completions, most, **columns): ...
    >>> reward_names([functools.partial(short, most=8), lambda completions, **columns: [1.0]])
    ['short', '<lambda>']
    """
    objects = {id(reward) for reward in rewards}
    taken = {
        name
        for reward in rewards
        for part, name in zip(all_parts(reward), getattr(reward, "names", ()), strict=False)
        if id(part) not in objects
    }
    names: list[str] = []
    for reward in rewards:
        bare, number = _bare_name(reward), 1
        name = bare
        while name in taken:
            number += 1
            name = f"{bare}_{number}"
        if name != bare:
            warnings.warn(
                f"several rewards are named {bare!r}; one of them is {name!r} in metrics and tables. Set __name__ to "
                "choose its name.",
                UserWarning,
                stacklevel=3,
            )
        taken.add(name)
        names.append(name)
    return names


def _bare_name(reward: Any) -> str:
    while isinstance(reward, functools.partial):
        reward = reward.func
    if not callable(reward):
        raise ValueError(f"reward {reward!r} cannot be called; give a function of completions")
    return getattr(reward, "__name__", None) or type(reward).__name__


class Asked:
    """A reward as a trainer may call it: by its name, its answers checked. See ask()."""

    def __init__(self, reward: Reward, name: str) -> None:
        self.reward, self.__name__ = reward, name

    def __call__(self, *, completions: Sequence[Any], **columns: Any) -> Scores:
        return ask(self.reward, completions, name=self.__name__, **columns)


def ask(
    reward: Reward,
    completions: Sequence[Any],
    *,
    name: str | None = None,
    in_range: bool = True,
    **columns: Any,
) -> Scores:
    """The reward's scores, one a completion, held to its contract: None ("cannot judge") or a number in [0, 1].

    The reward is called by keyword, as TRL does; columns are its data set columns, one entry a completion.
    in_range: False allows any number (for rewards that are about to be scaled).
    Raises RewardError, naming the reward, the row and the completion, if it raises, returns another number of values,
    or a value that is no number or out of range.

    >>> ask(lambda completions, **columns: [len(text) / 4 for text in completions], ["a", "four"])
    [0.25, 1.0]
    """
    name = _bare_name(reward) if name is None else name
    try:
        scores = reward(completions=completions, **columns)
    except RewardError:  # of a part: it names its row already
        raise
    except Exception as error:
        row, completion = _culprit(reward, completions, columns)
        raise RewardError(
            f"reward {name!r} raised {type(error).__name__}: {error}\nrow {row}, completion {completion!r}"
        ) from error
    if not hasattr(scores, "__len__"):
        raise RewardError(
            f"reward {name!r} returned {type(scores).__name__}; return one float or None for each completion"
        )
    if len(scores) != len(completions):
        row = min(len(scores), len(completions) - 1)
        raise RewardError(
            f"reward {name!r} returned {len(scores)} scores for {len(completions)} completions\n"
            f"first row without a partner: {row}, completion {completions[row]!r}"
        )
    check_range(scores, completions, name, in_range=in_range)
    return list(scores)


def check_range(scores: Scores, completions: Sequence[Any], name: str, *, in_range: bool = True) -> None:
    """Raises RewardError, naming row and completion, for a score that is neither None nor a number in [0, 1].

    in_range: False allows any number.
    """
    for row, score in enumerate(scores):
        if not _fits(score, in_range):
            wanted = "a value in [0, 1] (Clipped brings any scale there)" if in_range else "a number"
            raise RewardError(
                f"reward {name!r} gave {score!r} in row {row}, completion {completions[row]!r}; use {wanted}, or None "
                "where it cannot judge"
            )


def _fits(score: Any, in_range: bool) -> bool:
    if score is None:
        return True
    try:
        value = float(score)
    except (TypeError, ValueError):
        return False
    return not math.isnan(value) and (not in_range or -_ROUNDING <= value <= 1 + _ROUNDING)


def _culprit(reward: Reward, completions: Sequence[Any], columns: Mapping[str, Any]) -> tuple[int | str, Any]:
    """The first row that raises on its own; rewards are pure, so asking again is safe."""
    quiet = {**columns, **{log: lambda *_: None for log in ("log_extra", "log_metric") if log in columns}}
    for row in range(len(completions)):
        one = {
            k: v[row : row + 1] if isinstance(v, list) and len(v) == len(completions) else v
            for k, v in quiet.items()
        }
        try:
            reward(completions=completions[row : row + 1], **one)
        except Exception:
            return row, completions[row]
    return "unknown (each passes alone)", completions[0] if completions else ""


def ask_all(
    rewards: Sequence[Reward],
    completions: Sequence[Any],
    *,
    names: Sequence[str] | None = None,
    **columns: Any,
) -> dict[str, Scores]:
    """Every reward's scores by its name (default: reward_names), asked as a trainer asks. Raises RewardError.

    >>> from grpo_kit.rewards import ExactAnswer, SoftFormat
    >>> ask_all([ExactAnswer(), SoftFormat(think=None)], ["<answer>5</answer>"], answer=["4"])
    {'exact_answer': [0.0], 'soft_format': [1.0]}
    """
    names = reward_names(rewards) if names is None else names
    return {
        name: ask(reward, completions, name=name, **columns)
        for name, reward in zip(names, rewards, strict=True)
    }


def total(scores: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """The weighted sum of one completion's parts; None if one of them cannot judge it.

    Leaving such a part out would count it as 0. Rounded to 6 digits, so that equal sums are equal.

    >>> total([1.0, 0.5], [0.75, 0.25]), total([None, 1.0], [0.75, 0.25])
    (0.875, None)
    >>> total([0.1, 0.6], [0.8, 0.2]) == total([0.2, 0.2], [0.8, 0.2])
    True
    """
    if any(score is None or score != score for score in scores):  # tables hold None as NaN
        return None
    return round(math.fsum(w * float(s) for w, s in zip(weights, scores, strict=True)), 6)


def totals(
    parts: Sequence[Sequence[float | None]], weights: Sequence[float], groups: Sequence[Any]
) -> Scores:
    """The total of each completion, over the rewards that apply to its prompt.

    parts: a list a reward, one score a completion. groups: what tells the prompts apart, one entry a completion, a
    prompt's adjacent. A reward that judges no completion of a prompt is one for other prompts: it is left out there, as
    in TRL. One that judges some of them leaves the others without a total (see total): None moves no advantage, enters
    no mean and no training set.

    >>> totals([[1.0, None, None, None], [0.0, 1.0, 0.5, 1.0]], [0.5, 0.5], ["a", "a", "b", "b"])
    [0.5, None, 0.25, 0.5]
    """
    made: Scores = []
    for _, same in groupby(range(len(groups)), key=lambda row: groups[row]):
        rows = list(same)
        inside = [[part[row] for row in rows] for part in parts]
        applies = [i for i, scores in enumerate(inside) if any(s is not None and s == s for s in scores)]
        for place in range(len(rows)):
            row = [inside[i][place] for i in applies]
            made.append(total(row, [weights[i] for i in applies]) if applies else None)
    return made


def check_columns(rewards: Sequence[Reward], given: Collection[str], where: str) -> None:
    """Raises ValueError, naming reward and column, where a reward needs a column that is not among those given.

    where: what has these columns, for the message.
    """
    for reward in rewards:
        missing = [column for column in required_columns(reward) if column not in given]
        if missing:
            raise ValueError(
                f"reward {_bare_name(reward)!r} asks for the column{'s' * (len(missing) > 1)} {missing}, "
                f"which {where} does not have (it has {sorted(given)})"
            )


def required_columns(reward: Reward) -> list[str]:
    """Columns a reward cannot do without: its `columns` attribute and its parameters that have no default.

    >>> def right(completions, answer, **columns): ...
    >>> required_columns(right)
    ['answer']
    """
    columns = list(getattr(reward, "columns", ()))
    for p in inspect.signature(reward).parameters.values():
        named = p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        if named and p.default is p.empty and p.name not in _GIVEN_BY_TRL and p.name not in columns:
            columns.append(p.name)
    return columns

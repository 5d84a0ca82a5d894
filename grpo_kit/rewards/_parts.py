"""What rewards declare: their names, their parts, the columns they need."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

Reward = Callable[..., list[float | None]]

# Arguments that TRL gives every reward besides the columns of the data set.
_TRL_ARGUMENTS = frozenset(
    "self prompts completions completion_ids trainer_state log_extra log_metric environments".split()
)
_RESERVED = dict.fromkeys(
    _TRL_ARGUMENTS, "rewards are given something else under that name"
) | {
    "self": "a reward that is an object cannot be given it",
    "prompt": "the rendered prompt is kept under that name",
    "prefill": "the prompt's prefill is kept under that name",
    "completion": "trl keeps it from rewards",
    "image": "trl takes it for what a model should see",
    "images": "trl takes it for what a model should see",
}


def all_parts(reward: Reward) -> list[Reward]:
    """The parts of a reward made of others (`made_of_others`), and their parts, each object once; else [].

    >>> from grpo_kit.rewards import ExactAnswer, Gated, SoftFormat
    >>> reward_names(all_parts(Gated(ExactAnswer(), on=SoftFormat())))
    ['exact_answer', 'soft_format']
    """
    if getattr(reward, "made_of_others", False) is not True:
        return []
    parts = [*reward.parts]
    for part in reward.parts:
        parts += all_parts(part)
    return list({id(part): part for part in parts}.values())


def with_parts(rewards: Iterable[Reward]) -> list[Reward]:
    """The rewards, each before its parts."""
    return [part for reward in rewards for part in (reward, *all_parts(reward))]


def reward_names(rewards: Sequence[Reward]) -> list[str]:
    """The names of rewards in metrics and tables, as in TRL: `__name__`, else the class's name.

    A functools.partial has the name of the function it wraps. If rewards share a name, the later ones get "_2", "_3",
    and a warning reports it; the parts of a reward made of others keep their names.

    >>> def short(completions, most, **columns): ...
    >>> reward_names([functools.partial(short, most=8), lambda completions, **columns: [1.0]])
    ['short', '<lambda>']
    """
    bare_names = [bare_name(reward) for reward in rewards]
    part_names = _part_names(rewards)
    for reward in rewards:
        part_names.pop(id(reward), None)
    names: list[str] = []
    for bare in bare_names:
        name, number = bare, 1
        while name in names or name in part_names.values():
            number += 1
            name = f"{bare}_{number}"
        if name != bare:
            warnings.warn(
                f"several rewards are named {bare!r}; one of them is {name!r} in metrics and tables. Set __name__ to "
                "choose its name.",
                UserWarning,
                stacklevel=3,
            )
        names.append(name)
    return names


def _part_names(rewards: Iterable[Reward]) -> dict[int, str]:
    """The names of the parts of rewards made of others, by the id of the part."""
    names: dict[int, str] = {}
    for reward in rewards:
        names |= zip(map(id, all_parts(reward)), getattr(reward, "names", ()), strict=False)
    return names


def unwrapped(reward: Any) -> Any:
    """The reward itself, or the function that a functools.partial wraps."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    return reward


def bare_name(reward: Any) -> str:
    """A reward's own name, as in TRL. Raises ValueError for an object that cannot be called."""
    reward = unwrapped(reward)
    if not callable(reward):
        raise ValueError(
            f"reward {reward!r:.200} cannot be called; give a function of completions"
        )
    if hasattr(reward, "state_dict"):
        raise ValueError(
            f"reward {type(reward).__name__} is no function of completions; write one that calls it"
        )
    if isinstance(reward, type):
        raise ValueError(f"reward {reward.__name__} is a class; make one: {reward.__name__}()")
    return getattr(reward, "__name__", None) or type(reward).__name__


def range_of(reward: Any) -> tuple[float, float] | None:
    """The range that a reward states, its attribute `range = (low, high)`; None if it states none.

    A functools.partial has the range of the function it wraps.
    Raises ValueError, naming the reward, for anything but two finite numbers, low < high.

    >>> def points(completions, **columns): ...
    >>> points.range = (-1, 2)
    >>> range_of(points)
    (-1.0, 2.0)
    """
    while isinstance(reward, functools.partial) and not hasattr(reward, "range"):
        reward = reward.func
    stated_range = getattr(reward, "range", None)
    if stated_range is None:
        return None
    try:
        low, high = map(float, stated_range)
    except (TypeError, ValueError):
        low = high = math.nan
    if not -math.inf < low < high < math.inf:
        raise ValueError(
            f"reward {bare_name(reward)!r} has range={stated_range!r}; use (low, high), two finite numbers with "
            "low < high"
        )
    return low, high


def reaches_rewards(column: Any) -> bool:
    """Whether rewards can be given a column of that name: all but `prompt`, `completions` and the like.

    >>> reaches_rewards("name"), reaches_rewards("prompt")
    (True, False)
    """
    return isinstance(column, str) and column not in _RESERVED


def check_column_names(columns: Iterable[Any], owner: str) -> None:
    """Raises ValueError for the first column that rewards cannot be given under its name, and suggests another name.

    owner: of these columns, for the message. All other names are allowed: `name`, `reward`, `step`, ...

    >>> check_column_names(["question", "answer", "name", "reward"], "train")
    >>> check_column_names(["answer", "completions"], "train")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: train has a column 'completions', but rewards are given ...; call it 'row_completions'
    """
    for column in columns:
        if not isinstance(column, str):
            raise ValueError(
                f"{owner} has a column {column!r}, a {type(column).__name__}; call it {str(column)!r}"
            )
        if column in _RESERVED:
            raise ValueError(
                f"{owner} has a column {column!r}, but {_RESERVED[column]}; call it {f'row_{column}'!r}"
            )


def check_calls(rewards: Sequence[Reward], keywords: Collection[str], owner: str) -> None:
    """Raises ValueError, naming the reward, where a call with all of the keywords would fail in training.

    Such a reward has a parameter without a keyword, or a keyword without a parameter, or parts of one name, or a range
    that is none. owner: of the columns among the keywords, for the message.

    >>> check_calls([lambda completions: [1.0]], {"completions", "answer"}, "task 'sums'")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: reward '<lambda>' has the parameters (completions), but is called with answer too, by keyword; add ...
    """
    counts = Counter(_part_names(rewards).values())
    repeated = sorted(name for name, count in counts.items() if count > 1)
    if repeated:
        raise ValueError(
            f"rewards have several parts named {repeated}; metrics are kept by name, so set __name__ on one"
        )
    for reward in rewards:
        name, _ = bare_name(reward), range_of(reward)
        try:
            parameters = inspect.signature(reward).parameters
        except (TypeError, ValueError):  # some built-in callables have none
            continue
        check_columns([reward], keywords, owner)
        by_keyword = keyword_parameters(reward)
        required = [parameter for parameter, is_required in by_keyword.items() if is_required]
        unknown = [parameter for parameter in required if parameter not in keywords]
        if unknown:
            raise ValueError(
                f"reward {name!r} asks for {unknown}, which it is not given in training"
            )
        unexpected = sorted(set(keywords) - by_keyword.keys())
        if unexpected and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            raise ValueError(
                f"reward {name!r} has the parameters ({', '.join(parameters)}), but is called with "
                f"{', '.join(unexpected)} too, by keyword; add **columns to its parameters"
            )


def check_columns(rewards: Sequence[Reward], columns: Collection[str], owner: str) -> None:
    """Raises ValueError, naming reward and column, where a reward needs a column that is not among the columns.

    owner: of these columns, for the message.
    """
    for reward in rewards:
        missing_columns = [
            column for column in required_columns(reward) if column not in columns
        ]
        if missing_columns:
            plural = "s" if len(missing_columns) > 1 else ""
            raise ValueError(
                f"reward {bare_name(reward)!r} asks for the column{plural} {missing_columns}, "
                f"which {owner} does not have (it has {sorted(columns)})"
            )


def required_columns(reward: Reward) -> list[str]:
    """Columns that a reward needs: its `columns` attribute and its parameters without a default.

    >>> def right(completions, answer, **columns): ...
    >>> required_columns(right)
    ['answer']
    """
    columns = list(getattr(reward, "columns", ()))
    for name, is_required in keyword_parameters(reward).items():
        if is_required and name not in _TRL_ARGUMENTS and name not in columns:
            columns.append(name)
    return columns


def keyword_parameters(function: Callable) -> dict[str, bool]:
    """The parameters that can be given by keyword; True: one without a default.

    >>> keyword_parameters(lambda completions, answer="", **columns: [])
    {'completions': True, 'answer': False}
    """
    parameters = inspect.signature(function).parameters.values()
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name: p.default is p.empty for p in parameters if p.kind in by_keyword}


def answer_parts(
    rewards: Sequence[Reward], names: Sequence[str] | None = None
) -> dict[str, Reward]:
    """The rewards that judge the answer, by name: a reward does so if it needs a column of the row besides the prefill.

    Format, length and language need none. The parts of a WeightedSum count, not the sum. names: default reward_names().

    >>> from grpo_kit.rewards import ExactAnswer, SoftFormat, WeightedSum
    >>> list(answer_parts([WeightedSum({ExactAnswer(): 0.75, SoftFormat(): 0.25})]))
    ['exact_answer']
    """
    judges: dict[str, Reward] = {}
    for reward, name in zip(rewards, names or reward_names(rewards), strict=True):
        if getattr(reward, "sums", False):
            part_names = _part_names([reward])
            judges |= answer_parts(
                reward.parts, [part_names[id(part)] for part in reward.parts]
            )
        elif judges_answer(reward):
            judges[name] = reward
    return judges


def judges_answer(reward: Reward) -> bool:
    """Does the reward, or a part of it, need a column of the row besides the prefill?

    >>> from grpo_kit.rewards import ExactAnswer, Gated, SoftFormat
    >>> judges_answer(Gated(ExactAnswer(), on=SoftFormat())), judges_answer(SoftFormat())
    (True, False)
    """
    return any(
        set(required_columns(r)) - {"prompt", "prefill"} for r in [reward, *all_parts(reward)]
    )


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The rows as columns; None where a row lacks one.

    >>> columns_of([{"a": 1}, {"a": 2, "b": 3}])
    {'a': [1, 2], 'b': [None, 3]}
    """
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}

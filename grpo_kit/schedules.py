"""Schedules: f(progress) -> value, for annealing a temperature (or anything else) from high to low.

progress is the fraction of training done; it is clamped to [0, 1]. Every schedule is a pure function of it,
exact at both ends, never outside the range between its ends, and prints as the call that makes it.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from grpo_kit._support.argument_checks import check_above_zero, is_number


@dataclass(frozen=True)
class constant:  # noqa: N801 (used like a function; so are its siblings)
    """The same value throughout.

    >>> constant(0.9)(0.5)
    0.9
    """

    value: float

    def __post_init__(self) -> None:
        _check_finite("value", self.value)

    def __call__(self, progress: float) -> float:
        """The value at progress in [0, 1]."""
        _clamp(progress)
        return float(self.value)


@dataclass(frozen=True)
class _FromTo:
    start: float
    end: float

    def __post_init__(self) -> None:
        _check_finite("start", self.start)
        _check_finite("end", self.end)


@dataclass(frozen=True)
class linear(_FromTo):  # noqa: N801
    """A straight line from start (progress 0) to end (progress 1).

    >>> linear(1.2, 0.6)(0.5)
    0.9
    """

    def __call__(self, progress: float) -> float:
        """The value at progress in [0, 1]."""
        return _between(self.start, self.end, _clamp(progress))


@dataclass(frozen=True)
class cosine(_FromTo):  # noqa: N801
    """Half a cosine wave from start to end: flat at both ends, steepest in the middle.

    >>> cosine(1.2, 0.6)(0.25) > linear(1.2, 0.6)(0.25)
    True
    """

    def __call__(self, progress: float) -> float:
        """The value at progress in [0, 1]."""
        return _between(self.start, self.end, (1 - math.cos(math.pi * _clamp(progress))) / 2)


@dataclass(frozen=True)
class exponential(_FromTo):  # noqa: N801
    """The same factor in every equal stretch of progress: fast at first, slow at the end when it falls.

    Raises ValueError unless start and end are above 0.

    >>> exponential(1.0, 0.25)(0.5)
    0.5
    """

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_above_zero(name, value, hint="; a factor never reaches 0, use linear instead")

    def __call__(self, progress: float) -> float:
        """The value at progress in [0, 1]."""
        progress = _clamp(progress)
        if progress in (0, 1):
            return float(self.end if progress else self.start)
        value = self.start * (self.end / self.start) ** progress
        return _within(value, self.start, self.end)


@dataclass(unsafe_hash=True)
class stepwise:  # noqa: N801
    """Piecewise constant: values[0] until progress at[0], values[1] from there until at[1], and so on.

    values: one more than `at`. at: progress in (0, 1), rising.
    Raises ValueError if they do not fit together.

    >>> [stepwise([1.2, 0.9, 0.6], at=[0.5, 0.75])(p) for p in (0, 0.49, 0.5, 0.8, 1)]
    [1.2, 1.2, 0.9, 0.6, 0.6]
    """

    values: Sequence[float]
    at: Sequence[float]

    def __post_init__(self) -> None:
        for name in ("values", "at"):
            if not isinstance(getattr(self, name), list | tuple):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} must be a list of numbers, such as [0.5]"
                )
        self.values, self.at = tuple(self.values), tuple(self.at)
        for i, value in enumerate(self.values):
            _check_finite(f"values[{i}]", value)
        if len(self.values) != len(self.at) + 1:
            raise ValueError(
                f"values has {len(self.values)} entries and at has {len(self.at)}; give one value more"
            )
        edges = (0, *self.at, 1)
        if not all(map(is_number, edges)) or not all(
            low < high for low, high in pairwise(edges)
        ):
            raise ValueError(
                f"at={list(self.at)!r} must rise and lie between 0 and 1, such as [0.5, 0.75]"
            )

    def __call__(self, progress: float) -> float:
        """The value at progress in [0, 1]."""
        progress = _clamp(progress)
        return float(self.values[sum(edge <= progress for edge in self.at)])


def schedule_from(text: str) -> Callable[[float], float]:
    """The schedule that prints as this text; files keep schedules so.

    Raises ValueError for a text that is no call of a schedule of this file with numbers.

    >>> schedule_from("linear(start=1.2, end=0.6)")
    linear(start=1.2, end=0.6)
    """
    kinds = {kind.__name__: kind for kind in (constant, linear, cosine, exponential, stepwise)}
    try:
        call = ast.parse(text.strip(), mode="eval").body
        keywords = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        return kinds[call.func.id](*map(ast.literal_eval, call.args), **keywords)
    except (
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        SyntaxError,
        RecursionError,
        MemoryError,
    ) as error:
        raise ValueError(
            f"schedule {text!r:.200} cannot be read ({error}); write 'linear(1.2, 0.6)', one of {', '.join(kinds)}"
        ) from error


def _clamp(progress: float) -> float:
    if isinstance(progress, str | None) or math.isnan(progress):
        raise ValueError(
            f"progress={progress!r} is no fraction of training; give a number in [0, 1]"
        )
    return min(max(progress, 0.0), 1.0)


def _between(start: float, end: float, share: float) -> float:
    if share == 1:  # start + (end - start) may differ from end in the last bit
        return float(end)
    return _within(start + (end - start) * share, start, end)


def _within(value: float, start: float, end: float) -> float:
    return float(min(max(value, min(start, end)), max(start, end)))


def _check_finite(name: str, value: float) -> None:
    if not is_number(value):
        raise ValueError(f"{name}={value!r} must be a finite number, such as 0.9")

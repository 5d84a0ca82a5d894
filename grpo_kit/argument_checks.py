"""Checks of numbers that many rooms take as arguments, one function per check.

A bool, a text and a NaN never count as numbers here; numpy's numbers do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any


def is_number(value: Any) -> bool:
    """Whether a value is a finite real number.

    >>> [is_number(value) for value in (1, 0.5, float("inf"), True, "1")]
    [True, True, False, False, False]
    """
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: Any, least: int) -> bool:
    """Whether a value is a whole number of at least `least`; 2.0 is not.

    >>> [is_whole(value, 1) for value in (1, 0, 2.0, True)]
    [True, False, False, False]
    """
    return isinstance(value, Integral) and not isinstance(value, bool) and value >= least


def check_whole(name: str, value: Any, least: int = 1, *, hint: str = "") -> int:
    """The value as an int. Raises ValueError, naming the argument, unless it is a whole number of at least `least`.

    hint: the end of the message, such as ", or None for all".

    >>> check_whole("samples", 0)
    Traceback (most recent call last):
    ValueError: samples=0 must be a whole number of at least 1
    """
    if not is_whole(value, least):
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}{hint}")
    return int(value)


def check_number(name: str, value: Any, least: float = -math.inf, *, hint: str = "") -> float:
    """The value as a float. Raises ValueError, naming the argument, unless it is a finite number of at least `least`.

    hint: the end of the message, such as "; 0 means no reference model".

    >>> check_number("beta", 0, 0)
    0.0
    """
    if not is_number(value) or value < least:
        least_words = "" if least == -math.inf else f" of at least {least}"
        raise ValueError(f"{name}={value!r} must be a number{least_words}{hint}")
    return float(value)


def check_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Raises ValueError, naming the argument and the choices, unless the value is one of the choices.

    choices: two or more, such as the keys of a dict.

    >>> check_choice("keep", "first", ("last", "best"))
    Traceback (most recent call last):
    ValueError: keep='first' is not known; use 'last' or 'best'
    """
    known = list(choices)
    if value not in known:
        *others, last = map(repr, known)
        raise ValueError(f"{name}={value!r} is not known; use {', '.join(others)} or {last}")


def check_above_zero(name: str, value: Any, *, hint: str = "") -> None:
    """Raises ValueError, naming the argument, unless the value is a finite number above 0.

    hint: the end of the message, such as ", or None for no limit".

    >>> check_above_zero("learning_rate", -1.0)
    Traceback (most recent call last):
    ValueError: learning_rate=-1.0 must be a number above 0
    """
    if not is_number(value) or value <= 0:
        raise ValueError(f"{name}={value!r} must be a number above 0{hint}")


def check_temperature(value: Any, name: str = "temperature", *, greedy: bool = False) -> float:
    """The temperature as a float.

    greedy: 0 is allowed and means the likeliest token each time. Sampling, scoring and training need a value above 0.
    Raises ValueError, naming the argument, unless it is a finite number above 0, or 0 with `greedy`.

    >>> check_temperature(0, greedy=True)
    0.0
    """
    if is_number(value) and (value > 0 or greedy and value == 0):
        return float(value)
    if greedy:
        raise ValueError(f"{name}={value!r} must be 0 (greedy) or a number above 0, such as 1.0")
    raise ValueError(
        f"{name}={value!r} must be a number above 0, such as 1.0; at 0 (greedy) all samples of a prompt are alike"
    )

"""The rational value of a formula, with work that is bounded: by the size of the numbers, and by a deadline.

Each operation looks at the deadline, no signal does: so it holds in threads and in notebooks too.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

from grpo_kit.verdicts._formula import Tree

_BITS = 20_000  # of an exact number; a larger one is not worked out
_TERMS = 1_000  # of a sum or product
_OPERATIONS = 12_000  # of one verdict


class TooLargeError(ValueError):
    """A number too large to be worked out, or a sum of too many terms."""


class UndefinedError(ValueError):
    """No value: a division by zero, infinity, or a letter."""


class OutOfTimeError(Exception):
    """The deadline has passed: nothing can be said."""


class _Budget(threading.local):
    deadline = math.inf
    left = math.inf


_budget = _Budget()


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """A block in which work ends: OutOfTimeError after so many seconds, TooLargeError after 12,000 operations.

    Of this thread alone.
    """
    before = _budget.deadline, _budget.left
    _budget.deadline, _budget.left = time.monotonic() + seconds, _OPERATIONS
    try:
        yield
    finally:
        _budget.deadline, _budget.left = before


def tick(cost: int = 1) -> None:
    """Count an operation. Raises OutOfTimeError, TooLargeError."""
    _budget.left -= cost
    if _budget.left < 0:
        raise TooLargeError("too many operations")
    if time.monotonic() > _budget.deadline:
        raise OutOfTimeError


def exact(tree: Tree, env: Mapping[str, Fraction] | None = None) -> Fraction | None:
    """The rational value of a tree; None where it is not worked out by fractions alone (roots, letters, pi).

    Raises TooLargeError and UndefinedError (a division by zero).

    >>> exact(("div", ("num", Fraction(1)), ("num", Fraction(3))))
    Fraction(1, 3)
    """
    tick()
    kind, env = tree[0], env or {}
    if kind == "num":
        return tree[1]
    if kind in ("sym", "const"):
        return env.get(tree[1])
    if kind in ("sum", "prod"):
        return series(tree, env, exact)
    if kind in ("call", "apply"):
        values = [exact(part, env) for part in tree[2:]]
        if None in values:
            return None
        return exact_call(tree[1], values)
    if kind in ("pm", "mp"):
        raise UndefinedError("two values")
    values = [exact(part, env) for part in tree[1:]]
    if None in values or kind == "degree":
        return None
    if kind == "pow":
        return _exact_power(*values)
    value = arithmetic(kind, values)
    if kind in ("mul", "div"):
        bounded(value)
    return value


def exact_or_none(tree: Tree) -> Fraction | None:
    """The rational value of a tree; None too where it is too large, or has no value."""
    try:
        return exact(tree)
    except (TooLargeError, UndefinedError):
        return None


def arithmetic(kind: str, values: list[Any]) -> Any:
    """A sign, percentage, sum, difference, product or quotient of numbers of any one type.

    Raises UndefinedError for a division by zero, and for another kind of tree.
    """
    match kind, values:
        case "neg", [a]:
            return -a
        case "percent", [a]:
            return a / 100
        case "add" | "mixed", [a, b]:
            return a + b
        case "sub", [a, b]:
            return a - b
        case "mul", [a, b]:
            return a * b
        case "div", [a, b] if b != 0:
            return a / b
    raise UndefinedError("a division by zero" if kind == "div" else kind)


def bounded(value: Fraction) -> Fraction:
    """The value. Raises TooLargeError where it has too many digits."""
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _BITS:
        raise TooLargeError("a number of too many digits")
    return value


def _exact_power(a: Fraction, b: Fraction) -> Fraction | None:
    if b.denominator != 1:
        return None
    if a == 0:
        if b <= 0:
            raise UndefinedError("zero to that power")
        return Fraction(0)
    if abs(a) == 1:
        return a ** (b.numerator % 2)
    if max(a.numerator.bit_length(), a.denominator.bit_length()) * abs(b) > _BITS:
        raise TooLargeError("a power of too many digits")
    return a**b.numerator


def exact_call(name: str, values: list[Fraction]) -> Fraction | None:
    """A function of rational values, where it is rational; None else. Raises TooLargeError, UndefinedError."""
    whole = all(value.denominator == 1 for value in values)
    match name, values:
        case "abs", [a]:
            return abs(a)
        case "floor", [a]:
            return Fraction(math.floor(a))
        case "ceil", [a]:
            return Fraction(math.ceil(a))
        case "factorial", [a] if whole:
            if a > 1500:
                raise TooLargeError("a factorial")
            if a < 0:
                raise UndefinedError("a factorial")
            return Fraction(math.factorial(int(a)))
        case "binom", [n, k] if whole and 0 <= n <= 2_000:
            if k >= 0:
                return bounded(Fraction(math.comb(int(n), int(k))))
            return Fraction(0)
        case "gcd", _ if whole:
            return Fraction(math.gcd(*map(int, values)))
        case "lcm", _ if whole:
            return bounded(Fraction(math.lcm(*map(int, values))))
        case "max", _:
            return max(values)
        case "min", _:
            return min(values)
        case "sqrt", [a] if a >= 0:
            return _exact_root(a, 2)
        case "root", [a, n] if n.denominator == 1 and 2 <= n <= 64:
            if a >= 0:
                return _exact_root(a, int(n))
            root = _exact_root(-a, int(n)) if n % 2 else None
            return None if root is None else -root
    return None


def _exact_root(value: Fraction, index: int) -> Fraction | None:
    """The root where it is rational."""
    top, bottom = _whole_root(value.numerator, index), _whole_root(value.denominator, index)
    if top is None or bottom is None:
        return None
    return Fraction(top, bottom)


def _whole_root(power: int, index: int) -> int | None:
    if power.bit_length() > 2_000:
        return None
    low, high = 0, 1 << (power.bit_length() // index + 1)
    while low < high:
        middle = (low + high + 1) // 2
        if middle**index <= power:
            low = middle
        else:
            high = middle - 1
    return low if low**index == power else None


def series(tree: Tree, env: Mapping[str, Any], value_of: Any) -> Any:
    """A sum or product over its index; value_of(body, env) works out a term."""
    kind, index, start, end, body = tree
    rationals = {name: value for name, value in env.items() if isinstance(value, Fraction)}
    first, last = exact(start, rationals), exact(end, rationals)
    if first is None or last is None:
        if value_of is exact:
            return None
        raise UndefinedError("an end of a sum")
    if first.denominator != 1 or last.denominator != 1:
        raise UndefinedError("a sum to what is no whole number")
    if last - first > _TERMS:
        raise TooLargeError("a sum of too many terms")
    total: Any = Fraction(kind == "prod")
    for i in range(int(first), int(last) + 1):
        term = value_of(body, {**env, index: Fraction(i)})
        if term is None:
            return None
        if kind == "sum":
            total += term
        else:
            total *= term
        if isinstance(total, Fraction):
            bounded(total)
    return total

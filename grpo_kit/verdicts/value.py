"""What a formula is worth: exactly where it is rational, else to as many digits as its numbers need.

Two formulas are the same if they are equal as fractions, or agree to more digits than their own numbers have, at
several points where they hold letters.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

import mpmath

from grpo_kit.verdicts.formula import Tree
from grpo_kit.verdicts.rational import TooLargeError, UndefinedError, bounded, exact, exact_call, series, tick

_DIGITS = 40  # that agreeing values share beyond what their numbers have
_MOST_DIGITS = 3_000
_POINTS = 4
_WHOLE = frozenset(("binom", "factorial", "floor", "ceil", "gcd", "lcm", "sum", "prod"))


@lru_cache(4096)
def symbols(tree: Tree) -> frozenset[str]:
    """The letters of a tree that are not bound by a sum."""
    if tree[0] == "sym":
        return frozenset({tree[1]})
    inside = frozenset().union(*(symbols(part) for part in tree[1:] if isinstance(part, tuple)))
    return inside - {tree[1]} if tree[0] in ("sum", "prod") else inside


def _has(tree: Tree, names: frozenset[str]) -> bool:
    if tree[0] in names or (tree[0] == "call" and tree[1] in names):
        return True
    return any(_has(part, names) for part in tree[1:] if isinstance(part, tuple))


class _Numbers(threading.local):
    def __init__(self) -> None:
        self.mp = mpmath.MPContext()


_numbers = _Numbers()


class _Evaluator:
    """Values at one point with one precision; remembers the largest and smallest size it met, in decimal digits."""

    def __init__(self, digits: int) -> None:
        self.mp = _numbers.mp
        self.mp.dps = digits
        self.size = 0

    def value(self, tree: Tree, env: Mapping[str, Any]) -> Any:
        tick()
        made = self.work_out(tree, env)
        if isinstance(made, Fraction):
            bounded(made)
            made = self.mp.mpf(made.numerator) / made.denominator
        if not self.mp.isfinite(made):
            raise UndefinedError("no finite value")
        if made != 0:
            self.size = max(self.size, abs(int(self.mp.mag(made))) * 3 // 10)
        if self.size > _MOST_DIGITS:
            raise TooLargeError("a number of too many digits")
        return made

    def work_out(self, tree: Tree, env: Mapping[str, Any]) -> Any:
        mp, kind = self.mp, tree[0]
        if kind == "num":
            return tree[1]
        if kind in ("sym", "const") and tree[1] in env:
            return env[tree[1]]
        if kind == "const" and tree[1] != "oo":
            return {"pi": mp.pi, "e": mp.e, "i": mp.j}[tree[1]] * 1
        if kind in ("sym", "const", "pm", "mp"):
            raise UndefinedError(f"{tree[1]}")
        if kind in ("sum", "prod"):
            return series(tree, env, self.value)
        if kind == "call":
            return self.call(tree[1], [self.value(part, env) for part in tree[2:]])
        values = [self.value(part, env) for part in tree[1:]]
        match kind, values:
            case "neg", [a]:
                return -a
            case "percent", [a]:
                return a / 100
            case "degree", [a]:
                return a * mp.pi / 180
            case "add" | "mixed", [a, b]:
                return a + b
            case "sub", [a, b]:
                return a - b
            case "mul", [a, b]:
                return a * b
            case "div", [a, b]:
                if b == 0:
                    raise UndefinedError("a division by zero")
                return a / b
            case "pow", [a, b]:
                return self.power(a, b)
        raise UndefinedError(kind)

    def power(self, a: Any, b: Any) -> Any:
        mp = self.mp
        if a == 0:
            if mp.re(b) <= 0:
                raise UndefinedError("zero to that power")
            return mp.mpf(0)
        if abs(b) * (1 + abs(mp.mag(a))) > 12_000:
            raise TooLargeError("a power")
        return a**b

    def call(self, name: str, values: list[Any]) -> Any:
        mp = self.mp
        first = values[0]
        if name in ("exp", "sinh", "cosh", "tanh") and abs(first) > 8_000:
            raise TooLargeError(name)
        if name in ("ln", "log", "lg", "logb") and first == 0:
            raise UndefinedError("a logarithm of zero")
        simple = {
            "sin": mp.sin, "cos": mp.cos, "tan": mp.tan, "cot": mp.cot, "sec": mp.sec, "csc": mp.csc,
            "arcsin": mp.asin, "arccos": mp.acos, "arctan": mp.atan, "arccot": mp.acot, "arcsec": mp.asec,
            "arccsc": mp.acsc, "sinh": mp.sinh, "cosh": mp.cosh, "tanh": mp.tanh, "exp": mp.exp, "sqrt": mp.sqrt,
            "abs": abs, "ln": mp.log,
        }  # fmt: skip
        try:
            if name in simple:
                return simple[name](first)
            match name:
                case "lg":
                    return mp.log10(first)
                case "log":  # of no known base: one that no other formula knows
                    return mp.log(first) / mp.log(mp.sqrt(mp.mpf("5.8317")))
                case "logb":
                    return mp.log(first) / mp.log(values[1])
                case "root":
                    real = (
                        mp.im(first) == 0 and first < 0 and values[1] == int(values[1]) and int(values[1]) % 2
                    )
                    return -self.power(-first, 1 / values[1]) if real else self.power(first, 1 / values[1])
                case "floor" | "ceil":
                    return getattr(mp, name)(first)
                case "max" | "min":
                    return (max if name == "max" else min)(values)
                case "sgn":
                    return mp.sign(first)
                case "factorial" | "binom" | "gcd" | "lcm":
                    return self.whole(name, values)
        except (ZeroDivisionError, TypeError, ValueError) as error:
            if isinstance(error, UndefinedError | TooLargeError):
                raise
            raise UndefinedError(name) from error
        raise UndefinedError(name)

    def whole(self, name: str, values: list[Any]) -> Fraction:
        if any(self.mp.im(v) != 0 or v != self.mp.floor(v) for v in values):
            raise UndefinedError(f"{name} of what is no whole number")
        made = exact_call(name, [Fraction(int(v)) for v in values])
        if made is None:
            raise TooLargeError(name)
        return made


def _points(names: frozenset[str], whole: bool, count: int) -> list[dict[str, Fraction]]:
    """Values for the letters, the same for everyone: positive at the even points, of both signs at the odd ones."""
    points = []
    for k in range(count):
        point = {}
        for name in names:
            digest = int.from_bytes(hashlib.sha256(f"{name} {k}".encode()).digest()[:8], "big")
            if whole:
                point[name] = Fraction(digest % 9 + 2 + 3 * k)
            else:
                value = Fraction(digest % 100_003, 40_009) + Fraction(3, 7)
                point[name] = -value if k % 2 and digest >> 40 & 1 else value
        points.append(point)
    if not whole and count > 1 and names:
        points[1][min(names)] = -abs(points[1][min(names)])
    return points


def pairs_of_values(one: Tree, other: Tree) -> list[tuple[Any, Any, int]]:
    """(value, value, digits to trust) of both trees at points where both have one; at one point without letters.

    Raises TooLargeError. Empty where nothing can be worked out.
    """
    names = symbols(one) | symbols(other)
    whole = _has(one, _WHOLE) or _has(other, _WHOLE)
    found = []
    for point in _points(names, whole, _POINTS if names else 1):
        try:
            digits = _DIGITS + 10
            evaluator = _Evaluator(digits)
            values = evaluator.value(one, point), evaluator.value(other, point)
            if 2 * evaluator.size > 10:  # its numbers may cancel: with as many digits more
                digits = _DIGITS + 10 + 3 * evaluator.size
                evaluator = _Evaluator(digits)
                values = evaluator.value(one, point), evaluator.value(other, point)
        except UndefinedError:
            continue
        found.append((*values, digits - 2 * evaluator.size))
    return found


def _near(a: Any, b: Any, digits: int) -> bool:
    return abs(a - b) <= _numbers.mp.mpf(10) ** (-digits + 8) * max(
        abs(a), abs(b), _numbers.mp.mpf(10) ** -digits
    )


def same_value(one: Tree, other: Tree) -> bool:
    """Whether both are worth the same, for all values of their letters. Raises TooLargeError, OutOfTimeError.

    >>> from grpo_kit.verdicts.formula import parse
    >>> same_value(parse("(x+1)^2"), parse("x^2+2x+1")), same_value(parse("1/3"), parse("0.333333"))
    (True, False)
    """
    if one == other:
        return True
    try:
        a, b = exact(one), exact(other)
    except UndefinedError:
        return False
    if a is not None and b is not None:
        return a == b
    pairs = pairs_of_values(one, other)
    return bool(pairs) and all(_near(*pair) for pair in pairs)


def distance(one: Tree, other: Tree) -> Any:
    """How far two values without letters are apart, as an mpmath number or a Fraction; None if they have no value."""
    if symbols(one) | symbols(other):
        return None
    try:
        a, b = exact(one), exact(other)
    except UndefinedError:
        return None
    if a is not None and b is not None:
        return abs(a - b)
    pairs = pairs_of_values(one, other)
    return abs(pairs[0][0] - pairs[0][1]) if pairs else None


def ratio(one: Tree, other: Tree) -> int | None:
    """1 or -1 where the one is a positive or negative constant times the other, at all points; else None."""
    if symbols(one) != symbols(other):
        return None
    pairs = [pair for pair in pairs_of_values(one, other)]
    if len(pairs) < 2 or any(b == 0 for _, b, _ in pairs):
        return None
    quotients = [(a / b, digits) for a, b, digits in pairs]
    first = quotients[0][0]
    if first == 0 or _numbers.mp.im(first) != 0:
        return None
    if not all(_near(first, q, digits - 4) for q, digits in quotients[1:]):
        return None
    return 1 if _numbers.mp.re(first) > 0 else -1

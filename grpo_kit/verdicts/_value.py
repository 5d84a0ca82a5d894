"""What a formula is worth: exactly where it is rational, else to as many digits as its numbers need.

Two formulas are the same if they are equal as fractions, or agree to more digits than their own numbers have, at
several points where they hold letters.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache, reduce
from typing import Any

import mpmath

from grpo_kit.verdicts._formula import Tree, nodes
from grpo_kit.verdicts._formula_tokens import FUNCTIONS_ALONE
from grpo_kit.verdicts._rational import (
    TooLargeError,
    UndefinedError,
    arithmetic,
    bounded,
    exact,
    exact_call,
    series,
    tick,
)

_DIGITS = 40  # that agreeing values share beyond what their numbers have
_MOST_DIGITS = 1_500
_POINTS = 7
# Functions of one value that mpmath has, and its names where they are others.
_SIMPLE = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh exp sqrt abs ln lg sgn".split()
)
_OF_MPMATH = {"abs": "fabs", "ln": "log", "lg": "log10", "sgn": "sign"}


@lru_cache(4096)
def symbols(tree: Tree) -> frozenset[str]:
    """The letters of a tree that are not bound by a sum; that of a function f(x) as "f("."""
    if tree[0] == "sym":
        return frozenset({tree[1]})
    inside = frozenset().union(*(symbols(part) for part in tree[1:] if isinstance(part, tuple)))
    if tree[0] == "apply":
        return inside | {f"{tree[1]}("}
    return inside - {tree[1]} if tree[0] in ("sum", "prod") else inside


class _Numbers(threading.local):
    def __init__(self) -> None:
        self.mp = mpmath.MPContext()


_numbers = _Numbers()


class _Evaluator:
    """Values at one point with one precision; remembers how many digits stand before and behind the point at most."""

    def __init__(self, digits: int, *, real: bool, most: int) -> None:
        self.mp, self.cost = _numbers.mp, 1 + digits // 64
        self.mp.dps, self.digits, self.real, self.most = digits, digits, real, most
        self.before = self.behind = 0

    def value(self, tree: Tree, env: Mapping[str, Any]) -> Any:
        tick(self.cost)
        value = self.work_out(tree, env)
        if isinstance(value, Fraction):
            bounded(value)
            value = self.mp.mpf(value.numerator) / value.denominator
        if not self.mp.isfinite(value) or (self.real and self.mp.im(value) != 0):
            raise UndefinedError("no finite value, or no real one")
        if value != 0:
            size = int(self.mp.mag(value)) * 3 // 10
            self.before, self.behind = max(self.before, size), max(self.behind, -size)
        if max(self.before, self.behind) > self.most:
            raise TooLargeError("a number of too many digits")
        return value

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
        if kind == "apply":
            values = [self.value(part, env) for part in (("sym", f"{tree[1]}("), *tree[2:])]
            return reduce(lambda before, value: mp.atan(before + value), values)  # a function without a law
        values = [self.value(part, env) for part in tree[1:]]
        if kind == "degree":
            return values[0] * mp.pi / 180
        return self.power(*values) if kind == "pow" else arithmetic(kind, values)

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
        try:
            if name in _SIMPLE:
                return getattr(mp, _OF_MPMATH.get(name, name.replace("arc", "a")))(first)
            match name:
                case "log":  # of no known base: one that no other formula knows
                    return mp.log(first) / mp.log(mp.sqrt(mp.mpf("5.8317")))
                case "logb":
                    return mp.log(first) / mp.log(values[1])
                case "root":
                    exponent = 1 / values[1]
                    if mp.im(first) == 0 and first < 0 and values[1] % 2 == 1:
                        return -self.power(-first, exponent)
                    return self.power(first, exponent)
                case "floor" | "ceil":
                    near, apart = mp.nint(first), mp.mpf(10) ** -(self.digits // 2)
                    is_whole = abs(first - near) < apart  # a whole number that was not worked out exactly
                    return near if is_whole else getattr(mp, name)(first)
                case "max" | "min":
                    return (max if name == "max" else min)(values)
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
        value = exact_call(name, [Fraction(int(v)) for v in values])
        if value is None:
            raise TooLargeError(name)
        return value


def _largest(tree: Tree) -> Fraction:
    """The largest number written in a tree, up to a billion."""
    written = (abs(node[1]) for node in nodes(tree) if node[0] == "num")
    return min(max(written, default=Fraction(0)), Fraction(10**9))


def _read_alike(left: Tree, right: Tree) -> tuple[Tree, Tree]:
    """Both trees, with h(a + b) as a product where h stands without a bracket: in ha + hb, or in both."""
    sides = symbols(left), symbols(right)
    applied = {name[:-1] for side in sides for name in side if name.endswith("(")}
    if not applied:
        return left, right
    alone = {name for side in sides for name in side if f"{name}(" not in side} | (sides[0] & sides[1])
    factors = {name for name in applied & alone if name.partition("_")[0] not in FUNCTIONS_ALONE}
    return _as_product(left, factors), _as_product(right, factors)


def _as_product(tree: Tree, factors: set[str]) -> Tree:
    """The tree with the factors as such, but before another function: h(g(x)) is no product."""
    match tree:
        case ("pow", ("apply", *_), exponent):  # P(1 + r)^t
            before = _as_product(tree[1], factors)
            if before[0] == "mul":
                return ("mul", before[1], ("pow", before[2], _as_product(exponent, factors)))
        case ("apply", letter, power, inside) if letter in factors:
            if not any(part[0] == "apply" for part in nodes(inside)):
                return ("mul", ("pow", ("sym", letter), power), _as_product(inside, factors))
    return tuple(_as_product(part, factors) if isinstance(part, tuple) else part for part in tree)


def _points(left: Tree, right: Tree) -> list[dict[str, Fraction]]:
    """Values for the letters, the same for everyone: small and beyond every number written, positive and of both signs.

    Then whole ones, where factorials and the like have no other value.
    """
    names = sorted(symbols(left) | symbols(right))
    if not names:
        return [{}]
    beyond = 3 * max(_largest(left), _largest(right)) + 1000
    points = []
    for k in range(_POINTS):
        point = {}
        for rank, name in enumerate(names):
            digest = int.from_bytes(hashlib.sha256(f"{name} {k}".encode()).digest()[:8], "big")
            value = Fraction(digest % 100_003, 40_009) + Fraction(3, 7)
            sign = -1 if k % 2 and (digest >> 40 & 1 or name == names[0]) else 1
            point[name] = sign * (value if k < 2 else value * beyond)
            if k >= 4:
                point[name] = Fraction(5 + digest % 11 + 13 * (rank if k % 2 else len(names) - 1 - rank))
        points.append(point)
    return points


def _pairs_of_values(left: Tree, right: Tree) -> list[tuple[Any, Any, int | None]]:
    """(value, value, digits behind the point to trust, None: all) of both trees at points where both have one.

    Without letters there is one point. With letters, and no imaginary unit, only real values count. Raises
    TooLargeError where nothing can be worked out.
    """
    try:
        a, b = exact(left), exact(right)
    except UndefinedError:
        return []
    if a is not None and b is not None:
        return [(a, b, None)]
    left, right = _read_alike(left, right)
    real = bool(symbols(left) | symbols(right)) and ("const", "i") not in (*nodes(left), *nodes(right))
    pairs: list[tuple[Any, Any, int | None]] = []
    for k, point in enumerate(_points(left, right)):
        if k == 4 and len(pairs) >= 2:
            break
        try:
            pairs.append(_pair(left, right, point, real, _MOST_DIGITS if k < 2 else 400))
        except UndefinedError:
            continue
        except TooLargeError:
            if k < 2:
                raise
    return pairs if len(pairs) >= min(2, len(point) + 1) else []


def _pair(left: Tree, right: Tree, point: dict, real: bool, most: int) -> tuple[Any, Any, int]:
    """Twice: to see how large and how small its numbers are, then with as many digits as these need."""
    first = _Evaluator(_DIGITS + 10, real=real, most=most)
    a, b = first.value(left, point), first.value(right, point)
    if first.before <= 12 and abs(a - b) > 1e-20:  # no doubt
        return a, b, 20
    trusted = first.behind + _DIGITS
    second = _Evaluator(trusted + 2 * first.before + 30, real=real, most=2 * most + _DIGITS)
    a, b = second.value(left, point), second.value(right, point)
    if second.before > first.before + 5:  # a division by what is zero, worked out to ever more digits
        raise UndefinedError("a division by zero")
    return a, b, trusted


def _near(a: Any, b: Any, trusted: int | None) -> bool:
    if trusted is None:
        return a == b
    return abs(a - b) <= _numbers.mp.mpf(10) ** -trusted


def same_value(left: Tree, right: Tree) -> bool:
    """Whether both are worth the same, for all values of their letters. Raises TooLargeError, OutOfTimeError.

    >>> from grpo_kit.verdicts._formula import parse
    >>> same_value(parse("(x+1)^2"), parse("x^2+2x+1")), same_value(parse("1/3"), parse("0.333333"))
    (True, False)
    """
    if left == right:
        return True
    pairs = _pairs_of_values(left, right)
    return bool(pairs) and all(_near(*pair) for pair in pairs)


def distance(left: Tree, right: Tree) -> Any:
    """How far two values without letters are apart, as an mpmath number or a Fraction; None if they have no value."""
    if symbols(left) | symbols(right):
        return None
    pairs = _pairs_of_values(left, right)
    return abs(pairs[0][0] - pairs[0][1]) if pairs else None


def ratio(left: Tree, right: Tree) -> int | None:
    """1 or -1 where the left is a positive or negative constant times the right, at all points; else None."""
    left, right = _read_alike(left, right)
    if symbols(left) != symbols(right):
        return None
    pairs = _pairs_of_values(left, right)
    quotients = [a / b for a, b, trusted in pairs if not _near(b, 0, trusted)]
    if len(quotients) < 2 or len(quotients) < len(pairs):
        return None
    first, *rest = quotients
    if _near(first, 0, 25) or _numbers.mp.im(first) != 0:
        return None
    if any(abs(first - quotient) > abs(first) * _numbers.mp.mpf(10) ** -20 for quotient in rest):
        return None
    return 1 if _numbers.mp.re(first) > 0 else -1

"""What a formula is worth: exactly where it is rational, else to as many digits as its numbers need.

Two formulas are the same if they are equal as fractions, or agree to more digits than their own numbers have, at
several points where they hold letters.

Longer than 300 lines because every operation on a value stands beside the others, and all are short.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache, reduce
from typing import Any, NamedTuple

import mpmath

from grpo_kit.verdicts._formula import Tree, children, map_children, nodes
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
    letters = frozenset().union(*map(symbols, children(tree)))
    if tree[0] == "apply":
        return letters | {f"{tree[1]}("}
    if tree[0] in ("sum", "prod"):
        return letters - {tree[1]}
    return letters


class _Numbers(threading.local):
    def __init__(self) -> None:
        self.mp = mpmath.MPContext()


_numbers = _Numbers()


class _Evaluator:
    """Values at one point with one precision; remembers how many digits stand before and behind the point at most."""

    def __init__(self, digits: int, *, real: bool, most: int) -> None:
        self.mp, self.cost = _numbers.mp, 1 + digits // 64
        self.mp.dps, self.digits, self.real, self.most = digits, digits, real, most
        self.digits_before = self.digits_behind = 0

    def value(self, tree: Tree, env: Mapping[str, Any]) -> Any:
        """The value of a tree. env: the values of its letters."""
        tick(self.cost)
        value = self.compute(tree, env)
        if isinstance(value, Fraction):
            bounded(value)
            value = self.mp.mpf(value.numerator) / value.denominator
        if not self.mp.isfinite(value) or (self.real and self.mp.im(value) != 0):
            raise UndefinedError("no finite value, or no real one")
        if value != 0:
            size = int(self.mp.mag(value)) * 3 // 10
            self.digits_before = max(self.digits_before, size)
            self.digits_behind = max(self.digits_behind, -size)
        if max(self.digits_before, self.digits_behind) > self.most:
            raise TooLargeError("a number of too many digits")
        return value

    def compute(self, tree: Tree, env: Mapping[str, Any]) -> Any:
        mp = self.mp
        match tree:
            case ("num", number):
                return number
            case ("sym" | "const", name) if name in env:
                return env[name]
            case ("const", "pi" | "e" | "i" as name):
                return {"pi": +mp.pi, "e": +mp.e, "i": mp.j}[name]
            case ("sym" | "const" | "pm" | "mp", name, *_):
                raise UndefinedError(f"{name}")
            case ("sum" | "prod", *_):
                return series(tree, env, self.value)
            case ("call", name, *arguments):
                return self.call(name, [self.value(argument, env) for argument in arguments])
            case ("apply", name, *arguments):
                values = [self.value(part, env) for part in (("sym", f"{name}("), *arguments)]
                # A function of which no law is known.
                return reduce(lambda total, value: mp.atan(total + value), values)
        kind, *parts = tree
        values = [self.value(part, env) for part in parts]
        if kind == "degree":
            return values[0] * mp.pi / 180
        if kind == "pow":
            return self.power(*values)
        return arithmetic(kind, values)

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
                    nearest = mp.nint(first)
                    # A whole number, but for rounding.
                    if abs(first - nearest) < mp.mpf(10) ** -(self.digits // 2):
                        return nearest
                    return getattr(mp, name)(first)
                case "max":
                    return max(values)
                case "min":
                    return min(values)
                case "factorial" | "binom" | "gcd" | "lcm":
                    return self.whole(name, values)
        except (UndefinedError, TooLargeError):
            raise
        except (ZeroDivisionError, TypeError, ValueError) as error:
            raise UndefinedError(name) from error
        raise UndefinedError(name)

    def whole(self, name: str, values: list[Any]) -> Fraction:
        if any(self.mp.im(value) != 0 or value != self.mp.floor(value) for value in values):
            raise UndefinedError(f"{name} of what is no whole number")
        result = exact_call(name, [Fraction(int(value)) for value in values])
        if result is None:
            raise TooLargeError(name)
        return result


def _largest(tree: Tree) -> Fraction:
    """The largest number written in a tree, up to a billion."""
    numbers = [abs(node[1]) for node in nodes(tree) if node[0] == "num"]
    return min(max(numbers, default=Fraction(0)), Fraction(10**9))


def _read_alike(left: Tree, right: Tree) -> tuple[Tree, Tree]:
    """Both trees, with h(a + b) as a product where h stands without a bracket: in ha + hb, or in both."""
    sides = symbols(left), symbols(right)
    letters = {name for names in sides for name in names if f"{name}(" not in names} | (
        sides[0] & sides[1]
    )
    functions = {name[:-1] for names in sides for name in names if name.endswith("(")}
    factors = {
        name for name in functions & letters if name.partition("_")[0] not in FUNCTIONS_ALONE
    }
    if not factors:
        return left, right
    return _as_product(left, factors), _as_product(right, factors)


def _as_product(tree: Tree, factors: set[str]) -> Tree:
    """The tree with the factors as such, but before another function: h(g(x)) is no product."""
    match tree:
        case ("pow", ("apply", *_) as base, exponent):  # P(1 + r)^t
            product = _as_product(base, factors)
            if product[0] == "mul":
                _, factor, bracket = product
                return ("mul", factor, ("pow", bracket, _as_product(exponent, factors)))
        case ("apply", letter, power, argument) if letter in factors:
            if not any(part[0] == "apply" for part in nodes(argument)):
                return ("mul", ("pow", ("sym", letter), power), _as_product(argument, factors))
    return map_children(lambda part: _as_product(part, factors), tree)


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
            if k >= 2:
                value *= beyond
            if k % 2 and (digest >> 40 & 1 or name == names[0]):
                value = -value
            if k >= 4:
                place = rank if k % 2 else len(names) - 1 - rank
                value = Fraction(5 + digest % 11 + 13 * place)
            point[name] = value
        points.append(point)
    return points


class _Pair(NamedTuple):
    """The values of two formulas at one point. digits: behind the point that can be trusted; None: all."""

    left: Any
    right: Any
    digits: int | None = None


def _pairs_of_values(left: Tree, right: Tree) -> list[_Pair]:
    """The values of both trees at the points where both have one.

    Without letters there is one point. With letters, and no imaginary unit, only real values count. Raises
    TooLargeError where nothing can be worked out.
    """
    try:
        a, b = exact(left), exact(right)
    except UndefinedError:
        return []
    if a is not None and b is not None:
        return [_Pair(a, b)]
    left, right = _read_alike(left, right)
    has_letters = bool(symbols(left) | symbols(right))
    is_real = has_letters and ("const", "i") not in (*nodes(left), *nodes(right))
    pairs: list[_Pair] = []
    for k, point in enumerate(_points(left, right)):
        if k == 4 and len(pairs) >= 2:
            break
        try:
            pairs.append(_pair_at(point, left, right, is_real, _MOST_DIGITS if k < 2 else 400))
        except UndefinedError:
            continue
        except TooLargeError:
            if k < 2:
                raise
    if len(pairs) >= (2 if has_letters else 1):
        return pairs
    return []


def _pair_at(point: dict, left: Tree, right: Tree, is_real: bool, most: int) -> _Pair:
    """Twice: to see how large and how small its numbers are, then with as many digits as these need."""
    first = _Evaluator(_DIGITS + 10, real=is_real, most=most)
    a, b = first.value(left, point), first.value(right, point)
    if first.digits_before <= 12 and abs(a - b) > 1e-20:  # no doubt
        return _Pair(a, b, 20)
    digits = first.digits_behind + _DIGITS
    second = _Evaluator(
        digits + 2 * first.digits_before + 30, real=is_real, most=2 * most + _DIGITS
    )
    pair = _Pair(second.value(left, point), second.value(right, point), digits)
    # a division by what is zero, worked out to ever more digits
    if second.digits_before > first.digits_before + 5:
        raise UndefinedError("a division by zero")
    return pair


def _near(a: Any, b: Any, digits: int | None) -> bool:
    if digits is None:
        return a == b
    return abs(a - b) <= _numbers.mp.mpf(10) ** -digits


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
    if pairs:
        return abs(pairs[0].left - pairs[0].right)
    return None


def ratio(left: Tree, right: Tree) -> int | None:
    """1 or -1 where the left is a positive or negative constant times the right, at all points; else None."""
    left, right = _read_alike(left, right)
    if symbols(left) != symbols(right):
        return None
    mp = _numbers.mp
    quotients = []
    for pair in _pairs_of_values(left, right):
        if _near(pair.right, 0, pair.digits):
            return None
        quotients.append(pair.left / pair.right)
    if len(quotients) < 2:
        return None
    first = quotients[0]
    if _near(first, 0, 25) or mp.im(first) != 0:
        return None
    if any(abs(first - quotient) > abs(first) * mp.mpf(10) ** -20 for quotient in quotients):
        return None
    return 1 if mp.re(first) > 0 else -1

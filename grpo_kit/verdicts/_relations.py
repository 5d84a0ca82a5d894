"""Equations, inequalities, names: what stands between an answer's relation signs, and bounds of one letter."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from grpo_kit.verdicts._formula import Tree
from grpo_kit.verdicts._kinds import (
    HIGHEST,
    LOWEST,
    Bounds,
    Equation,
    Habit,
    Inequality,
    Named,
    Quantity,
    Row,
    Several,
    Union,
    Words,
)  # fmt: skip
from grpo_kit.verdicts._quantities import formula
from grpo_kit.verdicts._rational import exact
from grpo_kit.verdicts._sentences import split_relations
from grpo_kit.verdicts._value import same_value, symbols

_NAME = re.compile(
    r"\\(?:angle|triangle)\s*[A-Z]{1,3}|"
    r"\\(?:vec|overrightarrow)\s*\{\s*\w+\s*\}|"
    r"\\?[A-Za-z]+(?:\s*_\s*(?:\{[\w ,]+\}|\w))?'*(?:\^\{?-1\}?)?"
    r"(?:\s*\(\s*(?:\d+|\\?[a-zA-Z]+(?:,\s*[a-zA-Z]+)*)\s*\))?"
    r"|\(\s*\\?[a-zA-Z]+(?:\s*,\s*\\?[a-zA-Z]+)+\s*\)|[A-Za-z]+(?: [A-Za-z]+){1,3}"
)
_SHORT_WORDS = frozenset("sum max min age ans avg mean mode".split())
_DERIVATIVE = re.compile(r"\\frac\s*\{\s*d\s*(\w)\s*\}\s*\{\s*d\s*(\w)\s*\}|d(\w)\s*/\s*d(\w)")
_MIRRORED = {">": "<", "\\ge": "\\le"}
_DENIED = re.compile(r"\b(?:not|no|never|isn't|neither|nor|or|and|except)\b", re.I)


def read_relation(text: str, habit: Habit, read_side: Callable[..., Any]) -> Any:
    """What the relation signs of a text make of it; None if it has none, or is not understood.

    read_side: reads the text on one side of a sign.
    """
    sides, signs = split_relations(text)
    if not signs or not all(sides):
        return None
    if set(signs) == {"="}:
        return _equality([_DERIVATIVE.sub(r"\1\3'", side) for side in sides], habit, read_side)
    if signs == ["\\in"] and _NAME.fullmatch(sides[0]):
        value = read_side(re.sub(r"^\{(.*)\}$", r"\\{\1\\}", sides[1]), habit)
        if value is None:
            return None
        return Named(_name(sides[0]), value)
    trees = [formula(side, habit) for side in sides]
    if None in trees:
        return None
    if signs == ["\\ne"]:
        return _unequal(trees)
    if {*signs} <= {">", "\\ge"}:
        trees.reverse()
        signs = [_MIRRORED[sign] for sign in reversed(signs)]
    if {*signs} <= {"<", "\\le"}:
        return _increasing(trees, signs)
    return None


def _equality(sides: list[str], habit: Habit, read_side: Callable[..., Any]) -> Any:
    if len(sides) == 2 and not _is_name(sides[0]) and _is_name(sides[1]):
        sides.reverse()
    is_named = _is_name(sides[0])
    name = _name(sides[0])
    if is_named and len(sides) == 2:
        return _named(name, sides[1], habit, read_side)
    trees = [formula(side, habit) for side in sides[is_named:]]
    if None in trees:
        return None
    if len(sides) == 2 and any(map(symbols, trees)):
        return Equation(("sub", *trees))
    # 2 + 3 = 5 is 5, 4 = 5 is nothing
    if not all(same_value(trees[0], tree) for tree in trees[1:]):
        return None
    value = Quantity(trees[-1])
    if is_named:
        return Named(name, value)
    return value


def _named(name: str, side: str, habit: Habit, read_side: Callable[..., Any]) -> Any:
    """The value of the other side under its name; for (x, y) = (1, 2) a value for each letter."""
    value = read_side(side, habit)
    if isinstance(value, Words) and re.fullmatch(r"[A-Za-z]{2,3}", side):  # F = ma
        tree = formula(side)
        value = Quantity(tree) if tree else value
    # x = 2x: no name of a value
    if isinstance(value, Quantity) and name in symbols(value.tree):
        return Equation(("sub", ("sym", name), value.tree))
    if name.startswith("(") and isinstance(value, Row):
        names = name.strip("()").split(",")
        if len(names) != len(value.items) or value.brackets != "()":
            return None
        return Several(tuple(map(Named, names, value.items)), "and")
    return None if value is None else Named(name, value)


def _is_name(text: str) -> bool:
    """x, f(x), x_1, y', total cost; no product of letters (xy), no constant, and nothing that takes back."""
    if not _NAME.fullmatch(text) or _DENIED.search(text):
        return False
    if re.fullmatch(r"[a-z]{2,3}", text) and text not in _SHORT_WORDS:
        return False
    return formula(text) not in (("const", "pi"), ("const", "e"), ("const", "i"))


def _name(text: str) -> str:
    return re.sub(r"[\s\\{}]", "", text)


def _unequal(trees: list[Tree]) -> Bounds | None:
    letter, bound = trees if trees[0][0] == "sym" else trees[::-1]
    if letter[0] != "sym" or symbols(bound):
        return None
    match bound:
        case ("pm" | "mp", None, point):
            return _excluding(letter[1], [Quantity(point), Quantity(("neg", point))])
        case ("pm" | "mp", *_):
            return None
    return unequal(letter[1], Quantity(bound))


def unequal(name: str, point: Quantity) -> Bounds:
    """x is not 3: all below, and all above."""
    return Bounds(name, _between([point]))


def _excluding(name: str, points: list[Quantity]) -> Bounds | None:
    rows = without(points)
    return None if rows is None else Bounds(name, rows)


def _increasing(trees: list[Tree], signs: list[str]) -> Any:
    """Of an increasing chain: bounds of one letter, or an inequality."""
    low, high = LOWEST, HIGHEST
    match trees:
        case [("sym", name), bound] if not symbols(bound):
            high = Quantity(bound)
        case [bound, ("sym", name)] if not symbols(bound):
            low = Quantity(bound)
        case [lower, ("sym", name), upper] if not symbols(lower) and not symbols(upper):
            low, high = Quantity(lower), Quantity(upper)
        case [left, right] if symbols(left) or symbols(right):
            return Inequality(("sub", left, right), signs[0] == "<")
        case _:
            return None
    opening = "(" if low is LOWEST or signs[0] == "<" else "["
    closing = ")" if high is HIGHEST or signs[-1] == "<" else "]"
    return Bounds(name, Union((Row(opening + closing, (low, high)),)))


def without(points: list[Quantity]) -> Union | None:
    """All real numbers but these, as intervals; None where they cannot be put in order."""
    by_value = {exact(point.tree): point for point in points}
    if None in by_value or len(by_value) < len(points):
        return None
    return _between([by_value[value] for value in sorted(by_value)])


def _between(points: list[Quantity]) -> Union:
    return Union(tuple(Row("()", pair) for pair in pairwise([LOWEST, *points, HIGHEST])))


def joined(items: list[Bounds], word: str) -> Bounds | None:
    """Bounds with a word between them: x < 2 or x > 3; x > 1 and x < 3."""
    name = items[0].name
    if any(item.name != name for item in items):
        return None
    rows = [row for item in items for row in item.value.rows]
    if word == "or":
        return Bounds(name, Union(tuple(rows)))
    if all(len(item.value.rows) == 2 for item in items):  # x is not 2, x is not 3
        pairs = list(zip(rows[::2], rows[1::2], strict=True))
        if any(lower.items[1] != upper.items[0] for lower, upper in pairs):
            return None
        return _excluding(name, [lower.items[1] for lower, _ in pairs])
    if len(rows) != 2:
        return None
    upper, lower = sorted(rows, key=lambda row: row.items[0] == LOWEST)
    low, upper_end = upper.items
    lower_end, high = lower.items
    if (lower_end, upper_end) != (LOWEST, HIGHEST) or low == LOWEST or high == HIGHEST:
        return None
    return Bounds(name, Union((Row(upper.brackets[0] + lower.brackets[1], (low, high)),)))

"""Equations, inequalities, names: what stands between an answer's relation signs, and bounds of one letter."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import chain, pairwise
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
_DENIED = re.compile(r"\b(?:not|no|never|isn't|neither|nor|or|and|except)\b", re.I)


def read_relation(text: str, habit: Habit, read: Callable[..., Any]) -> Any:
    """What the relation signs of a text make of it; read: reads a side. None if it has none, or is not understood."""
    sides, signs = split_relations(text)
    if not signs or not all(sides):
        return None
    if set(signs) == {"="}:
        return _equality([_DERIVATIVE.sub(lambda m: f"{m[1] or m[3]}'", side) for side in sides], habit, read)
    if signs == ["\\in"]:
        side = re.sub(r"^\{(.*)\}$", r"\\{\1\\}", sides[1])
        value = read(side, habit)
        return Named(_name(sides[0]), value) if _NAME.fullmatch(sides[0]) and value is not None else None
    if "=" in signs or "\\in" in signs:
        return None
    trees = [formula(side, habit) for side in sides]
    if None in trees:
        return None
    if signs == ["\\ne"]:
        return _unequal(trees)
    down = all(sign in (">", "\\ge") for sign in signs)
    if "\\ne" in signs or not (down or all(sign in ("<", "\\le") for sign in signs)):
        return None
    if down:
        trees, signs = trees[::-1], [{">": "<", "\\ge": "\\le"}[sign] for sign in signs[::-1]]
    return _ordered(trees, signs)


def _equality(sides: list[str], habit: Habit, read: Callable[..., Any]) -> Any:
    first_is_name, last_is_name = _is_name(sides[0]), _is_name(sides[-1])
    if len(sides) == 2 and (first_is_name or last_is_name):
        name, side = sides if first_is_name else sides[::-1]
        return _named(_name(name), side, habit, read)
    trees = [formula(side, habit) for side in sides[first_is_name:]]
    if None in trees:
        return None
    if len(sides) == 2 and (symbols(trees[0]) or symbols(trees[1])):
        return Equation(("sub", trees[0], trees[1]))
    if not all(same_value(trees[0], tree) for tree in trees[1:]):  # 2 + 3 = 5 is 5, 4 = 5 is nothing
        return None
    value = Quantity(trees[-1])
    return Named(_name(sides[0]), value) if first_is_name else value


def _named(name: str, side: str, habit: Habit, read: Callable[..., Any]) -> Any:
    """The value of the other side under its name; for (x, y) = (1, 2) a value for each letter."""
    value = read(side, habit)
    if isinstance(value, Words) and re.fullmatch(r"[A-Za-z]{2,3}", side) and formula(side):  # F = ma
        value = Quantity(formula(side))
    if isinstance(value, Quantity) and name in symbols(value.tree):  # x = 2x: no name of a value
        return Equation(("sub", ("sym", name), value.tree))
    if name.startswith("(") and isinstance(value, Row):
        names = name.strip("()").split(",")
        fits = len(names) == len(value.items) and value.brackets == "()"
        return Several(tuple(map(Named, names, value.items)), "and") if fits else None
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
    if bound[0] in ("pm", "mp"):
        rows = without([Quantity(bound[2]), Quantity(("neg", bound[2]))]) if bound[1] is None else None
        return None if rows is None else Bounds(letter[1], rows)
    return unequal(letter[1], Quantity(bound))


def unequal(name: str, point: Quantity) -> Bounds:
    """x is not 3: all below, and all above."""
    return Bounds(name, _between([point]))


def _ordered(trees: list[Tree], signs: list[str]) -> Any:
    """An increasing chain: bounds of one letter, or an inequality."""
    letters = [place for place, tree in enumerate(trees) if tree[0] == "sym"]
    others = [tree for tree in trees if tree[0] != "sym"]
    if len(letters) == 1 and not any(map(symbols, others)) and len(trees) <= 3:
        place = letters[0]
        if len(trees) == 3 and place != 1:
            return None
        low, high, brackets = LOWEST, HIGHEST, ["(", ")"]
        if place == 1:
            low = Quantity(trees[0])
            brackets[0] = "(" if signs[0] == "<" else "["
        if place < len(trees) - 1:
            high = Quantity(trees[-1])
            brackets[1] = ")" if signs[-1] == "<" else "]"
        return Bounds(trees[place][1], Union((Row("".join(brackets), (low, high)),)))
    if len(trees) != 2 or not (symbols(trees[0]) or symbols(trees[1])):
        return None
    return Inequality(("sub", trees[0], trees[1]), signs[0] == "<")


def without(points: list[Quantity]) -> Union | None:
    """All real numbers but these, as intervals; None where they cannot be put in order."""
    values = [exact(point.tree) for point in points]
    if None in values or len(set(values)) < len(values):
        return None
    return _between(sorted(points, key=lambda point: exact(point.tree)))


def _between(points: list[Quantity]) -> Union:
    return Union(tuple(Row("()", pair) for pair in pairwise([LOWEST, *points, HIGHEST])))


def joined(items: list[Bounds], word: str) -> Bounds | None:
    """Bounds with a word between them: x < 2 or x > 3; x > 1 and x < 3."""
    if len({item.name for item in items}) > 1:
        return None
    name, pairs = items[0].name, [item.value.rows for item in items]
    if word != "or" and all(len(rows) == 2 for rows in pairs):  # x is not 2, x is not 3
        if any(below.items[1] != above.items[0] for below, above in pairs):
            return None
        rows = without([below.items[1] for below, _ in pairs])
        return None if rows is None else Bounds(name, rows)
    rows = tuple(chain.from_iterable(pairs))
    if word == "or":
        return Bounds(name, Union(rows))
    if len(rows) != 2:
        return None
    below = [row for row in rows if row.items[0] == LOWEST]
    above = [row for row in rows if row.items[1] == HIGHEST]
    if len(below) != 1 or len(above) != 1 or below == above:
        return None
    brackets = above[0].brackets[0] + below[0].brackets[1]
    return Bounds(name, Union((Row(brackets, (above[0].items[0], below[0].items[1])),)))

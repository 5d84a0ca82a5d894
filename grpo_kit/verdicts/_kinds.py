r"""The kinds of answers; see grpo_kit.verdicts._reading.

| kind | written |
|---|---|
| Quantity | 5, 2 1/2, 3 \times 10^8, 50%, $5, 5 km/h, 101_2, x^2 + 1 |
| Several | 1, 2 · 1 or 2 · \{1, 2\} · \pm 2 |
| Row | (1, 2) · [1, 2) · \langle 1, 2 \rangle: tuples and intervals; Union: rows joined by \cup |
| Named | x = 5 · f(x) = 2x · x \in [0, 1] |
| Bounds | x < 2 · 1 < x \le 2 · x \ne 3, as intervals of one letter |
| Equation, Inequality | 3x - y = 0 · x + y < 2 |
| Matrix, Ratio, Clock, Date, Congruence | \begin{pmatrix}... · 1:2 · 3:30 pm · 5 May 2020 · x \equiv 3 \pmod 5 |
| Choice, Words | (C) 25 · no solution |
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from grpo_kit.verdicts._formula import Tree
from grpo_kit.verdicts._units import Unit

INFINITY: Tree = ("const", "oo")


@dataclass(frozen=True)
class Quantity:
    """A value, perhaps with a unit."""

    tree: Tree
    units: tuple[Unit, ...] = ()
    base: int | None = None

    @property
    def is_percent(self) -> bool:
        return self.tree[0] == "percent"


LOWEST, HIGHEST = Quantity(("neg", INFINITY)), Quantity(INFINITY)


@dataclass(frozen=True)
class Row:
    """A tuple or an interval: its two brackets, and what stands between them."""

    brackets: str
    items: tuple[Any, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        return (self,)


@dataclass(frozen=True)
class Union:
    """Rows joined by a cup sign, in any order."""

    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Several:
    """In any order, unless one item is an ellipsis. word: "or", "and" or "," between them."""

    items: tuple[Any, ...]
    word: str = ","

    @property
    def ordered(self) -> bool:
        return Words("\\ldots") in self.items


@dataclass(frozen=True)
class Named:
    """A value with a name: x = 5, f(x) = 2x, D = [0, 1]."""

    name: str
    value: Any


@dataclass(frozen=True)
class Bounds:
    """The values that one letter may have."""

    name: str
    value: Union


@dataclass(frozen=True)
class Equation:
    """Two sides that are equal: their difference, of which zero or any other multiple says the same."""

    difference: Tree


@dataclass(frozen=True)
class Inequality:
    """difference < 0, or <= 0."""

    difference: Tree
    strict: bool


@dataclass(frozen=True)
class Matrix:
    """Rows of cells; a column has rows of one cell each."""

    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Ratio:
    """Two or more parts to each other."""

    parts: tuple[Tree, ...]


@dataclass(frozen=True)
class Clock:
    """minutes of a day; half: "am" or "pm" as written, "24 h" for 07:45 and 19:45, else None."""

    minutes: Fraction
    half: str | None


@dataclass(frozen=True)
class Date:
    """A day; without a year where none is written."""

    year: int | None
    month: int
    day: int


@dataclass(frozen=True)
class Congruence:
    """The remainder of a division by the modulus; name: of the number that is divided."""

    name: str
    remainder: Tree
    modulus: Tree


@dataclass(frozen=True)
class Choice:
    """The letter of a choice, and what may stand behind it."""

    letter: str
    content: str = ""


@dataclass(frozen=True)
class Words:
    """Words, or a text with words in it."""

    text: str


@dataclass(frozen=True)
class Habit:
    """How the gold writes, where that decides what an answer means.

    comma: 1,5 is one and a half. glued: a letter behind a number may be its unit (5m). choice: a letter is a choice.
    letters: those of a formula, which are no units.
    """

    comma: bool = False
    glued: bool = False
    choice: bool = False
    letters: frozenset[str] = frozenset()


PLAIN = Habit()

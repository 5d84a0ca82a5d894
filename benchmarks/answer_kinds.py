"""Typical answers by kind, for benchmarks.reward_cost: the right one in another habit than the gold's, or a wrong one.

Each maker takes (random, right?) and gives (answer text, {"answer": gold}); two calls hardly ever give the same.
"""

from __future__ import annotations

import random
from typing import Any

Made = tuple[str, dict[str, Any]]
WORDS = "north south east west even odd silver copper winter summer circle square monday friday prime".split()


def _whole(rng: random.Random, right: bool) -> Made:
    gold = rng.randrange(10**6)
    return f"{gold if right else gold + 1}.0", {"answer": str(gold)}


def _fraction(rng: random.Random, right: bool) -> Made:
    top, bottom = rng.randrange(1, 999), rng.randrange(2, 999)
    return rf"\frac{{{top if right else top + 1}}}{{{bottom}}}", {"answer": f"{top}/{bottom}"}


def _money(rng: random.Random, right: bool) -> Made:
    cents = rng.randrange(100, 10**5)
    answer = cents if right else cents + 100
    return f"{answer / 100:.2f} \\text{{ dollars}}", {
        "answer": f"{cents / 100:.2f}\\text{{ dollars}}"
    }


def _unit(rng: random.Random, right: bool) -> Made:
    gold, unit = rng.randrange(10**4), rng.choice(("cm", "kg", "km", "hours"))
    return f"{gold if right else gold + 1} {unit}", {"answer": rf"{gold} \text{{ {unit}}}"}


def _expression(rng: random.Random, right: bool) -> Made:
    a, b = rng.randrange(2, 99), rng.randrange(2, 99)
    middle = a + b if right else a + b + 1
    return f"x^2 + {middle}x + {a * b}", {"answer": f"(x + {a})(x + {b})"}


def _interval(rng: random.Random, right: bool) -> Made:
    low = rng.randrange(-99, 0)
    high = low + rng.randrange(1, 99)
    return f"[{low}, {high if right else high + 1})", {"answer": rf"\left[{low},{high}\right)"}


def _matrix(rng: random.Random, right: bool) -> Made:
    a, b, c, d = (rng.randrange(-99, 99) for _ in range(4))
    last = d if right else d + 1
    answer = rf"\begin{{bmatrix}} {a} & {b} \\ {c} & {last} \end{{bmatrix}}"
    return answer, {"answer": rf"\begin{{bmatrix}}{a}&{b}\\{c}&{d}\end{{bmatrix}}"}


def _word(rng: random.Random, right: bool) -> Made:
    gold, other, more = rng.sample(WORDS, 3)
    return f"{gold if right else other} {more}", {"answer": rf"\text{{{gold} {more}}}"}


KINDS = {
    "number": _whole,
    "fraction": _fraction,
    "money": _money,
    "number with a unit": _unit,
    "expression": _expression,
    "interval": _interval,
    "matrix": _matrix,
    "word": _word,
}

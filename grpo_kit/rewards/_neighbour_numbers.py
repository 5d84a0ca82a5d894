"""A gold answer that is one number: its spelling, and the fields of the texts around it. See neighbours."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

from grpo_kit.verdicts import _kinds as kinds
from grpo_kit.verdicts._formula import Tree

Fields = Mapping[str, str | None]
_DIGITS_OF = r"(\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)"
_LITERAL = re.compile(rf"(-?)([$€£]?){_DIGITS_OF}((?!\s*[\d,.'/_])[^\d!^_]*(?:\^\{{?\d\}}?|\^\\circ.*)?)")
_DIGITS = {"arabic": "٠١٢٣٤٥٦٧٨٩٫", "wide": "０１２３４５６７８９．"}
_THOUSANDS = {"commas": ",", "narrow": "\u202f", "spaced": "\u00a0", "apostrophes": "'", "braces": "{,}"}
_VULGAR = {Fraction(n, d): char for char, n, d in
           [("½", 1, 2), ("⅓", 1, 3), ("⅔", 2, 3), ("¼", 1, 4), ("¾", 3, 4), ("⅕", 1, 5), ("⅛", 1, 8)]}  # fmt: skip
_SPOKEN = "zero one two three four five six seven eight nine ten eleven twelve".split()
_MONEY = {"$": ("dollars", "euros"), "€": ("euros", "dollars"), "£": ("pounds", "dollars")}  # fmt: skip
_UNITS = {  # unit: how many of which smaller unit
    "km": (1000, "m"), "m": (100, "cm"), "cm": (10, "mm"), "kg": (1000, "g"), "g": (1000, "mg"), "L": (1000, "mL"),
    "weeks": (7, "days"), "days": (24, "hours"), "hours": (60, "minutes"), "minutes": (60, "seconds"),
    "years": (12, "months"), "yards": (3, "feet"), "feet": (12, "inches"),
}  # fmt: skip


class Number(NamedTuple):
    """A gold that is one number, as written: -$1,234.50 has the money sign $, 5 km has the rest " km"."""

    value: Fraction
    money: str = ""
    rest: str = ""

    def text(self, value: Fraction | str) -> str:
        """The same spelling with another number."""
        text = value if isinstance(value, str) else _decimal(value)
        return f"{'-' * text.startswith('-')}{self.money}{text.removeprefix('-')}{self.rest}"


def _decimal(value: Fraction) -> str:
    """The digits of a fraction whose decimal ends, else "a/b"."""
    if value.denominator == 1:
        return str(value.numerator)
    text = f"{Decimal(value.numerator) / value.denominator:f}"
    return text if Fraction(text) == value else f"{value.numerator}/{value.denominator}"


def _rational(tree: Tree) -> Fraction | None:
    """The value of a literal, a fraction or a mixed number, with a sign; None for anything else."""
    match tree:
        case ("num", value):
            return value
        case ("neg", ("num" | "div" | "mixed", *_) as part):
            return None if (value := _rational(part)) is None else -value
        case ("div", ("num", _) | ("neg", ("num", _)) as above, ("num", below)) if below:
            return _rational(above) / below
        case ("mixed", ("num", whole), part):
            return whole + _rational(part)
    return None


def number_of(text: str, known: Any) -> Number | None:
    """The gold as one number with its money, unit or per cent; None if it is something else."""
    if not isinstance(known, kinds.Quantity) or known.base is not None:
        return None
    value = _rational(known.tree[1] if known.is_percent else known.tree)
    found = _LITERAL.fullmatch(text) if value is not None else None
    if found and (not found[4] or known.units or known.is_percent or found[4].endswith("illion")):
        return Number(Fraction(found[1] + found[3].replace(",", "")), found[2], found[4])
    return None if value is None or known.units or known.is_percent else Number(value)


def number_fields(number: Number, known: kinds.Quantity) -> Fields:
    """The fields of neighbours.csv for a number: its neighbours, its spellings, its parts."""
    value, size, amount, unit = number.value, abs(number.value), _decimal(number.value), number.rest.strip()
    whole, put, turned = value.denominator == 1, number.text, str(size)[::-1]
    fields: dict[str, str | None] = {"amount": amount, "one_more": put(value + 1)}
    if value:
        fields |= {"opposite": put(-value), "ten": put(10 * value), "tenth": put(value / 10)}
    if whole and size % 10 and turned != str(size):
        fields["backwards"] = put(turned)
    if value >= 0 and not number.money:
        fields["plus"] = f"+{put(amount)}"
    if "/" not in amount:
        fields |= {n: put(amount.translate(str.maketrans("0123456789.", d))) for n, d in _DIGITS.items()}
        fields["zeros"] = put(amount + (".0" if whole else "0"))
    if whole and size >= 1000:
        grouped = f"{value.numerator:,}"
        fields |= {name: put(grouped.replace(",", sign)) for name, sign in _THOUSANDS.items()}
    if number.money:
        money, another = _MONEY[number.money]
        fields |= {"money": money, "other_unit": f"{amount} {another}"}
    elif known.is_percent:
        fields |= {"per_cent": amount, "per_cent_decimal": _decimal(value / 100)}
    fields |= {"unit_optional": amount} if known.units else {}
    if known.units and re.fullmatch("[A-Za-z]+", unit) and value:
        count, smaller = _UNITS.get(unit, (0, "kg"))
        fields |= {"unit": unit, "other_unit": f"{amount} {smaller}"}
        if count:
            fields |= {"smaller": smaller, "smaller_amount": _decimal(value * count)}
            fields["squared_unit"] = f"{amount} {unit}^2"
    return fields if number.money or number.rest else fields | _bare_fields(value, amount)


def _bare_fields(value: Fraction, text: str) -> Fields:
    """The fields of a number without money, unit or per cent."""
    size, sign = abs(value), "-" * (value < 0)
    above, below = size.numerator, size.denominator
    fields: dict[str, str | None] = {"bare": text, "sign": sign, "above": str(above)}
    fields |= {"nonzero": text} if value else {}
    fields |= {"unlike": text, "upside": f"{sign}{below}"} if size not in (0, 1) else {}
    if below == 1:
        n = int(value)
        factor = next((k for k in range(2, math.isqrt(n) + 1) if n % k == 0), None) if 3 < n < 10**9 else None
        fields |= {"factor": str(factor), "cofactor": str(n // factor)} if factor else {}
        fields |= {"low": str(n // 2), "high": str(n - n // 2)} if n > 3 else {}
        fields |= {"spoken": _SPOKEN[n]} if 0 <= n < len(_SPOKEN) else {}
        fits = {
            "whole": True,
            "nonzero_whole": n,
            "counted": n > 1,
            "over_nine": n > 9,
            "not_1_2": above not in (1, 2),
        }
        return fields | {"raised": str(n + 94)} | {name: text for name, fit in fits.items() if fit}
    rest, vulgar = size % 1, _VULGAR.get(size % 1)
    fields |= {"twice_above": str(2 * above), "twice_below": str(2 * below)}
    fields |= {"below": str(below), "rest": str(rest.numerator), "ones": str(int(size)) if size > 1 else None}
    fields["vulgar"] = f"{sign}{int(size) or ''}{vulgar}" if vulgar else None
    if "/" in text:
        return fields | {"rounded": f"{Decimal(value.numerator) / below:.6f}"}
    return fields | {"decimal": text, "percent": _decimal(100 * value) if size < 1 else None}

"""Texts around a gold answer: some equal to it by construction, others wrong by construction.

The table is neighbours.csv, one text per row: the kinds of gold it is for (empty: all), the pattern in the gold that
it replaces (empty: all of it), the text with its <fields>, its name, and why it is right, or wrong. This file computes
the fields with arithmetic of its own. It calls no verdict, since audit tests the verdicts with these texts. Where a
number or a word is its own neighbour (0, 1, a palindrome) the field is None, and rows that need the field are dropped.

Longer than 300 lines because the fields of one table are computed in one place.
"""

from __future__ import annotations

import csv
import math
import re
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from grpo_kit.verdicts import _kinds as kinds
from grpo_kit.verdicts._formula import nodes
from grpo_kit.verdicts._quantities import formula
from grpo_kit.verdicts._rational import TooLargeError, exact_or_none
from grpo_kit.verdicts._reading import read
from grpo_kit.verdicts._spelling import plain

Fields = dict[str, str | None]
_SIGN = re.compile(r" *(<|>|\\le(?![a-z])|\\ge(?![a-z])) *")
_FLIP = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
_TERM = r"\(?\d+(?:\.\d+)?\)?"
_ARITHMETIC = re.compile(
    rf"(?<![\w.^/*+-]){_TERM}(?:\s*[-+*/×÷−]\s*{_TERM})+(?![\w^/*+]|[.,]\d)"
)
_DIGITS_OF = r"(\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)"
_LITERAL = re.compile(
    rf"(-?)([$€£]?){_DIGITS_OF}((?!\s*[\d,.'/_])[^\d!^_]*(?:\^\{{?\d\}}?|\^\\circ.*)?)"
)
_DIGITS = {"arabic": "٠١٢٣٤٥٦٧٨٩٫", "wide": "０１２３４５６７８９．"}
_THOUSANDS = {
    "commas": ",",
    "narrow": "\u202f",
    "spaced": "\u00a0",
    "apostrophes": "'",
    "braces": "{,}",
}
_VULGAR = {"1/2": "½", "1/3": "⅓", "2/3": "⅔", "1/4": "¼", "3/4": "¾", "1/5": "⅕", "1/8": "⅛"}
_SPOKEN = "zero one two three four five six seven eight nine ten eleven twelve".split()
_MONEY = {"$": ("dollars", "euros"), "€": ("euros", "dollars"), "£": ("pounds", "dollars")}
_UNITS = {  # unit: how many of which smaller unit
    "km": (1000, "m"), "m": (100, "cm"), "cm": (10, "mm"), "kg": (1000, "g"), "g": (1000, "mg"), "L": (1000, "mL"),
    "weeks": (7, "days"), "days": (24, "hours"), "hours": (60, "minutes"), "minutes": (60, "seconds"),
    "years": (12, "months"), "yards": (3, "feet"), "feet": (12, "inches"),
}  # fmt: skip
_BY_RULE = {  # a reward's argument: names of texts that are right, or wrong, only without it
    "expressions": {"a sum to be done", "a difference to be done", "copied from the question"},
    "case": {"the other capital"},
    "tolerance": {"rounded", "one more", "and a half"},
    "significant": {"rounded", "one more", "and a half"},
}
# The near misses that check_rewards tries; audit draws from all.
TRIED = (
    "one more", "the other sign", "ten times", "another unit", "brackets changed", "items in another order",
    "an item more", "letters in another order", "the other case", "either of two", "plus or minus", "a remainder",
    "denied", "a set that holds it", "an earlier draft", "copied from the question",
)  # fmt: skip


def equal_texts(gold: str) -> dict[str, str]:
    r"""Other spellings of the same answer, {name: text}; few for a gold of unknown kind.

    >>> [equal_texts("0.5")[name] for name in ("a fraction", "per cent of a part", "in bold", "in a sentence")]
    ['1/2', '50%', '**0.5**', 'The answer is 0.5.']
    """
    texts = _filled("equal", plain(gold))
    return {name: text for name, text in texts.items() if text != gold.strip()}


def near_misses(gold: str, question: str | None = None) -> dict[str, str]:
    r"""Wrong answers near the gold, {name: text}: neighbours, hedges, denials, and the question's own arithmetic.

    >>> [near_misses("5")[name] for name in ("the other sign", "ten times", "either of two", "two side by side")]
    ['-5', '50', '5 or 6', '2 3']
    >>> near_misses("6", "What is 12/2?")["copied from the question"]
    '12/2'
    """
    spelling = plain(gold)
    texts = _filled("near", spelling, _arithmetic_of(question or "", spelling))
    return {name: text for name, text in texts.items() if text not in (gold.strip(), spelling)}


def why(name: str) -> str:
    """Why the text of that name is right, or wrong, in a few words."""
    return next(row["why"] for row in _table() if row["name"] == name)


def excused(rules: Any) -> set[str]:
    """Names of texts that are no evidence against a reward with these rules: its arguments accept, or refuse, them."""
    names = set()
    for rule, excused_names in _BY_RULE.items():
        if getattr(rules, rule, None):
            names |= excused_names
    if getattr(rules, "units", None) == "required":
        names.add("without its unit")
    return names


@lru_cache(1)
def _table() -> list[dict[str, str]]:
    lines = Path(__file__).with_name("neighbours.csv").read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(lines, delimiter=";", quoting=csv.QUOTE_NONE))


def _filled(list_name: str, gold: str, copied: str | None = None) -> dict[str, str]:
    """The rows of the table that apply, each name and each text once. <other>: the first of them, a wrong answer."""
    kind, fields = _kind_and_fields(gold)
    fields |= {"g": gold, "copied": copied, "other": f"{gold} 7"}
    texts: dict[str, str] = {}
    for row in _table():
        is_for_kind = not row["kinds"] or kind in row["kinds"].split()
        match = re.search(row["pattern"] or r"\A.*\Z", gold, re.S)
        if row["list"] != list_name or row["name"] in texts or not is_for_kind or match is None:
            continue
        values = fields | {
            str(place): group or "" for place, group in enumerate(match.groups(), 1)
        }
        if any(values.get(name) is None for name in re.findall(r"<(\w+)>", row["text"])):
            continue
        replacement = re.sub(
            r"<(\w+)>", lambda field, values=values: values[field[1]], row["text"]
        )
        text = (gold[: match.start()] + replacement + gold[match.end() :]).strip(" ")
        if text and text not in texts.values():
            texts[row["name"]] = text
            fields["other"] = next(iter(texts.values()))
    return texts


def _kind_and_fields(text: str) -> tuple[str, Fields]:
    """The kind of a gold, by the table's name, and the fields of its texts."""
    gold = _read(text)
    number, kind = _number_of(text, gold), type(gold).__name__
    if number:
        kind = "Number"
    elif isinstance(gold, kinds.Quantity):
        kind = "Measured" if gold.units or gold.is_percent else "Formula"
        if gold.base:
            kind = "Based"
    fields: Fields = {"invisible": "\u200b", "hard": "\u00a0", "bumped": _bump(text)}
    if not re.search("[$%]", text):  # signs that mean something else in LaTeX
        fields["formula"] = rf"\text{{{text}}}" if kind == "Words" else text
    if kind in ("Words", "Choice") or re.fullmatch(r"[\d.]+", text):
        fields["upright"] = text
    if kind not in ("Bounds", "Inequality"):  # x > 2 or x > 3 is x > 2
        fields["hedged"] = text
    signs = _SIGN.findall(text)
    if len(signs) == 1 and not re.search(" or | and |,", text):
        left, _, right = _SIGN.split(text)
        fields |= {"left": left, "right": right, "flipped": _FLIP[signs[0]]}
    if number:
        fields |= _number_fields(number, gold)
    elif kind == "Formula":
        fields |= _formula_fields(text, gold)
    elif kind == "Choice":
        fields |= _choice_fields(text, gold.letter)
    elif kind == "Words":
        fields |= _word_fields(text)
    elif isinstance(gold, kinds.Clock) and gold.half:
        hours, minutes = divmod(int(gold.minutes), 60)
        fields["hours24"] = f"{hours:02d}:{minutes:02d}"
    elif isinstance(gold, kinds.Date) and gold.year:
        fields["iso"] = f"{gold.year}-{gold.month:02d}-{gold.day:02d}"
    return kind, fields


def _read(text: str) -> Any:
    """The kind of the text; letters and spaces are words, even if they could be a product of letters ("a few")."""
    if re.fullmatch(r"[^\W\d_]+(?: [^\W\d_]+)*", text) and len(text) > 1:
        return kinds.Words(text)
    try:
        return read(text)
    except TooLargeError:
        return None


def _bump(text: str) -> str | None:
    """The text with its last whole number one higher; None without a whole number."""
    match = re.search(r"\d+(?!.*\d)", text, re.S)
    if match is None:
        return None
    return f"{text[: match.start()]}{int(match[0]) + 1}{text[match.end() :]}"


def _formula_fields(text: str, gold: kinds.Quantity) -> Fields:
    """The fields of a formula that is not 0, and of a multiple of a root or of pi."""
    fields: Fields = {}
    if "infty" not in text and exact_or_none(gold.tree) != 0:
        fields["not_zero"] = text
    match = re.fullmatch(r"(\d*)(?:\\sqrt\{(\d+)\}|\\pi)", text)
    if match:
        count, radicand = int(match[1] or 1), int(match[2] or 0)
        factor = math.sqrt(radicand) if match[2] else math.pi
        is_irrational = not match[2] or math.isqrt(radicand) ** 2 != radicand
        if count and is_irrational:
            fields["rounded"] = f"{count * factor:.6f}"
    return fields


def _choice_fields(text: str, letter: str) -> Fields:
    next_letter = "BCDEA"["ABCDE".find(letter)]
    fields: Fields = {"other_choice": re.sub(rf"\b{letter}\b", next_letter, text, count=1)}
    if text == letter:
        fields["other_case"] = text.lower()
    return fields


def _word_fields(text: str) -> Fields:
    fields: Fields = {}
    longest = max(text.split(), key=len)
    backwards = text.replace(longest, longest[::-1], 1)
    if backwards.casefold() != text.casefold():
        fields["anagram"] = backwards
    if (text.isupper() and " " not in text) or len(text) == 1:
        fields["other_case"] = text.swapcase()
    else:
        fields["sentence_case"] = text[0].swapcase() + text[1:]
    return fields


def _arithmetic_of(question: str, gold: str) -> str | None:
    """The question's own arithmetic, where it equals the gold, a whole number: 12/2 for 6."""
    if not re.fullmatch(r"-?[\d,]*\d", gold):
        return None
    for sum_text in _ARITHMETIC.findall(question):
        tree = formula(sum_text.translate({ord("×"): "*", ord("÷"): "/", ord("−"): "-"}))
        if tree and exact_or_none(tree) == int(gold.replace(",", "")):
            return sum_text.strip()
    return None


class _Number(NamedTuple):
    """A gold that is one number, as written: -$1,234.50 has the money sign $, 5 km has the unit " km"."""

    value: Fraction
    money: str = ""
    unit: str = ""

    def with_digits(self, digits: str) -> str:
        """The same spelling with other digits."""
        sign = "-" if digits.startswith("-") else ""
        return f"{sign}{self.money}{digits.removeprefix('-')}{self.unit}"

    def text(self, value: Fraction) -> str:
        """The same spelling with another number."""
        return self.with_digits(_decimal(value))


def _decimal(value: Fraction) -> str:
    """The digits of a fraction whose decimal ends, else "a/b"."""
    decimal = f"{Decimal(value.numerator) / value.denominator:f}"
    if value.denominator != 1 and Fraction(decimal) == value:
        return decimal
    return str(value)


def _number_of(text: str, gold: Any) -> _Number | None:
    """The gold as one number with its money, unit or per cent; None if it is something else."""
    if not isinstance(gold, kinds.Quantity) or gold.base is not None:
        return None
    tree = gold.tree[1] if gold.is_percent else gold.tree
    if any(node[0] not in ("num", "neg", "div", "mixed") for node in nodes(tree)):
        return None
    value = exact_or_none(tree)
    if value is None:
        return None
    is_measured = bool(gold.units) or gold.is_percent
    literal = _LITERAL.fullmatch(text)
    if literal and (not literal[4] or is_measured or literal[4].endswith("illion")):
        return _Number(
            Fraction(literal[1] + literal[3].replace(",", "")), literal[2], literal[4]
        )
    return None if is_measured else _Number(value)


def _number_fields(number: _Number, gold: kinds.Quantity) -> Fields:
    """The fields of neighbours.csv for a number: its neighbours, its spellings, its parts."""
    value, amount, put = number.value, _decimal(number.value), number.with_digits
    size, unit, is_whole = abs(value), number.unit.strip(), value.denominator == 1
    fields: Fields = {"amount": amount, "one_more": number.text(value + 1)}
    if value:
        fields["opposite"] = number.text(-value)
        fields["ten"] = number.text(10 * value)
        fields["tenth"] = number.text(value / 10)
    backwards = str(size)[::-1]
    if is_whole and size % 10 and backwards != str(size):
        fields["backwards"] = put(backwards)
    if value >= 0 and not number.money:
        fields["plus"] = f"+{put(amount)}"
    if "/" not in amount:
        for name, digits in _DIGITS.items():
            fields[name] = put(amount.translate(str.maketrans("0123456789.", digits)))
        fields["zeros"] = put(f"{amount}.0" if is_whole else f"{amount}0")
    if is_whole and size >= 1000:
        for name, separator in _THOUSANDS.items():
            fields[name] = put(f"{value.numerator:,}".replace(",", separator))
    if number.money:
        money, other_money = _MONEY[number.money]
        fields |= {"money": money, "other_unit": f"{amount} {other_money}"}
    elif gold.is_percent:
        fields |= {"per_cent": amount, "per_cent_decimal": _decimal(value / 100)}
    if gold.units:
        fields["unit_optional"] = amount
    if gold.units and re.fullmatch("[A-Za-z]+", unit) and value:
        count, smaller = _UNITS.get(unit, (0, "kg"))
        fields |= {"unit": unit, "other_unit": f"{amount} {smaller}"}
        if count:
            fields |= {"smaller": smaller, "smaller_amount": _decimal(value * count)}
            fields["squared_unit"] = f"{amount} {unit}^2"
    if not number.money and not number.unit:
        fields |= _bare_fields(value, amount)
    return fields


def _bare_fields(value: Fraction, text: str) -> Fields:
    """The fields of a number without money, unit or per cent."""
    size, sign = abs(value), "-" if value < 0 else ""
    top, bottom = size.numerator, size.denominator
    fields: Fields = {"bare": text, "sign": sign, "above": str(top)}
    if value:
        fields["nonzero"] = text
    if size not in (0, 1):
        fields |= {"unlike": text, "upside": f"{sign}{bottom}"}
    if bottom == 1:
        return fields | _whole_fields(int(value))
    fields |= {
        "twice_above": str(2 * top),
        "twice_below": str(2 * bottom),
        "below": str(bottom),
    }
    fields["rest"] = str(top % bottom)
    if size > 1:
        fields["ones"] = str(top // bottom)
    vulgar = _VULGAR.get(str(size % 1))
    if vulgar:
        fields["vulgar"] = f"{sign}{top // bottom or ''}{vulgar}"
    if "/" in text:
        fields["rounded"] = f"{Decimal(value.numerator) / bottom:.6f}"
        return fields
    fields["decimal"] = text
    if size < 1:
        fields["percent"] = _decimal(100 * value)
    return fields


def _whole_fields(n: int) -> Fields:
    text = str(n)
    fields: Fields = {"whole": text, "raised": str(n + 94)}
    if 3 < n < 10**9:
        factor = next((k for k in range(2, math.isqrt(n) + 1) if n % k == 0), None)
        if factor:
            fields |= {"factor": str(factor), "cofactor": str(n // factor)}
    if n > 3:
        fields |= {"low": str(n // 2), "high": str(n - n // 2)}
    if 0 <= n < len(_SPOKEN):
        fields["spoken"] = _SPOKEN[n]
    if n:
        fields["nonzero_whole"] = text
    if n > 1:
        fields["counted"] = text
    if n > 9:
        fields["over_nine"] = text
    if abs(n) not in (1, 2):
        fields["not_1_2"] = text
    return fields

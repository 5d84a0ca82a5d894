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
from grpo_kit.verdicts._formula import Tree, nodes
from grpo_kit.verdicts._quantities import formula
from grpo_kit.verdicts._rational import TooLargeError, UndefinedError, exact
from grpo_kit.verdicts._reading import read
from grpo_kit.verdicts._spelling import plain

Fields = dict[str, str | None]
_SIGN = re.compile(r" *(<|>|\\le(?![a-z])|\\ge(?![a-z])) *")
_FLIP = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
_TERM = r"\(?\d+(?:\.\d+)?\)?"
_ASKED = re.compile(rf"(?<![\w.^/*+-]){_TERM}(?:\s*[-+*/×÷−]\s*{_TERM})+(?![\w^/*+]|[.,]\d)")
_DIGITS_OF = r"(\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)"
_LITERAL = re.compile(rf"(-?)([$€£]?){_DIGITS_OF}((?!\s*[\d,.'/_])[^\d!^_]*(?:\^\{{?\d\}}?|\^\\circ.*)?)")
_DIGITS = {"arabic": "٠١٢٣٤٥٦٧٨٩٫", "wide": "０１２３４５６７８９．"}
_THOUSANDS = {"commas": ",", "narrow": "\u202f", "spaced": "\u00a0", "apostrophes": "'", "braces": "{,}"}
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
    made = _filled("equal", plain(gold))
    return {name: text for name, text in made.items() if text != gold.strip()}


def near_misses(gold: str, question: str | None = None) -> dict[str, str]:
    r"""Wrong answers near the gold, {name: text}: neighbours, hedges, denials, and the question's own arithmetic.

    >>> [near_misses("5")[name] for name in ("the other sign", "ten times", "either of two", "two side by side")]
    ['-5', '50', '5 or 6', '2 3']
    >>> near_misses("6", "What is 12/2?")["copied from the question"]
    '12/2'
    """
    wanted = plain(gold)
    made = _filled("near", wanted, _copied(wanted, question or ""))
    return {name: text for name, text in made.items() if text not in (gold.strip(), wanted)}


def why(name: str) -> str:
    """Why the text of that name is right, or wrong, in a few words."""
    return next(row["why"] for row in _table() if row["name"] == name)


def excused(rules: Any) -> set[str]:
    """Names of texts that are no evidence against a reward with these rules: its arguments accept, or refuse, them."""
    asked = {name for rule, names in _BY_RULE.items() if getattr(rules, rule, None) for name in names}
    return asked | ({"without its unit"} if getattr(rules, "units", None) == "required" else set())


@lru_cache(1)
def _table() -> list[dict[str, str]]:
    lines = Path(__file__).with_name("neighbours.csv").read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(lines, delimiter=";", quoting=csv.QUOTE_NONE))


def _filled(which: str, gold: str, copied: str | None = None) -> dict[str, str]:
    """The rows of the table that apply, each name and each text once. <other>: the first of them, a wrong answer."""
    kind, fields = _kind_and_fields(gold)
    fields |= {"g": gold, "copied": copied, "other": f"{gold} 7"}
    texts: dict[str, str] = {}
    for row in _table():
        if (
            row["list"] != which
            or row["name"] in texts
            or (row["kinds"] and kind not in row["kinds"].split())
        ):
            continue
        match = re.search(row["pattern"] or r"\A.*\Z", gold, re.S)
        if match is None:
            continue
        values = fields | {str(place): group or "" for place, group in enumerate(match.groups(), 1)}
        if all(values.get(name) is not None for name in re.findall(r"<(\w+)>", row["text"])):
            filled = re.sub(r"<(\w+)>", lambda field, values=values: values[field[1]], row["text"])
            text = (gold[: match.start()] + filled + gold[match.end() :]).strip(" ")
            if text and text not in texts.values():
                texts[row["name"]] = text
                fields["other"] = next(iter(texts.values()))
    return texts


def _kind_and_fields(text: str) -> tuple[str, Fields]:
    """The kind of a gold, by the table's name, and the fields of its texts."""
    known = _known(text)
    number, kind = _number_of(text, known), type(known).__name__
    if isinstance(known, kinds.Quantity):
        alone = not (known.units or known.is_percent)
        kind = "Number" if number else "Based" if known.base else "Formula" if alone else "Measured"
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
        fields |= _number_fields(number, known)
    elif kind == "Formula":
        fields |= _formula_fields(text, known)
    elif kind in ("Words", "Choice"):
        fields |= _word_fields(text, known)
    elif isinstance(known, kinds.Clock) and known.half:
        fields["hours24"] = f"{int(known.minutes) // 60:02d}:{int(known.minutes) % 60:02d}"
    elif isinstance(known, kinds.Date) and known.year:
        fields["iso"] = f"{known.year}-{known.month:02d}-{known.day:02d}"
    return kind, fields


def _known(text: str) -> Any:
    """The kind of the text; letters and spaces are words, even if they could be a product of letters ("a few")."""
    if re.fullmatch(r"[^\W\d_]+(?: [^\W\d_]+)*", text) and len(text) > 1:
        return kinds.Words(text)
    try:
        return read(text)
    except TooLargeError:
        return None


def _exact(tree: Tree | None) -> Fraction | None:
    try:
        return None if tree is None else exact(tree)
    except (TooLargeError, UndefinedError):
        return None


def _bump(text: str) -> str | None:
    """The text with its last whole number one higher; None without a whole number."""
    found = re.search(r"\d+(?!.*\d)", text, re.S)
    return f"{text[: found.start()]}{int(found[0]) + 1}{text[found.end() :]}" if found else None


def _formula_fields(text: str, known: kinds.Quantity) -> Fields:
    """The fields of a formula. Of its value only this is known: whether it is infinite, or exactly 0."""
    zero = "infty" in text or _exact(known.tree) == 0
    root = re.fullmatch(r"(\d*)(?:\\sqrt\{(\d+)\}|\\pi)", text)
    surd = root and (not root[2] or math.isqrt(int(root[2])) ** 2 != int(root[2]))
    size = int(root[1] or 1) * (math.sqrt(int(root[2])) if root[2] else math.pi) if surd else 0
    return {"not_zero": None if zero else text, "rounded": f"{size:.6f}" if size else None}


def _word_fields(text: str, known: kinds.Words | kinds.Choice) -> Fields:
    if isinstance(known, kinds.Choice):
        other = "BCDEA"["ABCDE".find(known.letter)]
        other = re.sub(rf"\b{known.letter}\b", other, text, count=1)
        return {"other_case": text.lower() if text == known.letter else None, "other_choice": other}
    longest = max(text.split(), key=len)
    backwards = text.replace(longest, longest[::-1], 1)
    case = {"other_case": text.swapcase()} if text.isupper() and " " not in text or len(text) == 1 else {}
    anagram = {"anagram": backwards} if backwards.casefold() != text.casefold() else {}
    return anagram | (case or {"sentence_case": text[0].swapcase() + text[1:]})


def _copied(text: str, question: str) -> str | None:
    """The question's own arithmetic, where it equals the gold, a whole number: 12/2 for 6."""
    if re.fullmatch(r"-?[\d,]*\d", text):
        for asked in _ASKED.findall(question):
            tree = formula(asked.replace("×", "*").replace("÷", "/").replace("−", "-"))
            if _exact(tree) == int(text.replace(",", "")):
                return asked.strip()
    return None


class _Number(NamedTuple):
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
    text = f"{Decimal(value.numerator) / value.denominator:f}"
    return text if value.denominator != 1 and Fraction(text) == value else str(value)


def _number_of(text: str, known: Any) -> _Number | None:
    """The gold as one number with its money, unit or per cent; None if it is something else."""
    if not isinstance(known, kinds.Quantity) or known.base is not None:
        return None
    tree = known.tree[1] if known.is_percent else known.tree
    is_literal = {node[0] for node in nodes(tree)} <= {"num", "neg", "div", "mixed"}
    value = _exact(tree) if is_literal else None
    if value is None:
        return None
    is_measured = bool(known.units) or known.is_percent
    literal = _LITERAL.fullmatch(text)
    if literal and (not literal[4] or is_measured or literal[4].endswith("illion")):
        return _Number(Fraction(literal[1] + literal[3].replace(",", "")), literal[2], literal[4])
    return None if is_measured else _Number(value)


def _number_fields(number: _Number, known: kinds.Quantity) -> Fields:
    """The fields of neighbours.csv for a number: its neighbours, its spellings, its parts."""
    value, amount, put = number.value, _decimal(number.value), number.text
    size, unit, is_whole = abs(value), number.rest.strip(), value.denominator == 1
    fields: Fields = {"amount": amount, "one_more": put(value + 1)}
    if value:
        fields |= {"opposite": put(-value), "ten": put(10 * value), "tenth": put(value / 10)}
    backwards = str(size)[::-1]
    if is_whole and size % 10 and backwards != str(size):
        fields["backwards"] = put(backwards)
    if value >= 0 and not number.money:
        fields["plus"] = f"+{put(amount)}"
    if "/" not in amount:
        for name, digits in _DIGITS.items():
            fields[name] = put(amount.translate(str.maketrans("0123456789.", digits)))
        fields["zeros"] = put(amount + (".0" if is_whole else "0"))
    if is_whole and size >= 1000:
        for name, sign in _THOUSANDS.items():
            fields[name] = put(f"{value.numerator:,}".replace(",", sign))
    if number.money:
        money, another = _MONEY[number.money]
        fields |= {"money": money, "other_unit": f"{amount} {another}"}
    elif known.is_percent:
        fields |= {"per_cent": amount, "per_cent_decimal": _decimal(value / 100)}
    if known.units:
        fields["unit_optional"] = amount
    if known.units and re.fullmatch("[A-Za-z]+", unit) and value:
        count, smaller = _UNITS.get(unit, (0, "kg"))
        fields |= {"unit": unit, "other_unit": f"{amount} {smaller}"}
        if count:
            fields |= {"smaller": smaller, "smaller_amount": _decimal(value * count)}
            fields["squared_unit"] = f"{amount} {unit}^2"
    if not number.money and not number.rest:
        fields |= _bare_fields(value, amount)
    return fields


def _bare_fields(value: Fraction, text: str) -> Fields:
    """The fields of a number without money, unit or per cent."""
    size, sign = abs(value), "-" * (value < 0)
    above, below = size.numerator, size.denominator
    fields: Fields = {"bare": text, "sign": sign, "above": str(above)}
    if value:
        fields["nonzero"] = text
    if size not in (0, 1):
        fields |= {"unlike": text, "upside": f"{sign}{below}"}
    if below == 1:
        return fields | _whole_fields(int(value))
    fields |= {"twice_above": str(2 * above), "twice_below": str(2 * below), "below": str(below)}
    fields["rest"] = str(above % below)
    if size > 1:
        fields["ones"] = str(above // below)
    vulgar = _VULGAR.get(str(size % 1))
    if vulgar:
        fields["vulgar"] = f"{sign}{above // below or ''}{vulgar}"
    if "/" in text:
        fields["rounded"] = f"{Decimal(value.numerator) / below:.6f}"
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

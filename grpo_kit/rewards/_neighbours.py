"""Texts around a gold answer: some equal to it by construction, others wrong by construction.

The table is neighbours.csv, one text per row: the kinds of gold it is for (empty: all), the pattern in the gold that
it replaces (empty: all of it), the text with its <fields>, its name, and why it is right, or wrong. This file computes
the fields with arithmetic of its own. It calls no verdict, since audit tests the verdicts with these texts. Where a
number or a word is its own neighbour (0, 1, a palindrome) the field is None, and rows that need the field are dropped.
"""

from __future__ import annotations

import csv
import math
import re
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

from grpo_kit.rewards._neighbour_numbers import Fields, number_fields, number_of
from grpo_kit.verdicts import _kinds as kinds
from grpo_kit.verdicts._formula import Tree
from grpo_kit.verdicts._quantities import formula
from grpo_kit.verdicts._rational import TooLargeError, UndefinedError, exact
from grpo_kit.verdicts._reading import read
from grpo_kit.verdicts._spelling import plain

_SIGN = re.compile(r" *(<|>|\\le(?![a-z])|\\ge(?![a-z])) *")
_FLIP = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
_TERM = r"\(?\d+(?:\.\d+)?\)?"
_ASKED = re.compile(rf"(?<![\w.^/*+-]){_TERM}(?:\s*[-+*/×÷−]\s*{_TERM})+(?![\w^/*+]|[.,]\d)")
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
    made: dict[str, str] = {}
    for row in _table():
        if row["list"] != which or row["name"] in made or (row["kinds"] and kind not in row["kinds"].split()):
            continue
        found = re.search(row["pattern"] or r"\A.*\Z", gold, re.S)
        if found is None:
            continue
        groups = {str(place): group or "" for place, group in enumerate(found.groups(), 1)}
        given = {
            "g": gold,
            "copied": copied,
            "other": next(iter(made.values()), f"{gold} 7"),
            **fields,
            **groups,
        }
        if all(given.get(name) is not None for name in re.findall(r"<(\w+)>", row["text"])):
            filled = re.sub(r"<(\w+)>", lambda m, given=given: given[m[1]], row["text"])
            text = (gold[: found.start()] + filled + gold[found.end() :]).strip(" ")
            if text and text not in made.values():
                made[row["name"]] = text
    return made


def _kind_and_fields(text: str) -> tuple[str, Fields]:
    """The kind of a gold, by the table's name, and the fields of its texts."""
    known = _known(text)
    number, kind = number_of(text, known), type(known).__name__
    if isinstance(known, kinds.Quantity):
        alone = not (known.units or known.is_percent)
        kind = "Number" if number else "Based" if known.base else "Formula" if alone else "Measured"
    fields: dict[str, str | None] = {"invisible": "\u200b", "hard": "\u00a0", "bumped": _bump(text)}
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
        fields |= number_fields(number, known)
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

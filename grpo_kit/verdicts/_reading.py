"""From a text to the kind of answer that it is: read whole, or not understood. See kinds."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from grpo_kit.verdicts._formula import num
from grpo_kit.verdicts._kinds import (
    HIGHEST,
    LOWEST,
    PLAIN,
    Bounds,
    Choice,
    Clock,
    Congruence,
    Date,
    Habit,
    Matrix,
    Named,
    Quantity,
    Ratio,
    Row,
    Several,
    Union,
    Words,
)  # fmt: skip
from grpo_kit.verdicts._quantities import (
    formula,
    put_together,
    read_based,
    read_in_words,
    read_quantity,
)
from grpo_kit.verdicts._relations import joined, read_relation, unequal, without
from grpo_kit.verdicts._sentences import pieces, read_clock, read_date
from grpo_kit.verdicts._units import says_more
from grpo_kit.verdicts._value import symbols

_MATRIX = re.compile(
    r"\\begin\{([pbBv]?matrix|smallmatrix|array)\}(?:\{[lcr| ]*\})?(.*)\\end\{\1\}", re.S
)
_CHOICE = re.compile(
    r"(?:(?:option|choice|answer)\s*)?(?:\(\s*(?P<bracketed>[A-Ja-j])\s*\)|(?P<bare>[A-J])(?=$|[.):]))[.):]?\s*"
    r"(?P<content>.*)",
    re.I,
)
# a formula or a list that begins with a letter
_GOES_ON = re.compile(r"[-+*/^=<>_!%(\\]|or\b|and\b")
_WORDS = re.compile(r"[^\\=<>^_{}+*|]*[^\W\d_]{2}[^\\=<>^_{}+*|]*|[^\W\d_]|\\ldots")
_EMPTY_SETS = ("\\emptyset", "empty set", "the empty set", "[]", "no solution", "no solutions", "there is no solution",
               "there are no solutions", "no solution exists", "no solutions exist")  # fmt: skip
_RATIO_WORD = re.compile(r"(?<=\d) to (?=\d)")


_SETS = {"real": "R", "integer": "Z", "rational": "Q", "complex": "C", "natural": "N"}
# all real numbers, every integer, x can be any real number, all real values of x
_ALL = re.compile(
    r"^(?:for )?(?:[a-z] (?:is|can be) )?(?:all(?: of)?(?: the)?|any|every|(?:the )?set of(?: all)?(?: the)?) "
    rf"({'|'.join(_SETS)})s?(?: numbers?| values?)?(?:(?: of)? [a-z])?$|^(?:the )?({'|'.join(_SETS)})(?:s| numbers)$",
    re.I,
)


@lru_cache(4096)
def read(text: str, habit: Habit = PLAIN) -> Any:
    """What the text, in plain()'s spelling, is: one of the kinds above; None if it is not understood as a whole."""
    text = _ALL.sub(
        lambda match: rf"\mathbb{{{_SETS[(match[1] or match[2]).lower()]}}}", text.strip()
    )
    if not text:
        return None
    answer = read_in_words(text)
    for reader in _READERS:
        if answer is not None:
            return answer
        answer = reader(text, habit)
    return answer


def habit_of(text: str, gold: Any) -> Habit:
    """How a gold, with what was read of it, writes."""
    comma = re.fullmatch(r"[^\d]*\d{1,3}(?:[. ]\d{3})+,\d+[^\d]*", text) is not None
    if isinstance(gold, Quantity):
        return Habit(comma=comma, glued=bool(gold.units), letters=symbols(gold.tree))
    return Habit(comma=comma, choice=isinstance(gold, Choice))


def _choice(text: str, habit: Habit) -> Choice | None:
    """(C), C, option C, (C) 25; where the gold is a choice, C. 25 and C: 25 too."""
    match = _CHOICE.fullmatch(text)
    if match is None or _GOES_ON.match(match["content"]):
        return None
    letter, content = match["bracketed"] or match["bare"], match["content"].strip()
    if match["bare"]:
        is_letter_alone = not content and text[-1:] == letter
        if letter.islower() or not (is_letter_alone or habit.choice):
            return None
    if content and not _is_one_answer(content, habit):
        return None
    return Choice(letter, content)


def _is_one_answer(content: str, habit: Habit) -> bool:
    """Whether the text behind a choice's letter is one answer: no other choice, no list, no doubt."""
    if re.fullmatch(r"\(?[A-J]\)?", content) or says_more(content):
        return False
    answer = read(content, replace(habit, choice=True))
    return answer is not None and not isinstance(answer, Choice | Several)


def _matrix(text: str, habit: Habit) -> Matrix | None:
    match = _MATRIX.fullmatch(text)
    if match is None or "\\begin" in match[2]:
        return None
    rows = []
    for line in re.split(r"\\\\|\\cr(?![a-z])", match[2]):
        if line.strip():
            cells = [read(cell.strip(), habit) for cell in line.split("&")]
            rows.append(Row("[]", tuple(cells)))
    if len({len(row.items) for row in rows}) != 1 or any(None in row.items for row in rows):
        return None
    if match[1] == "vmatrix":
        return _determinant([row.items for row in rows])
    return Matrix(tuple(rows))


def _determinant(rows: list[tuple[Any, ...]]) -> Quantity | None:
    """The determinant of up to three rows of quantities, as a formula."""
    if (
        len(rows) != len(rows[0])
        or len(rows) > 3
        or not all(_are(Quantity, row) for row in rows)
    ):
        return None
    if len(rows) == 1:
        return Quantity(rows[0][0].tree)
    tree = num(0)
    for place, cell in enumerate(rows[0]):
        minor = _determinant([row[:place] + row[place + 1 :] for row in rows[1:]])
        tree = ("sub" if place % 2 else "add", tree, ("mul", cell.tree, minor.tree))
    return Quantity(tree)


def _clock_or_date(text: str, habit: Habit) -> Clock | Date | None:
    clock = read_clock(text)
    if clock is not None:
        return Clock(*clock)
    date = read_date(text)
    if date is not None:
        return Date(*date)
    # 2/5/2020: either may be the month, and it is no quotient
    digits = re.fullmatch(r"(\d{1,2})[-/.](\d{1,2})[-/.](\d{4})", text)
    if digits:
        return Words("date {} {} {}".format(*map(int, digits.groups())))
    return None


_SIDES = r"(?:(.*?)(?:\\equiv|=))?(.*?)"  # x \equiv 3


def _congruence(text: str, habit: Habit) -> Congruence | None:
    match = re.fullmatch(rf"{_SIDES}\\pmod\s*\{{?(.*?)\}}?", text)
    match = match or re.fullmatch(rf"{_SIDES}\(?\s*\\?b?mod(?![a-z])\s*(.*?)\)?", text)
    if match is None:
        return None
    remainder, modulus = formula(match[2]), formula(match[3])
    if remainder is None or modulus is None:
        return None
    return Congruence(re.sub(r"\s", "", match[1] or ""), remainder, modulus)


def _several(text: str, habit: Habit) -> Any:
    """Items between commas or words, also in the braces of a set."""
    if text.startswith("\\{") and text.endswith("\\}"):
        return _set(text[2:-2], habit)
    if (
        text.startswith("{")
        and text.endswith("}")
        and len(pieces(text[1:-1], brackets=True)[0]) > 1
    ):
        return _set(text[1:-1], habit)
    if text.lower() in _EMPTY_SETS:
        return Several((), "{")
    parts, word = pieces(text, comma=habit.comma)
    items = [read(part, habit) for part in parts] if len(parts) > 1 else [None]
    if None in items:
        return None
    if word == "and" and len(items) == 2 and _are(Quantity, items):
        total = put_together(*items)
        if total is not None:
            return total
    items = _named_alike(items)
    if _are(Bounds, items):
        return joined(items, word)
    if word == "or" and _are(Row, items):
        return Union(tuple(items))
    return Several(_flat(items), word)


def _set(content: str, habit: Habit) -> Any:
    if re.search(r"\||:|\\\{", content):
        return _set_of(content, habit)
    parts, word = pieces(content, comma=habit.comma, brackets=True)
    if word != ",":  # a set of this or that
        return None
    items = [read(part, habit) for part in parts if parts != [""]]
    if None in items:
        return None
    return Several(_flat(_named_alike(items)), "{")


def _are(kind: type, items: Iterable[Any]) -> bool:
    return all(isinstance(item, kind) for item in items)


def _named_alike(items: list[Any]) -> list[Any]:
    """The items, each with the name of all: n = 2, 3, 4; x is not 1, 2; x_1 = 2, x_2 = 3 are values of x."""
    match items:
        case [Named(name), *others] if _are(Quantity, others):
            return [items[0], *(Named(name, item) for item in others)]
        case [Bounds(name, Union((_, _))), *others] if _are(Quantity, others):
            return [items[0], *(unequal(name, item) for item in others)]
    if _are(Named, items) and len({item.name for item in items}) == len(items):
        letters = {re.sub(r"_\d$", "", item.name) for item in items}
        if len(letters) == 1:
            return [Named(*letters, item.value) for item in items]
    return items


def _flat(items: list[Any]) -> tuple[Any, ...]:
    """The items, with both values of each plus-minus."""
    flat: list[Any] = []
    for item in items:
        match item:
            case Several(values, "\\pm"):
                flat += values
            case _:
                flat.append(item)
    return tuple(flat)


def _set_of(content: str, habit: Habit) -> Bounds | Row | Union | None:
    """{x | x > 3}, {x in R : 1 < x < 2}, {x | x in R}: the bounds behind the bar."""
    match = re.fullmatch(r"\s*([a-zA-Z])\s*(?:\\in\s*\\mathbb\{R\})?\s*[|:](.*)", content)
    if match is None:
        return None
    bounds = read(match[2].strip(), habit)
    match bounds:
        case Named(name, Row() | Union()) if name == match[1]:
            return bounds.value
        case Bounds(name) if name == match[1]:
            return bounds
    return None


def _relation(text: str, habit: Habit) -> Any:
    return read_relation(text, habit, read)


def _rows(text: str, habit: Habit) -> Any:
    """Tuples and intervals, and unions of them."""
    if text == "\\mathbb{R}":
        return Row("()", (LOWEST, HIGHEST))
    exception = re.fullmatch(
        r"\\mathbb\{R\}(?:\s*(?:\\setminus|-)\s*(?=\\\{.*\\\}$)| except )(.*)", text
    )
    if exception:
        points = read(exception[1], habit)
        points = list(points.items) if isinstance(points, Several) else [points]
        if _are(Quantity, points):
            return without(points)
        return None
    rows = [_row(part.strip(), habit) for part in re.split(r"\\cup(?![a-z])", text)]
    if None in rows:
        return None
    if len(rows) == 1:
        return rows[0]
    return Union(tuple(rows))


def _row(text: str, habit: Habit) -> Row | Matrix | None:
    text = text.replace("\\langle", "(").replace("\\rangle", ")")
    # <1, 2>, P(1, 2)
    text = re.sub(r"^<(.*,.*)>$", r"(\1)", re.sub(r"^[ABD-Z]\s?(?=\(.*,)", "", text))
    if len(text) < 3 or text[0] not in "([]" or text[-1] not in ")][":
        return None
    parts = pieces(text[1:-1], comma=habit.comma, brackets=True)[0]
    brackets = text[0] + text[-1]
    if len(parts) < 2 and brackets != "[]":  # (5) is 5; [5] is a list
        return None
    items = tuple(read(re.sub(r"""^(["'])(.*)\1$""", r"\2", part), habit) for part in parts)
    if None in items:
        return None
    if text[0] == "[" and all(
        isinstance(item, Row) and item.brackets == "[]" for item in items
    ):
        if len({len(item.items) for item in items}) == 1:
            return Matrix(items)
    brackets = re.sub(r"^\]", "(", re.sub(r"\[$", ")", brackets))  # ]1, 2[ is an open interval
    return Row(brackets, items)


def _ratio(text: str, habit: Habit) -> Ratio | None:
    parts = _RATIO_WORD.sub(":", text).split(":")
    trees = [formula(part, habit) for part in parts]
    if None in trees or len(trees) == 1:
        return None
    return Ratio(tuple(trees))


def _words(text: str, habit: Habit) -> Words | None:
    if _WORDS.fullmatch(text):
        return Words(text)
    return None


_READERS = (_choice, _matrix, _clock_or_date, read_based, _congruence, _several, _relation, _rows, _ratio,
            read_quantity, _words)  # fmt: skip

"""Quantities: a value, and perhaps what it is of: money, a unit, counted things, per cent, a base."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

from grpo_kit.verdicts._formula import Tree, map_children, nodes, num, parse
from grpo_kit.verdicts._formula_tokens import NotUnderstoodError, number_of
from grpo_kit.verdicts._kinds import INFINITY, PLAIN, Habit, Quantity, Several
from grpo_kit.verdicts._rational import TooLargeError, UndefinedError, exact, exact_or_none
from grpo_kit.verdicts._sentences import number_in_words
from grpo_kit.verdicts._units import AFTER, read_unit
from grpo_kit.verdicts._value import symbols

_MONEY = "$€£¥₹₩₽¢"
_BEFORE = re.compile(
    rf"([+-]?)\s*(US\$|A\$|C\$|[A-Z]{{3}}(?=\s)|Rs\.?(?=\s?\d)|[{_MONEY}])\s*([+-]?)\s*"
    r"((?:\d[\d., ']*)?\d|\.\d+|\\frac.*?)(\s?(?:k|K|m|M|bn|B)(?![A-Za-z]))?(\s*(?:[a-z/].*)?)(/-)?"
)
_THOUSANDS = {"": 1, "k": 10**3, "K": 10**3, "m": 10**6, "M": 10**6, "bn": 10**9, "B": 10**9}
_COMPOUNDS = (  # in short, and as they are read
    (r"^(\d+)\s?h(?:rs?|ours?)?\s?(\d+)\s?m(?:in|ins|inutes)?$", r"\1 hours \2 minutes"),
    (r"^(\d+)\s?'\s?(\d+(?:\.\d+)?)\s?\"$", r"\1 feet \2 inches"),
    (r"^(\d+)\s*\^\s*\\circ\s*(\d+)\s*'$", r"\1 degrees \2 arcminutes"),
    (r"^(?:an|one) (hour|day|week|year|mile|metre|meter) and a half$", r"3/2 \1s"),
    (r"^half an? (hour|day|week|year|mile|metre|meter|dozen|litre|liter|pound)$", r"1/2 \1"),
)
_UNIT_BEGINS = re.compile(
    rf"(?<![A-Za-z\\])(?:[A-Za-z]|\\(?:mu|Omega|cent)(?![a-z]))|\^\s*\\circ|[{_MONEY}円元]"
    r"|\\frac\s*\{\s*[A-Za-z]+\s*\}"
)
_TIMES_WORD = {"hundred": 100, "thousand": 1000, "million": 10**6, "millions": 10**6, "billion": 10**9,
               "billions": 10**9, "trillion": 10**12, "trillions": 10**12, "dozen": 12, "lakh": 10**5,
               "lakhs": 10**5, "crore": 10**7, "crores": 10**7}  # fmt: skip
_PERCENT_WORD = re.compile(
    r"(?<=[\d}) ])\s*(?:percent|per cent|pct\.?|Prozent|por ciento|pour cent|per cento)$"
)
_BASE_WORDS = r"\d{1,2}|two|three|four|five|six|seven|eight|nine|ten|twelve|sixteen"
_BASE = re.compile(
    rf"\(?([0-9A-Za-z]+)\)?\s*(?:_\s*\{{?\s*({_BASE_WORDS})\s*\}}?|\(?\s*(?:in )?base[ -]?({_BASE_WORDS})\s*\)?)"
)


def formula(text: str, habit: Habit = PLAIN) -> Tree | None:
    """The tree of a formula, None if it is none."""
    try:
        return parse(text.strip(), comma=habit.comma)
    except NotUnderstoodError:
        return None


def read_based(text: str, habit: Habit) -> Quantity | None:
    """101_2, AB_{16}, 101 (base 2), 0x1F."""
    match = re.fullmatch(r"0([xbo])([0-9A-Fa-f]+)", text)
    if match:
        digits, base = match[2], {"x": 16, "b": 2, "o": 8}[match[1]]
    else:
        match = _BASE.fullmatch(text)
        if match is None:
            return None
        digits, word = match[1], match[2] or match[3]
        base = int(number_in_words(word) or word)
    is_hexadecimal = base == 16 and digits.isupper()
    if not 2 <= base <= 36 or not (re.search(r"\d", digits) or is_hexadecimal):
        return None
    try:
        return Quantity(num(int(digits, base)), base=base)
    except ValueError:
        return None


def read_quantity(text: str, habit: Habit) -> Quantity | Several | None:
    """A value, with what it is of; with a plus-minus, both values. None if it is not understood."""
    quantity = _bare_quantity(text, habit)
    if quantity is None or not _has_two(quantity.tree):
        return quantity
    values = (replace(quantity, tree=_with_signs(quantity.tree, sign)) for sign in ("pm", "mp"))
    return Several(tuple(values), "\\pm")


def _bare_quantity(text: str, habit: Habit) -> Quantity | None:
    for pattern, replacement in _COMPOUNDS:
        text = re.sub(pattern, replacement, text)
    money = _BEFORE.fullmatch(text)
    if money and read_unit(money[2].strip()):
        return _money(money, habit)
    percent = _PERCENT_WORD.search(text)
    if percent:
        tree = _value(text[: percent.start()], habit)
        if tree is None or tree[0] == "percent":
            return None
        return Quantity(("percent", tree))
    for match in _UNIT_BEGINS.finditer(text):
        quantity = _with_unit(text[: match.start()], text[match.start() :], habit)
        if quantity is not None:
            return quantity
    tree = _value(text, habit)
    if tree is None or _words_alone(text, tree):
        return None
    if tree[0] == "degree":
        return Quantity(tree[1], read_unit("^\\circ"))
    return Quantity(tree)


def _money(match: re.Match, habit: Habit) -> Quantity | None:
    """$5, -$5, $1.2k, $5 million, $5 per hour, 5,00 in a currency with a decimal comma."""
    sign, currency, inner_sign, digits, short, unit, _ = match.groups()
    tree = _value(digits, habit)
    if tree is None or (sign and inner_sign):
        return None
    currency, unit = currency.strip(), unit.strip()
    factor = _THOUSANDS[(short or "").strip()]
    word, _, after_word = unit.partition(" ")
    if word in _TIMES_WORD:
        factor *= _TIMES_WORD[word]
        unit = after_word
    if factor > 1:
        value = exact(("mul", tree, num(factor)))
        if value is None:
            return None
        tree = num(value)
    if "-" in (sign, inner_sign):
        tree = ("neg", tree)
    units = read_unit(f"{currency} {unit}".strip())
    if not units and unit:  # $5 USD has the currency twice
        units = tuple(set(read_unit(currency)) & set(read_unit(unit)))
    return Quantity(tree, units) if units else None


_LETTER = re.compile(r"[A-Za-z](?:\s*\^.*)?")
# "1/2 g t^2" is a formula; "N m", "W h" and "m s^{-2}" are units.
_LETTERS = re.compile(rf"(?![NAWVJ] [mhsA]$|.*-){_LETTER.pattern}(?: {_LETTER.pattern})+")
_PRODUCT = re.compile(r"[abc]{2,3}|[xyz]{2,3}|[pqr]{2,3}|[mnk]{2}|[uvw]{2}")


def _words_alone(text: str, tree: Tree) -> bool:
    """Words and nothing else, whose letters are no product: "dog", "a dog"; no formula such as sin x or x y."""
    if (
        _PRODUCT.fullmatch(text)
        or tree[0] == "call"
        or tree in (INFINITY, ("const", "pi"), ("sym", text))
    ):
        return False
    is_words = re.fullmatch(r"[^\W\d_]+(?: [^\W\d_]+)*", text) is not None
    return is_words and any(len(word) > 1 for word in text.split())


def _value(text: str, habit: Habit) -> Tree | None:
    text = text.strip()
    number = number_of(text, comma=habit.comma)
    if number is None:
        number = number_in_words(text)
    if number is None:
        return formula(text, habit)
    return num(number)


def _with_unit(number: str, unit: str, habit: Habit) -> Quantity | None:
    """The number part and the unit part as a quantity; None where they are not both understood."""
    tree = _value(number, habit)
    if tree is None or symbols(tree):
        return None
    if unit.startswith("^") and _has_function(tree):  # the sine of 30 degrees
        return None
    is_glued = not number.endswith(" ")
    word, _, after_word = unit.partition(" ")
    factor = _TIMES_WORD.get(word.lower())
    if factor:
        tree = num(tree[1] * factor) if tree[0] == "num" else ("mul", tree, num(factor))
        if not after_word:
            return Quantity(tree)
        unit, is_glued = after_word, False
    if AFTER.fullmatch(f" {unit}"):  # 5 in total
        return Quantity(tree)
    if _LETTERS.fullmatch(unit) or (
        habit.letters and habit.letters >= set(re.findall("[A-Za-z]", unit))
    ):
        return None
    is_letter = _LETTER.fullmatch(unit) and not habit.glued
    if is_letter and is_glued:
        return None
    try:
        count = exact(tree)
    except (TooLargeError, UndefinedError):
        return None
    units = read_unit(unit, count=count)
    if not units:
        return _compound(tree, unit, habit)
    if is_letter and unit[0] != "m" and count is None:  # 2 \pi h
        return None
    return Quantity(tree, units)


def _compound(tree: Tree, text: str, habit: Habit) -> Quantity | None:
    """2 hours 30 minutes, 5 feet and 3 inches: one value, in the first unit."""
    match = re.fullmatch(r"([A-Za-z.]+),?(?: and)? (\d.*)", text)
    if match is None or len(text) >= 60:
        return None
    units = read_unit(match[1])
    smaller = _bare_quantity(match[2], habit) if units else None
    if smaller:
        return put_together(Quantity(tree, units), smaller)
    return None


def put_together(larger: Quantity, smaller: Quantity) -> Quantity | None:
    """Two quantities as one, the second in a smaller unit of the same dimension; None if they are no such two."""
    for large, small in product(larger.units, smaller.units):
        if large.dimensions == small.dimensions and small.factor < large.factor:
            scale = num(small.factor / large.factor)
            value = exact_or_none(("add", larger.tree, ("mul", smaller.tree, scale)))
            if value is None:
                return None
            return Quantity(num(value), (large,))
    return None


def read_in_words(text: str) -> Quantity | None:
    """Eighteen, twenty-five eggs, two and a half hours."""
    words = text.split(" ")
    for end in range(len(words), 0, -1):
        value = number_in_words(" ".join(words[:end]))
        if value is not None:
            units = read_unit(" ".join(words[end:]), count=value)
            if units or end == len(words):
                return Quantity(num(value), units)
            return None
    return None


def _has_function(tree: Tree) -> bool:
    return any(
        node[0] == "call" and node[1] not in ("sqrt", "root", "abs") for node in nodes(tree)
    )


def _has_two(tree: Tree) -> bool:
    return any(node[0] in ("pm", "mp") for node in nodes(tree))


def _with_signs(tree: Tree, plus: str) -> Tree:
    """The tree with every plus-minus a plus (plus="pm") or a minus; minus-plus the other way."""
    tree = map_children(lambda part: _with_signs(part, plus), tree)
    match tree:
        case ("pm" | "mp" as sign, None, right):
            if sign == plus:
                return right
            return ("neg", right)
        case ("pm" | "mp" as sign, left, right):
            return ("add" if sign == plus else "sub", left, right)
    return tree

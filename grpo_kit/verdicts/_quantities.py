"""Quantities: a value, and perhaps what it is of: money, a unit, counted things, per cent, a base."""

from __future__ import annotations

import re
from dataclasses import replace

from grpo_kit.verdicts._formula import Tree, map_children, nodes, num, parse
from grpo_kit.verdicts._formula_tokens import NotUnderstoodError, number_of
from grpo_kit.verdicts._kinds import INFINITY, PLAIN, Habit, Quantity, Several
from grpo_kit.verdicts._rational import TooLargeError, UndefinedError, exact
from grpo_kit.verdicts._sentences import number_in_words
from grpo_kit.verdicts._units import AFTER, read_unit
from grpo_kit.verdicts._value import symbols

_MONEY = "$€£¥₹₩₽¢"
_BEFORE = re.compile(
    rf"([+-]?)\s*(US\$|A\$|C\$|[A-Z]{{3}}(?=\s)|Rs\.?(?=\s?\d)|[{_MONEY}])\s*([+-]?)\s*"
    r"((?:\d[\d., ']*)?\d|\.\d+|\\frac.*?)(\s?(?:k|K|m|M|bn|B)(?![A-Za-z]))?(\s*(?:[a-z/].*)?)(/-)?"
)
_THOUSANDS = {"k": 10**3, "K": 10**3, "m": 10**6, "M": 10**6, "bn": 10**9, "B": 10**9}
_TOGETHER = (  # compounds in short: what it is, and as it is read
    (re.compile(r"(\d+)\s?h(?:rs?|ours?)?\s?(\d+)\s?m(?:in|ins|inutes)?"), r"\1 hours \2 minutes"),
    (re.compile(r"(\d+)\s?'\s?(\d+(?:\.\d+)?)\s?\""), r"\1 feet \2 inches"),
    (re.compile(r"(\d+)\s*\^\s*\\circ\s*(\d+)\s*'"), r"\1 degrees \2 arcminutes"),
    (re.compile(r"(?:an|one) (hour|day|week|year|mile|metre|meter) and a half"), r"3/2 \1s"),
    (re.compile(r"half an? (hour|day|week|year|mile|metre|meter|dozen|litre|liter|pound)"), r"1/2 \1"),
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
    prefixed = re.fullmatch(r"0([xbo])([0-9A-Fa-f]+)", text)
    match = _BASE.fullmatch(text)
    if prefixed:
        digits, base = prefixed[2], {"x": 16, "b": 2, "o": 8}[prefixed[1]]
    elif match:
        digits, written = match[1], match[2] or match[3]
        base = int(number_in_words(written) or written)
    else:
        return None
    if not 2 <= base <= 36 or not (re.search(r"\d", digits) or (base == 16 and digits.isupper())):
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
    ends = (replace(quantity, tree=_with_signs(quantity.tree, sign)) for sign in ("pm", "mp"))
    return Several(tuple(ends), "\\pm")


def _bare_quantity(text: str, habit: Habit) -> Quantity | None:
    for short, long in _TOGETHER:
        match = short.fullmatch(text)
        text = match.expand(long) if match else text
    money = _BEFORE.fullmatch(text)
    if money and read_unit(money[2].strip()):
        return _money(money, habit)
    percent = _PERCENT_WORD.search(text)
    if percent:
        tree = _value(text[: percent.start()], habit)
        return None if tree is None or tree[0] == "percent" else Quantity(("percent", tree))
    for begins in _UNIT_BEGINS.finditer(text):
        place = begins.start()
        quantity = _with_unit(text[:place].strip(), text[place:].strip(), text, place, habit)
        if quantity is not None:
            return quantity
    tree = _value(text, habit)
    if tree is None or _words_alone(text, tree):
        return None
    return Quantity(tree[1], read_unit("^\\circ")) if tree[0] == "degree" else Quantity(tree)


def _money(match: re.Match, habit: Habit) -> Quantity | None:
    """$5, -$5, $1.2k, $5 million, $5 per hour, 5,00 in a currency with a decimal comma."""
    sign, currency, inner, digits, short, tail, _ = match.groups()
    if sign and inner:
        return None
    tree = _value(digits, habit)
    times = _THOUSANDS[short.strip()] if short else 1
    currency, tail = currency.strip(), tail.strip()
    word, _, rest = tail.partition(" ")
    if word in _TIMES_WORD:
        times, tail = times * _TIMES_WORD[word], rest
    if tree is not None and times > 1:
        value = exact(("mul", tree, num(times)))
        tree = None if value is None else num(value)
    if tree is None:
        return None
    units = read_unit(f"{currency} {tail}".strip())
    if not units and tail:  # $5 USD says it twice
        units = tuple(set(read_unit(currency)) & set(read_unit(tail)))
    tree = ("neg", tree) if "-" in (sign, inner) else tree
    return Quantity(tree, units) if units else None


_LETTER = re.compile(r"[A-Za-z](?:\s*\^.*)?")
# "1/2 g t^2" is a formula; "N m", "W h" and "m s^{-2}" are units.
_LETTERS = re.compile(rf"(?![NAWVJ] [mhsA]$|.*-){_LETTER.pattern}(?: {_LETTER.pattern})+")
_PRODUCT = re.compile(r"[abc]{2,3}|[xyz]{2,3}|[pqr]{2,3}|[mnk]{2}|[uvw]{2}")


def _words_alone(text: str, tree: Tree) -> bool:
    """Words and nothing else, whose letters are no product: "dog", "a dog"; no formula such as sin x or x y."""
    if _PRODUCT.fullmatch(text) or tree[0] == "call" or tree in (INFINITY, ("const", "pi"), ("sym", text)):
        return False
    is_words = re.fullmatch(r"[^\W\d_]+(?: [^\W\d_]+)*", text) is not None
    return is_words and any(len(word) > 1 for word in text.split())


def _value(text: str, habit: Habit) -> Tree | None:
    text = text.strip()
    number = number_of(text, comma=habit.comma)
    if number is None:
        number = number_in_words(text)
    return formula(text, habit) if number is None else num(number)


def _with_unit(number: str, unit: str, text: str, place: int, habit: Habit) -> Quantity | None:
    """The number part and the unit part as a quantity; None where they are not both understood."""
    word, _, rest = unit.partition(" ")
    factor = _TIMES_WORD.get(word.lower()) if number else None
    tree = _value(number, habit) if number else None
    if tree is not None and unit.startswith("^") and tree[0] != "num" and _has_function(tree):
        return None  # the sine of 30 degrees
    if tree is None or symbols(tree):
        return None if number else read_in_words(text)
    if factor is not None:
        tree = num(tree[1] * factor) if tree[0] == "num" else ("mul", tree, num(factor))
        if not rest:
            return Quantity(tree)
        unit = rest
    if f" {unit}" == (AFTER.search(f" {unit}") or [None])[0]:  # 5 in total
        return Quantity(tree)
    is_letter = _LETTER.fullmatch(unit) is not None
    if _LETTERS.fullmatch(unit) or (habit.letters and habit.letters >= set(re.findall("[A-Za-z]", unit))):
        return None
    if is_letter and factor is None and text[place - 1 : place] != " " and not habit.glued:
        return None
    try:
        count = exact(tree)
    except (TooLargeError, UndefinedError):
        return None
    units = read_unit(unit, count=count)
    if not units:
        return _compound(tree, unit, habit)
    if is_letter and unit[0] != "m" and count is None and not habit.glued:  # 2 \pi h
        return None
    return Quantity(tree, units)


def _compound(tree: Tree, rest: str, habit: Habit) -> Quantity | None:
    """2 hours 30 minutes, 5 feet and 3 inches: one value, in the first unit."""
    match = re.fullmatch(r"([A-Za-z.]+),?(?: and)? (\d.*)", rest)
    first = read_unit(match[1]) if match else ()
    more = _bare_quantity(match[2], habit) if first and len(rest) < 60 else None
    return put_together(Quantity(tree, first), more) if isinstance(more, Quantity) else None


def put_together(whole: Quantity, part: Quantity) -> Quantity | None:
    """Two quantities as one, the second in a smaller unit of the same dimension; None if they are no such two."""
    for large in whole.units:
        for small in part.units:
            if large.dimensions == small.dimensions and small.factor < large.factor:
                try:
                    share = num(small.factor / large.factor)
                    value = exact(("add", whole.tree, ("mul", part.tree, share)))
                except (TooLargeError, UndefinedError):
                    return None
                return None if value is None else Quantity(num(value), (large,))
    return None


def read_in_words(text: str) -> Quantity | None:
    """Eighteen, twenty-five eggs, two and a half hours."""
    words = text.split(" ")
    for end in range(len(words), 0, -1):
        value = number_in_words(" ".join(words[:end]))
        if value is not None:
            unit = " ".join(words[end:])
            units = read_unit(unit, count=value) if unit else ()
            return Quantity(num(value), units) if units or not unit else None
    return None


def _has_function(tree: Tree) -> bool:
    return any(node[0] == "call" and node[1] not in ("sqrt", "root", "abs") for node in nodes(tree))


def _has_two(tree: Tree) -> bool:
    return any(node[0] in ("pm", "mp") for node in nodes(tree))


def _with_signs(tree: Tree, plus: str) -> Tree:
    """The tree with every plus-minus a plus (plus="pm") or a minus; minus-plus the other way."""
    tree = map_children(lambda part: _with_signs(part, plus), tree)
    match tree:
        case ("pm" | "mp" as sign, None, right):
            return right if sign == plus else ("neg", right)
        case ("pm" | "mp" as sign, left, right):
            return ("add" if sign == plus else "sub", left, right)
    return tree

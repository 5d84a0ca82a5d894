"""Is the answer what the gold is? One rule a pair of kinds; another kind is wrong unless a rule says otherwise.

Longer than 300 lines because the rules of one table are read together.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from typing import Any

from grpo_kit.verdicts._formula import Tree, children, map_children, nodes, num
from grpo_kit.verdicts._kinds import (
    Bounds,
    Choice,
    Clock,
    Congruence,
    Date,
    Equation,
    Inequality,
    Matrix,
    Named,
    Quantity,
    Ratio,
    Row,
    Several,
    Union,
    Words,
)  # fmt: skip
from grpo_kit.verdicts._rational import UndefinedError, exact
from grpo_kit.verdicts._reading import read
from grpo_kit.verdicts._units import same_dimension
from grpo_kit.verdicts._value import distance, ratio, same_value, symbols


@dataclass(frozen=True)
class Rules:
    """What else counts as the same. See grpo_kit.rewards.MathAnswer for what each one means."""

    units: str = "optional"
    tolerance: float | None = None
    significant: int | None = None
    case: bool = False
    expressions: bool = False


_NAMED = Named | Bounds
_WITH_ITEMS = Several | Row | Union | Matrix


def same(gold: Any, answer: Any, rules: Rules) -> bool:
    """Whether an answer that was read is the gold that was read. Raises TooLargeError, OutOfTimeError."""
    if isinstance(gold, _NAMED) or isinstance(answer, _NAMED):
        return _same_with_names(gold, answer, rules)
    if isinstance(gold, _WITH_ITEMS) or isinstance(answer, _WITH_ITEMS):
        return _same_items(gold, answer, rules)
    match gold, answer:
        case Quantity(), Quantity():
            return _same_quantity(gold, answer, rules)
        case (Equation(), Equation()) | (Inequality(), Inequality()):
            return _same_equation(gold, answer)
        case Ratio(), Ratio():
            return _same_ratio(gold.parts, answer.parts)
        case Ratio(), Quantity(tree=("div", top, bottom)):
            return _same_ratio(gold.parts, (top, bottom))
        case Clock() | Ratio(), Clock() | Ratio():
            return _same_time(gold, answer)
        case Date(), Date():
            is_same_year = gold.year in (None, answer.year)
            return is_same_year and (gold.month, gold.day) == (answer.month, answer.day)
        case Congruence(), Congruence():
            return _same_congruence(gold, answer)
        case Choice(), Choice():
            return gold.letter == answer.letter and _same_content(
                gold.content, answer.content, rules
            )
        case Words(), Words():
            return same_words(gold.text, answer.text, case=rules.case)
    return False


def _same_with_names(gold: Any, answer: Any, rules: Rules) -> bool:
    """x = 5, x < 5, f(x) = 2x, on one side or on both."""
    match gold, answer:
        case Named(), Named():
            return _same_named(gold, answer, rules)
        case Named() | Bounds(), Named() | Bounds():
            return gold.name == answer.name and same(gold.value, answer.value, rules)
        case Named(), Equation():
            return _same_equation(_as_equation(gold), answer)
        case Equation(), Named():
            return _same_equation(gold, _as_equation(answer))
        case Named(), _:
            return not _is_letter(gold.value) and same(gold.value, answer, rules)
        case Bounds(), Row() | Union():
            return same(gold.value, answer, rules)
        case Row() | Union(), Bounds():
            return same(gold, answer.value, rules)
        case _, Named():
            is_at_a_point = re.search(r"\(\d|''", answer.name) and _has_letters(answer.value)
            return (
                not _is_letter(gold) and not is_at_a_point and same(gold, answer.value, rules)
            )
    return False


def _same_items(gold: Any, answer: Any, rules: Rules) -> bool:
    """Lists, sets, tuples, intervals and matrices. [1, 2, 3] is a list, [1, 2] may be an interval."""
    match gold, answer:
        case Several(), Several():
            return _same_list(gold, answer, rules)
        case (Several() | Matrix(), Row(brackets="()")) | (
            Row(brackets="()"),
            Several() | Matrix(),
        ):
            return _in_order(_components(gold), _components(answer), rules)
        case Several(), Row(brackets="[]", items=items) if len(items) != 2:
            return same(gold, Several(items, gold.word), rules)
        case Row(brackets="[]", items=items), Several(word="," | "and") if len(items) != 2:
            return _in_order(items, answer.items, rules)
        case Row(), Row():
            return gold.brackets == answer.brackets and _in_order(
                gold.items, answer.items, rules
            )
        case Row() | Union(), Row() | Union():
            return _in_any_order(gold.rows, answer.rows, rules)
        case Matrix(), Matrix():
            return _in_order(gold.rows, answer.rows, rules)
    return False


def _same_list(gold: Several, answer: Several, rules: Rules) -> bool:
    """1, 2 and 2, 1; x = 1, y = 2 and y = 2, x = 1. "or" is another thing for names and words."""
    is_same_word = (gold.word == "or") == (answer.word == "or")
    if _is_assignment(gold) or _is_assignment(answer):
        values, answer_values = _by_name(gold), _by_name(answer)
        if "" in values or values.keys() != answer_values.keys() or not is_same_word:
            return False
        if len(gold.items) > len(values) or len(answer.items) > len(values):  # one name twice
            return False
        return all(same(values[name], answer_values[name], rules) for name in values)
    has_words = any(isinstance(item, Words | Choice) or _is_letter(item) for item in gold.items)
    if has_words and not is_same_word:
        return False
    compare = _in_order if gold.ordered or answer.ordered else _in_any_order
    return compare(gold.items, answer.items, rules)


def _components(side: Several | Matrix | Row) -> Sequence[Any]:
    """The components of a vector: (3, 4); x = 3, y = 4; a matrix of one column. Else []."""
    if isinstance(side, Row):
        return side.items
    if isinstance(side, Matrix):
        return [row.items[0] for row in side.rows if len(row.items) == 1]
    if not _is_assignment(side):
        return []
    return [value for _, value in sorted(_by_name(side).items())]


def _is_assignment(several: Several) -> bool:
    """Whether the items are values of different letters: x = 1, y = 2. x_1 = 2, x_2 = 3 are two of one letter."""
    return (
        len({item.name.partition("_")[0] for item in several.items if isinstance(item, Named)})
        > 1
    )


def _by_name(several: Several) -> dict[str, Any]:
    return {getattr(item, "name", ""): getattr(item, "value", item) for item in several.items}


def _same_time(gold: Clock | Ratio, answer: Clock | Ratio) -> bool:
    """At least one of the two is a time; 2:11 may be a ratio too."""
    match gold, answer:
        case Clock(), Clock():
            if gold.half is None and answer.half in ("am", "pm") and gold.minutes <= 720:
                return gold.minutes % 720 == answer.minutes % 720
            return gold.minutes == answer.minutes
        case Clock(half=None), Ratio():
            return gold.minutes % 60 >= 10 and _as_ratio(gold) == answer.parts
        case Ratio(), Clock(half=None):
            return _same_ratio(gold.parts, _as_ratio(answer))
    return False


def _as_ratio(clock: Clock) -> tuple[Tree, ...]:
    hours, minutes = divmod(clock.minutes, 60)
    return num(hours), num(minutes)


def _same_content(gold: str, answer: str, rules: Rules) -> bool:
    """Whether the texts behind two equal letters of a choice agree; a missing text agrees with any."""
    if not gold or not answer or gold == answer:
        return True
    gold_read, answer_read = read(gold), read(answer)
    return (
        gold_read is not None
        and answer_read is not None
        and same(gold_read, answer_read, rules)
    )


def same_words(gold: str, answer: str, *, case: bool) -> bool:
    """Whether two texts are the same words in the same order. Capitals do not matter but in a gold of capitals alone.

    >>> same_words("no solution", "No solution!", case=False), same_words("ABC", "abc", case=False)
    (True, False)
    """
    is_initials = gold.isupper() and " " not in gold
    spellings = (gold, gold.capitalize(), gold.lower())
    # Co is not CO
    is_symbol = len(gold) == 2 and gold.lower() != "no" and answer not in spellings
    if not (case or is_initials or is_symbol or len(gold) == 1):
        gold, answer = gold.casefold(), answer.casefold()
    return _bare(gold) == _bare(answer)


def _bare(text: str) -> str:
    text = re.sub(r"[\s-]+", " ", text.rstrip(" .,;:!").strip(' "()'))
    return re.sub(r"^(?:the|an?|on|in|at) (?=\w)", "", text, flags=re.I)


def _is_letter(value: Any) -> bool:
    return isinstance(value, Quantity) and value.tree[0] == "sym"


def _has_letters(value: Any) -> bool:
    return isinstance(value, Quantity) and bool(symbols(value.tree))


def _same_named(gold: Named, answer: Named, rules: Rules) -> bool:
    """y = 2x and f(x) = 2x; f(t) = 2t and f(x) = 2x; y = x + 1 and x = y - 1."""
    letter, argument = _letter_and_argument(gold.name)
    other_letter, other_argument = _letter_and_argument(answer.name)
    if letter != other_letter and {letter, other_letter} != {"y", "f"}:
        are_letters = len(gold.name) == len(answer.name) == 1
        return are_letters and _same_equation(_as_equation(gold), _as_equation(answer))
    value = answer.value
    if argument and other_argument and argument != other_argument:
        if not (
            argument.isalpha() and other_argument.isalpha() and isinstance(value, Quantity)
        ):
            return False
        if argument in symbols(value.tree):
            return False
        value = _renamed(value, other_argument, argument)
    return same(gold.value, value, rules)


def _letter_and_argument(name: str) -> tuple[str, str]:
    """The letter of a function and the letter in its brackets: f(x)."""
    letter, _, argument = name.partition("(")
    return letter, argument.removesuffix(")")


def _as_equation(named: Named) -> Equation | None:
    """y = 2x + 3 as an equation; x = 5 is none: it is solved, and 2x = 10 is not."""
    if not _has_letters(named.value) or len(named.name.rstrip("'")) > 1:
        return None
    return Equation(("sub", ("sym", named.name), named.value.tree))


def _same_equation(gold: Any, answer: Any) -> bool:
    if gold is None or type(gold) is not type(answer):
        return False
    factor_sign = ratio(answer.difference, gold.difference)
    if isinstance(gold, Inequality):
        return gold.strict == answer.strict and factor_sign == 1
    return factor_sign is not None


def _in_order(gold: Sequence[Any], answer: Sequence[Any], rules: Rules) -> bool:
    return len(gold) == len(answer) and all(
        same(*pair, rules) for pair in zip(gold, answer, strict=True)
    )


def _in_any_order(gold: Sequence[Any], answer: Sequence[Any], rules: Rules) -> bool:
    """Whether each item has a partner of its own."""
    if len(gold) != len(answer) or len(gold) > 40:
        return False
    partners = list(answer)
    for item in gold:
        partner = next((partner for partner in partners if same(item, partner, rules)), None)
        if partner is None:
            return False
        partners.remove(partner)
    return True


def _same_ratio(gold: Sequence[Tree], answer: Sequence[Tree]) -> bool:
    if len(gold) != len(answer):
        return False
    pairs = list(zip(gold, answer, strict=True))
    if any(same_value(part, num(0)) for part in (*gold, *answer)):
        return all(same_value(*pair) for pair in pairs)
    a, b = pairs[0]
    return all(same_value(("mul", a, d), ("mul", b, c)) for c, d in pairs[1:])


def _same_congruence(gold: Congruence, answer: Congruence) -> bool:
    modulus = exact(gold.modulus)
    if not modulus or not same_value(gold.modulus, answer.modulus):
        return gold == answer
    if gold.name and answer.name and gold.name != answer.name:
        return False
    remainders = exact(gold.remainder), exact(answer.remainder)
    if None in remainders:
        return False
    return (remainders[0] - remainders[1]) % modulus == 0


def _same_quantity(gold: Quantity, answer: Quantity, rules: Rules) -> bool:
    if gold.base is not None and gold.base != answer.base:
        return False
    if answer.is_percent and not gold.is_percent and not _is_fraction(gold.tree):
        return False
    answer = _with_constant_of(gold, answer)
    is_number = not symbols(gold.tree)
    if (
        is_number
        and not rules.expressions
        and unfinished(answer.tree)
        and not unfinished(gold.tree)
    ):
        return False
    if answer.units or rules.units == "optional":
        scaled = _on_one_scale(gold, answer)
        if scaled:
            return same_value(*scaled)
    if not gold.units:
        return _same_number(gold.tree, answer.tree, rules)
    if not answer.units:
        is_refused = rules.units == "required" and not symbols(answer.tree)
        return not is_refused and _same_number(gold.tree, answer.tree, rules)
    for unit, answer_unit in product(gold.units, answer.units):
        if same_dimension(unit, answer_unit):
            tree = answer.tree
            if unit.factor != answer_unit.factor:
                tree = ("mul", tree, num(answer_unit.factor / unit.factor))
            return _same_number(gold.tree, tree, rules)
    return False


def _with_constant_of(gold: Quantity, answer: Quantity) -> Quantity:
    """The answer, with the gold's letter C for the constant of an integration (c, K, k)."""
    letters, answer_letters = symbols(gold.tree), symbols(answer.tree)
    if "C" in letters - answer_letters:
        for name in ("c", "K", "k"):
            if name in answer_letters - letters:
                return _renamed(answer, name, "C")
    return answer


# A temperature as a number of kelvin, an angle as a number of degrees.
_TEMPERATURES = {
    "kelvin": lambda t: t,
    "celsius": lambda t: ("add", t, num("273.15")),
    "fahrenheit": lambda t: ("mul", ("add", t, num("459.67")), num("5/9")),
}
_ANGLES = {
    "degree": lambda t: t,
    "radian": lambda t: ("div", ("mul", t, num(180)), ("const", "pi")),
}


def _on_one_scale(gold: Quantity, answer: Quantity) -> tuple[Tree, Tree] | None:
    """Both values on one scale where they are on two; None if they are no temperatures or angles."""
    scale, answer_scale = _scale(gold), _scale(answer)
    for scales in (_TEMPERATURES, _ANGLES):
        if scale in scales and answer_scale in scales and scale != answer_scale:
            return scales[scale](gold.tree), scales[answer_scale](answer.tree)
    return None


def _scale(quantity: Quantity) -> str | None:
    names = [name for unit in quantity.units for name, power in unit.dimensions if power == 1]
    if not names and ("const", "pi") in nodes(quantity.tree):
        return "radian"
    return next((name for name in names if name in _TEMPERATURES or name in _ANGLES), None)


def _renamed(quantity: Quantity, old: str, new: str) -> Quantity:
    """The quantity with another name of a letter."""

    def renamed(tree: Tree) -> Tree:
        if tree == ("sym", old):
            return ("sym", new)
        return map_children(renamed, tree)

    return replace(quantity, tree=renamed(quantity.tree))


def _is_fraction(tree: Tree) -> bool:
    """Whether a percentage may stand for it: 0.5, 1/2; no whole number."""
    try:
        value = exact(tree)
    except UndefinedError:
        return False
    return value is not None and value.denominator != 1


def unfinished(tree: Tree) -> bool:
    """Whether a sum, a difference or a division of numbers was left to the reader: 100 - 94 or 12/2 for 6.

    A mixed number is finished, and so is a fraction that is no whole number.
    """
    try:
        match tree:
            case ("add" | "sub", left, right):
                if exact(left) is not None and exact(right) is not None:
                    return True
            case ("div", ("num", top), ("num", bottom)) if bottom not in (0, 1):
                return top != 0 and (top / bottom).denominator == 1
    except UndefinedError:
        return True
    return any(map(unfinished, children(tree)))


def _same_number(gold: Tree, answer: Tree, rules: Rules) -> bool:
    if same_value(gold, answer):
        return True
    tolerance = Fraction(rules.tolerance or 0)
    if rules.significant:
        size = distance(gold, num(0))
        if size:
            last_digit = Fraction(10) ** (_exponent(size) - rules.significant + 1)
            tolerance = max(tolerance, last_digit / 2)
    if not tolerance:
        return False
    error = distance(gold, answer)
    return error is not None and bool(error * tolerance.denominator <= tolerance.numerator)


def _exponent(size: Any) -> int:
    """The place of the first digit: 0 for 1 to 9.99."""
    if not isinstance(size, Fraction):
        return int(f"{float(size):e}".partition("e")[2])
    digits = len(str(size.numerator)) - len(str(size.denominator))
    if size < Fraction(10) ** digits:
        digits -= 1
    return digits

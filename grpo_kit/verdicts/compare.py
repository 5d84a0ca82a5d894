"""Is the answer what the gold is? One rule a pair of kinds; another kind is wrong unless a rule says otherwise.

Longer than 300 lines because the rules of one table are read together.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from grpo_kit.verdicts._formula import Tree, nodes, num
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


def same(gold: Any, answer: Any, rules: Rules) -> bool:
    """Whether an answer that was read is the gold that was read. Raises TooLargeError, OutOfTimeError."""
    if isinstance(gold, Named | Bounds) or isinstance(answer, Named | Bounds):
        return _same_of_a_name(gold, answer, rules)
    if isinstance(gold, Several | Row | Union | Matrix) or isinstance(answer, Several | Row | Union | Matrix):
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
            return (gold.month, gold.day) == (answer.month, answer.day) and gold.year in (None, answer.year)
        case Congruence(), Congruence():
            return _same_congruence(gold, answer)
        case Choice(), Choice():
            if not gold.content or not answer.content:
                return gold.letter == answer.letter
            return gold.letter == answer.letter and _same_text(gold.content, answer.content, rules)
        case Words(), Words():
            return same_words(gold.text, answer.text, case=rules.case)
    return False


def _same_of_a_name(gold: Any, answer: Any, rules: Rules) -> bool:
    """x = 5, x < 5, f(x) = 2x, on one side or on both."""
    match gold, answer:
        case Named(), Named():
            return _same_named(gold, answer, rules)
        case Named() | Bounds(), Named() | Bounds():
            return gold.name == answer.name and same(gold.value, answer.value, rules)
        case Named(), Equation() | Inequality():
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
            at_a_point = re.search(r"\(\d|''", answer.name) and _has_letters(answer.value)
            return not _is_letter(gold) and not at_a_point and same(gold, answer.value, rules)
    return False


def _same_items(gold: Any, answer: Any, rules: Rules) -> bool:
    """Lists, sets, tuples, intervals and matrices. [1, 2, 3] is a list, [1, 2] may be an interval."""
    match gold, answer:
        case Several(), Several() if _named_apart(gold) or _named_apart(answer):
            return _same_assignment(gold, answer, rules)
        case (Row(brackets="()"), Several()) if _named_apart(answer):  # (3, 4) and x = 3, y = 4
            return _in_order(gold.items, _values_by_name(answer), rules)
        case (Several(), Row(brackets="()")) if _named_apart(gold):
            return _in_order(_values_by_name(gold), answer.items, rules)
        case Several(), Several():
            words = any(isinstance(item, Words | Choice) or _is_letter(item) for item in gold.items)
            if words and (gold.word == "or") != (answer.word == "or"):
                return False
            if gold.ordered or answer.ordered:
                return _in_order(gold.items, answer.items, rules)
            return _in_any_order(gold.items, answer.items, rules)
        case Several(), Row(brackets="[]", items=items) if len(items) != 2:
            return same(gold, Several(items, gold.word), rules)
        case Row(brackets="[]", items=items), Several(word="," | "and") if len(items) != 2:
            return _in_order(items, answer.items, rules)
        case Row(), Row():
            return gold.brackets == answer.brackets and _in_order(gold.items, answer.items, rules)
        case Row() | Union(), Row() | Union():
            rows = [side.rows if isinstance(side, Union) else (side,) for side in (gold, answer)]
            return _in_any_order(*rows, rules)
        case Matrix(), Matrix():
            return _in_order(gold.rows, answer.rows, rules)
        case Matrix(), Row(brackets="()"):  # a column beside a tuple
            return _in_order(_column(gold), answer.items, rules)
        case Row(brackets="()"), Matrix():
            return _in_order(gold.items, _column(answer), rules)
    return False


def _column(matrix: Matrix) -> list[Any]:
    """The cells of a matrix of one column; [] of a wider one."""
    return [row.items[0] for row in matrix.rows if len(row.items) == 1]


def _same_time(gold: Clock | Ratio, answer: Clock | Ratio) -> bool:
    """Of the two at least one is a time; 2:11 may be a ratio too."""
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


def _named_apart(several: Several) -> bool:
    """Whether the items are values of different letters: x = 1, y = 2. x_1 = 2, x_2 = 3 are two of one."""
    return len({item.name.partition("_")[0] for item in several.items if isinstance(item, Named)}) > 1


def _by_name(several: Several) -> dict[str, Any]:
    return {getattr(item, "name", ""): getattr(item, "value", item) for item in several.items}


def _values_by_name(several: Several) -> list[Any]:
    return [value for _, value in sorted(_by_name(several).items())]


def _same_assignment(gold: Several, answer: Several, rules: Rules) -> bool:
    """x = 1, y = 2 beside y = 2, x = 1; "or" is another thing."""
    known, given = _by_name(gold), _by_name(answer)
    if "" in known or known.keys() != given.keys() or (gold.word == "or") != (answer.word == "or"):
        return False
    if len(known) < len(gold.items) or len(given) < len(answer.items):  # one name twice
        return False
    return all(same(value, given[name], rules) for name, value in known.items())


def _same_text(gold: str, answer: str, rules: Rules) -> bool:
    one, other = read(gold), read(answer)
    return gold == answer or (one is not None and other is not None and same(one, other, rules))


def same_words(gold: str, answer: str, *, case: bool) -> bool:
    """Whether two texts are the same words in the same order. Capitals do not matter but in a gold of capitals alone.

    >>> same_words("no solution", "No solution!", case=False), same_words("ABC", "abc", case=False)
    (True, False)
    """
    habits = (gold, gold.capitalize(), gold.lower())
    is_symbol = len(gold) == 2 and gold.lower() != "no" and answer not in habits  # Co is not CO
    is_initials = gold.isupper() and " " not in gold
    if not case and not is_initials and not is_symbol and len(gold) > 1:
        gold, answer = gold.casefold(), answer.casefold()
    return _bare(gold) == _bare(answer)


def _bare(text: str) -> str:
    text = re.sub(r"[\s-]+", " ", text.rstrip(" .,;:!").strip(' "()'))
    return re.sub(r"^(?:the|an?|on|in|at) (?=\w)", "", text, flags=re.I)


def _is_letter(value: Any) -> bool:
    return isinstance(value, Quantity) and value.tree[0] == "sym"


def _same_named(gold: Named, answer: Named, rules: Rules) -> bool:
    one, other = _parts(gold.name), _parts(answer.name)
    if one[0] == other[0] or {one[0], other[0]} == {"y", "f"}:
        value = answer.value
        if one[1] and other[1] and one[1] != other[1]:  # f(t) = 2t is f(x) = 2x
            if not (one[1].isalpha() and other[1].isalpha() and isinstance(value, Quantity)):
                return False
            if one[1] in symbols(value.tree):
                return False
            value = replace(value, tree=_renamed(value.tree, other[1], one[1]))
        return same(gold.value, value, rules)
    if not isinstance(answer.value, Quantity) or (len(gold.name), len(answer.name)) != (1, 1):
        return False
    return _same_equation(_as_equation(gold), _as_equation(answer))


def _parts(name: str) -> tuple[str, str]:
    """A name and what stands in its brackets."""
    base, _, argument = name.partition("(")
    return base, argument.removesuffix(")")


def _has_letters(value: Any) -> bool:
    return isinstance(value, Quantity) and bool(symbols(value.tree))


def _as_equation(named: Named) -> Equation | None:
    """y = 2x + 3 as an equation; x = 5 is none: it is solved, and 2x = 10 is not."""
    if not _has_letters(named.value) or len(named.name.rstrip("'")) > 1:
        return None
    return Equation(("sub", ("sym", named.name), named.value.tree))


def _same_equation(gold: Any, answer: Any) -> bool:
    if gold is None or type(gold) is not type(answer):
        return False
    times = ratio(answer.difference, gold.difference)
    if isinstance(gold, Inequality):
        return gold.strict == answer.strict and times == 1
    return times is not None


def _in_order(gold: Sequence[Any], answer: Sequence[Any], rules: Rules) -> bool:
    return len(gold) == len(answer) and all(same(*pair, rules) for pair in zip(gold, answer, strict=True))


def _in_any_order(gold: Sequence[Any], answer: Sequence[Any], rules: Rules) -> bool:
    """Whether each item has a partner of its own."""
    if len(gold) != len(answer) or len(gold) > 40:
        return False
    left = list(answer)
    for item in gold:
        place = next((place for place, other in enumerate(left) if same(item, other, rules)), None)
        if place is None:
            return False
        del left[place]
    return True


def _as_ratio(clock: Clock) -> tuple[Tree, ...]:
    """2:11 may be either."""
    hours, minutes = divmod(clock.minutes, 60)
    return num(hours), num(minutes)


def _same_ratio(gold: Sequence[Tree], answer: Sequence[Tree]) -> bool:
    if len(gold) != len(answer):
        return False
    pairs = list(zip(gold, answer, strict=True))
    if any(same_value(part, num(0)) for part in [*gold, *answer]):
        return all(same_value(*pair) for pair in pairs)
    (a, b), rest = pairs[0], pairs[1:]
    return all(same_value(("mul", a, d), ("mul", b, c)) for c, d in rest)


def _same_congruence(gold: Congruence, answer: Congruence) -> bool:
    modulus = exact(gold.modulus)
    if modulus is None or not same_value(gold.modulus, answer.modulus) or not modulus:
        return gold == answer
    rests = exact(gold.rest), exact(answer.rest)
    named = gold.name == answer.name or not gold.name or not answer.name
    return named and None not in rests and (rests[0] - rests[1]) % modulus == 0


def _same_quantity(gold: Quantity, answer: Quantity, rules: Rules) -> bool:
    if gold.base is not None and gold.base != answer.base:
        return False
    if answer.is_percent and not gold.is_percent and not _is_part(gold.tree):
        return False
    if "C" in symbols(gold.tree) - symbols(answer.tree):  # a constant of integration by another letter
        others = [name for name in ("c", "K", "k") if name in symbols(answer.tree) - symbols(gold.tree)]
        if others:
            answer = replace(answer, tree=_renamed(answer.tree, others[0], "C"))
    is_number = not symbols(gold.tree)
    if is_number and not rules.expressions and unfinished(answer.tree) and not unfinished(gold.tree):
        return False
    if (answer.units or rules.units == "optional") and (scales := _on_one_scale(gold, answer)):
        return same_value(*scales)
    if not gold.units:
        return _same_number(gold.tree, answer.tree, rules)
    if not answer.units:
        if rules.units == "required" and not symbols(answer.tree):
            return False
        return _same_number(gold.tree, answer.tree, rules)
    for one in gold.units:
        for other in answer.units:
            if same_dimension(one, other):
                tree = answer.tree
                if one.factor != other.factor:
                    tree = ("mul", tree, num(other.factor / one.factor))
                return _same_number(gold.tree, tree, rules)
    return False


# Temperatures and angles, each as a number of kelvin or of degrees.
_SCALES = {
    "kelvin": lambda t: t,
    "celsius": lambda t: ("add", t, num("273.15")),
    "fahrenheit": lambda t: ("mul", ("add", t, num("459.67")), num("5/9")),
    "degree": lambda t: t,
    "radian": lambda t: ("div", ("mul", t, num(180)), ("const", "pi")),
}


def _on_one_scale(gold: Quantity, answer: Quantity) -> tuple[Tree, Tree] | None:
    """Both values on one scale where they were written on two; None if they are no temperatures or angles."""
    scales = [_scale(gold), _scale(answer)]
    angles = [scale in ("degree", "radian") for scale in scales]
    if None in scales or scales[0] == scales[1] or angles[0] != angles[1]:
        return None
    return _SCALES[scales[0]](gold.tree), _SCALES[scales[1]](answer.tree)


def _scale(quantity: Quantity) -> str | None:
    names = [name for unit in quantity.units for name, power in unit.dimensions if power == 1]
    if not names and ("const", "pi") in nodes(quantity.tree):
        return "radian"
    return next((name for name in names if name in _SCALES), None)


def _renamed(tree: Tree, old: str, new: str) -> Tree:
    if tree == ("sym", old):
        return ("sym", new)
    return tuple(_renamed(part, old, new) if isinstance(part, tuple) else part for part in tree)


def _is_part(tree: Tree) -> bool:
    """A fraction or decimal that a percentage may stand for: 0.5, 1/2; no whole number."""
    try:
        value = exact(tree)
    except UndefinedError:
        return False
    return value is not None and value.denominator != 1


def unfinished(tree: Tree) -> bool:
    """Whether a sum, a difference or a division of numbers was left to the reader: 100 - 94 or 12/2 for 6.

    A mixed number is none, nor is a fraction that is no whole number.
    """
    try:
        if tree[0] in ("add", "sub"):
            if all(exact(part) is not None for part in tree[1:]):
                return True
        elif tree[0] == "div" and all(part[0] == "num" for part in tree[1:]) and tree[2][1] not in (0, 1):
            return (tree[1][1] / tree[2][1]).denominator == 1 and tree[1][1] != 0
    except UndefinedError:
        return True
    return any(unfinished(part) for part in tree[1:] if isinstance(part, tuple))


def _same_number(gold: Tree, answer: Tree, rules: Rules) -> bool:
    if same_value(gold, answer):
        return True
    allowed = Fraction(rules.tolerance or 0)
    size = distance(gold, num(0)) if rules.significant else None
    if size:
        last = Fraction(10) ** (_exponent(size) - rules.significant + 1)
        allowed = max(allowed, last / 2)
    if not allowed:
        return False
    apart = distance(gold, answer)
    return apart is not None and bool(apart * allowed.denominator <= allowed.numerator)


def _exponent(size: Any) -> int:
    """The place of the first digit: 0 for 1 to 9.99."""
    if not isinstance(size, Fraction):
        return int(f"{float(size):e}".partition("e")[2])
    digits = len(str(size.numerator)) - len(str(size.denominator))
    return digits if size >= Fraction(10) ** digits else digits - 1

"""Is the answer what the gold is? One rule a pair of kinds; another kind is wrong unless a rule says otherwise.

Longer than 300 lines because the rules of one table are read together.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from grpo_kit.verdicts._formula import Tree, nodes
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
        case (Bounds(), Bounds()) | (Named(), Bounds()) | (Bounds(), Named()):
            values = [getattr(side, "rows", None) or side.value for side in (gold, answer)]
            return gold.name == answer.name and same(*values, rules)
        case Named(), Equation() | Inequality():
            return _same_equation(_as_equation(gold), answer)
        case Equation(), Named():
            return _same_equation(gold, _as_equation(answer))
        case Named(), _:
            return not _is_letter(gold.value) and same(gold.value, answer, rules)
        case Bounds(), Row() | Union():
            return same(gold.rows, answer, rules)
        case Row() | Union(), Bounds():
            return same(gold, answer.rows, rules)
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
            return _in_order(gold.items, _by_name(answer), rules)
        case (Several(), Row(brackets="()")) if _named_apart(gold):
            return _in_order(_by_name(gold), answer.items, rules)
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
        case Union(), Union():
            return _in_any_order(gold.rows, answer.rows, rules)
        case (Union(), Row()) | (Row(), Union()):
            one, other = (gold.rows, (answer,)) if isinstance(gold, Union) else ((gold,), answer.rows)
            return _in_any_order(one, other, rules)
        case (Matrix(), Row(brackets="()")) | (Row(brackets="()"), Matrix()):
            return _same_vector(gold, answer, rules)
        case Matrix(), Matrix():
            return len(gold.rows) == len(answer.rows) and all(
                _in_order(row, other, rules) for row, other in zip(gold.rows, answer.rows, strict=True)
            )
    return False


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


def _by_name(several: Several) -> list[Any]:
    return [
        getattr(item, "value", item)
        for item in sorted(several.items, key=lambda item: getattr(item, "name", ""))
    ]


def _same_assignment(gold: Several, answer: Several, rules: Rules) -> bool:
    """x = 1, y = 2 beside y = 2, x = 1; "or" is another thing."""
    names = [[getattr(item, "name", None) for item in several.items] for several in (gold, answer)]
    if (
        None in names[0] + names[1]
        or sorted(names[0]) != sorted(names[1])
        or len(set(names[0])) < len(names[0])
    ):
        return False
    return (gold.word == "or") == (answer.word == "or") and _in_order(_by_name(gold), _by_name(answer), rules)


def _same_vector(gold: Any, answer: Any, rules: Rules) -> bool:
    """A column beside a tuple."""
    one, other = (
        [row[0] for row in side.rows] if isinstance(side, Matrix) and all(len(row) == 1 for row in side.rows) else
        getattr(side, "items", ())
        for side in (gold, answer)
    )  # fmt: skip
    return bool(one) and _in_order(one, other, rules)


def _same_text(gold: str, answer: str, rules: Rules) -> bool:
    one, other = read(gold), read(answer)
    return gold == answer or (one is not None and other is not None and same(one, other, rules))


def same_words(gold: str, answer: str, *, case: bool) -> bool:
    """Whether two texts are the same words in the same order. Capitals do not matter but in a gold of capitals alone.

    >>> same_words("no solution", "No solution!", case=False), same_words("ABC", "abc", case=False)
    (True, False)
    """
    short = (
        len(gold) == 2 and gold.lower() != "no" and answer not in (gold, gold.capitalize(), gold.lower())
    )  # Co is not CO
    if not case and not (gold.isupper() and " " not in gold) and len(gold) > 1 and not short:
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
    both = isinstance(gold.value, Quantity) and isinstance(answer.value, Quantity)
    if both and symbols(gold.value.tree) and len(gold.name) == 1 and len(answer.name) == 1:
        return _same_equation(_as_equation(gold), _as_equation(answer))
    return False


def _parts(name: str) -> tuple[str, str]:
    """A name and what stands in its brackets."""
    base, _, argument = name.partition("(")
    return base, argument.removesuffix(")")


def _has_letters(value: Any) -> bool:
    return isinstance(value, Quantity) and bool(symbols(value.tree))


def _as_equation(named: Named) -> Equation | None:
    """y = 2x + 3 as an equation; x = 5 is none: it is solved, and 2x = 10 is not."""
    if (
        not isinstance(named.value, Quantity)
        or not symbols(named.value.tree)
        or len(named.name.rstrip("'")) > 1
    ):
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
    return ("num", Fraction(hours)), ("num", minutes)


def _same_ratio(gold: Sequence[Tree], answer: Sequence[Tree]) -> bool:
    if len(gold) != len(answer):
        return False
    pairs = list(zip(gold, answer, strict=True))
    zero = ("num", Fraction(0))
    if any(same_value(part, zero) for part in [*gold, *answer]):
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
    if "C" in symbols(gold.tree) and "C" not in symbols(
        answer.tree
    ):  # a constant of integration by another letter
        other = next(
            (name for name in ("c", "K", "k") if name in symbols(answer.tree) - symbols(gold.tree)), None
        )
        answer = replace(answer, tree=_renamed(answer.tree, other, "C")) if other else answer
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
                scaled = (
                    answer.tree
                    if one.factor == other.factor
                    else ("mul", answer.tree, ("num", other.factor / one.factor))
                )
                return _same_number(gold.tree, scaled, rules)
    return False


# Temperatures and angles, each as a number of kelvin or of degrees.
_SCALES = {
    "kelvin": lambda t: t,
    "celsius": lambda t: ("add", t, ("num", Fraction(5463, 20))),
    "fahrenheit": lambda t: ("mul", ("add", t, ("num", Fraction(45967, 100))), ("num", Fraction(5, 9))),
    "degree": lambda t: t,
    "radian": lambda t: ("div", ("mul", t, ("num", Fraction(180))), ("const", "pi")),
}


def _on_one_scale(gold: Quantity, answer: Quantity) -> tuple[Tree, Tree] | None:
    """Both values on one scale where they were written on two; None if they are no temperatures or angles."""
    names = [
        [name for unit in q.units for name, power in unit.dimensions if power == 1]
        or ["radian"] * (("const", "pi") in nodes(q.tree))
        for q in (gold, answer)
    ]
    found = [next((name for name in several if name in _SCALES), None) for several in names]
    angles = [name in ("degree", "radian") for name in found]
    if None in found or found[0] == found[1] or angles[0] != angles[1]:
        return None
    return _SCALES[found[0]](gold.tree), _SCALES[found[1]](answer.tree)


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
    allowed: Any = None
    if rules.tolerance:
        allowed = Fraction(rules.tolerance)
    if rules.significant:
        size = distance(gold, ("num", Fraction(0)))
        if size:
            last = Fraction(10) ** (_exponent(size) - rules.significant + 1)
            allowed = max(allowed or 0, last / 2)
    if allowed is None:
        return False
    apart = distance(gold, answer)
    return apart is not None and bool(apart * allowed.denominator <= allowed.numerator)


def _exponent(size: Any) -> int:
    """The place of the first digit: 0 for 1 to 9.99."""
    if not isinstance(size, Fraction):
        return int(f"{float(size):e}".partition("e")[2])
    digits = len(str(size.numerator)) - len(str(size.denominator))
    return digits if size >= Fraction(10) ** digits else digits - 1

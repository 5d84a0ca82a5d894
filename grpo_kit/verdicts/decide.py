"""The verdict: is an answer what the gold is? The number that a text is."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

from grpo_kit.verdicts._formula import Tree, map_children, num
from grpo_kit.verdicts._formula_tokens import FUNCTIONS
from grpo_kit.verdicts._kinds import PLAIN, Habit, Named, Quantity
from grpo_kit.verdicts._quantities import formula
from grpo_kit.verdicts._rational import (
    OutOfTimeError,
    TooLargeError,
    UndefinedError,
    exact_or_none,
    limited,
)
from grpo_kit.verdicts._reading import habit_of, read
from grpo_kit.verdicts._spelling import plain
from grpo_kit.verdicts._value import same_value, symbols
from grpo_kit.verdicts.compare import Rules, same

_LONGEST = 1_000  # characters that are read at all
_NUMBERS = Habit(glued=True)  # of texts that are numbers, where a letter is no factor


def verdict(
    gold: str,
    answer: str,
    *,
    rules: Rules | None = None,
    question: str | None = None,
    timeout: float = 5.0,
    numbers_only: bool = False,
) -> bool | None:
    r"""True if the answer is right, False if it is wrong, None if the gold was not understood or the time ran out.

    question: what was asked; an answer that only copies an expression out of it is wrong unless rules.expressions.
    numbers_only: whether a gold that is no number is not understood, and an answer that is none wrong.
    timeout: seconds. Work is bounded besides: a number too large to be worked out is wrong, as a gold None.

    >>> verdict(r"\frac{1}{2}", "50%"), verdict("5", "4 5"), verdict("5 kg", "5000 g"), verdict("5?", "5")
    (True, False, True, None)
    """
    if max(len(gold), len(answer)) > _LONGEST:
        if gold.strip() == answer.strip():
            return True
        return None if len(gold) > _LONGEST else False
    gold_text, answer_text = plain(gold), plain(answer)
    if not gold_text:
        return None
    rules, gold_read = rules or Rules(), None
    try:
        with limited(timeout):
            gold_read = _read_gold(gold_text, question or "", numbers_only)
            if numbers_only and not _is_number(gold_read):
                return None
            if _same_spelling(gold_text, answer_text, gold_read):
                return True
            if gold_read is None:
                return None
            answer_read = read(answer_text, habit_of(gold_text, gold_read))
            if answer_read is None or (numbers_only and not _is_number(answer_read)):
                return False
            if (
                question
                and not rules.expressions
                and _is_copied(gold_read, answer_read, answer_text, question)
            ):
                return False
            if numbers_only:  # a number may be a quotient, so there is no sum to be worked out
                rules = replace(rules, expressions=True)
            return same(gold_read, answer_read, rules)
    except OutOfTimeError:
        return None
    except (RecursionError, UndefinedError):
        # brackets in brackets in brackets; a modulus of 1/0
        return None if gold_read is None else False
    except TooLargeError:
        if gold_read is None or _is_too_large(gold_read, timeout):
            return None
        return False


_SUBSTANCE = re.compile(r"(?=.*\d)(?:[A-Z][a-z]?\d*|\((?:[A-Z][a-z]?\d*)+\)\d*){2,}")


def _same_spelling(gold: str, answer: str, gold_read: Any) -> bool:
    """Whether the texts are equal. Spaces, braces and indices do not count in H_2O and in what is not understood."""
    if gold_read is None and not re.search(r"\w", gold):  # marks alone say nothing
        return False
    if gold == answer:
        return True
    gold, answer = (re.sub(r"[\s_{}]", "", text) for text in (gold, answer))
    return gold == answer and (gold_read is None or _SUBSTANCE.fullmatch(gold) is not None)


def number(text: str) -> Fraction | None:
    """The value of a text that is one number, whatever its unit; None if it is none.

    >>> number("1 234,5 km"), number("12 - 6")
    (Fraction(2469, 2), None)
    """
    if len(text) > _LONGEST:
        return None
    quantity = read(plain(text), _NUMBERS)
    if isinstance(quantity, Quantity) and _is_number(quantity):
        return exact_or_none(quantity.tree)
    return None


def _read_gold(text: str, question: str, numbers_only: bool) -> Any:
    """What the gold is. Its letter is a unit (5 m), unless the question asks for a term with that letter."""
    gold = read(text, _NUMBERS if numbers_only else PLAIN)
    letter = re.search(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])", text)
    if isinstance(gold, Quantity) and gold.units and letter:
        term = rf"\d{letter[0]}\b\s*[-+]|[-+]\s*\d*{letter[0]}\b|\bterms? of \W*{letter[0]}\b"
        if re.search(term, question):
            return read(text, Habit(letters=frozenset(letter[0])))
    return gold


def _is_number(answer: Any) -> bool:
    """One number: a literal, a fraction, a mixed number, 10^3, 3 x 10^8; with a sign, a unit, a name, per cent."""
    if isinstance(answer, Named):
        return _is_number(answer.value)
    if not isinstance(answer, Quantity):
        return False
    tree = answer.tree
    while tree[0] in ("neg", "percent"):
        tree = tree[1]
    match tree:
        case ("num" | "mixed", *_):
            return True
        case ("mul", factor, power):
            return _is_literal(factor) and _is_power_of_ten(power)
        case ("div", top, ("num", _)):
            return _is_literal(top)
    return _is_power_of_ten(tree)


def _is_literal(tree: Tree) -> bool:
    return tree[0] == "num" or (tree[0] == "neg" and tree[1][0] == "num")


def _is_power_of_ten(tree: Tree) -> bool:
    return tree[:2] == ("pow", num(10)) and _is_literal(tree[2])


def _is_too_large(gold: Any, timeout: float) -> bool:
    """Whether the gold alone cannot be worked out."""
    value = getattr(gold, "value", gold)
    try:
        with limited(timeout):
            if isinstance(value, Quantity):
                same_value(value.tree, num(0))
    except (TooLargeError, OutOfTimeError):
        return True
    return False


_WORDS = {"times": "*", "multiplied by": "*", "divided by": "/", "over": "/", "plus": "+", "minus": "-",
          "squared": "^2", "cubed": "^3", "factorial": "!", "to the power of": "^"}  # fmt: skip
_IN_WORDS = re.compile(rf"(?<=[\d)}}]) (?:raised )?({'|'.join(_WORDS)})\b")
_ROOTS = {"square": r"\sqrt", "cube": r"\sqrt[3]"}
_EXPRESSION = re.compile(
    rf"(?:\\[A-Za-z]+|(?<![A-Za-z])(?:(?![aAI] [a-z]{{2}})[A-Za-z]|{'|'.join(sorted(FUNCTIONS))})(?![A-Za-z])"
    r"|\d+(?:[.,]\d+)*|(?<=_\{[a-z])=|[-+*/^_(){}\[\]|!%,\s])+"
)
_REWRITE = re.compile(
    r"\b(?:write|express|convert|change|turn|rewrite|round|simplify|reduce)\b", re.I
)
_OPERATIONS = {"add", "sub", "mul", "div", "pow", "mixed", "call", "sum", "prod", "apply"}


@lru_cache(1024)
def _expressions(question: str) -> dict[Tree, Tree]:
    """Every expression of a question, by _ordered()."""
    text = _IN_WORDS.sub(lambda match: f" {_WORDS[match[1]]} ", plain(question))
    text = re.sub(
        r"(square|cube) root of (\d+)", lambda match: f"{_ROOTS[match[1]]}{{{match[2]}}}", text
    )
    text = re.sub(r"\blog(?:arithm)?,? (?:to )?base (\d+),? of (\d+)", r"\\log_{\1}(\2)", text)
    text = re.sub(r"\\[()\[\]]", " ; ", text)
    trees: list[Tree] = []
    for expression in _EXPRESSION.findall(text):
        expression = expression.strip(" ,")
        tree = formula(expression) or formula(expression.rstrip(" (-"))
        parts = [tree] if tree else map(formula, re.split(r"[(),]", expression))
        trees += filter(None, parts)
    return {_ordered(tree): tree for tree in trees}


def _sides(tree: Tree, operation: str, inverse: str) -> tuple[list[Tree], list[Tree]]:
    """The factors and divisors of a product, or the terms of a sum that are added and taken away."""
    if tree[0] not in (operation, inverse):
        return [tree], []
    above, below = _sides(tree[1], operation, inverse)
    right_above, right_below = _sides(tree[2], operation, inverse)
    if tree[0] == inverse:
        return above + right_below, below + right_above
    return above + right_above, below + right_below


def _ordered(tree: Tree) -> Tree:
    """The tree with factors and terms in one order, without the factor 1 and the term 0."""
    for operation, inverse, neutral in (("mul", "div", num(1)), ("add", "sub", num(0))):
        if tree[0] in (operation, inverse):
            sides = []
            for side in _sides(tree, operation, inverse):
                parts = [part for part in map(_ordered, side) if part != neutral]
                sides.append(tuple(sorted(parts, key=repr)))
            above, below = sides
            if len(above) == 1 and not below:
                return above[0]
            return (operation, above, below)
    return map_children(_ordered, tree)


def _is_copied(gold: Any, answer: Any, answer_text: str, question: str) -> bool:
    """Whether the answer is what the question asks to work out, or to write in another way."""
    gold, answer = getattr(gold, "value", gold), getattr(answer, "value", answer)
    if not isinstance(answer, Quantity) or gold == answer:
        return False
    if answer.base:
        digits = re.escape(re.split("[_ (]", answer_text)[0])
        if re.search(rf"(?<!\d){digits}(?!\d)", question):
            return True
    ordered = _ordered(answer.tree)
    if isinstance(gold, Quantity) and not (gold.units and answer.units):  # a unit more or less
        if gold.tree == answer.tree or (
            _ordered(gold.tree) == ordered and not _is_number(gold)
        ):
            return False
    asks_to_rewrite = _REWRITE.search(question) is not None
    if ordered in _expressions(question) and (asks_to_rewrite or ordered[0] in _OPERATIONS):
        return True
    numbers = {
        Fraction(digits.replace(",", ""))
        for digits in re.findall(r"\d[\d,]*(?:\.\d+)?", question)
    }
    if asks_to_rewrite and ordered[0] == "num" and ordered[1] in numbers:
        return True
    if _is_work_on(ordered, numbers):
        return True
    return _is_number(gold) and not _is_number(answer) and _is_value_in(question, gold.tree)


def _is_value_in(question: str, value: Tree) -> bool:
    """Whether an expression of the question has that value, so that the question asks for a number."""
    for tree in _expressions(question).values():
        try:
            if tree[0] in _OPERATIONS and not symbols(tree) and same_value(tree, value):
                return True
        except (TooLargeError, UndefinedError):
            continue
    return False


def _is_work_on(tree: Tree, numbers: set[Fraction]) -> bool:
    """Whether a tree of _ordered() is a product of the question's own numbers, or a quotient that is whole."""
    if tree[0] != "mul" or any(part[0] != "num" for part in (*tree[1], *tree[2])):
        return False
    above, below = ([part[1] for part in side] for side in tree[1:])
    quotient = math.prod(above, start=Fraction(1)) / (math.prod(below) or 1)
    is_fraction = len(above) < 2 and quotient.denominator > 1
    return not is_fraction and numbers.issuperset(above + below)

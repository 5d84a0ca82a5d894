"""The verdict: is an answer what the gold is? The number that a text is."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache

from grpo_kit.verdicts.compare import Rules, same
from grpo_kit.verdicts.formula import Tree
from grpo_kit.verdicts.kinds import PLAIN, Habit, Named, Quantity
from grpo_kit.verdicts.rational import OutOfTimeError, TooLargeError, UndefinedError, exact, limited
from grpo_kit.verdicts.reading import habit_of, read
from grpo_kit.verdicts.spelling import letters, plain
from grpo_kit.verdicts.value import same_value

_LONGEST = 1_000  # characters that are read at all
_NUMBERS = Habit(glued=True)  # of texts that are numbers, where a letter is no factor
_OPERATOR = re.compile(r"[-+*/^!|]|\\(?:frac|binom|sqrt|sum|prod|times|cdot|lfloor|lceil)|\b[a-z]{2,5}\s?\(")


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
    rules = rules or Rules()
    if len(gold) > _LONGEST or len(answer) > _LONGEST:
        return True if gold.strip() == answer.strip() else None if len(gold) > _LONGEST else False
    wanted, given = plain(gold), plain(answer)
    if not wanted:
        return None
    known = None
    try:
        with limited(timeout):
            known = _gold(wanted, question or "", numbers_only)
            if numbers_only and not _is_number(known):
                return None
            says_something = known is not None or re.search(r"\w", wanted)
            if says_something and (
                wanted == given or (known is None and _squeezed(wanted) == _squeezed(given))
            ):
                return True
            if _chemical(wanted) and _chemical(wanted) == _chemical(given):
                return True
            if known is None:
                return None
            found = read(given, habit_of(wanted, known))
            if found is None or (numbers_only and not _is_number(found)):
                return False
            if question and not rules.expressions and _copied(known, found, given, question):
                return False
            # a number may be a quotient, so there is no sum to be worked out
            return same(known, found, replace(rules, expressions=True) if numbers_only else rules)
    except OutOfTimeError:
        return None
    except (RecursionError, UndefinedError):  # brackets in brackets in brackets; a modulus of 1/0
        return None if known is None else False
    except TooLargeError:
        return None if known is None or _is_too_large(known, timeout) else False


def number(text: str) -> Fraction | None:
    """The value of a text that is one number, whatever its unit; None if it is none.

    >>> number("1 234,5 km"), number("12 - 6")
    (Fraction(2469, 2), None)
    """
    found = read(plain(text), _NUMBERS) if len(text) <= _LONGEST else None
    try:
        return exact(found.tree) if isinstance(found, Quantity) and _is_number(found) else None
    except (TooLargeError, UndefinedError):
        return None


def _gold(text: str, question: str, numbers_only: bool) -> object:
    """What the gold is. Its letter is a unit (5 m), unless the question asks for a term with that letter."""
    known = read(text, _NUMBERS if numbers_only else PLAIN)
    letter = re.search(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])", text)
    if isinstance(known, Quantity) and known.units and letter:
        term = rf"\d{letter[0]}\b\s*[-+]|[-+]\s*\d*{letter[0]}\b|\bterms? of \W*{letter[0]}\b"
        if re.search(term, question):
            return read(text, Habit(letters=frozenset(letter[0])))
    return known


def _is_number(found: object) -> bool:
    """One number: a literal, a fraction, a mixed number, 10^3, 3 x 10^8; with a sign, a unit, a name, per cent."""
    if isinstance(found, Named):
        return _is_number(found.value)
    if not isinstance(found, Quantity):
        return False
    tree = found.tree
    while tree[0] in ("neg", "percent"):
        tree = tree[1]
    match tree:
        case ("mul", left, ("pow", *_) as right):
            return _is_literal(left) and _is_power_of_ten(right)
        case ("div", left, ("num", _)):
            return _is_literal(left)
    return tree[0] == "mixed" or _is_literal(tree) or _is_power_of_ten(tree)


def _is_literal(tree: Tree) -> bool:
    return tree[0] == "num" or (tree[0] == "neg" and tree[1][0] == "num")


def _is_power_of_ten(tree: Tree) -> bool:
    return tree[0] == "pow" and tree[1] == ("num", 10) and _is_literal(tree[2])


def _is_too_large(known: object, timeout: float) -> bool:
    """Whether the gold alone cannot be worked out."""
    value = known.value if isinstance(known, Named) else known
    try:
        with limited(timeout):
            if isinstance(value, Quantity):
                same_value(value.tree, ("num", Fraction(0)))
    except (TooLargeError, OutOfTimeError):
        return True
    return False


_SUBSTANCE = re.compile(r"(?=.*\d)(?:[A-Z][a-z]?\d*|\((?:[A-Z][a-z]?\d*)+\)\d*){2,}")


def _chemical(text: str) -> str | None:
    """H_2O as H2O; None for what is no formula of a substance."""
    bare = _squeezed(text)
    return bare if _SUBSTANCE.fullmatch(bare) else None


def _squeezed(text: str) -> str:
    return re.sub(r"[\s_{}]", "", text)


_WRITTEN = [  # expressions of a question and of an answer in one spelling
    (r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"(\1)/(\2)"),
    (r"\((\s*[\w.]+\s*)\)", r"\1"),
    (r"\{\s*([\w.]+)\s*\}", r"\1"),
    (r"\\(?:times|cdot)(?![a-z])|\*(?!\*)|\b(?:times|multiplied by)\b", " * "),
    (r"\\div(?![a-z])|\bdivided by\b", " / "),
    (r"\bplus\b", " + "),
    (r"\bminus\b", " - "),
    (r"\*\s*\*", "^"),
    (r"\\(?:left|right)(?![a-z])|\$", ""),
    (r"\\(?=(?:sqrt|sin|cos|tan|ln|log|exp|max|min|gcd)(?![a-z]))", ""),
]
_SIGN = re.compile(r"\\?[A-Za-z]+|\d+(?:\.\d+)?|\S")
_TURN = re.compile(r"\b(?:write|express|convert|change|turn|rewrite|round|simplify|reduce)\b", re.I)


@lru_cache(4096)
def _asked(text: str) -> str:
    """An expression, or a question full of them, in one spelling of its signs; what is in words stays."""
    text = letters(text)
    for pattern, to in _WRITTEN:
        text = re.sub(pattern, to, text)
    return re.sub(r"\s+", " ", text).strip()


def _copied(known: object, found: object, given: str, question: str) -> bool:
    """Whether the answer stands in the question as it is, and was to be worked out or written in another way."""
    if not isinstance(found, Quantity) or known == found:
        return False
    if found.base and re.search(rf"(?<!\d){re.escape(re.split('[_ (]', given)[0])}(?!\d)", question):
        return True
    if isinstance(known, Quantity) and known.tree == found.tree and not (known.units and found.units):
        return False  # a unit more or less
    if _still_to_do(found.tree, re.findall(r"\d+(?:\.\d+)?", question)):
        return True
    if not _OPERATOR.search(given.lstrip("+-")) and not _TURN.search(question):
        return False
    signs = _SIGN.findall(_asked(given))
    before, behind = r"(?<![\w.^)*/+-])(?<![*/+^-] )", r"(?!\w|\.\d|\s?[*/^(!])"
    if re.search(before + r"\s*".join(map(re.escape, signs)) + behind, _asked(question)):
        return True
    asked = _SIGN.findall(_asked(question))  # or its factors in another order
    windows = (asked[place : place + len(signs)] for place in range(len(asked) - len(signs) + 1))
    return len(signs) >= 7 and sorted(signs) in map(sorted, windows)


def _still_to_do(tree: tuple, asked: list[str]) -> bool:
    """A product of the question's own numbers, or a quotient of them that is a whole number: 3 * 4, 12/2."""
    if tree[0] not in ("mul", "div") or any(part[0] != "num" for part in tree[1:]):
        return False
    value = exact(tree) if tree[2][1] else None
    done = value is None or (tree[0] == "div" and value.denominator != 1)
    return not done and all(str(part[1]) in asked for part in tree[1:])

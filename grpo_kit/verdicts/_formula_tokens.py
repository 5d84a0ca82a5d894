"""The signs of a formula: numbers in the habits of the world, letters, functions, commands."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any, NamedTuple

FUNCTIONS = frozenset(
    "Abs sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc asin acos atan sinh cosh tanh log ln lg exp "
    "abs floor ceil ceiling sqrt cbrt gcd lcm max min sgn det".split()
)
_ALIASES = {"Abs": "abs", "asin": "arcsin", "acos": "arccos", "atan": "arctan", "ceiling": "ceil"}
CONSTANTS = {
    "pi": ("const", "pi"),
    "infinity": ("const", "oo"),
    "inf": ("const", "oo"),
    "oo": ("const", "oo"),
}
LETTERS = frozenset(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau "
    "upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega ell hbar".split()
)
# Names that are those of functions alone, and names of functions: a bracket behind them holds an argument.
FUNCTIONS_ALONE = frozenset("f phi psi chi zeta Phi Psi Gamma Var Cov Re Im Tr Pr erf".split())
OF = FUNCTIONS_ALONE | frozenset("ghuvFGHPT")
# Short words of sentences, which are no products of letters.
_SENTENCE = frozenset(
    "no on or is if not and to of in at it so as an the be by are was but nor per for yes am pm".split()
)
NUMBER = re.compile(
    r"(?P<repeating>\d*\.\d*(?:\\(?:overline|bar|dot)\s*\{?\s*\d+\s*\}?|\(\d+\)))"
    r"|(?P<grouped>[1-9]\d{0,2}(?:\.\d{3})+,\d+|[1-9]\d{0,2}(?: \d{3})+,\d+|[1-9]\d{0,2}(?:\.\d{3}){2,}(?![.\d])"
    r"|(?:[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d?(?:,\d{2})+,\d{3}|[1-9]\d{0,2}(?: \d{3})+|[1-9]\d{0,2}(?:'\d{3})+"
    r"|[1-9]\d{0,2}(?:_\d{3})+)(?![\d])(?:\.\d+)?)"
    r"|(?P<plain>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,4}(?![\dA-Za-z]))?)"
)
_COMMAND = re.compile(r"\\([A-Za-z]+)\*?|\\(.)")
_TIMES = re.compile(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)|(?<=\d)\s+[xX]\s+(?=\d)")


class NotUnderstoodError(ValueError):
    """The text, as a whole, is no formula."""


class Token(NamedTuple):
    """One sign; a number has (value, text) as its value."""

    kind: str  # "num", "name", "function", "command", or the sign itself
    value: Any
    spaced: bool  # white space before it


def number_of(text: str, *, comma: bool = False) -> Fraction | None:
    """The value of one number literal; None if the text is none.

    >>> number_of("12,34,567"), number_of("1.234,5"), number_of("0.(3)"), number_of("1,5")
    (Fraction(1234567, 1), Fraction(2469, 2), Fraction(1, 3), None)
    """
    if comma and re.fullmatch(r"\d+,\d+|\d{1,3}(?:[. ]\d{3})+", text):
        text = re.sub("[. ]", "", text).replace(",", ".")
    found = NUMBER.fullmatch(text)
    return _value(found) if found else None


def _value(found: re.Match) -> Fraction:
    text = found[0]
    if found["repeating"]:
        whole, _, rest = text.partition(".")
        fixed, again = re.fullmatch(r"(\d*)\D+(\d+)\D*", rest).groups()
        period = Fraction(int(again), (10 ** len(again) - 1) * 10 ** len(fixed))
        return Fraction(int(whole or 0)) + (Fraction(int(fixed), 10 ** len(fixed)) if fixed else 0) + period
    if found["grouped"]:
        if re.search(r"[. ]\d{3},\d+$", text):
            return Fraction(re.sub("[. ]", "", text).replace(",", "."))
        if text.count(".") > 1:
            text = text.replace(".", "")
        return Fraction(re.sub("[ ,'_]", "", text))
    return Fraction(
        text.removesuffix(".") if "e" not in text.lower() else text.replace(".e", "e").replace(".E", "E")
    )


def tokens(text: str, *, comma: bool) -> list[Token]:
    """The signs of the text. Raises NotUnderstoodError for one that no formula has."""
    text = _TIMES.sub(r" \\times ", text)
    found, at, depth = [], 0, 0
    while at < len(text):
        spaced = at > 0 and text[at - 1].isspace()
        char = text[at]
        if char.isspace():
            at += 1
            continue
        number = NUMBER.match(text, at)
        if number:
            if number["grouped"] and "," in number[0] and depth:  # in brackets a comma is a comma
                number = re.compile(r"(?P<plain>\d+)|(?P<grouped>x)|(?P<repeating>x)").match(text, at)
            if comma and (other := re.compile(r"\d{1,3}(?:[. ]\d{3})+(?:,\d+)?|\d+,\d+").match(text, at)):
                found.append(Token("num", (number_of(other[0], comma=True), other[0]), spaced))
                at = other.end()
                continue
            found.append(Token("num", (_value(number), number[0]), spaced))
            at = number.end()
            continue
        if char == "\\":
            command = _COMMAND.match(text, at)
            if command is None:
                raise NotUnderstoodError("a backslash at the end")
            name = command[1] or command[2]
            kind = "function" if name in FUNCTIONS else "command"
            if command[2]:
                kind = {"{": "{", "}": "}", "|": "|"}.get(name, "command")
                if kind in ("{", "}"):
                    raise NotUnderstoodError("a set inside a formula")
            found.append(Token(kind, _ALIASES.get(name, name), spaced))
            at = command.end()
            continue
        if char.isalpha():
            word = re.compile(r"[^\W\d_]+").match(text, at)[0]
            found += _word(word, spaced)
            at += len(word)
            continue
        if char not in "+-*/^_()[]{}|!%=,'":
            raise NotUnderstoodError(f"the sign {char!r}")
        depth += (char in "([{") - (char in ")]}")
        found.append(Token(char, char, spaced))
        at += 1
    return found


def _word(word: str, spaced: bool) -> list[Token]:
    if word in FUNCTIONS:
        return [Token("function", _ALIASES.get(word, word), spaced)]
    if word[:-1] in ("sin", "cos", "tan", "ln", "log") and word[-1] in "xyztn":  # sinx
        return [Token("function", word[:-1], spaced), Token("name", word[-1], False)]
    if word in CONSTANTS or word in LETTERS or word in OF:
        return [Token("name", word, spaced)]
    if len(word) > 3 or word.lower() in _SENTENCE or not word.isascii():
        raise NotUnderstoodError(f"the word {word!r}")
    return [Token("name", letter, spaced and place == 0) for place, letter in enumerate(word)]

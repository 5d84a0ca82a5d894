"""The signs of a formula: numbers in the habits of the world, letters, functions, commands."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

FUNCTIONS = frozenset(
    "Abs sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc asin acos atan sinh cosh tanh log ln lg exp "
    "abs floor ceil ceiling sqrt cbrt gcd lcm max min sgn det".split()
)
_ALIASES = {
    "Abs": "abs",
    "asin": "arcsin",
    "acos": "arccos",
    "atan": "arctan",
    "ceiling": "ceil",
}
CONSTANTS = {"pi": "pi", "e": "e", "i": "i", "infinity": "oo", "inf": "oo", "oo": "oo"}
LETTERS = frozenset(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau "
    "upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega ell hbar pi".split()
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
_DECIMAL_COMMA = re.compile(r"\d{1,3}(?:[. ]\d{3})+(?:,\d+)?|\d+,\d+")
_COMMAND = re.compile(r"\\([A-Za-z]+)\*?|\\(.)")
_WORD = re.compile(r"[^\W\d_]+")
_TIMES = re.compile(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)|(?<=\d)\s+[xX]\s+(?=\d)")


class NotUnderstoodError(ValueError):
    """The text, as a whole, is no formula."""


class Token(NamedTuple):
    """One sign.

    kind: "num", "name", "letter" (of Greek), "function", a command such as "\\frac", or the sign itself.
    spaced: whether white space stands before it. number: the value of a "num".
    """

    kind: str
    text: str
    spaced: bool
    number: Fraction | None = None


def number_of(text: str, *, comma: bool = False) -> Fraction | None:
    """The value of one number literal; None if the text is none.

    >>> number_of("12,34,567"), number_of("1.234,5"), number_of("0.(3)"), number_of("1,5")
    (Fraction(1234567, 1), Fraction(2469, 2), Fraction(1, 3), None)
    """
    if comma and re.fullmatch(r"\d+,\d+|\d{1,3}(?:[. ]\d{3})+", text):
        text = re.sub("[. ]", "", text).replace(",", ".")
    literal = NUMBER.fullmatch(text)
    if literal is None:
        return None
    if literal["repeating"]:
        return _repeating(text)
    if re.search(r"[. ]\d{3},\d+$", text):
        return Fraction(re.sub("[. ]", "", text).replace(",", "."))
    if text.count(".") > 1:
        text = text.replace(".", "")
    text = re.sub("[ ,'_]", "", text).lower()
    return Fraction(text.replace(".e", "e").removesuffix("."))


def _repeating(text: str) -> Fraction:
    """The value of 0.1(6) or 0.1\\overline{6}."""
    integer, _, decimals = text.partition(".")
    fixed, period = re.fullmatch(r"(\d*)\D+(\d+)\D*", decimals).groups()
    ninths = Fraction(int(period), 10 ** len(period) - 1)
    return int(integer or 0) + (int(fixed or 0) + ninths) / 10 ** len(fixed)


def number_at(text: str, start: int, *, comma: bool, brackets: bool) -> str:
    """The number literal that begins there; "" for none. brackets: it stands in brackets, where 1,234 are two."""
    literal = NUMBER.match(text, start)
    if literal is None:
        return ""
    if comma:
        literal = _DECIMAL_COMMA.match(text, start) or literal
    elif brackets and literal["grouped"] and "," in literal[0]:
        literal = re.compile(r"\d+").match(text, start)
    return literal[0]


def tokens(text: str, *, comma: bool) -> list[Token]:
    """The signs of the text. Raises NotUnderstoodError for one that no formula has."""
    text = _TIMES.sub(r" \\times ", text)
    signs: list[Token] = []
    place = depth = 0
    while place < len(text):
        spaced = text[:place][-1:].isspace()
        char = text[place]
        number = number_at(text, place, comma=comma, brackets=depth > 0)
        if number:
            signs.append(Token("num", number, spaced, number_of(number, comma=comma)))
            place += len(number)
        elif char == "\\":
            command = _COMMAND.match(text, place)
            if command is None:
                raise NotUnderstoodError("a backslash at the end")
            signs.append(_command(command[1] or command[2], spaced))
            place = command.end()
        elif char.isalpha():
            word = _WORD.match(text, place)[0]
            signs += _word(word, spaced)
            place += len(word)
        elif char.isspace():
            place += 1
        elif char in "+-*/^_()[]{}|!%=,'":
            if char in "([{":
                depth += 1
            elif char in ")]}":
                depth -= 1
            signs.append(Token(char, char, spaced))
            place += 1
        else:
            raise NotUnderstoodError(f"the sign {char!r}")
    return signs


def _command(name: str, spaced: bool) -> Token:
    if name in ("{", "}"):
        raise NotUnderstoodError("a set inside a formula")
    if name in FUNCTIONS:
        return Token("function", _ALIASES.get(name, name), spaced)
    if name in LETTERS:
        return Token("letter", name, spaced)
    if name == "|":
        return Token("|", name, spaced)
    return Token(f"\\{name}", name, spaced)


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

r"""A formula, in LaTeX or plain, read whole into a tree; what cannot be read whole is not understood.

Grammar: sums of products of powers, with functions, roots, fractions, mixed numbers and sums over an index. A number
never stands directly behind something else: "4 5", "x5" and "(3) 5" are no product and no sum. A letter or a bracket
behind a number is a product (2x, 3(x+1)).

Longer than 300 lines because the rules of one grammar are read together.

A tree is a tuple: ("num", Fraction), ("sym", name), ("const", "pi" | "e" | "i" | "oo"), ("neg", a), ("add" | "sub" |
"mul" | "div" | "pow", a, b), ("mixed", whole, part), ("pm" | "mp", a or None, b), ("call", name, arguments ...),
("sum" | "prod", index, from, to, body), ("percent", a), ("degree", a), ("apply", letter, power, arguments ...) of a
function that nobody defines: f(x), f^{-1}(x) with the letter "f^-1", f'(x) with "f^()".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from typing import Any

from grpo_kit.verdicts._formula_tokens import CONSTANTS, OF, NotUnderstoodError, Token, tokens

Tree = tuple[Any, ...]
_LONGEST = 400  # characters; no answer needs more
_DEEPEST = 60
_TERMS = {"+": "add", "-": "sub", "\\pm": "pm", "\\mp": "mp"}
_FACTORS = {"*": "mul", "\\cdot": "mul", "\\times": "mul", "/": "div"}
_NO_FACTOR = frozenset(
    rf"\{name}"
    for name in "rfloor rceil pm mp cdot times choose circ rangle permille over".split()
)
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_OF_SEVERAL = ("gcd", "lcm", "max", "min")
_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}


def num(value: int | str | Fraction) -> Tree:
    """The tree of a number.

    >>> num("0.5")
    ('num', Fraction(1, 2))
    """
    return "num", Fraction(value)


def children(tree: Tree) -> list[Tree]:
    """The trees directly inside a tree."""
    return [part for part in tree[1:] if isinstance(part, tuple)]


def map_children(function: Callable[[Tree], Tree], tree: Tree) -> Tree:
    """The tree, with the function of each tree directly inside it in its place."""
    return tuple(function(part) if isinstance(part, tuple) else part for part in tree)


def nodes(tree: Tree) -> Iterator[Tree]:
    """The tree and all trees inside it, in no order.

    >>> ("sym", "x") in nodes(("neg", ("sym", "x")))
    True
    """
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += children(node)


@lru_cache(4096)
def parse(text: str, *, comma: bool = False) -> Tree:
    r"""The tree of a formula in plain()'s spelling. Raises NotUnderstoodError where anything is left over.

    comma: whether "1,234" is one and a bit (a decimal comma), else it has thousands.

    >>> parse("3x")
    ('mul', ('num', Fraction(3, 1)), ('sym', 'x'))
    """
    if not text or len(text) > _LONGEST:
        raise NotUnderstoodError(f"{len(text)} characters")
    parser = _Parser(tokens(text, comma=comma))
    tree = parser.sum()
    if parser.accept("\\over"):
        tree = ("div", tree, parser.sum())
    if parser.next.kind != "end":
        raise NotUnderstoodError(f"left over: {parser.next.text!r}")
    return tree


class _Parser:
    """One method a rule of the grammar; each reads what it can from self.place on."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = [*tokens, Token("end", "", False)]
        self.place = self.depth = self.bars = 0

    @property
    def next(self) -> Token:
        return self.tokens[self.place]

    def take(self, kind: str | None = None) -> Token:
        token = self.next
        if token.kind == "end" or (kind is not None and token.kind != kind):
            raise NotUnderstoodError(f"{token.text!r} where {kind or 'more'} should stand")
        self.place += 1
        return token

    def accept(self, *kinds: str) -> Token | None:
        """The next token, taken, if it is of one of these kinds."""
        if self.next.kind in kinds:
            return self.take()
        return None

    def follow(self, *kinds: str) -> bool:
        """Whether the next tokens are of these kinds."""
        upcoming = self.tokens[self.place : self.place + len(kinds)]
        return [token.kind for token in upcoming] == list(kinds)

    def sum(self) -> Tree:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise NotUnderstoodError("nested too deep")
        tree = self.product()
        while sign := self.accept(*_TERMS):
            tree = (_TERMS[sign.kind], tree, self.product())
        self.depth -= 1
        return tree

    def product(self) -> Tree:
        tree = self.signed()
        while True:
            token = self.next
            if self.accept(*_FACTORS):
                right = self.signed()
                if _is_vector(tree) or _is_vector(right):
                    raise NotUnderstoodError("a product of vectors")
                tree = (_FACTORS[token.kind], tree, right)
            elif self.begins_factor():
                right = self.power()
                if (
                    token.kind == "("
                    and token.spaced
                    and _plain_number(tree)
                    and _plain_number(right)
                ):
                    raise NotUnderstoodError("a number, and another one in brackets")
                tree = ("mul", tree, right)
            else:
                return tree

    def begins_factor(self) -> bool:
        """Whether a factor may follow without a sign between; a number only in n2^{n-1} and 3!7!."""
        token = self.next
        if token.kind == "num":
            if token.spaced:
                return False
            before = self.tokens[self.place - 1].kind
            return (before == "name" and self.follow("num", "^")) or (
                before == "!" and self.follow("num", "!")
            )
        if token.kind == "|":
            return not self.bars
        if token.kind[0] == "\\":
            return token.kind not in _NO_FACTOR
        return token.kind in ("name", "letter", "function", "(", "{")

    def signed(self) -> Tree:
        sign = self.accept(*_TERMS)
        tree = self.power()  # one sign: --5 is no number
        if sign is None or sign.kind == "+":
            return tree
        if sign.kind == "-":
            return ("neg", tree)
        return (sign.text, None, tree)

    def power(self) -> Tree:
        base = self.behind(self.primary())
        if not self.accept("^"):
            return base
        exponent = self.exponent()
        if self.next.kind == "^":
            raise NotUnderstoodError("a power of a power without brackets")
        return self.behind(("pow", base, exponent))

    def behind(self, tree: Tree) -> Tree:
        """The signs that stand behind a value: factorial, per cent, degrees."""
        while True:
            if self.accept("\\permille"):
                tree = ("percent", ("div", tree, num(10)))
            elif self.accept("!"):
                if tree[:2] == ("call", "factorial"):
                    raise NotUnderstoodError("a factorial twice, or a double factorial")
                tree = ("call", "factorial", tree)
            elif self.accept("%"):
                tree = ("percent", tree)
            elif self.follow("^", "\\circ"):
                self.place += 2
                tree = ("degree", tree)
            else:
                return tree

    def exponent(self) -> Tree:
        if self.next.kind == "{":
            return self.group("{")
        sign = self.accept("-", "+")
        if sign is None:
            return self.primary()
        tree = self.exponent()
        if sign.kind == "-":
            return ("neg", tree)
        return tree

    def arguments(self, opening: str = "(") -> list[Tree]:
        """The values in brackets, between commas."""
        self.take(opening)
        bars, self.bars = self.bars, 0
        trees = [self.sum()]
        if opening == "{" and self.accept("\\choose"):
            trees = [("call", "binom", *trees, self.sum())]
        elif opening == "{" and self.accept("\\over"):
            trees = [("div", *trees, self.sum())]
        while self.accept(","):
            trees.append(self.sum())
        self.take(_CLOSING[opening])
        self.bars = bars
        return trees

    def group(self, opening: str) -> Tree:
        """The one value in brackets."""
        trees = self.arguments(opening)
        if len(trees) > 1:
            raise NotUnderstoodError("a comma in brackets")
        return trees[0]

    def argument(self) -> Tree:
        """The argument of a LaTeX command: a group, or the one digit or letter that follows."""
        if self.next.kind == "{":
            return self.group("{")
        if self.next.kind in ("name", "letter"):
            return self.name()
        digits = self.take("num").text
        if not digits.isdigit():
            raise NotUnderstoodError(f"{digits!r} as an argument")
        if len(digits) > 1:  # the others stay: \frac12 has two arguments
            self.place -= 1
            self.tokens[self.place] = Token("num", digits[1:], False, Fraction(digits[1:]))
        return num(digits[0])

    def primary(self) -> Tree:
        token = self.next
        match token.kind:
            case "num":
                return self.number()
            case "name" | "letter":
                return self.name()
            case "function":
                return self.function()
            case "(" | "[" | "{":
                return self.group(token.kind)
            case "|":
                self.take()
                self.bars += 1
                tree = self.sum()
                self.bars -= 1
                self.take("|")
                return ("call", "abs", tree)
        return self.command()

    def number(self) -> Tree:
        """A number, also a mixed one: 2 1/2, 2\\frac{1}{2}."""
        token = self.take()
        number = num(token.number)
        if self.next.kind == "_":
            raise NotUnderstoodError("a base inside a formula")
        if not token.text.isdigit():
            return number
        start = self.place
        if self.next.kind == "\\frac":
            part = self.primary()
            if part[0] == "div" and _is_whole(part[1]) and _is_whole(part[2]):
                if part[1][1] >= part[2][1]:
                    raise NotUnderstoodError("a number beside an improper fraction")
                return ("mixed", number, part)
        elif self.next.spaced and self.follow("num", "/", "num"):
            top, _, bottom = self.tokens[start : start + 3]
            if top.text.isdigit() and bottom.text.isdigit() and top.number < bottom.number:
                self.place += 3
                return ("mixed", number, ("div", num(top.number), num(bottom.number)))
        self.place = start
        return number

    def name(self) -> Tree:
        name = self.take().text
        if name == "C" and self.next.kind == "(":
            start = self.place
            with suppress(NotUnderstoodError):
                arguments = self.arguments()
                if len(arguments) == 2:
                    return ("call", "binom", *arguments)
            self.place = start
        if self.accept("_"):
            return self.applied(name, f"{name}_{self.subscript()}")
        if name in CONSTANTS:
            return ("const", CONSTANTS[name])
        return self.applied(name, name)

    def applied(self, letter: str, name: str) -> Tree:
        """The letter, or the function by that name of the arguments in brackets behind it; a(b + c) is a product."""
        primes = 0
        while self.accept("'"):
            primes += 1
        start, power = self.place, num(primes or 1)
        is_function = letter in OF or primes > 0
        is_derivative = primes > 0
        if is_function and self.next.kind == "^" and not self.follow("^", "\\circ"):
            is_derivative = self.follow("^", "{", "(")
            self.take()
            power = self.exponent()
        arguments = self.arguments() if self.next.kind == "(" else []
        is_term = len(arguments) == 1 and arguments[0][0] not in ("add", "sub")
        if not arguments or not (is_function or is_term):
            self.place = start
            return ("sym", name + primes * "'")
        if is_derivative:
            name += "^()"
        elif _is_inverse(power):
            name += "^-1"
        return ("apply", name, power, *arguments)

    def subscript(self) -> str:
        if self.next.kind in ("num", "name"):
            return self.index()
        self.take("{")
        text = ""
        while not self.accept("}"):
            text += self.index()
        return text

    def index(self) -> str:
        """The text of the next token of an index."""
        token = self.take()
        if (
            token.kind not in ("num", "name", "letter", "function", ",", "+", "-")
            and token.kind[0] != "\\"
        ):
            raise NotUnderstoodError("an index")
        return token.text

    def function(self) -> Tree:
        name = self.take().text
        if name == "sqrt":
            return self.root()
        base = power = None
        if name == "log" and self.accept("_"):
            base = num(self.take().number) if self.next.kind == "num" else self.argument()
        if self.accept("^"):
            power = self.exponent()
            if _is_inverse(power):
                if name not in _INVERSE:
                    raise NotUnderstoodError("an inverse function")
                name, power = _INVERSE[name], None
        if self.next.kind == "(":
            arguments = self.arguments()
        elif name in _OF_SEVERAL:
            raise NotUnderstoodError(f"{name} without brackets")
        else:
            arguments = [self.bare_argument()]
        if name == "cbrt":
            return ("call", "root", *arguments, num(3))
        if name not in _OF_SEVERAL and len(arguments) != 1:
            raise NotUnderstoodError(f"{name} of {len(arguments)} arguments")
        tree = ("call", name, *arguments)
        if base is not None:
            tree = ("call", "logb", *arguments, base)
        if power is None:
            return tree
        return ("pow", tree, power)

    def bare_argument(self) -> Tree:
        """sin 2x, ln x: factors side by side up to the next sign or function."""
        if self.accept("-"):
            return ("neg", self.bare_argument())
        tree = self.power()
        while self.begins_factor() and self.next.kind not in ("function", "("):
            tree = ("mul", tree, self.power())
        return tree

    def root(self) -> Tree:
        index = self.group("[") if self.next.kind == "[" else None
        tree = self.group("(") if self.next.kind == "(" else self.argument()
        if index is None:
            return ("call", "sqrt", tree)
        return ("call", "root", tree, index)

    def command(self) -> Tree:
        token = self.take()
        match token.kind.removeprefix("\\"):
            case "infty":
                return ("const", "oo")
            case "frac":
                top, bottom = self.argument(), self.argument()
                if _begins_with_d(top) and _begins_with_d(bottom):
                    raise NotUnderstoodError("a derivative")
                return ("div", top, bottom)
            case "binom":
                return ("call", "binom", self.argument(), self.argument())
            case "lfloor" | "lceil" as name:
                tree = self.sum()
                self.take(f"\\r{name[1:]}")
                return ("call", name[1:], tree)
            case "sum" | "prod" as name:
                return self.series(name)
            case (
                "overline"
                | "vec"
                | "hat"
                | "bar"
                | "mathbb"
                | "mathcal"
                | "widehat"
                | "tilde" as name
            ):
                self.take("{")
                letters = self.take("name").text
                while self.next.kind == "name":
                    letters += self.take().text
                self.take("}")
                return ("sym", f"{name} {letters}")
        raise NotUnderstoodError(f"{token.text!r} where a value should stand")

    def series(self, name: str) -> Tree:
        """A sum or product over an index: its index, from, to, and the product behind it."""
        self.take("_")
        self.take("{")
        index = self.take("name").text
        self.take("=")
        start = self.sum()
        self.take("}")
        self.take("^")
        end = self.exponent()
        return (name, index, start, end, self.product())


def _begins_with_d(tree: Tree) -> bool:
    return tree == ("sym", "d") or (tree[0] in ("mul", "pow") and _begins_with_d(tree[1]))


def _is_vector(tree: Tree) -> bool:
    return tree[0] == "sym" and tree[1].startswith(("vec ", "hat ", "widehat "))


def _is_whole(tree: Tree) -> bool:
    return tree[0] == "num" and tree[1].denominator == 1


def _is_inverse(power: Tree) -> bool:
    return power == ("neg", num(1))


def _plain_number(tree: Tree) -> bool:
    """A number or what is made of numbers alone."""
    return not any(node[0] in ("sym", "const") for node in nodes(tree))

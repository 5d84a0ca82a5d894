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

from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Any

from grpo_kit.verdicts._formula_tokens import CONSTANTS, LETTERS, OF, NotUnderstoodError, Token, tokens

Tree = tuple[Any, ...]
_LONGEST = 400  # characters; no answer needs more
_DEEPEST = 60
_NO_FACTOR = frozenset("rfloor rceil cdot times pm mp choose circ rangle permille over".split())
_INVERSE_POWER = ("neg", ("num", Fraction(1)))
_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}


def nodes(tree: Tree) -> Iterator[Tree]:
    """The tree and all trees inside it, in no order.

    >>> ("sym", "x") in nodes(("neg", ("sym", "x")))
    True
    """
    waiting = [tree]
    while waiting:
        yield (one := waiting.pop())
        waiting += [part for part in one[1:] if isinstance(part, tuple)]


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
    if parser.is_command("over"):
        parser.take()
        tree = ("div", tree, parser.sum())
    if parser.place < len(parser.tokens):
        raise NotUnderstoodError(f"left over: {parser.tokens[parser.place].value!r}")
    return tree


class _Parser:
    """One method a rule of the grammar; each reads what it can from self.place on."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens, self.place, self.depth, self.bars = tokens, 0, 0, 0

    @property
    def next(self) -> Token:
        return self.tokens[self.place] if self.place < len(self.tokens) else Token("end", None, False)

    def take(self, kind: str | None = None) -> Token:
        token = self.next
        if token.kind == "end" or (kind is not None and token.kind != kind):
            raise NotUnderstoodError(f"{token.value!r} where {kind or 'more'} should stand")
        self.place += 1
        return token

    def is_command(self, *names: str) -> bool:
        return self.next.kind == "command" and self.next.value in names

    def sum(self) -> Tree:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise NotUnderstoodError("nested too deep")
        tree = self.product()
        while self.next.kind in ("+", "-") or self.is_command("pm", "mp"):
            sign = self.take().value
            right = self.product()
            tree = ({"+": "add", "-": "sub"}.get(sign, sign), tree, right)
        self.depth -= 1
        return tree

    def product(self) -> Tree:
        tree = self.signed()
        while True:
            token = self.next
            if token.kind in ("*", "/") or self.is_command("cdot", "times"):
                self.take()
                right = self.signed()
                if _is_vector(tree) or _is_vector(right):
                    raise NotUnderstoodError("a product of vectors")
                tree = ("div" if token.kind == "/" else "mul", tree, right)
            elif self.begins_factor():
                right = self.power()
                if token.kind == "(" and token.spaced and _plain_number(tree) and _plain_number(right):
                    raise NotUnderstoodError("a number, and another one in brackets")
                tree = ("mul", tree, right)
            else:
                return tree

    def begins_factor(self) -> bool:
        """Whether a factor may follow without a sign between; never a number."""
        token = self.next
        if token.kind == "num":
            return self.number_goes_on()
        if token.kind == "|":
            return not self.bars
        if token.kind == "command":
            return token.value not in _NO_FACTOR
        return token.kind in ("name", "function", "(", "{")

    def number_goes_on(self) -> bool:
        """n2^{n-1} and 3!7!: a power behind a letter, a factorial behind a factorial."""
        before = self.tokens[self.place - 1] if self.place else None
        after = self.tokens[self.place + 1] if self.place + 1 < len(self.tokens) else None
        if before is None or after is None or self.next.spaced:
            return False
        return (before.kind, after.kind) in (("name", "^"), ("!", "!"))

    def signed(self) -> Tree:
        if self.next.kind in ("+", "-") or self.is_command("pm", "mp"):
            sign = self.take().value
            inside = self.power()  # one sign: --5 is no number
            return inside if sign == "+" else ("neg", inside) if sign == "-" else (sign, None, inside)
        return self.power()

    def power(self) -> Tree:
        base = self.behind(self.primary())
        if self.next.kind == "^":
            self.take()
            exponent = self.exponent()
            if self.next.kind == "^":
                raise NotUnderstoodError("a power of a power without brackets")
            return self.behind(("pow", base, exponent))
        return base

    def behind(self, tree: Tree) -> Tree:
        """The signs that stand behind a value: factorial, per cent, degrees."""
        while True:
            if self.is_command("permille"):
                self.take()
                tree = ("percent", ("div", tree, ("num", Fraction(10))))
            elif self.next.kind == "!":
                self.take()
                if tree[:2] == ("call", "factorial"):
                    raise NotUnderstoodError("a factorial twice, or a double factorial")
                tree = ("call", "factorial", tree)
            elif self.next.kind == "%":
                self.take()
                tree = ("percent", tree)
            elif self.next.kind == "^" and self.after_is_circle():
                self.place += 2
                tree = ("degree", tree)
            else:
                return tree

    def after_is_circle(self) -> bool:
        after = self.tokens[self.place + 1] if self.place + 1 < len(self.tokens) else None
        return after is not None and after.kind == "command" and after.value == "circ"

    def exponent(self) -> Tree:
        if self.next.kind == "{":
            return self.group("{", "}")
        if self.next.kind in ("-", "+"):
            sign = self.take().value
            inside = self.exponent()
            return ("neg", inside) if sign == "-" else inside
        return self.primary()

    def group(self, opening: str, closing: str) -> Tree:
        self.take(opening)
        bars, self.bars = self.bars, 0
        tree = self.sum()
        if opening == "{" and self.is_command("choose"):
            self.take()
            tree = ("call", "binom", tree, self.sum())
        elif opening == "{" and self.is_command("over"):
            self.take()
            tree = ("div", tree, self.sum())
        self.take(closing)
        self.bars = bars
        return tree

    def argument(self) -> Tree:
        """What a LaTeX command takes: a group, or the one digit or letter that follows."""
        if self.next.kind == "{":
            return self.group("{", "}")
        token = self.take()
        if token.kind == "num" and token.value[1].isdigit():
            first, rest = token.value[1][0], token.value[1][1:]
            if rest:
                self.place -= 1
                self.tokens[self.place] = Token("num", (Fraction(int(rest)), rest), False)
            return ("num", Fraction(int(first)))
        if token.kind == "name" or (
            token.kind == "command" and (token.value == "pi" or token.value in LETTERS)
        ):
            self.place -= 1
            return self.name()
        raise NotUnderstoodError(f"{token.value!r} as an argument")

    def primary(self) -> Tree:
        token = self.next
        match token.kind:
            case "num":
                return self.number()
            case "name":
                return self.name()
            case "function":
                return self.function()
            case "(":
                return self.group("(", ")")
            case "[":
                return self.group("[", "]")
            case "{":
                return self.group("{", "}")
            case "|":
                self.take()
                self.bars += 1
                inside = self.sum()
                self.bars -= 1
                self.take("|")
                return ("call", "abs", inside)
            case "command":
                return self.command()
        raise NotUnderstoodError(f"{token.value!r} where a value should stand")

    def number(self) -> Tree:
        value, written = self.take().value
        tree = ("num", value)
        if self.next.kind == "_":
            raise NotUnderstoodError("a base inside a formula")
        if not written.isdigit():
            return tree
        if self.is_command("frac"):
            start = self.place
            part = self.primary()
            if part[0] == "div" and all(_is_whole(side) for side in part[1:]):
                if not part[1][1] < part[2][1]:
                    raise NotUnderstoodError("a number beside an improper fraction")
                return ("mixed", tree, part)
            self.place = start
        rest = self.tokens[self.place : self.place + 3]
        if (
            len(rest) == 3
            and rest[0].kind == "num"
            and rest[0].spaced
            and rest[1].kind == "/"
            and rest[2].kind == "num"
        ):
            top, bottom = rest[0].value, rest[2].value
            if top[1].isdigit() and bottom[1].isdigit() and top[0] < bottom[0]:
                self.place += 3
                return ("mixed", tree, ("div", ("num", top[0]), ("num", bottom[0])))
        return tree

    def name(self) -> Tree:
        name = self.take().value
        if name == "C" and self.next.kind == "(" and len(choose := self.arguments_or_none()) == 2:
            return ("call", "binom", *choose)
        if name in ("pi", "infty"):
            tree = ("const", "pi" if name == "pi" else "oo")
        elif name in CONSTANTS:
            tree = CONSTANTS[name]
        elif name in ("e", "i"):
            tree = ("const", name)
        else:
            tree = ("sym", name)
        if self.next.kind == "_":
            self.take()
            tree = ("sym", f"{name}_{self.subscript()}")
        return self.applied(name, tree[1]) if tree[0] == "sym" else tree

    def applied(self, letter: str, name: str) -> Tree:
        """The letter, or the function by that name of what stands in brackets behind it; a(b + c) is a product."""
        start = self.place
        while self.next.kind == "'":
            self.take()
        primes = self.place - start
        alone = ("sym", name + primes * "'")
        behind, power = self.place, ("num", Fraction(primes or 1))
        is_function = letter in OF or primes > 0
        if is_function and self.next.kind == "^" and not self.after_is_circle():
            primes = [token.kind for token in self.tokens[behind + 1 : behind + 3]] == ["{", "("]
            self.take()
            power = self.exponent()
        arguments = self.arguments() if self.next.kind == "(" else []
        if not arguments or not (
            is_function or (len(arguments) == 1 and arguments[0][0] not in ("add", "sub"))
        ):
            self.place = behind
            return alone
        kind = "^()" if primes else "^-1" if power == _INVERSE_POWER else ""
        return ("apply", name + kind, power, *arguments)

    def subscript(self) -> str:
        token = self.take()
        if token.kind != "{":
            if token.kind not in ("num", "name"):
                raise NotUnderstoodError("an index")
            return token.value[1] if token.kind == "num" else token.value
        written = []
        while self.next.kind != "}":
            token = self.take()
            if token.kind not in ("num", "name", "function", "command", ",", "+", "-"):
                raise NotUnderstoodError("an index")
            written.append(token.value[1] if token.kind == "num" else token.value)
        self.take("}")
        return "".join(written)

    def function(self) -> Tree:
        name = self.take().value
        if name == "sqrt":
            return self.root()
        base = None
        if name == "log" and self.next.kind == "_":
            self.take()
            base = self.argument() if self.next.kind != "num" else ("num", self.take().value[0])
        power = None
        if self.next.kind == "^":
            self.take()
            power = self.exponent()
            if power == _INVERSE_POWER:
                if name not in _INVERSE:
                    raise NotUnderstoodError("an inverse function")
                name, power = _INVERSE[name], None
        if self.next.kind == "(":
            arguments = self.arguments()
        elif name in ("gcd", "lcm", "max", "min"):
            raise NotUnderstoodError(f"{name} without brackets")
        else:
            arguments = [self.bare_argument()]
        if name == "cbrt":
            return ("call", "root", *arguments, ("num", Fraction(3)))
        if name not in ("gcd", "lcm", "max", "min") and len(arguments) != 1:
            raise NotUnderstoodError(f"{name} of {len(arguments)} arguments")
        tree = ("call", name, *arguments) if base is None else ("call", "logb", arguments[0], base)
        return tree if power is None else ("pow", tree, power)

    def arguments(self) -> list[Tree]:
        self.take("(")
        bars, self.bars = self.bars, 0
        made = [self.sum()]
        while self.next.kind == ",":
            self.take()
            made.append(self.sum())
        self.take(")")
        self.bars = bars
        return made

    def arguments_or_none(self) -> list[Tree]:
        """The arguments in brackets where there are several; else nothing is read."""
        start = self.place
        try:
            made = self.arguments()
        except NotUnderstoodError:
            made = []
        if len(made) < 2:
            self.place = start
            return []
        return made

    def bare_argument(self) -> Tree:
        """sin 2x, ln x: factors side by side up to the next sign or function."""
        if self.next.kind == "-":
            self.take()
            return ("neg", self.bare_argument())
        tree = self.power()
        while self.begins_factor() and self.next.kind not in ("function", "("):
            tree = ("mul", tree, self.power())
        return tree

    def root(self) -> Tree:
        index = None
        if self.next.kind == "[":
            index = self.group("[", "]")
        inside = self.group("(", ")") if self.next.kind == "(" else self.argument()
        return ("call", "sqrt", inside) if index is None else ("call", "root", inside, index)

    def command(self) -> Tree:
        name = self.next.value
        if name in LETTERS or name in ("pi", "infty"):
            return self.name()
        self.take()
        match name:
            case "frac":
                top, bottom = self.argument(), self.argument()
                if _begins_with_d(top) and _begins_with_d(bottom):
                    raise NotUnderstoodError("a derivative")
                return ("div", top, bottom)
            case "binom":
                return ("call", "binom", self.argument(), self.argument())
            case "lfloor" | "lceil":
                inside = self.sum()
                if not self.is_command("rfloor" if name == "lfloor" else "rceil"):
                    raise NotUnderstoodError(f"{name} that is not closed")
                self.take()
                return ("call", "floor" if name == "lfloor" else "ceil", inside)
            case "sum" | "prod":
                return self.series(name)
            case "overline" | "vec" | "hat" | "bar" | "mathbb" | "mathcal" | "widehat" | "tilde":
                self.take("{")
                return ("sym", f"{name} {self.letters()}")
        raise NotUnderstoodError(f"the command {name!r}")

    def letters(self) -> str:
        written = []
        while self.next.kind == "name":
            written.append(self.take().value)
        self.take("}")
        if not written:
            raise NotUnderstoodError("no letters")
        return "".join(written)

    def series(self, name: str) -> Tree:
        """A sum or product over an index: its index, from, to, and the product behind it."""
        self.take("_")
        self.take("{")
        index = self.take("name").value
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


def _plain_number(tree: Tree) -> bool:
    """A number or what is made of numbers alone."""
    return not any(one[0] in ("sym", "const") for one in nodes(tree))

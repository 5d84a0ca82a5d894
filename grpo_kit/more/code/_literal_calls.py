"""Reads calls with literal arguments out of text, `name(1, "a", key=[2])`, by ast; nothing is run."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

_MAX_TEXT = 10_000  # characters of a call or a value; no setting and no answer needs more
# Python's own parser warns about these: backslashes in texts, and a number glued to a word (1or 2, 0xfor 2, 1jif 2).
_WARNS = re.compile(r"\\|(?:[0-9.jJ]|(?<!\w)0\w*)(?:and|else|for|if|in|is|not|or)")


class LiteralCall(NamedTuple):
    """A call: its name ("f", "math.sqrt"), its positional arguments, its keyword arguments."""

    name: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


def call_from_text(text: str) -> LiteralCall:
    """The call in a text. White space around it does not count; at most 10,000 characters.

    Raises ValueError for anything else: see call_from_node.

    >>> call_from_text("linear(1.2, end=-0.6)")
    LiteralCall(name='linear', arguments=(1.2,), keywords={'end': -0.6})
    """
    return call_from_node(_expression(text))


def call_from_node(
    node: ast.AST | None, value: Callable[[ast.expr], Any] | None = None
) -> LiteralCall:
    """The call in an ast node.

    value: reads one argument, and raises ValueError for one that it does not accept; default literal_value.
    Raises ValueError for a node that is no call of a plain name, for arguments that are no literals, for * and **, and
    for a keyword given twice.

    >>> call_from_node(ast.parse("f(1, k='a')", mode="eval").body)
    LiteralCall(name='f', arguments=(1,), keywords={'k': 'a'})
    """
    value = value or literal_value
    if not isinstance(node, ast.Call):
        raise ValueError("it is no call, such as name(1, key=2)")
    names = [keyword.arg for keyword in node.keywords]
    if None in names or any(isinstance(argument, ast.Starred) for argument in node.args):
        raise ValueError("* and ** are not read; write each argument out")
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"the keyword {min(twice)} is given twice")
    keywords = {str(keyword.arg): value(keyword.value) for keyword in node.keywords}
    return LiteralCall(_dotted(node.func), tuple(map(value, node.args)), keywords)


def value_from_text(text: str) -> Any:
    """The literal in a text of at most 10,000 characters. Raises ValueError for anything else.

    >>> value_from_text("[1, -2.5, {'a': None}]")
    [1, -2.5, {'a': None}]
    """
    return literal_value(_expression(text))


def literal_value(node: ast.expr) -> Any:
    """The value of a literal node: numbers, texts, bytes, constants, and lists, tuples, sets, dicts of these.

    Raises ValueError for anything else, such as names and dicts with a list as key.

    >>> literal_value(ast.parse("(-1, 'a')", mode="eval").body)
    (-1, 'a')
    """
    try:
        return ast.literal_eval(node)
    except (TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"it is no literal ({error})") from error


def parse_quietly(text: str) -> ast.Module | None:
    """The result of ast.parse on a text that a model wrote, without its warnings. None if the text is not Python.

    >>> parse_quietly("x =") is None
    True
    """
    try:
        return parse_without_warnings(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # ValueError: NUL, lone surrogates
        return None


def parse_without_warnings(text: str, mode: str = "exec") -> Any:
    """The result of ast.parse, or its error, without its warnings. mode: "exec" or "eval".

    >>> parse_without_warnings("1", "eval").body.value
    1
    """
    if not _WARNS.search(text):
        return ast.parse(text, mode=mode)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text, mode=mode)


def _expression(text: str) -> ast.expr:
    if len(text) > _MAX_TEXT:
        raise ValueError(f"it has {len(text)} characters; at most {_MAX_TEXT} are read")
    try:
        return parse_without_warnings(text.strip(), "eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"it is no expression of Python: {error}") from error


def _dotted(node: ast.expr) -> str:
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return f"{_dotted(node.value)}.{node.attr}"
    raise ValueError("what is called is no plain name")

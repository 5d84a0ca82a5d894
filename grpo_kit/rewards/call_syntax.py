"""Sequences of calls out of text, read by ast and never run, and how far two of them are apart."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

_MAX_TEXT = 4000  # characters; no answer needs more, and comparing takes calls x gold calls steps
# What Python's own parser warns about: backslashes in texts, and a number glued to a word (1or 2, 0xfor 2, 1jif 2).
_WARNS = re.compile(r"\\|(?:[0-9.jJ]|(?<!\w)0\w*)(?:and|else|for|if|in|is|not|or)")


class Call(NamedTuple):
    """One call: its operation, and its arguments as comparable values; keywords sorted by name."""

    name: str
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...] = ()


def parse_calls(text: str) -> list[Call] | None:
    """The calls of a text, one a line or with ; between them; None if it is anything else. Comments are skipped.

    Arguments are numbers, texts, True, False, None, plain names, and lists or tuples of these; 2 and 2.0 are the
    same, "x" and x are not. No calls in calls, attributes, assignments or operators; at most 4,000 characters.

    >>> parse_calls("add(2, 3)\\nlamp('hall', on=True)")[1]
    Call(name='lamp', arguments=(('text', 'hall'),), keywords=(('on', ('constant', True)),))
    """
    if len(text) > _MAX_TEXT:
        return None
    try:
        body = _parse("\n".join(line.strip() for line in text.split("\n")))
        return [_call(statement) for statement in body]
    # ValueError: NUL, lone surrogates, no call
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def call_distance(calls: Sequence[Call], wanted: Sequence[Call]) -> float:
    """Edit distance between two sequences of calls, over the longer one's length: in [0, 1], 0 if they are equal.

    A call that is left out, added or of another name costs 1. A call of the right name costs half the share of its
    arguments that differ, matched by place or keyword. Symmetric. Two empty sequences have distance 0.

    >>> call_distance(parse_calls("add(2, 3)"), parse_calls("add(2, 4); neg(1)"))  # (0.25 + 1) / 2
    0.625
    """
    row = [float(place) for place in range(len(wanted) + 1)]
    for done, call in enumerate(calls, 1):
        above, row = row, [float(done)]
        for place, gold in enumerate(wanted):
            row.append(min(above[place] + _difference(call, gold), above[place + 1] + 1, row[place] + 1))
    return row[-1] / max(len(calls), len(wanted), 1)


def _difference(a: Call, b: Call) -> float:
    if a == b:
        return 0.0
    if a.name != b.name:
        return 1.0
    given, gold = (dict([*enumerate(call.arguments), *call.keywords]) for call in (a, b))
    places = given.keys() | gold.keys()
    missing = object()
    return sum(given.get(place, missing) != gold.get(place, missing) for place in places) / len(places) / 2


def _parse(text: str) -> list[ast.stmt]:
    if not _WARNS.search(text):
        return ast.parse(text).body
    with warnings.catch_warnings():  # what a model writes is no reason to warn
        warnings.simplefilter("ignore")
        return ast.parse(text).body


def _call(statement: ast.stmt) -> Call:
    node = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError("no call of a plain name")
    keywords = {keyword.arg: _value(keyword.value) for keyword in node.keywords}
    if None in keywords or len(keywords) < len(node.keywords):
        raise ValueError("** or a keyword twice")
    return Call(node.func.id, tuple(map(_value, node.args)), tuple(sorted(keywords.items())))


def _value(node: ast.expr) -> tuple[str, Any]:
    sign = 1
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        sign, node = (-1 if isinstance(node.op, ast.USub) else 1), node.operand
        if not isinstance(node, ast.Constant) or type(node.value) not in (int, float):
            raise ValueError("a sign before something that is no number")
    match node:
        case ast.Constant(value=bool() | None):
            return "constant", node.value
        case ast.Constant(value=int() | float()):
            return "number", sign * node.value
        case ast.Constant(value=str()):
            return "text", node.value
        case ast.Name():
            return "name", node.id
        case ast.List() | ast.Tuple():
            return "list", tuple(map(_value, node.elts))
    raise ValueError("no plain value")

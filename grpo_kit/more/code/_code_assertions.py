"""Turns `assert f(args) == value` into tests of calls, without running anything."""

from __future__ import annotations

import ast
import operator
from typing import Any

from grpo_kit._support.literal_calls import call_from_node, literal_value
from grpo_kit.more.code._code_harness import encode
from grpo_kit.more.code._code_tests import READ_AS

_ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class AssertionNotReadError(ValueError):
    """An assertion of no known form; the message shows it."""


def read_assertions(statements: list[ast.stmt], entry_point: str) -> list[dict]:
    """A test {"args", "expected"} (see code.code_tests.read_tests) for each assertion about the entry point.

    Reads f(...) == v, v == f(...), f(...) is v, f(...), not f(...), abs(f(...) - v) < e, math.isclose(f(...), v)
    and tuple / list / set / sorted around both sides; values are literals with + - * /. A bare f(...) stands
    for True, `not f(...)` for False. An assertion of a true constant ("assert True") tests nothing and is left out.
    Raises AssertionNotReadError for every other statement.

    >>> read_assertions(ast.parse("assert f(1, [2]) == (3,)").body, "f")
    [{'args': [1, [2]], 'expected': {'$tuple': [3]}}]
    """
    tests = []
    for statement in statements:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant | ast.Name):
            continue
        if not isinstance(statement, ast.Assert):
            raise AssertionNotReadError(ast.unparse(statement))
        if isinstance(statement.test, ast.Constant) and statement.test.value:
            continue
        try:
            tests.append(_test(statement.test, entry_point))
        except (ValueError, TypeError, ZeroDivisionError, RecursionError) as error:
            raise AssertionNotReadError(ast.unparse(statement)) from error
    return tests


def literal(node: ast.expr) -> Any:
    """The value of a literal, also one with + - * / of numbers, or + and * of texts and lists; else ValueError.

    >>> literal(ast.parse("(3 + 5, 6.0 / 5)", mode="eval").body)
    (8, 1.2)
    """
    match node:
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            a, b = literal(left), literal(right)
            sizes = [len(x) if isinstance(x, str | list | tuple) else abs(x) for x in (a, b)]
            if isinstance(op, ast.Mult) and sizes[0] * sizes[1] > 10**15:
                raise ValueError("too large")
            if not (isinstance(a, int | float) and isinstance(b, int | float)) and max(sizes) > 10_000:
                raise ValueError("too long")
            return _ARITHMETIC[type(op)](a, b)
        case ast.BinOp(left=ast.Constant(value=int(a)), op=ast.Pow(), right=ast.Constant(value=int(b))):
            if a > 1000 or b > 64:
                raise ValueError("too large")
            return a**b
        case ast.List(elts=elements):
            return [literal(item) for item in elements]
        case ast.Tuple(elts=elements):
            return tuple(literal(item) for item in elements)
        case ast.Call(func=ast.Name(id=name), args=[inside], keywords=[]) if name in READ_AS:
            return READ_AS[name](literal(inside))
        case ast.Call(func=ast.Name(id="set"), args=[], keywords=[]):
            return set()
    return literal_value(node)


def _test(node: ast.expr, entry_point: str) -> dict:
    match node:
        case ast.UnaryOp(op=ast.Not(), operand=call):
            return _made(call, False, entry_point)
        case ast.Compare(left=left, ops=[ast.Eq() | ast.Is()], comparators=[right]):
            if not _is_call(_inner(left)[0], entry_point):
                left, right = right, left
            call, read_as = _inner(left)
            return _made(call, literal(right), entry_point, read_as=read_as)
        case ast.Compare(
            left=ast.Call(func=ast.Name(id="abs"), args=[ast.BinOp(left=left, op=ast.Sub(), right=right)]),
            ops=[ast.Lt() | ast.LtE()],
            comparators=[bound],
        ):
            if not _is_call(left, entry_point):
                left, right = right, left
            return _made(left, literal(right), entry_point, tolerance=literal(bound))
        case ast.Call(func=ast.Attribute(value=ast.Name(id="math"), attr="isclose"), args=[left, right]):
            value, bounds = literal(right), {k.arg: literal(k.value) for k in node.keywords}
            if set(bounds) - {"rel_tol", "abs_tol"}:
                raise ValueError("unknown arguments")
            tolerance = max(bounds.get("rel_tol", 1e-9) * abs(value), bounds.get("abs_tol", 0.0))
            return _made(left, value, entry_point, tolerance=tolerance)
    return _made(node, True, entry_point)


def _made(call: ast.expr, expected: Any, entry_point: str, **more: Any) -> dict:
    name, given, keywords = call_from_node(call, literal)
    if name != entry_point or keywords:
        raise ValueError("no call of the entry point")
    args = list(map(encode, given))
    named = {"tolerance": more.get("tolerance"), "as": more.get("read_as")}
    return {"args": args, "expected": encode(expected)} | {k: v for k, v in named.items() if v is not None}


def _is_call(node: ast.expr, entry_point: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == entry_point


def _inner(node: ast.expr) -> tuple[ast.expr, str | None]:
    """The call inside tuple(...), list(...), set(...) or sorted(...), and that name."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in READ_AS:
        if len(node.args) == 1 and isinstance(node.args[0], ast.Call) and not node.keywords:
            return node.args[0], node.func.id
    return node, None

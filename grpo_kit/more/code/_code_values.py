"""Values of code tests: read from a program's output and from `assert f(args) == value`, and compared.

Nothing is run.
"""

from __future__ import annotations

import ast
import json
import math
import operator
from functools import partial
from typing import Any

from grpo_kit.more.code._code_harness import encode
from grpo_kit.more.code._literal_calls import call_from_node, literal_value

READ_AS = {"tuple": tuple, "list": list, "set": set, "sorted": sorted}
_DEEP = 40
_READ_TEXT = {"$int": lambda digits: int(digits, 16), "$bytes": bytes.fromhex}
_READ_ITEMS = {"$tuple": tuple, "$set": set, "$frozenset": frozenset, "$dict": dict}
_ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def decode(data: Any, depth: int = 0) -> Any:
    """The plain value of encode()'s JSON; {"$tuple": [...]} and its like become what they name.

    Names: $tuple, $set, $frozenset, $dict (list of pairs), $int (hexadecimal), $bytes (hexadecimal), $complex.
    Raises ValueError or TypeError for anything else, such as nesting deeper than 40 or a list in a set.

    >>> decode({"a": {"$tuple": [1, None]}}), decode({"$dict": [[1, {"$set": [2]}]]})
    ({'a': (1, None)}, {1: {2}})
    """
    if depth > _DEEP:
        raise ValueError(f"nested deeper than {_DEEP}")
    if isinstance(data, list):
        return [decode(item, depth + 1) for item in data]
    if not isinstance(data, dict):
        return data
    if not any(key.startswith("$") for key in data):
        return {key: decode(item, depth + 1) for key, item in data.items()}
    if len(data) != 1:
        raise ValueError(f"{sorted(data)} are {len(data)} keys; a tagged value has one")
    ((tag, content),) = data.items()
    if tag in _READ_TEXT:
        if not isinstance(content, str):
            raise ValueError(f"{tag} needs hexadecimal digits")
        return _READ_TEXT[tag](content)
    if not isinstance(content, list):
        raise ValueError(f"{tag} needs a list")
    items = [decode(item, depth + 1) for item in content]
    if tag == "$complex":
        return complex(*items)
    if tag not in _READ_ITEMS:
        raise ValueError(
            f"{tag} is no tag; use $tuple, $set, $frozenset, $dict, $int, $bytes or $complex"
        )
    return _READ_ITEMS[tag](items)


def read_json(text: str) -> Any:
    """json.loads that refuses a key given twice; ValueError for any text that it cannot read.

    >>> read_json('{"value": [1, 2]}')
    {'value': [1, 2]}
    """
    try:
        return json.loads(text, object_pairs_hook=keys_once)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def same(value: Any, expected: Any, *, tolerance: float = 1e-9) -> bool:
    """Python's == on plain values, except that floats may differ by 1e-9 of their size or by `tolerance`.

    So 1 == 1.0 == True, a tuple is no list, and a set has no order; floats inside a set compare exactly.
    NaN equals NaN, so that a test that expects it can be passed.

    >>> same([0.1 + 0.2], [0.3]), same((1, 2), [1, 2]), same(float("nan"), float("nan"))
    (True, False, True)
    """
    near = partial(same, tolerance=tolerance)
    if isinstance(expected, list | tuple) and type(value) is type(expected):
        return len(value) == len(expected) and all(map(near, value, expected))
    if isinstance(expected, dict) and isinstance(value, dict):
        return value.keys() == expected.keys() and all(
            near(value[key], expected[key]) for key in expected
        )
    are_numbers = isinstance(value, int | float) and isinstance(expected, int | float)
    if are_numbers and (isinstance(value, float) or isinstance(expected, float)):
        try:
            if math.isnan(value) or math.isnan(expected):
                return math.isnan(value) and math.isnan(expected)
            return math.isclose(value, expected, rel_tol=1e-9, abs_tol=tolerance)
        except OverflowError:  # an integer beyond every float
            return False
    return bool(value == expected)


def keys_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The dict of these pairs; ValueError if a key is given twice."""
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key is given twice")
    return dict(pairs)


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
        if isinstance(statement, ast.Expr) and isinstance(
            statement.value, ast.Constant | ast.Name
        ):
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
            size_a, size_b = _size(a), _size(b)
            if isinstance(op, ast.Mult) and size_a * size_b > 10**15:
                raise ValueError("too large")
            are_numbers = isinstance(a, int | float) and isinstance(b, int | float)
            if not are_numbers and max(size_a, size_b) > 10_000:
                raise ValueError("too long")
            return _ARITHMETIC[type(op)](a, b)
        case ast.BinOp(
            left=ast.Constant(value=int(a)),
            op=ast.Pow(),
            right=ast.Constant(value=int(b)),
        ):
            if a > 1000 or b > 64:
                raise ValueError("too large")
            return a**b
        case ast.List(elts=elements):
            return [literal(item) for item in elements]
        case ast.Tuple(elts=elements):
            return tuple(literal(item) for item in elements)
        case ast.Call(func=ast.Name(id=name), args=[items], keywords=[]) if name in READ_AS:
            return READ_AS[name](literal(items))
    return literal_value(node)


def _size(value: Any) -> float:
    if isinstance(value, str | list | tuple):
        return len(value)
    return abs(value)


def _test(node: ast.expr, entry_point: str) -> dict:
    match node:
        case ast.UnaryOp(op=ast.Not(), operand=call):
            return _test_of(call, False, entry_point)
        case ast.Compare(left=left, ops=[ast.Eq() | ast.Is()], comparators=[right]):
            if not _is_call(_unwrapped(left)[0], entry_point):
                left, right = right, left
            call, read_as = _unwrapped(left)
            return _test_of(call, literal(right), entry_point, read_as=read_as)
        case ast.Compare(
            left=ast.Call(
                func=ast.Name(id="abs"),
                args=[ast.BinOp(left=left, op=ast.Sub(), right=right)],
            ),
            ops=[ast.Lt() | ast.LtE()],
            comparators=[bound],
        ):
            if not _is_call(left, entry_point):
                left, right = right, left
            return _test_of(left, literal(right), entry_point, tolerance=literal(bound))
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="math"), attr="isclose"),
            args=[left, right],
        ):
            expected = literal(right)
            bounds = {keyword.arg: literal(keyword.value) for keyword in node.keywords}
            if set(bounds) - {"rel_tol", "abs_tol"}:
                raise ValueError("unknown arguments")
            tolerance = max(
                bounds.get("rel_tol", 1e-9) * abs(expected), bounds.get("abs_tol", 0.0)
            )
            return _test_of(left, expected, entry_point, tolerance=tolerance)
    return _test_of(node, True, entry_point)


def _test_of(
    node: ast.expr,
    expected: Any,
    entry_point: str,
    *,
    tolerance: float | None = None,
    read_as: str | None = None,
) -> dict:
    call = call_from_node(node, literal)
    if call.name != entry_point or call.keywords:
        raise ValueError("no call of the entry point")
    test = {"args": list(map(encode, call.arguments)), "expected": encode(expected)}
    if tolerance is not None:
        test["tolerance"] = tolerance
    if read_as is not None:
        test["as"] = read_as
    return test


def _is_call(node: ast.expr, name: str) -> bool:
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    )


def _unwrapped(node: ast.expr) -> tuple[ast.expr, str | None]:
    """The call inside tuple(...), list(...), set(...) or sorted(...), and that name."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=[ast.Call() as call], keywords=[]) if (
            name in READ_AS
        ):
            return call, name
    return node, None

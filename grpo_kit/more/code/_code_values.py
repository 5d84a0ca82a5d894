"""Values of code tests: turns a sandboxed program's output into plain Python values, and compares two values."""

from __future__ import annotations

import json
import math
from typing import Any

_DEEP = 40


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
    ((tag, inside),) = data.items()
    if tag in ("$int", "$bytes"):
        if not isinstance(inside, str):
            raise ValueError(f"{tag} needs hexadecimal digits")
        return int(inside, 16) if tag == "$int" else bytes.fromhex(inside)
    if not isinstance(inside, list):
        raise ValueError(f"{tag} needs a list")
    items = [decode(item, depth + 1) for item in inside]
    match tag:
        case "$tuple":
            return tuple(items)
        case "$set":
            return set(items)
        case "$frozenset":
            return frozenset(items)
        case "$complex":
            return complex(*items)
        case "$dict":
            return dict(items)
    raise ValueError(f"{tag} is no tag; use $tuple, $set, $frozenset, $dict, $int, $bytes or $complex")


def read_json(text: str) -> Any:
    """json.loads that refuses a key given twice; ValueError for any text that it cannot read.

    >>> read_json('{"value": [1, 2]}')
    {'value': [1, 2]}
    """
    try:
        return json.loads(text, object_pairs_hook=keys_once)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def same(given: Any, expected: Any, *, tolerance: float = 1e-9) -> bool:
    """Python's == on plain values, except that floats may differ by 1e-9 of their size or by `tolerance`.

    So 1 == 1.0 == True, a tuple is no list, and a set has no order; floats inside a set compare exactly.
    NaN equals NaN, so that a test that expects it can be passed.

    >>> same([0.1 + 0.2], [0.3]), same((1, 2), [1, 2]), same(float("nan"), float("nan"))
    (True, False, True)
    """
    if isinstance(expected, list | tuple) and type(given) is type(expected):
        pairs = zip(given, expected, strict=False)
        return len(given) == len(expected) and all(same(g, e, tolerance=tolerance) for g, e in pairs)
    if isinstance(expected, dict) and isinstance(given, dict):
        if given.keys() != expected.keys():
            return False
        return all(same(given[key], item, tolerance=tolerance) for key, item in expected.items())
    numbers = isinstance(given, int | float) and isinstance(expected, int | float)
    if numbers and (isinstance(given, float) or isinstance(expected, float)):
        try:
            if math.isnan(given) or math.isnan(expected):
                return math.isnan(given) and math.isnan(expected)
            return math.isclose(given, expected, rel_tol=1e-9, abs_tol=tolerance)
        except OverflowError:  # an integer beyond every float
            return False
    return bool(given == expected)


def keys_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The dict of these pairs; ValueError if a key is given twice."""
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key is given twice")
    return dict(pairs)

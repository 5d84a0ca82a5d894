"""Tests of a program: reads them from a data set column, and judges the program's answers."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from grpo_kit.more.code._code_harness import LONGEST
from grpo_kit.more.code._code_values import READ_AS, decode, same
from grpo_kit.rewards.response import python_value

_ENTRY_POINT = re.compile(r"(?:[^\W\d]\w*(?:\(\))?\.)?([^\W\d]\w*)")
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")


@dataclass(frozen=True)
class CallTest:
    """One call: the arguments as Python text (all that the sandbox receives), and the value that should come back.

    tolerance: how far floats may be off. read_as: the type that both sides are converted to first, such as "sorted".
    """

    args: str
    expected: Any
    tolerance: float = 1e-9
    read_as: str | None = None

    @property
    def input(self) -> str:
        """The text that the program receives."""
        return self.args


@dataclass(frozen=True)
class StdinTest:
    """The program's input, and the output it should print (white space at line ends and empty last lines aside).

    tolerance: how far printed numbers may be off; lines are then compared word by word. None: compare the exact text.
    """

    stdin: str
    stdout: str
    tolerance: float | None = None

    @property
    def input(self) -> str:
        """The text that the program receives."""
        return self.stdin

    @property
    def expected(self) -> str:
        """The text that the program should print."""
        return self.stdout


Test = CallTest | StdinTest


@dataclass(frozen=True)
class Answer:
    """The result of one test: a `value` (for a stdin test the printed text), an `error`, or nothing at all.

    kind: "value"; "other" (returned, but no plain value); "error"; "none" (the program ended or was stopped before).
    """

    kind: Literal["value", "other", "error", "none"] = "none"
    value: Any = None
    error: str = ""


def read_tests(column: Any) -> tuple[Test, ...]:
    """The tests in a `tests` cell: JSON text, or the list itself; () for None, "" and [].

    A test is [args, expected], {"args": ..., "expected": ...} with an optional "tolerance" and "as" ("tuple",
    "list", "set" or "sorted"), or {"stdin": ..., "stdout": ...} with an optional "tolerance". Values are JSON or tagged
    (code_values.decode).
    Raises ValueError naming the test that does not fit.

    >>> read_tests('[[[3], 6]]')
    (CallTest(args='(3,)', expected=6, tolerance=1e-09, read_as=None),)
    """
    if isinstance(column, str):
        data = json.loads(column) if column.strip() else []
    else:
        data = _without_padding(python_value(column) or [])
    if not isinstance(data, list | tuple):
        raise ValueError(f"tests={column!r:.80} is no list of tests")
    tests = tuple(_read(test, place) for place, test in enumerate(data))
    if len({type(test) for test in tests}) > 1:
        raise ValueError("tests has calls and stdin tests; use one kind for a problem")
    return tests


def _without_padding(tests: Any) -> Any:
    """Tests without the keys that a table filled with None. What a call returns may be None."""
    if isinstance(tests, list | tuple):
        return [_without_padding(test) if isinstance(test, dict) else test for test in tests]
    if not isinstance(tests, dict):
        return tests
    is_call = tests.get("args") is not None
    return {
        key: value
        for key, value in tests.items()
        if value is not None or (is_call and key == "expected")
    }


def function_name(entry_point: str) -> str:
    """The function's own name in an entry point; ValueError for a text that can be none.

    >>> function_name("Solution().two_sum")
    'two_sum'
    """
    match = _ENTRY_POINT.fullmatch(entry_point)
    if not match:
        raise ValueError(
            f"entry_point={entry_point!r}: use 'f', 'Solution().f' or 'Solution.f'"
        )
    return match[1]


def passes(answer: Answer, test: Test) -> bool:
    """Whether the answer is what the test expects. Judged in this process, where the program cannot interfere.

    >>> passes(Answer("value", 6), CallTest("(3,)", 6)), passes(Answer("value", "7 \\n"), StdinTest("", "7"))
    (True, True)
    """
    if answer.kind != "value":
        return False
    value, expected = answer.value, test.expected
    if isinstance(test, StdinTest):
        return _lines_agree(value, expected, test.tolerance)
    if test.read_as is not None:
        convert = READ_AS[test.read_as]
        try:
            value, expected = convert(value), convert(expected)
        except TypeError:  # no collection, or its items cannot be sorted or hashed
            return False
    return same(value, expected, tolerance=test.tolerance)


def _lines_agree(text: str, expected: str, tolerance: float | None) -> bool:
    lines, expected_lines = _lines(text), _lines(expected)
    if lines == expected_lines:
        return True
    if tolerance is None or len(lines) != len(expected_lines):
        return False
    return all(_is_near(a, b, tolerance) for a, b in zip(lines, expected_lines, strict=True))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _is_near(line: str, expected: str, tolerance: float) -> bool:
    """Whether two lines have the same words, numbers within the tolerance."""
    words, expected_words = line.split(), expected.split()
    if len(words) != len(expected_words):
        return False
    for a, b in zip(words, expected_words, strict=True):
        are_numbers = _NUMBER.fullmatch(a) and _NUMBER.fullmatch(b)
        if a != b and not (are_numbers and same(_number(a), _number(b), tolerance=tolerance)):
            return False
    return True


def _number(text: str) -> int | float:
    if text.lstrip("+-").isdigit() and len(text) <= 40:
        return int(text)
    return float(text)


def _tolerance(test: dict, place: int, default: float | None) -> float | None:
    tolerance = test.get("tolerance", default)
    if tolerance is not default and not (
        isinstance(tolerance, int | float) and 0 <= tolerance < math.inf
    ):
        raise ValueError(
            f"test {place} has tolerance={tolerance!r}; use a number >= 0, such as 1e-6"
        )
    return tolerance


def _read(test: Any, place: int) -> Test:
    if isinstance(test, dict) and {"stdin", "stdout"} <= set(test) <= {
        "stdin",
        "stdout",
        "tolerance",
    }:
        if isinstance(test["stdin"], str) and isinstance(test["stdout"], str):
            if len(test["stdout"]) > LONGEST:
                raise ValueError(
                    f"test {place} has a stdout of {len(test['stdout'])} characters; use {LONGEST} at most"
                )
            return StdinTest(test["stdin"], test["stdout"], _tolerance(test, place, None))
    elif isinstance(test, list | tuple) and len(test) == 2:
        test = {"args": test[0], "expected": test[1]}
    keys = set(test) if isinstance(test, dict) else set()
    if not {"args", "expected"} <= keys <= {"args", "expected", "tolerance", "as"}:
        raise ValueError(
            f"test {place} is {test!r:.120}; use [args, expected], or an object with stdin and stdout"
        )
    if not isinstance(test["args"], list | tuple):
        raise ValueError(
            f"test {place} has the args {test['args']!r:.80}; use a list, such as [3] for f(3)"
        )
    tolerance = _tolerance(test, place, 1e-9)
    read_as = test.get("as")
    if read_as not in (None, *READ_AS):
        raise ValueError(f"test {place} has as={read_as!r}; use one of {sorted(READ_AS)}")
    try:
        args, expected = decode(list(test["args"])), decode(test["expected"])
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"test {place} holds a value that cannot be read: {error}") from error
    return CallTest(repr(tuple(args)), expected, tolerance, read_as)

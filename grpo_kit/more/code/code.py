"""code: write a Python function (or a program) that passes hidden tests, run in the sandbox.

The shipped problems (data/code_problems.json) are the kit's own, under the kit's licence.
Base rate: SmolLM2-135M-Instruct with the example and without prefill, 28 held-out problems of level 1 x 8 samples of at
most 96 tokens at temperature 1 (notebook 08, CPU, seed 0, 2026-11-25): solved 21.9 %, tests passed 31.5 %,
`code_runs` 0.68; without the example 10.3 %, 16.2 % and 0.34.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from grpo_kit._support.argument_checks import is_whole
from grpo_kit.more.code._code_files import load_problems, to_text
from grpo_kit.more.code._code_runner import CodeRunner
from grpo_kit.more.code._code_tests import read_tests
from grpo_kit.more.code.code_rewards import (
    CodeFormat,
    CodeRuns,
    CodeTests,
    definition,
    own_code,
)
from grpo_kit.rewards.cheat_cases import Case
from grpo_kit.tasks.task import Strategy, Task

_SHIPPED = Path(__file__).parent / "data" / "code_problems.json"
_PREFILL = "```python\n"
_EXAMPLE = (
    "Write a Python function triple(n) that returns n times 3.",
    "```python\ndef triple(n):\n    return n * 3\n```",
)


def code(
    *,
    levels: Sequence[int] = (1, 2, 3),
    n_held_out: int = 20,
    seed: int = 0,
    source: str | os.PathLike | None = None,
    max_completion_tokens: int = 160,
    runner: CodeRunner | None = None,
) -> Task:
    """Rows "Write a Python function double(n) that returns n times 2."; the answer is one ```python block.

    levels: levels of the problems (1 easy to 3 hard). n_held_out: how many problems are held out, from every level
    in proportion.
    source: None for the shipped problems; else a file, "mbpp" or "humaneval" (see code_files.load_problems),
    all of whose problems are level 1.
    runner: how programs are run (limits). The rewards share it, so each program runs once.
    Row columns: question, answer (a right program), entry_point (None for stdin problems), tests (hidden,
    JSON text), level. The prefill opens the block.
    Rewards: code format (0.125), code runs (0.125), code tests (0.75). Right: passes every hidden test.
    Constant strategies: the first argument, nothing, the value most tests of the train rows expect.
    Raises ValueError for levels without a problem, and for n_held_out that leaves no train row.

    >>> code(levels=(1,)).system
    'Answer with one Python code block.'
    """
    if not isinstance(levels, Sequence):
        raise ValueError(f"levels={levels!r} must be a list of levels, such as ({levels!r},)")
    problems = load_problems(_SHIPPED if source is None else source).problems
    known_levels = {problem["level"] for problem in problems}
    if not levels or set(levels) - known_levels:
        raise ValueError(
            f"levels={tuple(levels)!r} must be some of the levels that the problems have: {sorted(known_levels)}"
        )
    problems = [p for p in problems if p["level"] in levels and p["question"] != _EXAMPLE[0]]
    held_out = _stratified(problems, n_held_out, seed)
    names = {problem["name"] for problem in held_out}
    train = [problem for problem in problems if problem["name"] not in names]
    random.Random(f"code order {seed}").shuffle(train)
    runner = CodeRunner() if runner is None else runner
    rows = [_row(problem) for problem in train]

    return Task(
        name="code",
        train=rows,
        held_out=[_row(problem) for problem in held_out],
        rewards=[CodeFormat(), CodeRuns(runner), CodeTests(runner)],
        reward_weights=[0.125, 0.125, 0.75],
        strategies=_strategies(rows),
        system="Answer with one Python code block.",
        prefill=_PREFILL,
        examples=(_EXAMPLE,),
        max_completion_tokens=max_completion_tokens,
        read_answer=own_code,
        write_answer=_block,
        cases=_cases,
        cheats=_cheats,
    )


def _row(problem: dict) -> dict:
    return {
        "question": problem["question"],
        "answer": problem["solution"],
        "entry_point": problem["entry_point"],
        "tests": to_text(problem["tests"]),
        "level": problem["level"],
    }


def _stratified(problems: list[dict], count: int, seed: int) -> list[dict]:
    """`count` problems, from every level in proportion, rounded so that they add up."""
    if not is_whole(count, 1) or count >= len(problems):
        raise ValueError(
            f"n_held_out={count!r}: there are {len(problems)} problems; use 1..{len(problems) - 1}"
        )
    rng = random.Random(f"code {seed}")
    ordered = sorted(problems, key=lambda problem: problem["name"])
    rng.shuffle(ordered)
    ordered.sort(key=lambda problem: problem["level"])  # stable: shuffled within a level
    # Every (n / count)-th of the sorted list: no level gets more than its share, rounded up.
    picked = [ordered[(2 * i + 1) * len(ordered) // (2 * count)] for i in range(count)]
    rng.shuffle(picked)
    return picked


def _block(program: str, prefill: str) -> str:
    block = f"{program.rstrip()}\n```"
    if prefill.endswith(_PREFILL):
        return block
    return _PREFILL + block


def _cases(row: dict) -> list[Case]:
    """The honest block, and right programs with wrong fences around them."""
    body = row["answer"].rstrip("\n")

    def case(
        name: str,
        completion: str,
        tie: str = "never",
        *,
        honest: bool = False,
    ) -> Case:
        return Case(name, completion, honest, tie, _PREFILL, row)

    return [
        case("honest", f"{body}\n```", honest=True),
        case("truncated", body),
        case("prefill said again", f"{_PREFILL}{body}\n```"),
        case("the question again", f"{row['question']}\n```", "format"),
        case("another program", _EXAMPLE[1].removeprefix(_PREFILL), "format"),
        case(
            "right program with an explanation",
            f"{body}\n```\nThis works because it is right.",
            "always",
        ),
    ]


def _cheats(row: dict, honest: Case) -> list[Case]:
    """The constant strategies as completions. Add cheats that training finds here."""
    programs = {
        "returns its first argument": _first_argument(row),
        "returns True": _constant(row, "True"),
        "returns an empty list": _constant(row, "[]"),
    }
    return [honest.cheat(name, f"{program}```", "format") for name, program in programs.items()]


def _strategies(rows: list[dict]) -> dict[str, Strategy]:
    # True: of calls; False: of programs.
    counts: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for row in rows:
        counts[bool(row["entry_point"])].update(
            repr(test.expected) for test in read_tests(row["tests"])
        )
    most_frequent = {
        is_call: min(counter, key=lambda value: (-counter[value], value), default="None")
        for is_call, counter in counts.items()
    }
    shown = most_frequent[bool(counts[True])]
    return {
        "always its first argument": _first_argument,
        "always nothing": lambda row: _constant(row, "None"),
        f"always {shown:.40}": lambda row: _constant(
            row, most_frequent[bool(row["entry_point"])]
        ),
    }


def _first_argument(row: dict) -> str:
    if not row["entry_point"]:
        return "print(input())\n"
    return "{}{}return first\n".format(*definition(row["entry_point"], "first=None, *rest"))


def _constant(row: dict, value: str) -> str:
    if not row["entry_point"]:
        return f"print({value})\n"
    return "{}{}return {}\n".format(*definition(row["entry_point"]), value)

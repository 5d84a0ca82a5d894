"""Runs programs on their tests in the sandbox, those of one call in parallel, each once, and reads their answers."""

from __future__ import annotations

import re
import secrets
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice
from pathlib import Path

from grpo_kit.more.code._code_harness import LONGEST, NOT_PYTHON
from grpo_kit.more.code._code_tests import Answer, Test
from grpo_kit.more.code._code_values import decode, read_json
from grpo_kit.more.code.sandbox import SMALLEST_MEMORY_MB, SandboxResult, run_python_batch

_PROGRAMS_KEPT = 256
_PLACE = re.compile(r"-?[0-9]{1,6}")


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
        return cls(source, entry_point or None, tuple(test.input for test in tests))


@dataclass(frozen=True)
class Outcome:
    """The result of a program. parses: it is Python. runs: it ended without an error, and so did every call or input.

    error: the first error, as the child process worded it; "" if there was none.
    """

    parses: bool
    runs: bool
    answers: tuple[Answer, ...]
    error: str = ""


class CodeRunner:
    """Runs programs in the sandbox, those of one call in parallel; the same program on the same inputs runs once.

    seconds, memory_mb: limits of one program, all its calls together (a stdin test has its own). allow_unsafe: run
    without isolation where the machine has none (see more.code.sandbox). The last 256 outcomes are kept, so that
    rewards that share a runner share its work.
    Raises SandboxUnavailableError where programs cannot be isolated. No program is scored then: none is to blame.
    """

    def __init__(
        self, *, seconds: float = 2.0, memory_mb: int = 256, allow_unsafe: bool = False
    ) -> None:
        if not 0 < seconds < float("inf") or memory_mb < SMALLEST_MEMORY_MB:
            raise ValueError(
                f"seconds={seconds!r}, memory_mb={memory_mb!r}: use a time above 0 and at least "
                f"{SMALLEST_MEMORY_MB} MB, such as 2 and 256"
            )
        self.seconds, self.memory_mb, self.allow_unsafe = seconds, memory_mb, allow_unsafe
        self._kept: OrderedDict[Job, Outcome] = OrderedDict()

    def __repr__(self) -> str:
        return f"CodeRunner(seconds={self.seconds!r}, memory_mb={self.memory_mb!r})"

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """The outcome of every job, in order."""
        outcomes = {job: self._kept[job] for job in jobs if job in self._kept}
        new_jobs = [job for job in dict.fromkeys(jobs) if job not in outcomes]
        marks = [secrets.token_hex(16) for _ in new_jobs]
        programs = list(map(programs_of, new_jobs, marks))
        results = iter(
            run_python_batch(
                list(chain.from_iterable(programs)),
                seconds=self.seconds,
                memory_mb=self.memory_mb,
                output_kb=1024,
                allow_unsafe=self.allow_unsafe,
            )
        )
        for job, mark, job_programs in zip(new_jobs, marks, programs, strict=True):
            outcomes[job] = outcome_of(job, list(islice(results, len(job_programs))), mark)
        for job, outcome in outcomes.items():
            self._kept[job] = outcome
            self._kept.move_to_end(job)
        while len(self._kept) > _PROGRAMS_KEPT:
            self._kept.popitem(last=False)
        return [outcomes[job] for job in jobs]


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
    error = ""
    failure = next(
        (answer for answer in (loaded, *answers) if answer.kind in ("error", "none")), None
    )
    if failure:
        error = failure.error or _stop_reason(results[0])
    return Outcome(True, failure is None, tuple(answers[: len(job.inputs)]), error)


def _printed(result: SandboxResult) -> Answer:
    if not result.ok:
        return Answer("error", error=_stop_reason(result))
    if len(result.stdout) > LONGEST:  # outcomes are kept: flooded stdout must not fill memory
        return Answer("other", error="longer than a result may be")
    return Answer("value", result.stdout)


def _read_lines(stdout: str, mark: str, calls: int) -> list[Answer]:
    """Answers -1 .. calls - 1 from the written lines; a call with two answers counts as not answered."""
    texts_of = defaultdict(list)
    for line in stdout.split("\n"):
        line_mark, _, rest = line.partition(" ")
        place, _, text = rest.partition(" ")
        if line_mark == mark and _PLACE.fullmatch(place):
            texts_of[int(place)].append(text)
    answers = []
    for place in range(-1, calls):
        texts = texts_of[place]
        answers.append(_answer(texts[0]) if len(texts) == 1 else Answer())
    return answers


def _answer(text: str) -> Answer:
    # The program may write anything here. The limit on length bounds the work: in a set, integers whose hashes
    # collide (multiples of 2**61 - 1) cost the square of their number.
    if len(text) > LONGEST:
        return Answer("other", error="longer than a result may be")
    try:
        data = read_json(text)
        ((kind, content),) = data.items()
        if kind == "value":
            return Answer("value", decode(content))
    except (ValueError, TypeError, AttributeError, OverflowError):
        return Answer("other", error="unreadable")
    return Answer("error" if kind == "error" else "other", error=str(content)[:200])


def _stop_reason(result: SandboxResult) -> str:
    """The limit that stopped the program, or the last line of the traceback."""
    if result.status == "ok":
        return "it ended early"
    if result.status != "error":
        return result.status
    last_line = result.stderr.strip().rpartition("\n")[2].strip()
    return last_line[:200] or f"exit code {result.exit_code}"

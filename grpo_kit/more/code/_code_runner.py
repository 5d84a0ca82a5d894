"""Runs programs on their tests in the sandbox: the programs of one call in parallel, each once."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Sequence

from grpo_kit.more.code._code_tests import Job, Outcome, outcome_of, programs_of
from grpo_kit.more.code.sandbox import SMALLEST_MEMORY_MB, run_python_batch

_PROGRAMS_KEPT = 256


class CodeRunner:
    """Runs programs in the sandbox, those of one call in parallel; the same program on the same inputs runs once.

    seconds, memory_mb: limits of one program, all its calls together (a stdin test has its own). allow_unsafe: run
    without isolation where the machine has none (see more.code.sandbox). The last 256 outcomes are kept, so that
    rewards that share a runner share its work.
    Raises SandboxUnavailableError where programs cannot be isolated. No program is scored then: none is to blame.
    """

    def __init__(self, *, seconds: float = 2.0, memory_mb: int = 256, allow_unsafe: bool = False) -> None:
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
        found = {job: self._kept[job] for job in jobs if job in self._kept}
        new = [job for job in dict.fromkeys(jobs) if job not in found]
        marks = [secrets.token_hex(16) for _ in new]
        programs = [programs_of(job, mark) for job, mark in zip(new, marks, strict=True)]
        limits = {"seconds": self.seconds, "memory_mb": self.memory_mb, "output_kb": 1024}
        texts = [program for several in programs for program in several]
        results = iter(run_python_batch(texts, **limits, allow_unsafe=self.allow_unsafe))
        for job, mark, several in zip(new, marks, programs, strict=True):
            found[job] = outcome_of(job, [next(results) for _ in several], mark)
        for job, outcome in found.items():
            self._kept[job] = outcome
            self._kept.move_to_end(job)
        while len(self._kept) > _PROGRAMS_KEPT:
            self._kept.popitem(last=False)
        return [found[job] for job in jobs]

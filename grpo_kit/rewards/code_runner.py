"""Running programs on their tests in the sandbox: all of a call side by side, each once, and some ahead of the call."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from grpo_kit.rewards.code_tests import Job, Outcome, outcome_of, programs_of
from grpo_kit.sandbox import SMALLEST_MEMORY_MB

if TYPE_CHECKING:
    from grpo_kit.sandbox import PythonBatch, SandboxResult

_PROGRAMS_KEPT = 256
_NOT_ITS_FAULT = (
    "timeout",
    "killed",
)  # perhaps: the machine was busy with something else, or short of memory


class CodeRunner:
    """Runs programs in the sandbox, all of a call side by side; the same program on the same inputs runs once.

    seconds, memory_mb: of one program, all its calls together (a stdin test has its own). allow_unsafe: run
    without isolation where there is none (see grpo_kit.sandbox). The last 256 outcomes are kept, so that
    rewards that share a runner share its work.
    Raises SandboxUnavailableError where programs cannot be isolated: no program is to blame, so none is scored.
    """

    def __init__(self, *, seconds: float = 2.0, memory_mb: int = 256, allow_unsafe: bool = False) -> None:
        if not 0 < seconds < float("inf") or memory_mb < SMALLEST_MEMORY_MB:
            raise ValueError(
                f"seconds={seconds!r}, memory_mb={memory_mb!r}: use a time above 0 and at least "
                f"{SMALLEST_MEMORY_MB} MB, such as 2 and 256"
            )
        self.seconds, self.memory_mb, self.allow_unsafe = seconds, memory_mb, allow_unsafe
        self._kept: OrderedDict[Job, Outcome] = OrderedDict()
        self._batch: PythonBatch | None = None  # only while something runs
        self._running: dict[Job, tuple[str, list[int]]] = {}  # its mark, its programs in the batch
        self._ahead: dict[Job, Outcome] = {}  # begun and done, not asked for yet

    def __repr__(self) -> str:
        return f"CodeRunner(seconds={self.seconds!r}, memory_mb={self.memory_mb!r})"

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """The outcome of every job, in order; the same whether or not it was begun before."""
        found = {job: self._kept[job] for job in jobs if job in self._kept}
        try:
            asked = [job for job in dict.fromkeys(jobs) if job not in found]
            begun = [job for job in asked if job in self._running]
            found |= {job: self._ahead.pop(job) for job in asked if job in self._ahead}
            self._start([job for job in asked if job not in found and job not in begun], workers=None)
            for job in asked:
                if job in self._running:
                    outcome, fair = self._result(job)
                    if fair or job not in begun:
                        found[job] = outcome
            again = [job for job in asked if job not in found]
            self._start(again, workers=None)
            found |= {job: self._result(job)[0] for job in again}
        except BaseException:  # an interrupt, too
            self.drop()
            raise
        self._forget_batch()
        for job, outcome in found.items():
            self._kept[job] = outcome
            self._kept.move_to_end(job)
        while len(self._kept) > _PROGRAMS_KEPT:
            self._kept.popitem(last=False)
        return [found[job] for job in jobs]

    def begin(self, jobs: Sequence[Job], *, workers: int) -> None:
        """Start what is new among these, at most `workers` programs at a time, and see how far earlier ones are.

        Returns at once; `run` then finds them done or waits for them. One that reached its time limit is run again
        there, when it has the machine for itself. At most 256 wait to be asked for; what is more is not begun.
        """
        try:
            new = [
                j
                for j in dict.fromkeys(jobs)
                if not any(j in d for d in (self._kept, self._ahead, self._running))
            ]
            room = _PROGRAMS_KEPT - len(self._ahead) - len(self._running)
            self._start(new[: max(0, room)], workers=workers)
            if self._batch is not None:
                self._batch.look()
            for job, (_, numbers) in list(self._running.items()):
                if self._batch.has(numbers):
                    outcome, fair = self._result(job)
                    if fair:
                        self._ahead[job] = outcome
        except BaseException:
            self.drop()
            raise
        self._forget_batch()

    def drop(self) -> None:
        """Stop what runs and forget what was begun; outcomes that were asked for are kept."""
        batch, self._batch = self._batch, None
        self._running, self._ahead = {}, {}
        if batch is not None:
            batch.close()

    def _start(self, jobs: Sequence[Job], *, workers: int | None) -> None:
        from grpo_kit.sandbox import PythonBatch

        if self._batch is None:
            if not jobs:
                return
            limits = {"seconds": self.seconds, "memory_mb": self.memory_mb, "output_kb": 1024}
            self._batch = PythonBatch(**limits, allow_unsafe=self.allow_unsafe)
        self._batch.workers = workers
        for job in jobs:
            mark = secrets.token_hex(16)
            self._running[job] = mark, self._batch.add(programs_of(job, mark))

    def _result(self, job: Job) -> tuple[Outcome, bool]:
        """Wait for it: its outcome, and whether it can be no other on a machine that has nothing else to do."""
        mark, numbers = self._running.pop(job)
        results: list[SandboxResult] = self._batch.results(numbers)
        return outcome_of(job, results, mark), not any(one.status in _NOT_ITS_FAULT for one in results)

    def _forget_batch(self) -> None:
        if not self._running:
            self._batch = None

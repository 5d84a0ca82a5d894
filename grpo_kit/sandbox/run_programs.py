"""Programs handed to launchers and their results read, while the caller waits or does something else."""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

Launcher = Any  # pool.Launcher, which stands above this file

GRACE_SECONDS = 15.0  # beyond a program's own limit, before its launcher is given up


class LauncherError(Exception):
    """The launcher could not start, or could not start a program."""


def wait_for(launchers: list[Launcher], deadline: float) -> list[Launcher]:
    """Those with something to read, at the latest at `deadline`. poll: descriptors may be above 1023."""
    poll = select.poll()
    by_file = {launcher.fileno(): launcher for launcher in launchers}
    for file in by_file:
        poll.register(file, select.POLLIN)
    return [by_file[file] for file, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000)]


class Running:
    """Programs on a pool's launchers, at most `workers` at a time, which go on while the caller does something else.

    A program whose launcher ends or cannot start it gets a second one. LauncherError where that cannot start it either:
    a full disk, say. One whose second launcher ends while it runs is "killed".
    """

    def __init__(self, pool: Any, limits: dict, workers: int):
        self.workers = workers
        self._pool, self._limits = pool, limits
        self._count = 0
        self._programs: dict[int, tuple[bytes, bytes]] = {}  # without a result
        self._waiting: deque[int] = deque()
        self._busy: dict[Launcher, int] = {}
        self._refused: set[int] = set()
        self._results: dict[int, tuple] = {}

    def add(self, programs: Sequence[tuple[bytes, bytes]]) -> list[int]:
        """Start these (code, stdin), or let them wait for their turn; numbers to ask for them by."""
        numbers = list(range(self._count, self._count + len(programs)))
        self._count += len(programs)
        self._programs.update(zip(numbers, programs, strict=True))
        self._waiting.extend(numbers)
        self.look()
        return numbers

    def look(self) -> None:
        """Read the results that are there and start those that wait; does not wait for any."""
        self._turns(lambda: False)

    def has(self, numbers: Sequence[int]) -> bool:
        """Are these done, as of the last look?"""
        return all(number in self._results for number in numbers)

    def take(self, numbers: Sequence[int]) -> list[tuple]:
        """Wait for these and hand them out: (fields, stdout, stderr) of each. The others go on."""
        self._turns(lambda: not self.has(numbers))
        return [self._results.pop(number) for number in numbers]

    def close(self) -> None:
        """Stop what runs."""
        self._waiting.clear()
        busy, self._busy = self._busy, {}
        for launcher in busy:
            launcher.close()

    def _turns(self, wait: Callable[[], bool]) -> None:
        """Start and read until nothing is there to be read, and wait() says no."""
        try:
            self._start()
            while ready := self._ready(wait()):
                for launcher in ready:
                    self._receive(launcher)
                self._start()
        except BaseException:  # an interrupt, too
            self.close()
            raise

    def _start(self) -> None:
        while self._waiting and len(self._busy) < self.workers:
            number = self._waiting.popleft()
            launcher = self._pool._take()
            self._busy[launcher] = number
            try:
                launcher.start(*self._programs[number], self._limits)
            except LauncherError:
                pass  # it has ended, which `receive` then says

    def _ready(self, wait: bool) -> list[Launcher]:
        """Launchers with something to read, and those that are overdue."""
        if not self._busy:
            return []
        until = min(launcher.deadline for launcher in self._busy) if wait else 0.0
        while True:
            ready = wait_for(list(self._busy), until)
            now = time.monotonic()
            for launcher in ready:  # where nobody looked for long the rest of its message may take a moment
                launcher.deadline = max(launcher.deadline, now + GRACE_SECONDS)
            ready = ready or [one for one in self._busy if one.deadline <= now]
            if ready or not wait:
                return ready

    def _receive(self, launcher: Launcher) -> None:
        number = self._busy[launcher]
        try:
            fields, bodies = launcher.receive()
        except LauncherError as problem:
            launcher.close()
            del self._busy[launcher]
            if number not in self._refused:  # killed from outside, perhaps; not the program's fault
                return self._once_more(number)
            if not launcher.ready:
                raise
            fields = {"status": "killed", "exit_code": None, "seconds": self._limits["seconds"]}
            return self._done(number, (fields, b"", f"sandbox: {problem}\n".encode()))
        if "ready" in fields:
            launcher.ready = True
            return None
        del self._busy[launcher]
        if "problem" in fields:
            launcher.close()
            if number in self._refused:
                raise LauncherError(fields["problem"])
            return self._once_more(number)
        self._pool._give(launcher)
        return self._done(number, (fields, *bodies))

    def _once_more(self, number: int) -> None:
        self._refused.add(number)
        self._waiting.appendleft(number)

    def _done(self, number: int, result: tuple) -> None:
        self._results[number] = result
        del self._programs[number]

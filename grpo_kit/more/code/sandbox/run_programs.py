"""Gives programs to launchers and reads their results."""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

Launcher = Any  # pool.Launcher, which imports this file

GRACE_SECONDS = 15.0  # beyond a program's own limit, before its launcher counts as lost


class LauncherError(Exception):
    """The launcher could not start, or could not start a program."""


def wait_for(launchers: list[Launcher], deadline: float) -> list[Launcher]:
    """Launchers with something to read, at the latest at `deadline`. poll: descriptors may be above 1023."""
    poll = select.poll()
    by_file = {launcher.fileno(): launcher for launcher in launchers}
    for file in by_file:
        poll.register(file, select.POLLIN)
    return [by_file[file] for file, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000)]


class Running:
    """One batch of programs on a pool's launchers, at most `workers` at a time.

    A program whose launcher ends or cannot start it gets a second launcher. If that cannot start it either (a full
    disk, say), LauncherError. A program whose second launcher ends while it runs is "killed".
    """

    def __init__(self, pool: Any, programs: Sequence[tuple[bytes, bytes]], limits: dict, workers: int):
        self._pool, self._programs, self._limits, self._workers = pool, programs, limits, workers
        self._waiting = deque(range(len(programs)))
        self._busy: dict[Launcher, int] = {}
        self._refused: set[int] = set()
        self._results: dict[int, tuple] = {}

    def results(self) -> list[tuple]:
        """Run all: (fields, stdout, stderr) of each, in order. An exception or interrupt stops all running programs."""
        try:
            self._start()
            while self._busy:
                for launcher in self._ready():
                    self._receive(launcher)
                self._start()
        except BaseException:
            for launcher in self._busy:
                launcher.close()
            raise
        return [self._results[number] for number in range(len(self._programs))]

    def _start(self) -> None:
        while self._waiting and len(self._busy) < self._workers:
            number = self._waiting.popleft()
            launcher = self._pool._take()
            self._busy[launcher] = number
            try:
                launcher.start(*self._programs[number], self._limits)
            except LauncherError:
                pass  # it has ended, which `receive` then raises

    def _ready(self) -> list[Launcher]:
        """Wait for launchers with something to read, or for the first that is overdue."""
        while True:
            ready = wait_for(list(self._busy), min(launcher.deadline for launcher in self._busy))
            now = time.monotonic()
            for launcher in ready:  # on a busy machine the rest of its message may take a moment
                launcher.deadline = max(launcher.deadline, now + GRACE_SECONDS)
            ready = ready or [one for one in self._busy if one.deadline <= now]
            if ready:
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
            self._results[number] = fields, b"", f"sandbox: {problem}\n".encode()
            return None
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
        self._results[number] = (fields, *bodies)
        return None

    def _once_more(self, number: int) -> None:
        self._refused.add(number)
        self._waiting.appendleft(number)

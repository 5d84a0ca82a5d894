"""Keeps launchers between calls, gives them programs and reads their results."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
_START_SECONDS = 60.0  # for a launcher to start, on a very busy machine
_GRACE_SECONDS = 15.0  # beyond a program's own limit, before its launcher counts as lost


class LauncherError(Exception):
    """The launcher could not start, or could not start a program."""


def environment() -> dict[str, str]:
    """The environment of a program: the path of the interpreter's own libraries, if that is set, and nothing else."""
    return {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}


@functools.cache
def interpreter() -> dict:
    """The result of interpreter.py, run by an interpreter without installed packages."""
    executable = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    command = [executable, "-I", "-S", "-B", str(HERE / "interpreter.py")]
    process = subprocess.run(
        command, capture_output=True, stdin=subprocess.DEVNULL, env=environment(), timeout=60
    )
    if process.returncode:
        raise LauncherError(
            f"{executable} does not run: {process.stderr.decode(errors='replace')[-500:]}"
        )
    return json.loads(process.stdout)


class Launcher:
    """A running launcher.py and the folder it works in."""

    def __init__(self, kind: str):
        bwrap = shutil.which("bwrap")
        if kind == "bubblewrap" and not bwrap:
            raise LauncherError("no bwrap on PATH")
        package = importlib.util.find_spec("sandlock")
        if kind == "sandlock" and not package:
            raise LauncherError("the package is not installed")
        python = interpreter()
        self.root = os.path.realpath(tempfile.mkdtemp(prefix="grpo-kit-sandbox-"))
        self.ready = False  # set by its first message; a program may be sent before
        self.deadline = 0.0
        command = [python["executable"], "-I", "-S", "-B", str(HERE / "launcher.py")]
        # vfork: the cost does not depend on the memory of this process
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment(),
            cwd="/",
            bufsize=0,
            start_new_session=True,  # this process alone handles an interrupt in the terminal
        )
        _launchers.add(self)
        self._remove = weakref.finalize(self, shutil.rmtree, self.root, ignore_errors=True)
        try:
            self.send(
                {
                    "kind": kind,
                    "python": python,
                    "root": self.root,
                    "environment": environment(),
                    "bwrap": bwrap,
                    "sandlock": package and str(Path(package.origin).parent.parent),
                }
            )
        except LauncherError:
            pass  # it has ended, which `receive` then raises
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        return self.process.stdout.fileno()

    def send(self, fields: dict, *bodies: bytes) -> None:
        header = json.dumps({**fields, "sizes": [len(body) for body in bodies]}).encode()
        message = memoryview(struct.pack("!I", len(header)) + header + b"".join(bodies))
        try:
            while message:
                message = message[self.process.stdin.write(message) :]
        except BrokenPipeError as error:
            raise LauncherError("the launcher has ended") from error

    def start(self, code: bytes, stdin: bytes, limits: dict) -> None:
        """Send a program; `receive` its result."""
        self.deadline = (
            time.monotonic()
            + limits["seconds"]
            + _GRACE_SECONDS
            + _START_SECONDS * (not self.ready)
        )
        self.send(limits, code, stdin)

    def receive(self) -> tuple[dict, list[bytes]]:
        """The next message; LauncherError if the launcher has ended or is long overdue."""
        (length,) = struct.unpack("!I", self._read(4))
        fields = json.loads(self._read(length))
        return fields, [self._read(size) for size in fields.pop("sizes")]

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            ready = _wait_for([self], self.deadline)
            part = self.process.stdout.read(size) if ready else b""
            if not part:
                raise LauncherError(
                    "the launcher has ended" if ready else "the launcher does not answer"
                )
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        """End the launcher and its program; no process and no file remains."""
        self.process.stdin.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its program dies with it
            self.process.wait()
        self.process.stdout.close()
        self._remove()

    def forget(self) -> None:
        """In a forked copy of the trainer: the launcher belongs to the original."""
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.returncode = 0  # not our child: nothing to wait for
        self._remove.detach()


def _wait_for(launchers: list[Launcher], deadline: float) -> list[Launcher]:
    """Launchers with something to read, at the latest at `deadline`. poll: descriptors may be above 1023."""
    poll = select.poll()
    by_file = {launcher.fileno(): launcher for launcher in launchers}
    for file in by_file:
        poll.register(file, select.POLLIN)
    return [
        by_file[file] for file, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
    ]


class _Running:
    """One batch of programs on a pool's launchers, at most `workers` at a time.

    A program whose launcher ends or cannot start it gets a second launcher. If that cannot start it either (a full
    disk, say), LauncherError. A program whose second launcher ends while it runs is "killed".
    """

    def __init__(
        self, pool: Pool, programs: Sequence[tuple[bytes, bytes]], limits: dict, workers: int
    ):
        self._pool, self._programs, self._limits, self._workers = (
            pool,
            programs,
            limits,
            workers,
        )
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
            ready = _wait_for(
                list(self._busy), min(launcher.deadline for launcher in self._busy)
            )
            time_now = time.monotonic()
            # on a busy machine the rest of its message may take a moment
            for launcher in ready:
                launcher.deadline = max(launcher.deadline, time_now + _GRACE_SECONDS)
            ready = ready or [
                launcher for launcher in self._busy if launcher.deadline <= time_now
            ]
            if ready:
                return ready

    def _receive(self, launcher: Launcher) -> None:
        number = self._busy[launcher]
        try:
            fields, bodies = launcher.receive()
        except LauncherError as problem:
            launcher.close()
            del self._busy[launcher]
            # killed from outside, perhaps; not the program's fault
            if number not in self._refused:
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


class Pool:
    """Launchers of one kind, shared by all threads."""

    def __init__(self, kind: str):
        self.kind = kind
        self._idle: list[Launcher] = []
        self._lock = threading.Lock()
        _pools.add(self)

    def _take(self) -> Launcher:
        while self._idle:
            with self._lock:
                launcher = self._idle.pop() if self._idle else None
            if launcher and launcher.process.poll() is None:
                return launcher
            if launcher:
                launcher.close()  # ended from outside
        return Launcher(self.kind)

    def _give(self, launcher: Launcher) -> None:
        with self._lock:
            self._idle.append(launcher)

    def run(
        self, programs: Sequence[tuple[bytes, bytes]], limits: dict, workers: int
    ) -> list[tuple]:
        """(fields, stdout, stderr) of each (code, stdin), in their order; at most `workers` at a time.

        Raises LauncherError like `_Running`.
        """
        return _Running(self, programs, limits, workers).results()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for launcher in idle:
            launcher.process.stdin.close()  # all at once, then wait for each
        for launcher in idle:
            launcher.close()


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
_launchers: weakref.WeakSet[Launcher] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for pool in list(_pools):
        pool.close()


def _after_fork() -> None:
    """The copy starts its own launchers; its open descriptors must not hold the original's input open."""
    for launcher in list(_launchers):
        launcher.forget()
    for pool in list(_pools):
        pool._idle, pool._lock = [], threading.Lock()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_after_fork)

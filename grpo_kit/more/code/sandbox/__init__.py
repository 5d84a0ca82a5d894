"""Run Python that a model wrote.

Each program runs in a fresh interpreter with an empty folder of its own. It can read the interpreter's standard
library and nothing else, write in its folder and nowhere else, and has no network, no other processes, no threads, and
nothing of this process: no descriptors, no variables, no environment. Time, memory, output and files are bounded.

    sandlock      Landlock; Linux >= 6.2, no root, works in containers       pip install sandlock
    bubblewrap    namespaces; where user namespaces are allowed              apt install bubblewrap

Both add the kit's system-call filter (syscalls.py), for x86-64 and aarch64. On other machines no program is run
unless `allow_unsafe=True`: then nothing is isolated, and only well-meaning programs keep to the limits.

Limitations: sandlock cannot hide whether a path exists, its size and its dates. Neither isolation can count files
deleted while mapped (a program can fill the disk with them until it ends), or protect from a hole in the kernel.
Seconds are wall-clock: on a busy machine a program gets less done in them.
"""

from __future__ import annotations

import functools
import os
import platform
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from grpo_kit.more.code.sandbox import syscalls
from grpo_kit.more.code.sandbox.pool import LauncherError, Pool

__all__ = [
    "SandboxResult", "SandboxUnavailableError", "isolation", "run_python", "run_python_batch",
]  # fmt: skip

Status = Literal["ok", "error", "timeout", "memory", "output", "killed"]
SMALLEST_MEMORY_MB = 64
LONGEST_SECONDS = 86_400  # a day


class SandboxUnavailableError(RuntimeError):
    """Nothing here can isolate a program (the message names what to install), or none can start: a full disk."""


@dataclass(frozen=True)
class SandboxResult:
    """A program's output and how it ended.

    stdout, stderr: text, each cut at output_kb; undecodable bytes replaced.
    exit_code: 0 and up if it ended by itself, -signal if a signal ended it, None if a limit stopped it.
    status: "ok" exit code 0; "error" another code, an exception for one; "timeout", "output": stopped at that limit;
    "memory": it ran out of memory; "killed": ended by a signal, or stopped for filling its folder.
    seconds: wall-clock, interpreter start included.
    """

    stdout: str
    stderr: str
    exit_code: int | None
    status: Status
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.status == "ok"


def run_python(
    code: str,
    stdin: str = "",
    *,
    seconds: float = 2.0,
    memory_mb: int = 256,
    output_kb: int = 64,
    allow_unsafe: bool = False,
) -> SandboxResult:
    """Run one program. Whatever the program is or does, the result is a SandboxResult.

    memory_mb: address space, interpreter included. allow_unsafe: run it even if nothing can isolate it.
    Raises ValueError for limits that make no sense, SandboxUnavailableError if nothing can isolate it.

    >>> run_python("print(6 * int(input()))", "7").stdout
    '42\\n'
    """
    limits = {"seconds": seconds, "memory_mb": memory_mb, "output_kb": output_kb}
    return run_python_batch([(code, stdin)], workers=1, **limits, allow_unsafe=allow_unsafe)[0]


def run_python_batch(
    programs: Sequence[tuple[str, str]],
    *,
    workers: int | None = None,
    seconds: float = 2.0,
    memory_mb: int = 256,
    output_kb: int = 64,
    allow_unsafe: bool = False,
) -> list[SandboxResult]:
    """Run programs, each (code, stdin), several at a time; results in their order.

    workers: programs at a time; None: one per CPU core. The limits are each program's. Raises like `run_python`.
    An interrupt stops running programs.

    >>> [result.stdout for result in run_python_batch([("print(1)", ""), ("print(2)", "")])]
    ['1\\n', '2\\n']
    """
    if not 0 < seconds <= LONGEST_SECONDS:
        raise ValueError(
            f"seconds is {seconds!r}: a program needs a time limit above 0, and of at most {LONGEST_SECONDS}"
        )
    if memory_mb < SMALLEST_MEMORY_MB:
        raise ValueError(
            f"memory_mb is {memory_mb!r}: the interpreter alone needs about 40; give {SMALLEST_MEMORY_MB} or more"
        )
    if output_kb < 1:
        raise ValueError(f"output_kb is {output_kb!r}: give 1 or more")
    if workers is not None and workers < 1:
        raise ValueError(f"workers is {workers!r}: give 1 or more, or None for one a CPU core")
    for index, program in enumerate(programs):
        if (
            isinstance(program, str)
            or len(program) != 2
            or not all(isinstance(text, str) for text in program)
        ):
            raise ValueError(
                f"programs[{index}] is {program!r:.80}: give (code, stdin), two strings"
            )
    if not programs:
        return []
    limits = {
        "seconds": float(seconds),
        "memory_mb": int(memory_mb),
        "output_kb": int(output_kb),
    }
    # A lone surrogate becomes invalid UTF-8, which is then the program's error and not the kit's.
    encoded = [
        tuple(text.encode("utf-8", "surrogatepass") for text in program) for program in programs
    ]
    pool = _pool(allow_unsafe)
    try:
        results = pool.run(encoded, limits, workers or os.cpu_count() or 1)
    except LauncherError as problem:
        raise SandboxUnavailableError(f"A program could not be started: {problem}") from problem
    return [_result(*result) for result in results]


def isolation() -> Literal["sandlock", "bubblewrap"] | None:
    """The isolation on this machine; None: there is none, and programs are refused. Tested once."""
    return _working()[0]


def _result(fields: dict, stdout: bytes, stderr: bytes) -> SandboxResult:
    return SandboxResult(
        stdout.decode("utf-8", "replace"), stderr.decode("utf-8", "replace"), **fields
    )


def _pool(allow_unsafe: bool) -> Pool:
    kind, problems = _working()
    if kind is None and not allow_unsafe:
        raise SandboxUnavailableError(
            "Nothing on this machine can isolate a program:\n  "
            + "\n  ".join(problems)
            + "\nOn Linux 6.2 or newer: pip install sandlock. Elsewhere on Linux: apt install bubblewrap, with user"
            " namespaces allowed. On Windows: run it in WSL. allow_unsafe=True runs programs with all rights of this"
            " process: use it only on a machine that holds nothing of value."
        )
    if not hasattr(os, "fork"):
        raise SandboxUnavailableError(
            f"allow_unsafe={allow_unsafe!r}: a program is started by fork and with limits, which {platform.system()} "
            "does not have; run it in WSL, where it is isolated too"
        )
    return _shared_pool(kind or "none")


@functools.cache
def _shared_pool(kind: str) -> Pool:
    return Pool(kind)


_lock = threading.Lock()


def _working() -> tuple[Literal["sandlock", "bubblewrap"] | None, list[str]]:
    """The first isolation that runs a program here, and the failures of those before it."""
    with _lock:
        return _try_out()


@functools.cache
def _try_out() -> tuple[Literal["sandlock", "bubblewrap"] | None, list[str]]:
    problems = []
    if sys.platform != "linux" or not syscalls.supported():
        machine = f"{platform.system()} on {platform.machine()}"
        return None, [f"isolation needs Linux on x86-64 or aarch64, and this is {machine}"]
    for kind in ("sandlock", "bubblewrap"):
        limits = {"seconds": 30.0, "memory_mb": 256, "output_kb": 64}
        try:
            fields, stdout, stderr = _shared_pool(kind).run(
                [(b"print('runs')", b"")], limits, 1
            )[0]
        except (LauncherError, OSError) as problem:
            problems.append(f"{kind}: {problem}")
            continue
        if stdout == b"runs\n" and fields["status"] == "ok":
            return kind, problems
        reason = stderr.decode(errors="replace").strip()[-300:] or fields["status"]
        problems.append(f"{kind}: {reason}")
    return None, problems

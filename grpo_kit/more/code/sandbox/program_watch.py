"""Watches one running program: its output, the clock, its folder, and whether the trainer still runs.

Measures the folder's contents, and empties it whatever was left. Links are never followed.
"""

from __future__ import annotations

import os
import select
import signal
import stat
import time

DISK_BYTES, ENTRIES = 32 << 20, 1000  # of the program: all files together, files and folders
_MAX_DEPTH = 32  # folders within folders; a deeper tree counts as over the limit
# between two checks of the folder; writes in that time may exceed the limit
_LOOK_SECONDS = 0.02
_OUT_OF_MEMORY = (  # printed if memory does not even suffice for a traceback
    b"Cannot recover from MemoryErrors",
    b"object type name: MemoryError",
)
_DIED = tuple(
    getattr(signal, name)
    for name in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGKILL", "SIGSYS")
)


class Watch:
    """Reads a program's output until it ends or reaches a limit.

    folder: all that the program can write to; ours: bytes of the launcher's own files in it, which do not count.
    """

    def __init__(
        self,
        pid: int,
        outputs: tuple[int, int],
        started: float,
        job: dict,
        folder: str,
        ours: int,
    ):
        self.pid, self.started, self.folder = pid, started, folder
        self.disk_bytes = DISK_BYTES + ours
        self.deadline = started + job["seconds"]
        self.limit = job["output_kb"] * 1024
        self.seconds: float = 0
        self.stopped = ""  # the limit that was reached
        self.note = b""
        self.output = {file: bytearray() for file in outputs}
        self.open = set(outputs)
        for file in outputs:
            os.set_blocking(file, False)

    def until_it_ends(self) -> None:
        """Returns when the program has ended or must be stopped. Raises EOFError if the trainer has ended."""
        poll = select.poll()
        for file in (0, *self.open):
            poll.register(file, select.POLLIN)
        ending = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else None
        if ending is not None:
            poll.register(ending, select.POLLIN)
        look = self.started + _LOOK_SECONDS
        try:
            while not self.stopped:
                now = time.monotonic()
                if now >= self.deadline:
                    self.stopped = "timeout"
                    break
                step = min(self.deadline, look) - now if ending is not None else 0.002
                ready = {file for file, _ in poll.poll(max(0, step) * 1000 + 1)}
                for file in ready & self.open:
                    if not self.read(file):
                        poll.unregister(file)
                if 0 in ready:
                    raise EOFError
                if ending in ready or (ending is None and self.has_ended()):
                    break
                if time.monotonic() >= look:
                    if over_limit(self.folder, self.disk_bytes, ENTRIES):
                        self.stopped, self.note = (
                            "killed",
                            b"sandbox: stopped, too much in its folder\n",
                        )
                    look = time.monotonic() + _LOOK_SECONDS
        finally:
            self.seconds = time.monotonic() - self.started
            if ending is not None:
                os.close(ending)

    def has_ended(self) -> bool:
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            return not self.open
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def read(self, file: int) -> bool:
        """Read the available output, up to the limit; False at the end of the stream."""
        output = self.output[file]
        while True:
            try:
                part = os.read(file, 1 << 16)
            except BlockingIOError:
                return True
            if not part:
                self.open.discard(file)
                return False
            output += part
            if len(output) > self.limit:
                del output[self.limit :]
                self.stopped = self.stopped or "output"
                return True

    def drain(self) -> None:
        """Read the output that is left in the pipes after the program's end."""
        for file in tuple(self.open):
            self.read(file)

    def result(self, status: int | None, wrapped: bool) -> tuple[dict, bytes, bytes]:
        """Fields of the result, stdout, stderr. wrapped: the exit code came through bubblewrap (128 + signal)."""
        stdout, stderr = map(bytes, self.output.values())
        code = None if status is None else os.waitstatus_to_exitcode(status)
        if wrapped and code is not None and code - 128 in _DIED:
            code = 128 - code
        verdict = self.stopped
        if verdict:
            code = None
        elif code == 0:
            verdict = "ok"
        elif (
            code in (-signal.SIGXCPU, -signal.SIGKILL)
            and self.seconds >= self.deadline - self.started
        ):
            verdict, code = "timeout", None
        elif code is None or code < 0:
            verdict = "killed"
        else:
            verdict = "error"
        last_line = stderr.rstrip().rpartition(b"\n")[2]
        starved = last_line.startswith(b"MemoryError") or any(
            words in stderr for words in _OUT_OF_MEMORY
        )
        if verdict in ("error", "killed") and not self.stopped and starved:
            verdict = "memory"
        return (
            {"status": verdict, "exit_code": code, "seconds": self.seconds},
            stdout,
            stderr + self.note,
        )


def over_limit(top: str, max_bytes: int, max_entries: int) -> bool:
    """Whether the tree under `top` has more bytes or entries than allowed, or hides them.

    Stops counting at the limit. A running program may change the tree meanwhile: vanished files are not counted, and
    a folder that cannot be listed counts as over the limit.
    """
    total = entries = 0
    waiting = [(top, 0)]
    while waiting:
        path, depth = waiting.pop()
        try:
            with os.scandir(path) as listing:
                for entry in listing:
                    entries += 1
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    total += status.st_blocks * 512
                    if total > max_bytes or entries > max_entries or depth > _MAX_DEPTH:
                        return True
                    if stat.S_ISDIR(status.st_mode):
                        waiting.append((entry.path, depth + 1))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:  # no permission to list, or a path that is too long
            return True
    return False


def empty(top: str) -> None:
    """Remove everything in the folder `top`; the programs that wrote there must be gone.

    Folders within are moved up before their turn, so neither depth nor the length of a path matters.
    """
    os.chmod(top, 0o700)
    moved = 0
    while names := os.listdir(top):
        for name in names:
            path = os.path.join(top, name)
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                os.unlink(path)
                continue
            os.chmod(path, 0o700)
            for inner in os.listdir(path):
                inner_path = os.path.join(path, inner)
                if stat.S_ISDIR(os.lstat(inner_path).st_mode):
                    # a folder without write permission cannot be moved
                    os.chmod(inner_path, 0o700)
                    while os.path.lexists(target := os.path.join(top, f"moved{moved}")):
                        moved += 1
                    os.rename(inner_path, target)
                else:
                    os.unlink(inner_path)
            os.rmdir(path)

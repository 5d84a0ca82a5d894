"""What a child process does: train with a fault, go on after it, or train untouched."""

from __future__ import annotations

import ctypes
import io
import os
import re
import resource
import shutil
import signal
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from benchmarks.faults.processes import pids
from benchmarks.faults.runs import STEPS, make, result_of
from grpo_kit.loop.processes import Stopped
from grpo_kit.record._digests import checkpoints, what_is_wrong
from grpo_kit.record._lines import METRICS_LINES
from grpo_kit.record.files import RunFolderError
from grpo_kit.trainer.held_out import HeldOutHook

_CAPABILITIES = 0x20080522  # the version of Linux' capset
_WRITES_ANYWHERE = 0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


class Watched:
    """A part of a run that calls started(name, number) first; what it wraps is asked for everything else."""

    def __init__(
        self, inner: Any, name: str, started: Callable[[str, int], None], ended: Any = None
    ) -> None:
        self._inner, self._name, self._started, self._ended, self._calls = (
            inner,
            name,
            started,
            ended,
            0,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._started(self._name, self._calls)
        self._calls, began = self._calls + 1, time.monotonic()
        found = self._inner(*args, **kwargs)
        if self._ended:
            self._ended(self._name, time.monotonic() - began)
        return found


def watch(trainer: Any, started: Callable[[str, int], None], ended: Any = None) -> None:
    """Have every part of the run that a fault may strike call started, and ended with its seconds."""
    (measuring,) = (hook for hook in trainer.hooks if isinstance(hook, HeldOutHook))
    for name, owner, attribute in (
        ("sampling", trainer, "sample"),
        ("update", trainer, "learn"),
        ("writing", trainer, "_write"),
        ("saving", trainer, "save"),
        ("evaluation", measuring, "_measure"),
    ):
        setattr(owner, attribute, Watched(getattr(owner, attribute), name, started, ended))


def untouched(arm: str, folder: Path) -> dict[str, Any]:
    """The run that nobody touches; how long it and its parts take, and how many of each part there are."""
    trainer, parts = make(arm, folder), {}
    watch(
        trainer,
        lambda name, number: None,
        lambda name, seconds: parts.setdefault(name, []).append(seconds),
    )
    began = time.monotonic()
    trainer.train()
    lasts = {name: statistics.median(seconds) for name, seconds in parts.items()}
    counts = {name: len(seconds) for name, seconds in parts.items()}
    return {"lasts": lasts | {"any": time.monotonic() - began}, "counts": counts} | result_of(
        trainer
    )


def touched(fault: dict[str, Any], folder: Path, reference: dict[str, Any]) -> dict[str, Any]:
    """Train with the fault, to the end or to where it goes on in a new process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # outside train(); inside the loop listens
    if fault["kind"] == "read-only folder" and os.geteuid() == 0:
        obey_permissions()
    trainer, said, disk = make(fault["arm"], folder), [], Disk(fault, folder)
    striker = Striker(trainer, fault, reference, disk)
    processes, calls = trainer.processes, 0
    while True:
        stopped, failed = False, False
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            try:
                trainer.train()
            except Stopped:
                stopped = True
            except (OSError, RunFolderError) as error:
                failed = True
                said.append(str(error))
        said += [str(one.message) for one in seen if "written" in str(one.message)]
        calls, full = calls + 1, disk.full
        if full and calls > fault["stays"]:
            disk.fill(False)
        over = trainer.step == STEPS and not (stopped or failed or full)
        new = stopped and fault["new_process"] and bool(checkpoints(folder))
        over, new, tired = processes.from_main(lambda found=(over, new, calls > 8): found)
        if tired:
            raise RuntimeError(f"it does not go on: {said}")
        if over or new:
            striker.over = True
            found = {"goes_on": True} if new else result_of(trainer)
            return {"hit": striker.hit, "said": said} | found


class Striker:
    """Strikes once, at the fault's moment. hit: the steps that were done then; of a kill it is a file."""

    def __init__(
        self, trainer: Any, fault: dict[str, Any], reference: dict[str, Any], disk: Disk
    ) -> None:
        self.hit: list[int] = []
        self.over = False
        self._trainer, self._fault, self._disk = trainer, fault, disk
        if not trainer.processes.is_main:
            return
        moment = fault["moment"]
        at = fault["at"] * reference["lasts"][moment]
        if moment == "any":
            _later(at, self._strike)
            return
        number = int(fault["place"] * reference["counts"][moment])

        def started(name: str, calls: int) -> None:
            if name == moment and calls == number:
                _later(at, self._strike)

        watch(trainer, started)

    def _strike(self) -> None:
        if self.over:
            return
        kind = self._fault["kind"]
        self.hit.append(self._trainer.step)
        (self._trainer.folder.parent / "hit").write_text(str(self._trainer.step))
        if kind in ("kill", "damage", "torn line", "damage at rest"):
            self._send(signal.SIGKILL)
        elif "press" in kind:
            self._send(signal.SIGINT)
            if kind == "two presses":
                _later(self._fault["second"], lambda: self.over or self._send(signal.SIGINT))
        else:
            self._disk.fill(True)

    def _send(self, number: int) -> None:
        """To a process or to all, this one last."""
        everyone = [os.getpid(), *pids]
        chosen = (
            everyone
            if self._fault["whom"] == "all"
            else [everyone[self._fault["whom"] % len(everyone)]]
        )
        for pid in reversed(chosen):
            os.kill(pid, number)


class Disk:
    """A disk that fills up and is freed. full: it is full now."""

    def __init__(self, fault: dict[str, Any], folder: Path) -> None:
        self.full = False
        self._folder = folder
        self._filler, self._room, self._kind = (
            folder.parent / "filler",
            fault["room"],
            fault["kind"],
        )

    def fill(self, full: bool) -> None:
        """Take all of it but the fault's room, or give it back. Or let nobody write into the folder."""
        self.full = full
        if self._kind == "read-only folder":
            for path in [self._folder, *self._folder.rglob("*")]:
                path.chmod(
                    (0o555 if full else 0o755) if path.is_dir() else (0o444 if full else 0o644)
                )
            return
        if self._kind == "full tmpfs":
            self._filler.unlink(missing_ok=True)
            if full:
                size = shutil.disk_usage(self._filler.parent).free - self._room
                with open(self._filler, "wb") as file:
                    os.posix_fallocate(file.fileno(), 0, max(size, 1))
            return
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (self._room if full else hard, hard))


def resumed(fault: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A new process goes on with the run that is in the folder, or begins it where the words say so."""
    shown, done = io.StringIO(), []
    try:
        while True:
            try:
                trainer = make(fault["arm"], folder)
                with redirect_stdout(shown):
                    trainer.train(resume=True)
                break
            except RunFolderError as error:
                if fault["kind"] != "damage at rest" or len(done) > 4 or not mended(str(error)):
                    raise
                done.append(str(error))
    except RunFolderError as error:
        words = "; ".join([*done, str(error)])
        if "holds no run to go on with" in words:
            trainer = make(fault["arm"], folder)
            trainer.train()
            return {"words": words} | result_of(trainer)
        rows = (folder / METRICS_LINES).exists()
        nothing = (
            "no whole checkpoint" in words or "without a checkpoint to go on from" in words
        )
        there = rows if "before its first row" in words else not nothing
        if there or any(map(_whole, checkpoints(folder))):
            raise
        return {"nothing_yet": words}
    words = [
        *done,
        *(
            line
            for line in shown.getvalue().splitlines()
            if "damaged" in line or "were lost" in line
        ),
    ]
    return {"words": "; ".join(words)} | result_of(trainer)


def obey_permissions() -> None:
    """Root, too, is then refused what a folder's permissions refuse."""
    libc, header = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint32 * 2)(_CAPABILITIES, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice 32 bits
    failed = libc.capget(header, sets)
    sets[0] &= ~_WRITES_ANYWHERE
    if failed or libc.capset(header, sets):
        raise OSError(ctypes.get_errno(), "this process writes into every folder")


def mended(words: str) -> bool:
    """Do what the words of a refusal say: delete the line, or move the file away. False where they say neither.

    Of several processes, which all say it, the first one does it.
    """
    line = re.search(r"(\S+), line (\d+) cannot be read", words)
    file = re.search(r"(\S+) cannot be read .*move it away", words)
    if os.environ.get("RANK", "0") != "0":
        time.sleep(1)
    elif line:
        lines = Path(line[1]).read_bytes().splitlines(keepends=True)
        del lines[int(line[2]) - 1]
        Path(line[1]).write_bytes(b"".join(lines))
    elif file:
        os.replace(file[1], f"{file[1]}.damaged")
    return bool(line or file)


def _whole(checkpoint: Path) -> bool:
    return what_is_wrong(checkpoint) is None


def _later(seconds: float, act: Callable[[], Any]) -> None:
    """Do it from another thread, which does not keep the process."""
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()

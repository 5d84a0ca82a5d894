"""What a child process does: train with a fault, go on after it, or train untouched."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.faults.campaign import Implementation
from benchmarks.faults.runs import STEPS, make, result_of
from grpo_kit.record.files import RunFolderError
from grpo_kit.training.checkpoints import checkpoints


def later(seconds: float, act: Callable[[], None]) -> None:
    """Do it from another thread, which does not keep the process."""
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()


def set_off(trainer: Any, fault: dict[str, Any], lasts: dict[str, float], act: Callable[[], None]) -> None:
    """Let `act` happen at the fault's moment of the train() that follows."""
    if fault["moment"] == "any":
        later(fault["at"] * lasts["train"], act)
        return
    owner, name = {
        "evaluation": (trainer, "evaluate"),
        "saving": (trainer, "_save_checkpoint"),
    }[fault["moment"]]
    inner, calls = getattr(owner, name), []

    def watched(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == fault["which"] + 1:
            later(fault["at"] * lasts[fault["moment"]], act)
        return inner(*args, **kwargs)

    setattr(owner, name, watched)


def touched(fault: dict[str, Any], folder: Path, lasts: dict[str, float]) -> dict[str, Any]:
    """Train with the fault, to the end or to where it goes on in a new process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # outside train(); there the trainer listens
    trainer, hit, said = make(fault["arm"], folder), [], []
    disk, calls = _disk(fault, folder), 0

    def strike() -> None:
        hit.append(trainer.state.global_step)
        if fault["kind"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif "press" in fault["kind"]:
            os.kill(os.getpid(), signal.SIGINT)
            if fault["kind"] == "two presses":
                later(fault["second"], lambda: os.kill(os.getpid(), signal.SIGINT))
        else:
            disk(True)

    set_off(trainer, fault, lasts, strike)
    while True:
        try:
            trainer.train(on_stop="return")
        except (OSError, RunFolderError) as error:
            said.append(str(error))
        calls += 1
        if calls > fault["stays"]:
            disk(False)
        if trainer.interrupted and fault["new_process"] and checkpoints(folder):
            return {"goes_on": True, "hit": hit, "said": said}
        if len(said) > 3:
            raise RuntimeError(f"it does not go on: {said}")
        waits = trainer.session._unsaved is not None or trainer.recorder.folder is not None
        if trainer.state.global_step == STEPS and not trainer.interrupted and not waits:
            return {"hit": hit, "said": said} | result_of(trainer)


def _disk(fault: dict[str, Any], folder: Path) -> Callable[[bool], None]:
    """A function that fills the disk (True) or frees it (False)."""
    if fault["kind"] == "full tmpfs":
        filler = folder.parent / "filler"

        def tmpfs(fill: bool) -> None:
            filler.unlink(missing_ok=True)
            if fill:
                size = max(shutil.disk_usage(folder.parent).free - fault["room"], 0)
                with open(filler, "wb") as file:
                    os.posix_fallocate(file.fileno(), 0, max(size, 1))

        return tmpfs
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

    def limit(fill: bool) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault["room"] if fill else hard, hard))

    return limit


def resumed(fault: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A new process goes on with the run that is in the folder."""
    try:
        trainer = make(fault["arm"], folder)
        trainer.train(resume_from_checkpoint=True)
    except ValueError as error:
        if "without a checkpoint" not in str(error) or checkpoints(folder):
            raise
        return {"nothing_yet": str(error)}
    return result_of(trainer)


def untouched(arm: str, folder: Path) -> dict[str, Any]:
    """The run that nobody touches, and how long it, an evaluation and a save take."""
    trainer, lasts = make(arm, folder), {}
    for moment, name in (("evaluation", "evaluate"), ("saving", "_save_checkpoint")):
        setattr(trainer, name, partial(_timed, lasts, moment, getattr(trainer, name)))
    start = time.monotonic()
    trainer.train()
    lasts["train"] = time.monotonic() - start
    return {"lasts": lasts} | result_of(trainer)


def _timed(lasts: dict[str, float], moment: str, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    start = time.monotonic()
    out = work(*args, **kwargs)
    lasts[moment] = time.monotonic() - start
    return out


TODAY = Implementation(untouched, touched, resumed)

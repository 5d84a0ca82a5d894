"""Watchdog: says that a step hangs while it hangs, and where: sampling, which reward, an environment, the update."""

from __future__ import annotations

import faulthandler
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from types import CodeType, FrameType
from typing import IO, Any

from grpo_kit.loop import grpo
from grpo_kit.loop.protocols import Hook, Sampler
from grpo_kit.loop.step_batch import Batch
from grpo_kit.record.files import read_metrics
from grpo_kit.rewards import scoring

_FIRST = 600.0  # seconds of a step with no steps before it: a model is compiled, a kernel is built
_STEPS = 20  # whose median counts
_PHASES = {  # of the innermost of these functions that runs
    grpo.Loop.roll_out.__code__: "sampling",
    grpo.score.__code__: "the rewards",
    scoring.score_all.__code__: "the rewards",
    grpo.Loop.learn.__code__: "the update",
}
_KIT = str(Path(__file__).parents[1])
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class Watchdog(Hook):
    """Prints a line while a step takes `factor` times the median of the last steps, and at least `at_least` seconds.

    The line says where the step is; it comes again each time that the time has doubled. The stack of every thread goes
    to stack.txt in the run's folder: `stack_after` seconds into the step (None: with the first line), even where
    nothing can be printed, as while a regular expression of a reward runs for hours.
    The standard trainer has one; give your own in hooks= for other limits.
    Raises ValueError for limits that are not positive.

    >>> kit.GRPOTrainer(model, task, tokenizer=tokenizer, hooks=[Watchdog(factor=3, at_least=20)])  # doctest: +SKIP
    """

    def __init__(
        self, *, factor: float = 10.0, at_least: float = 60.0, stack_after: float | None = None
    ) -> None:
        for name, value in (("factor", factor), ("at_least", at_least), ("stack_after", stack_after)):
            if value is not None and not 0 < value < threading.TIMEOUT_MAX:
                raise ValueError(f"{name}={value!r} must be a number above 0")
        self.factor, self.at_least, self.stack_after = factor, at_least, stack_after
        self._seconds: deque[float] = deque(maxlen=_STEPS)
        self._timer: threading.Timer | None = None
        self._file: IO[str] | None = None
        self._said = False

    def begin(self, trainer: Any) -> None:
        """Take up how long the steps took that are there."""
        self._seconds.extend(read_metrics(trainer.folder).get("step_seconds", []))
        self._stack = trainer.folder / "stack.txt"
        with suppress(OSError):  # a full disk: the line comes without a stack
            self._file = self._stack.open("a")

    def before_step(self, trainer: Any) -> None:
        """From here on the step's time counts."""
        usual, limit = None, _FIRST
        if self._seconds:
            usual = median(self._seconds)
            limit = self.factor * usual
        limit = max(self.at_least, limit)
        self._said, self._phases = False, _PHASES | getattr(trainer.sample, "phases", Sampler.phases)
        self._wait(limit, limit, usual, trainer.step + 1, threading.get_ident())
        if self._file is not None:
            faulthandler.dump_traceback_later(self.stack_after or limit, file=self._file)

    def after_step(self, trainer: Any, row: dict[str, Any], batch: Batch) -> None:
        """The step is done in time, or late."""
        self._rest()
        self._seconds.append(row["step_seconds"])
        if self._said:
            print(f"Step {trainer.step} is done, after {row['step_seconds']:.0f} s.", flush=True)

    def end(self, trainer: Any, error: BaseException | None) -> None:
        """No step runs."""
        self._rest()
        if self._file is not None:
            self._file.close()
            self._file = None
            with suppress(OSError):
                if not self._stack.stat().st_size:
                    self._stack.unlink()

    def _rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._file is not None:
            faulthandler.cancel_dump_traceback_later()

    def _wait(self, seconds: float, so_far: float, usual: float | None, step: int, thread: int) -> None:
        self._timer = threading.Timer(seconds, self._say, (so_far, usual, step, thread))
        self._timer.daemon = True
        self._timer.start()

    def _say(self, so_far: float, usual: float | None, step: int, thread: int) -> None:
        median_words = "" if usual is None else f" (the median of the steps before: {usual:.3g} s)"
        stack_words = "" if self._file is None else f" The stack of every thread goes to {self._stack}."
        print(
            f"Step {step} has taken {so_far:.3g} s{median_words} and is still in {where(thread, self._phases)}. "
            f"Interrupt it to stop the run; what is done is saved.{stack_words}",
            flush=True,
        )
        self._said = True
        self._wait(so_far, 2 * so_far, usual, step, thread)


def where(thread: int, phases: Mapping[CodeType, str] = _PHASES) -> str:
    """What a thread does, in words: the phase of a step, by name a reward, and the last line that is no library's.

    thread: its identifier (threading.get_ident()). phases: functions, by their code, in words.
    """
    frame: FrameType | None = sys._current_frames().get(thread)
    phase = line = None
    while frame is not None and not (phase and line):
        code = frame.f_code
        if phase is None:
            phase = phases.get(code)
            if code is scoring.score.__code__:
                phase = f"reward {frame.f_locals.get('name')!r}"
        if line is None and not code.co_filename.startswith((_KIT, *_LIBRARIES, "<frozen")):
            line = f"{code.co_name}, line {frame.f_lineno} of {Path(code.co_filename).name}"
        frame = frame.f_back
    phase = phase or "a hook"
    return f"{phase} ({line})" if line else phase

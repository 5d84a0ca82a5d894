"""Hooks that watch a run: its chart and red flags, what is said once, and a step that hangs.

WatchRun draws the live chart, or prints a line a step, and raises the red flags. OffScale and StillStep print a line
once: about a reward outside [0, 1], and about a step without a gradient (the red flags wait for several). Watchdog says
that a step hangs while it hangs, and where: sampling, which reward, an environment, the update.
"""

from __future__ import annotations

import faulthandler
import sys
import sysconfig
import threading
import warnings
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from types import CodeType, FrameType
from typing import IO, Any

import pandas as pd

from grpo_kit.loop import grpo
from grpo_kit.loop.batch import Batch
from grpo_kit.loop.processes import Stopped
from grpo_kit.loop.protocols import Hook, Sampler
from grpo_kit.models._model_facts import few_weights
from grpo_kit.record.files import RunFolderError, read_metrics, run_settings
from grpo_kit.rewards import scoring
from grpo_kit.rewards.scoring import off_scale
from grpo_kit.watch._flags import Flag
from grpo_kit.watch._live import LiveChart
from grpo_kit.watch._run_state import change_text
from grpo_kit.watch.monitor import Monitor, OnFlag
from grpo_kit.watch.run_card import model_card


class StoppedByFlag(Stopped):
    """A red flag ended the run, where on_flag="stop"."""


class WatchRun(Hook):
    """Shows each step and raises red flags.

    live: True draws in a notebook and prints a line elsewhere, False prints lines, None shows flags alone.
    on_flag: "warn" shows a flag, "stop" also ends the run after the step (StoppedByFlag), f(flag) is called.
    Measures of a step's completions (diversity/..., script/..., scale/...) are added to its row.
    """

    def __init__(self, live: bool | None = True, on_flag: OnFlag = "warn") -> None:
        self._chart = None if live is None else LiveChart(pictures=live)
        self._monitor = Monitor(on_flag)

    def begin(self, trainer: Any) -> None:
        """Take up the steps that are there; show the chart."""
        rows = read_metrics(trainer.folder).to_dict("records")
        self._monitor.begin(trainer.folder, run_settings(trainer.folder) or {}, rows)
        trainer.guard.say = self.say
        if self._chart is not None:
            first_step = trainer.config.at(trainer.step)
            self._chart.start(trainer.config.steps, trainer.folder, vars(first_step))

    def after_step(self, trainer: Any, row: dict[str, Any], batch: Batch) -> None:
        """Measure, show, and raise flags."""
        table = pd.DataFrame(trainer.completions)  # of all processes, which batch is not
        table.insert(0, "step", trainer.step)
        measured = self._monitor.measure(table)
        trainer.log.write(trainer.step, measured)
        row |= {"step": trainer.step} | measured
        if self._chart is not None:
            if changes := row.get("changes"):
                before = {name: pair[0] for name, pair in changes.items()}
                after = {name: pair[1] for name, pair in changes.items()}
                self._chart.change(trainer.step, change_text(after, before))
            self._chart.update([row], table, trainer.config.steps)
        flags = self._monitor.step(row)
        for flag in flags:
            self._show(flag)
        if flags and self._monitor.on_flag == "stop":
            raise StoppedByFlag(f"red flag: {flags[0].name}", trainer.step)

    def end(self, trainer: Any, error: BaseException | None) -> None:
        """The last picture, and the model card: README.md in the run's folder."""
        self._monitor.flush()
        if self._chart is not None:
            self._chart.finish()
        if not trainer.step:
            return
        try:
            model_card(trainer.folder)
        except (OSError, RunFolderError) as failure:
            # a full disk, whose rows wait in memory; a damaged file
            warnings.warn(
                f"The model card was not written ({failure})", RuntimeWarning, stacklevel=2
            )

    def say(self, text: str) -> None:
        """A sentence under the chart, where its buttons are; elsewhere a printed line."""
        if self._chart is not None:
            self._chart.say(text)
        else:
            print(text, flush=True)

    def _show(self, flag: Flag) -> None:
        if self._chart is not None:
            self._chart.flag(flag)
        elif not callable(self._monitor.on_flag):
            print(f"Red flag: {flag}", flush=True)


class OffScale(Hook):
    """Prints the line once a reward; none about a reward that states its range. Any finite score is taken."""

    def __init__(self) -> None:
        self._named: set[str] = set()
        # Lowest and highest score of each reward.
        self._ranges: dict[str, tuple[float, float]] = {}

    def after_step(self, trainer: Any, row: dict[str, Any], batch: Batch) -> None:
        """Look at the step's scores."""
        for (name, scores), reward in zip(
            batch.parts.items(), trainer.task.rewards, strict=False
        ):
            numbers = [score for score in scores if score is not None]
            if not numbers or name in self._named:
                continue
            numbers += self._ranges.get(name, ())
            self._ranges[name] = min(numbers), max(numbers)
            if line := off_scale(name, reward, scores, self._ranges[name]):
                self._named.add(name)
                print(f"{line}; choose reward_weights by its scale.", flush=True)


class StillStep(Hook):
    """Prints the line at the first step without a gradient, and no more.

    Such a step is made as TRL makes it: the optimizer's moments move the weights on. The line says how far, the root
    mean square of up to 64 weights of each tensor.
    """

    def __init__(self) -> None:
        self._printed = False
        self._weights = None
        self._distance = None

    def before_step(self, trainer: Any) -> None:
        """Keep some of the weights that the step begins with."""
        if not self._printed:
            self._weights = few_weights(trainer.trained.values())

    def after_step(self, trainer: Any, row: dict[str, Any], batch: Batch) -> None:
        """Look at the step's gradient, rewards and weights."""
        if self._printed:
            return
        distance = (
            (few_weights(trainer.trained.values()) - self._weights)
            .square()
            .mean()
            .sqrt()
            .item()
        )
        earlier_distance, self._distance = self._distance, distance
        if row.get("grad_norm"):
            return
        self._printed = True
        reason = "no completion has tokens that count, or weights and epsilon leave no gradient"
        if row.get("frac_reward_zero_std") == 1:
            reason = f"in none of its {len(set(batch.groups))} groups do the rewards differ"
            rewards = {*batch.rewards} - {None}
            if len(rewards) == 1:
                reason += f", all are {rewards.pop():g}"
        movement = "No weight moved."
        if distance:
            movement = (
                f"The optimizer's moments still moved each weight by {distance:.1e} on average"
            )
            if earlier_distance:
                movement += f", {distance / earlier_distance:.2f} times as far as step {trainer.step - 1}"
            movement += "."
        print(
            f"Step {trainer.step} has no gradient: {reason}. {movement} If it stays so nothing is learned; "
            "kit.readiness(...) counts how many groups would have a signal.",
            flush=True,
        )


# seconds of a step with no steps before it: a model is compiled, a kernel is built
_FIRST = 600.0
_STEPS = 20  # whose median counts
_PHASES = {  # of the innermost of these functions that runs
    grpo.Loop.roll_out.__code__: "sampling",
    grpo.score.__code__: "the rewards",
    scoring.score_all.__code__: "the rewards",
    grpo.Loop.learn.__code__: "the update",
}
_KIT = str(Path(__file__).parents[1])
_LIBRARIES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


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
        for name, value in (
            ("factor", factor),
            ("at_least", at_least),
            ("stack_after", stack_after),
        ):
            if value is not None and not 0 < value < threading.TIMEOUT_MAX:
                raise ValueError(f"{name}={value!r} must be a number above 0")
        self.factor = factor
        self.at_least = at_least
        self.stack_after = stack_after
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
        usual = None
        limit = _FIRST
        if self._seconds:
            usual = median(self._seconds)
            limit = self.factor * usual
        limit = max(self.at_least, limit)
        self._said = False
        self._phases = _PHASES | getattr(trainer.sample, "phases", Sampler.phases)
        self._thread = threading.get_ident()
        self._wait(limit, limit, usual, trainer.step + 1)
        if self._file is not None:
            faulthandler.dump_traceback_later(self.stack_after or limit, file=self._file)

    def after_step(self, trainer: Any, row: dict[str, Any], batch: Batch) -> None:
        """The step is done in time, or late."""
        self._rest()
        self._seconds.append(row["step_seconds"])
        if self._said:
            print(
                f"Step {trainer.step} is done, after {row['step_seconds']:.0f} s.", flush=True
            )

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

    def _wait(self, seconds: float, so_far: float, usual: float | None, step: int) -> None:
        self._timer = threading.Timer(seconds, self._say, (so_far, usual, step))
        self._timer.daemon = True
        self._timer.start()

    def _say(self, so_far: float, usual: float | None, step: int) -> None:
        median_words = (
            "" if usual is None else f" (the median of the steps before: {usual:.3g} s)"
        )
        stack_words = (
            "" if self._file is None else f" The stack of every thread goes to {self._stack}."
        )
        print(
            f"Step {step} has taken {so_far:.3g} s{median_words} and is still in {where(self._thread, self._phases)}. "
            f"Interrupt it to stop the run; what is done is saved.{stack_words}",
            flush=True,
        )
        self._said = True
        self._wait(so_far, 2 * so_far, usual, step)


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

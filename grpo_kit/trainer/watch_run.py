"""WatchRun: the live chart of a run, or a line a step, and its red flags."""

from __future__ import annotations

import warnings
from typing import Any

import pandas as pd

from grpo_kit.loop.interrupts import Stopped
from grpo_kit.loop.protocols import Hook
from grpo_kit.loop.step_batch import Batch
from grpo_kit.record.files import RunFolderError, read_metrics, run_settings
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
        if self._chart is not None:
            self._chart.start(trainer.config.steps, trainer.folder)

    def after_step(self, trainer: Any, row: dict[str, Any], batch: Batch) -> None:
        """Measure, show, and raise flags."""
        table = pd.DataFrame(trainer.completions)  # of all processes, which batch is not
        table.insert(0, "step", trainer.step)
        measured = self._monitor.measure(table)
        trainer.log.write(trainer.step, measured)
        row |= {"step": trainer.step} | measured
        if self._chart is not None:
            if changes := row.get("changes"):
                was, now = ({name: pair[n] for name, pair in changes.items()} for n in (0, 1))
                self._chart.change(trainer.step, change_text(now, was))
            self._chart.update([row], table, trainer.config.steps)
        for flag in (flags := self._monitor.step(row)):
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
        except (OSError, RunFolderError) as failure:  # a full disk, whose rows wait in memory; a damaged file
            warnings.warn(f"The model card was not written ({failure})", RuntimeWarning, stacklevel=2)

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

"""TrackerHook: what a tracker gets of a run, and when. The three trackers are subclasses, each over its public API."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from grpo_kit.loop.hooks import Hook
from grpo_kit.loop.step_batch import Batch
from grpo_kit.record.files import run_settings, write_whole
from grpo_kit.record.lines import METRICS_LINES, lines_of, read_json
from grpo_kit.trackers.tracker_table import table_is_due, table_of
from grpo_kit.watch.monitor import read_flags

KEPT = "trackers.json"  # in the run folder: what finds each tracker's run again


class TrackerHook(Hook):
    """Writes each step to a tracker as it is done: numbers, changes, red flags, now and then its completions.

    Give it after the hooks that add to a step's row, as `hooks=` of kit.GRPOTrainer does. A run that goes on goes on in
    the tracker's run of before; a tracker that a run has only now gets the rows of the steps before too.
    A tracker that fails is reported once per train(), and ends nothing: metrics.jsonl has every row.
    Raises ValueError, with the pip line, where the tracker is not installed.

    A subclass has `name`, the package; `takes_back`, whether what steps done again write hides what they wrote before;
    _open(folder, run.json, kept, step) -> (kept, where), where kept finds its run again, {} of a new one;
    _numbers(step, {name: number}); _text(step, "INFO" or "WARN", title, text); _table(step, columns); _close(failed).
    """

    name: str
    takes_back = False

    def __init__(self) -> None:
        if find_spec(self.name) is None:
            raise ValueError(
                f"{self.name} is not installed; pip install {self.name} (or grpo-kit[trackers]), or leave it out: the "
                "run folder has everything"
            )
        self._is_open, self._where = False, ""

    def begin(self, trainer: Any) -> None:
        """Open the tracker's run. One that is new gets the rows so far."""
        self._folder, self._failed, rows = trainer.folder, False, {}
        kept = self._all_kept().get(self.name, {})
        self._evaluated = kept.pop("evaluated", -1)  # last step whose evaluation the tracker has
        flags = read_flags(trainer.folder) if kept else []
        self._flags = {each.name for each in flags if not self.takes_back or each.step <= trainer.step}
        self._try(lambda: self._begin(kept, trainer.step))
        for line in lines_of(trainer.folder / METRICS_LINES):
            rows.setdefault(line["step"], {}).update(line)
        if kept:
            evaluation = {n: v for n, v in rows.get(trainer.step, {}).items() if n.startswith("eval/")}
            rows = (
                {trainer.step: evaluation} if trainer.step > self._evaluated else {}
            )  # it was cut short before
        for step, row in rows.items():
            self._write(step, row)

    def after_step(self, trainer: Any, row: dict[str, Any], batch: Batch) -> None:
        """Write the step."""
        self._write(trainer.step, row)
        if self._is_open and table_is_due(trainer.step, trainer.config.steps):
            self._try(lambda: self._table(trainer.step, table_of(trainer.completions)))

    def end(self, trainer: Any, error: BaseException | None) -> None:
        """Close the tracker's run, after a stop and an error too."""
        if self._is_open:
            self._is_open = False
            self._try(lambda: self._close(isinstance(error, Exception)))

    def _begin(self, kept: dict[str, Any], step: int) -> None:
        self._kept, where = self._open(self._folder, run_settings(self._folder) or {}, kept, step)
        self._is_open = True
        if where != self._where:
            print(f"{self.name}: {where}", flush=True)
        self._where = where
        self._keep()

    def _write(self, step: int, row: Mapping[str, Any]) -> None:
        if not self._is_open:
            return
        numbers = {name_of(name): v for name, v in row.items() if name != "step" and _is_number(v)}
        flags = [flag for flag in read_flags(self._folder) if flag.name not in self._flags]
        self._flags |= {flag.name for flag in flags}

        def write() -> None:
            for name, (was, now) in (row.get("changes") or {}).items():
                self._text(step, "INFO", "change", f"{name} {was} -> {now}")
            if numbers:
                self._numbers(step, numbers)
            for flag in flags:  # at the step since when
                self._numbers(flag.step, {f"flags/{flag.name.replace(' ', '_')}": 1.0})
                self._text(flag.step, "WARN", f"red flag: {flag.name}", str(flag))
            if any(name.startswith("eval/") for name in numbers):
                self._evaluated = step
                self._keep()

        self._try(write)

    def _all_kept(self) -> dict[str, dict[str, Any]]:
        path = self._folder / KEPT
        return read_json(path) if path.exists() else {}

    def _keep(self) -> None:
        kept = self._all_kept() | {self.name: self._kept | {"evaluated": self._evaluated}}
        write_whole(self._folder / KEPT, (json.dumps(kept, indent=2) + "\n").encode())

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # a tracker's own, of any kind: no reason to end a training
            why = f"{type(error).__name__}: {str(error)[:200]}"
            if not self._failed:
                print(
                    f"{self.name} failed ({why}). Training goes on; metrics.jsonl has every row.", flush=True
                )
            self._failed = True


def name_of(column: str) -> str:
    """A column of metrics.jsonl in every tracker: train/<column>; eval/... stays as it is.

    >>> name_of("reward"), name_of("reward/format"), name_of("eval/accuracy")
    ('train/reward', 'train/reward/format', 'eval/accuracy')
    """
    return column if column.startswith("eval/") else f"train/{column}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == value

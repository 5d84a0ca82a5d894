"""Follows a run from another terminal: lines from its files, worded like the run's own output."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_kit.record.control import read_changes
from grpo_kit.record.files import has_metrics, run_settings
from grpo_kit.record.run_lock import is_locked
from grpo_kit.watch.follow import signature
from grpo_kit.watch.held_out_words import held_out_words
from grpo_kit.watch.run_state import RunState, change_line, flag_line


def follow(folder: Path, *, last: int = 10, every: float = 1.0, once: bool = False) -> None:
    """Print a run's lines until it has ended. last: earlier steps that are printed. every: seconds between two looks.

    once: print what there is, and return.
    Raises ValueError for what is no folder.
    """
    if last < 0 or not every > 0:
        raise ValueError(f"last={last} must be at least 0 and every={every:g} above 0")
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give a run's, such as runs/largest")
    lines = Lines(folder, last=last)
    while True:
        state, ended = where_it_is(folder)
        for line in lines.new():
            print(line, flush=True)
        if ended or once:
            print(state, flush=True)
            return
        time.sleep(every)


class Lines:
    """The run's new output since the last call, as lines. last: number of earlier steps to print first."""

    def __init__(self, folder: Path, *, last: int) -> None:
        self._folder, self._last = folder, last
        self._steps: set[int] | None = None  # printed; None: none so far
        self._evaluated: set[int] = set()
        self._flags = self._changes = 0
        self._seen: tuple = ()

    def new(self) -> list[str]:
        """The lines, oldest first; [] while a file is being written."""
        if (now := signature(self._folder)) == self._seen:
            return []
        try:
            run = RunState.read(self._folder)
            total = _steps_asked_for(self._folder, run.rows)
        except (ValueError, OSError):
            return []
        self._seen = now
        lines = [*self._of_steps(run, total)]
        lines += map(change_line, run.changes[self._changes :])
        lines += map(flag_line, run.flags[self._flags :])
        self._flags, self._changes = len(run.flags), len(run.changes)
        return lines

    def _of_steps(self, run: RunState, total: int) -> Iterator[str]:
        trained = [step for step in sorted(run.rows) if step > 0]
        if self._steps is not None:  # a resumed run's repeated steps are printed again
            self._steps &= set(run.rows)
        if self._steps is None:
            shown = trained[len(trained) - min(self._last, len(trained)) :]
            self._steps = {step for step in trained if step not in shown}
            self._evaluated = {step for step in self._steps if held_out_words(run.rows[step])}
        for step, row in sorted(run.rows.items()):
            if step > 0 and step not in self._steps:
                self._steps.add(step)
                yield run.step_line(step, max(step, total))
            if step not in self._evaluated and (line := held_out_words(row)):
                self._evaluated.add(step)
                yield line


def _steps_asked_for(folder: Path, rows: Mapping[int, Mapping[str, Any]]) -> int:
    """How many steps a run is to have, with later changes of that. rows: its metrics, by which an older run says it."""
    config = (run_settings(folder) or {}).get("config", {})
    if "steps" not in config:
        done = [
            round(step / row["progress"])
            for step, row in sorted(rows.items())
            if (row.get("progress") or 0) > 0
        ]
        return done[-1] if done else 0
    changes = [change["change"] for change in read_changes(folder) if "change" in change]
    return [config["steps"], *(change["steps"] for change in changes if "steps" in change)][-1]


def where_it_is(folder: Path) -> tuple[str, bool]:
    """The progress of a run in a sentence, and whether it has ended."""
    run = RunState.read(folder) if has_metrics(folder) else RunState()
    step, total = run.step, _steps_asked_for(folder, run.rows) if run.rows else 0
    of, done = f" of {total}" if total else "", 0 < total <= step
    going = is_locked(folder)
    if going:
        if done:
            return f"Trained for {step} steps; it is being evaluated.", False
        return f"It goes on, after step {step}{of}." if step else "It has not done its first step yet.", False
    if (folder / "results.json").is_file() and done:
        return f"Done after {step} steps: {_came_to(folder)}", True
    what = f"Done after {step} steps." if done else f"Stopped after step {step}{of}."
    if going is False:
        what = f"Killed after step {step}{of}, or trained by another machine."
    goes_on = f" To go on: grpo-kit train --resume {folder}" if _says_its_task(folder) else ""
    return what + goes_on, True


def _says_its_task(folder: Path) -> bool:
    """Can `grpo-kit train --resume` find the task of the run?"""
    settings = run_settings(folder) or {}
    return bool(settings.get("task", {}).get("file") or settings.get("config", {}).get("task"))


def _came_to(folder: Path) -> str:
    """The result in results.json, which Comparison.save and the notebooks write."""
    found = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    measure = found.get("measure", "accuracy")

    def words(value: float) -> str:
        return f"{100 * value:.1f}" if measure == "accuracy" else f"{value:.3f}"

    unit = " %" * (measure == "accuracy")
    sides = [found["before"], found["after"]]
    before, after = (
        f"{words(one[measure])}{unit} [{words(one['low'])}, {words(one['high'])}]" for one in sides
    )
    said = f"{before} -> {after} {'right' if measure == 'accuracy' else 'mean reward'}, n = {found['n']}"
    if found.get("no_better"):
        return f"{found['no_better']}: {said}."
    best = found.get("best_constant")
    what = "strategy has" if measure == "accuracy" else "completion earns"
    return said + (f"; the best constant {what} {words(best[measure])}{unit}." if best else ".")

"""Follows a run from another terminal: lines from its files, worded like the run's own output; which run can go on."""

import time
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from grpo_kit._support.kernel import visible
from grpo_kit.record._lines import METRICS_LINES, last_step, read_json
from grpo_kit.record._run_folder import is_locked, path_of
from grpo_kit.record.files import (
    RunFolderError,
    has_metrics,
    next_run_folder,
    numbered,
    run_settings,
    steps_done,
)
from grpo_kit.watch._follow import signature
from grpo_kit.watch._run_state import (
    RunState,
    change_line,
    flag_line,
    held_out_words,
    killed_words,
    steps_asked_for,
)

_OF_STEPS = ("step", "held out")  # kinds of lines of which `last` leaves earlier ones out


def follow(folder: Path, *, last: int = 10, every: float = 1.0, once: bool = False) -> None:
    """Print a run's lines until it has ended. last: earlier steps that are printed. every: seconds between two looks.

    once: print what is there, and return.
    Raises ValueError for what is no folder.
    """
    if last < 0 or not every > 0:
        raise ValueError(f"last={last} must be at least 0 and every={every:g} above 0")
    folder = path_of(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give a run's, such as runs/largest")
    lines = Lines(folder, last=last)
    while True:
        state, has_ended = where_it_is(folder)
        for line in lines.new():
            print(visible(line), flush=True)
        if has_ended or once:
            print(visible(state), flush=True)
            return
        time.sleep(every)


class Lines:
    """The run's new output since the last call, as lines. last: number of earlier steps to print first."""

    def __init__(self, folder: Path, *, last: int) -> None:
        self._folder = folder
        self._last = last
        self._printed: set[tuple] | None = None  # keys of entries; None: nothing so far
        self._signature: tuple = ()

    def new(self) -> list[str]:
        """The lines, oldest first; [] while a file is being written."""
        current = signature(self._folder)
        if current == self._signature:
            return []
        try:
            run = RunState.read(self._folder)
            total = steps_asked_for(self._folder)
        except (ValueError, OSError):
            return []
        self._signature = current
        entries = _entries(run)
        if self._printed is None:
            steps = sorted(step for step in run.rows if step > 0)
            earlier = set(steps[: max(0, len(steps) - self._last)])
            self._printed = {
                entry for entry in entries if entry[0] in _OF_STEPS and entry[1] in earlier
            }
        # a resumed run's repeated steps are printed again
        self._printed = {
            entry for entry in self._printed if entry[0] != "step" or entry in entries
        }
        new = [entry for entry in entries if entry not in self._printed]
        self._printed.update(entries)
        return [_line(run, total, *entry) for entry in new]


def _entries(run: RunState) -> list[tuple]:
    """All that a run has shown, in the order of printing: (kind, value)."""
    entries: list[tuple] = []
    for step, row in sorted(run.rows.items()):
        if step > 0:
            entries.append(("step", step))
        if held_out_words(row):
            entries.append(("held out", step))
    entries += [("change", change) for change in run.changes]
    return entries + [("flag", flag) for flag in run.flags]


def _line(run: RunState, total: int, kind: str, value: Any) -> str:
    """An entry's line."""
    if kind == "step":
        return run.step_line(value, max(value, total))
    if kind == "held out":
        return held_out_words(run.rows[value])
    return change_line(value) if kind == "change" else flag_line(value)


def where_it_is(folder: Path) -> tuple[str, bool]:
    """The progress of a run in a sentence, and whether it has ended."""
    step = steps_done(folder)
    total = steps_asked_for(folder) if has_metrics(folder) else 0
    after = f"after step {step}"
    if total:
        after += f" of {total}"
    is_done = 0 < total <= step
    is_going = is_locked(folder)
    if is_going:
        if is_done:
            return f"Trained for {step} steps; it is being evaluated.", False
        if step:
            return f"It goes on, {after}.", False
        return "It has not done its first step yet.", False
    results = folder / "results.json"
    if is_done and results.is_file() and (sentence := read_json(results).get("sentence")):
        return f"Done after {step} steps: {sentence}", True
    state = f"Done after {step} steps." if is_done else f"Stopped {after}."
    if is_going is False:
        state = f"{killed_words(step, total)}."
    settings = run_settings(folder) or {}
    # `grpo-kit train --resume` finds the task of the run
    if settings.get("task", {}).get("file") or settings.get("config", {}).get("task"):
        state += f" To go on: grpo-kit train --resume {folder}"
    return state, True


def unfinished_run(root: str | Path, name: str) -> Path | None:
    """The newest of root/name, root/name-2, ... that can go on: it has a checkpoint, fewer steps than it was last asked
    for, and no process that trains it. None where there is none; `train(resume=True)` in that folder goes on.
    """
    newest = None
    free = next_run_folder(root, name)
    for path in takewhile(lambda path: path != free, numbered(root, name)):
        if is_locked(path) or not any(path.glob("checkpoint-*")):
            continue
        with suppress(RunFolderError):  # of a run that is damaged
            if last_step(path / METRICS_LINES) < steps_asked_for(path):
                newest = path
    return newest

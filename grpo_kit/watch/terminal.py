"""Follows a run from another terminal: lines from its files, worded like the run's own output; which run can go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import takewhile
from pathlib import Path

from grpo_kit._support.kernel import visible
from grpo_kit.record._lines import METRICS_LINES, last_step, read_json
from grpo_kit.record._run_lock import is_locked
from grpo_kit.record.control import read_changes
from grpo_kit.record.files import RunFolderError, has_metrics, next_run_folder, numbered, run_settings
from grpo_kit.record.run_path import path_of
from grpo_kit.watch._follow import signature
from grpo_kit.watch._held_out_words import held_out_words
from grpo_kit.watch._run_state import RunState, change_line, flag_line


def follow(folder: Path, *, last: int = 10, every: float = 1.0, once: bool = False) -> None:
    """Print a run's lines until it has ended. last: earlier steps that are printed. every: seconds between two looks.

    once: print what there is, and return.
    Raises ValueError for what is no folder.
    """
    if last < 0 or not every > 0:
        raise ValueError(f"last={last} must be at least 0 and every={every:g} above 0")
    folder = path_of(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give a run's, such as runs/largest")
    lines = Lines(folder, last=last)
    while True:
        state, ended = where_it_is(folder)
        for line in lines.new():
            print(visible(line), flush=True)
        if ended or once:
            print(visible(state), flush=True)
            return
        time.sleep(every)


class Lines:
    """The run's new output since the last call, as lines. last: number of earlier steps to print first."""

    def __init__(self, folder: Path, *, last: int) -> None:
        self._folder, self._last = folder, last
        self._printed: set[tuple] | None = None  # keys of entries; None: nothing so far
        self._seen: tuple = ()

    def new(self) -> list[str]:
        """The lines, oldest first; [] while a file is being written."""
        if (now := signature(self._folder)) == self._seen:
            return []
        try:
            run = RunState.read(self._folder)
            total = steps_asked_for(self._folder)
        except (ValueError, OSError):
            return []
        self._seen = now
        entries = _entries(run, total)
        if self._printed is None:
            trained = [step for step in sorted(run.rows) if step > 0]
            earlier = trained[: max(0, len(trained) - self._last)]
            self._printed = {(kind, step) for kind in ("step", "held out") for step in earlier}
        # a resumed run's repeated steps are printed again
        self._printed = {key for key in self._printed if key[0] != "step" or key[1] in run.rows}
        lines = [line() for key, line in entries.items() if key not in self._printed]
        self._printed |= set(entries)
        return lines


def _entries(run: RunState, total: int) -> dict[tuple, Callable[[], str]]:
    """All that a run has shown, in the order of printing: what it is -> its line, composed when it is called for."""
    found: dict[tuple, Callable[[], str]] = {}
    for step, row in sorted(run.rows.items()):
        if step > 0:
            found["step", step] = partial(run.step_line, step, max(step, total))
        if held_out_words(row):
            found["held out", step] = partial(held_out_words, row)
    found |= {("change", *change): partial(change_line, change) for change in run.changes}
    return found | {("flag", flag): partial(flag_line, flag) for flag in run.flags}


def steps_asked_for(folder: Path) -> int:
    """How many steps a run is to have, with later changes of that; 0 if it does not say."""
    steps = (run_settings(folder) or {}).get("config", {}).get("steps", 0)
    changes = [change["change"] for change in read_changes(folder) if "change" in change]
    return [steps, *(change["steps"] for change in changes if "steps" in change)][-1]


def where_it_is(folder: Path) -> tuple[str, bool]:
    """The progress of a run in a sentence, and whether it has ended."""
    run = RunState.read(folder) if has_metrics(folder) else RunState()
    step, total = run.step, steps_asked_for(folder) if run.rows else 0
    of, done = f" of {total}" if total else "", 0 < total <= step
    going = is_locked(folder)
    if going:
        if done:
            return f"Trained for {step} steps; it is being evaluated.", False
        return f"It goes on, after step {step}{of}." if step else "It has not done its first step yet.", False
    results = folder / "results.json"
    if results.is_file() and done and (sentence := read_json(results).get("sentence")):
        return f"Done after {step} steps: {sentence}", True
    what = f"Done after {step} steps." if done else f"Stopped after step {step}{of}."
    if going is False:
        what = f"Killed after step {step}{of}, or trained by another machine."
    goes_on = f" To go on: grpo-kit train --resume {folder}" if _says_its_task(folder) else ""
    return what + goes_on, True


def _says_its_task(folder: Path) -> bool:
    """Can `grpo-kit train --resume` find the task of the run?"""
    settings = run_settings(folder) or {}
    return bool(settings.get("task", {}).get("file") or settings.get("config", {}).get("task"))


def unfinished_run(root: str | Path, name: str) -> Path | None:
    """The newest of root/name, root/name-2, ... that can go on: it has a checkpoint, fewer steps than it was last asked
    for, and no process that trains it. None where there is none; `train(resume=True)` in that folder goes on.
    """
    free, found = next_run_folder(root, name), None
    for path in takewhile(lambda path: path != free, numbered(root, name)):
        if next(path.glob("checkpoint-*"), None) and is_locked(path) is not True:
            with suppress(RunFolderError):  # of a run that is damaged
                found = path if last_step(path / METRICS_LINES) < steps_asked_for(path) else found
    return found

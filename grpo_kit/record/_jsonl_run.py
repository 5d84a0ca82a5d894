"""RunLog: a run's record as two files of lines, appended to and never rewritten, readable while training goes on.

    runs/<name>/run.json            what was asked for
                metrics.jsonl       a line a step; later lines of the same step add to it
                completions.jsonl   a line a completion
                checkpoint-<step>/  the weights after a step

A run that goes on from an earlier step appends {"resumed_from": step} to both: readers leave out what stands before
that line of later steps. Nothing is deleted. While the disk is full, lines wait in memory. The settings' run_id is in
the first line of each table too: one that was put there from another run is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_kit.record._lines import (
    COMPLETIONS_LINES,
    METRICS_LINES,
    RESUMED,
    RUN,
    RUN_ID,
    LineFile,
    RunFolderError,
    as_line,
    last_step,
    lines_of,
    reading,
    write_lines,
)
from grpo_kit.record.files import (
    REDONE,
    holds_run,
    next_run_folder,
    rename_fields,
    steps_done,
    write_whole,
)


class RunLog:
    """Writes the record of one run. Make it with `RunLog.open`.

    >>> log = RunLog.open("runs/demo", {"task": "largest"})  # doctest: +SKIP
    >>> log.write(1, {"reward": 0.25}, {"completion": ["4"], "reward": [0.25]})  # doctest: +SKIP
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = {
            name: LineFile(path / name) for name in (METRICS_LINES, COMPLETIONS_LINES)
        }
        self._tags: dict[str, dict[str, Any]] = {}  # table -> what its next line says besides
        # changes of steps to be done again
        self._later: dict[int, dict[str, Any]] | None = None
        self._disk_works = True

    @staticmethod
    def check(path: Path) -> None:
        """Refuse a folder that no run could begin or go on in, before anything is computed.

        Raises RunFolderError for a file, a checkpoint, for what cannot be written, and for steps without a checkpoint.
        """
        if path.is_dir() and path.name.startswith("checkpoint-") and holds_run(path.parent):
            raise RunFolderError(
                f"folder={str(path)!r} is a checkpoint; give the run's folder, {str(path.parent)!r}, and "
                "train(resume=True)."
            )
        parent = next(place for place in (path, *path.absolute().parents) if place.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise RunFolderError(
                f"folder={str(path)!r}: {parent} is no folder that can be written; name another."
            )
        # Nothing is lost by that: no step was done.
        is_before_first_step = (path / RUN).is_file() and not steps_done(path)
        if holds_run(path) and not is_before_first_step and not any(path.glob("checkpoint-*")):
            raise RunFolderError(
                f"folder={str(path)!r} already holds a run, without a checkpoint to go on from, and no run is "
                f"overwritten. The next free name is {str(next_run_folder(path.parent, path.name))!r}."
            )

    @classmethod
    def open(
        cls, path: str | Path, settings: Mapping[str, Any], *, resume: bool = False
    ) -> RunLog:
        """Begin a run in `path`, or with `resume` go on with the one that is there.

        settings: kept as run.json; of a resumed run, where they differ, as run-resumed-<n>.json.
        Raises RunFolderError if path holds a run and not `resume`, holds none with `resume`, or cannot be written.
        """
        path = Path(path)
        if path.exists() and not path.is_dir():
            raise RunFolderError(f"folder={str(path)!r} is a file; name a folder.")
        free = str(next_run_folder(path.parent, path.name))
        if holds_run(path) and not resume:
            raise RunFolderError(
                f"folder={str(path)!r} already holds a run, and no run is overwritten. The next free name is "
                f"{free!r}; or go on with the run that is there: train(resume=True)."
            )
        if resume and not holds_run(path):
            raise RunFolderError(
                f"folder={str(path)!r} holds no run to go on with; begin one, with resume left out. {free!r} is free."
            )
        is_new = not path.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
            _keep_settings(path, settings)
        except OSError as error:
            if is_new and path.is_dir() and not any(path.iterdir()):
                path.rmdir()  # else a full disk would block the name
            raise RunFolderError(
                f"folder={str(path)!r} cannot be written: {error}. Free some space or name another folder."
            ) from error
        log = cls(path)
        if settings.get(RUN_ID):
            log._tags = {name: {RUN_ID: settings[RUN_ID]} for name in log._files}
        return log

    def go_on_from(self, step: int) -> None:
        """The steps after `step` are done again; with the changes that they were made with, each at its step."""
        self.flush()
        metrics = self._files[METRICS_LINES]
        repeated = [
            line for line in lines_of(metrics.path, metrics.waiting) if line["step"] > step
        ]
        if repeated or self._later is None:
            taken_back = lines_of(metrics.path, metrics.waiting, taken_back=True)
            with reading(metrics.path):
                self._later = {}
                for line in [*taken_back, *repeated]:
                    if line["step"] > step and line.get("changes"):
                        changes = {name: after for name, (_, after) in line["changes"].items()}
                        rename_fields(changes)
                        self._later[line["step"]] = changes
        # The metrics of these completions may have been lost.
        if not repeated and last_step(self.path / COMPLETIONS_LINES) <= step:
            return
        for name in self._files:
            self._append(name, {RESUMED: step})
        for checkpoint in self.path.glob("checkpoint-*"):
            number = checkpoint.name.removeprefix("checkpoint-")
            if number.isdecimal() and int(number) > step:
                (self.path / REDONE).mkdir(exist_ok=True)
                os.replace(checkpoint, next_run_folder(self.path / REDONE, checkpoint.name))
        self.flush()

    def lost(self, step: int) -> list[str]:
        """A line for each table that lacks some of the steps that are done: a disk or a person took them."""
        messages = []
        for file in self._files.values():
            steps = {line["step"] for line in lines_of(file.path, file.waiting)} - {
                file.torn_step()
            }
            lost = [number for number in range(1, step + 1) if number not in steps]
            if lost:
                messages.append(
                    f"{file.path} lacks lines of {len(lost)} of the {step} steps that are done (the first is step "
                    f"{lost[0]}): they were lost. The run goes on; charts and tables do without them."
                )
        return messages

    def changes_at(self, step: int) -> dict[str, Any]:
        """What a resumed run changes at this step, because it did so before: name -> value as JSON."""
        return (self._later or {}).pop(step, {})

    def write(
        self,
        step: int,
        metrics: Mapping[str, Any],
        completions: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        """A line of metrics of this step, and a line for each completion. Never raises because of the disk."""
        columns = completions or {}
        for values in zip(*columns.values(), strict=True):
            completion = dict(zip(columns, values, strict=True))
            self._append(COMPLETIONS_LINES, {"step": step} | completion)
        measured = {name: value for name, value in metrics.items() if value is not None}
        self._append(METRICS_LINES, {"step": step} | measured)
        self.flush()

    def _append(self, name: str, values: Mapping[str, Any]) -> None:
        tags = self._tags.pop(name, {})
        self._files[name].waiting.append(as_line({**values, **tags}))

    def flush(self) -> bool:
        """Write what waits in memory; True if nothing waits any more. Warns once each time the disk fails."""
        advice = "Training goes on; the lines are kept in memory and tried again at the next step. Free some space."
        # the metrics last: a step with a row has its completions
        files = reversed(self._files.values())
        self._disk_works = write_lines(files, self.path, advice, warns=self._disk_works)
        return self._disk_works


def _keep_settings(path: Path, settings: Mapping[str, Any]) -> None:
    text = (json.dumps(dict(settings), indent=2, default=str) + "\n").encode()
    target = path / RUN
    number = 0
    while target.exists():
        if target.read_bytes() == text:
            return
        number += 1
        target = path / f"run-resumed-{number}.json"
    write_whole(target, text)

"""Trackers as hooks of a run: TensorBoard, trackio and Weights & Biases have what the run folder holds, step by step.

>>> GRPOTrainer(model, task, config, tokenizer=tokenizer, hooks=[trackers.TensorBoard()])  # doctest: +SKIP

Each is over its tracker's own API. accelerate's trackers have neither alerts nor, but for wandb, tables; TensorBoard's
takes no nested settings, and wandb's drops steps that are done again.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd

from grpo_kit._support.argument_checks import check_choice
from grpo_kit.loop.batch import Batch
from grpo_kit.loop.protocols import Hook
from grpo_kit.record._lines import METRICS_LINES, lines_of, plain, read_json
from grpo_kit.record.files import run_settings, write_whole
from grpo_kit.watch.monitor import read_flags

# in the run folder: each tracker's entry, by which its run is found again
_RUNS = "trackers.json"
_TABLES, _ROWS, _CHARACTERS = 100, 64, 200_000  # of a run; of a table
_TOKEN_COLUMNS = ("tokens", "logprobs")  # a value a token: for kit.browse
_WANDB_STEP = "train/global_step"  # the axis of every chart: wandb's own step counts calls


class _Tracker(Hook):
    """Writes each step to a tracker as it is done: numbers, changes, red flags, now and then its completions.

    Give it after the hooks that add to a step's row, as `hooks=` of kit.GRPOTrainer does. A run that goes on goes on in
    the tracker's run of before; a tracker that a run has only now gets the rows of the steps before too.
    A tracker that fails is reported once per train(), and ends nothing: metrics.jsonl has every row.
    Raises ValueError, with the pip line, where the tracker is not installed.

    A subclass has `name`, the package; `takes_back`, whether what steps done again write hides what they wrote before;
    _open(folder, run.json as a dict, entry, step) -> (entry, place): the entry finds its run again, {} of a new one;
    _numbers(step, {name: number}); _text(step, "INFO" or "WARN", title, text); _table(step, {column: values});
    _close(failed).
    """

    name: str
    takes_back = False

    def __init__(self) -> None:
        if find_spec(self.name) is None:
            raise ValueError(
                f"{self.name} is not installed; pip install {self.name} (or grpo-kit[trackers]), or leave it out: the "
                "run folder has everything"
            )
        self._is_open, self._place = False, ""

    def begin(self, trainer: Any) -> None:
        """Open the tracker's run. One that is new gets the rows so far."""
        self._folder, self._failed = trainer.folder, False
        entry = self._entries().get(self.name, {})
        # last step whose evaluation the tracker has
        self._evaluated = entry.pop("evaluated", -1)
        flags = read_flags(trainer.folder) if entry else []
        self._flags = {
            flag.name for flag in flags if not self.takes_back or flag.step <= trainer.step
        }
        self._try(self._begin, entry, trainer.step)
        rows: dict[int, dict[str, Any]] = {}
        for line in lines_of(trainer.folder / METRICS_LINES):
            rows.setdefault(line["step"], {}).update(line)
        # the last step's evaluation alone: the run may have ended before it was written
        if entry:
            last_row = rows.get(trainer.step, {})
            evaluation = {name: v for name, v in last_row.items() if name.startswith("eval/")}
            rows = {trainer.step: evaluation} if trainer.step > self._evaluated else {}
        for step, row in rows.items():
            self._try(self._write, step, row)

    def after_step(self, trainer: Any, row: dict[str, Any], batch: Batch) -> None:
        """Write the step."""
        self._try(self._write, trainer.step, row)
        if _table_is_due(trainer.step, trainer.config.steps):
            self._try(self._table, trainer.step, _table_of(trainer.completions))

    def end(self, trainer: Any, error: BaseException | None) -> None:
        """Close the tracker's run, after a stop and an error too."""
        self._try(self._close, isinstance(error, Exception))
        self._is_open = False

    def _begin(self, entry: dict[str, Any], step: int) -> None:
        self._entry, place = self._open(
            self._folder, run_settings(self._folder) or {}, entry, step
        )
        self._is_open = True
        if place != self._place:
            print(f"{self.name}: {place}", flush=True)
        self._place = place
        self._write_entry()

    def _write(self, step: int, row: Mapping[str, Any]) -> None:
        for name, (before, after) in (row.get("changes") or {}).items():
            self._text(step, "INFO", "change", f"{name} {before} -> {after}")
        numbers = _numbers_of(row)
        if numbers:
            self._numbers(step, numbers)
        for flag in read_flags(self._folder):
            if flag.name not in self._flags:
                self._flags.add(flag.name)
                column = f"flags/{flag.name.replace(' ', '_')}"
                self._numbers(flag.step, {column: 1.0})  # at the step since when
                self._text(flag.step, "WARN", f"red flag: {flag.name}", str(flag))
        if any(name.startswith("eval/") for name in numbers):
            self._evaluated = step
            self._write_entry()

    def _entries(self) -> dict[str, dict[str, Any]]:
        path = self._folder / _RUNS
        return read_json(path) if path.exists() else {}

    def _write_entry(self) -> None:
        entries = self._entries() | {self.name: self._entry | {"evaluated": self._evaluated}}
        write_whole(self._folder / _RUNS, (json.dumps(entries, indent=2) + "\n").encode())

    def _try(self, method: Callable[..., None], *arguments: Any) -> None:
        """Call a method; all but _begin only while the tracker's run is open."""
        if not self._is_open and method != self._begin:
            return
        try:
            method(*arguments)
        except Exception as error:  # a tracker's own, of any kind: no reason to end a training
            reason = f"{type(error).__name__}: {str(error)[:200]}"
            if not self._failed:
                print(
                    f"{self.name} failed ({reason}). Training goes on; metrics.jsonl has every row."
                )
            self._failed = True


class TensorBoard(_Tracker):
    """Event files in <run folder>/tensorboard, with numbers in 32 bits. Steps done again hide those of before."""

    name, takes_back = "tensorboard", True

    def _open(self, folder, settings, entry, step):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(
            str(folder / "tensorboard"), purge_step=step + 1 if entry else None
        )
        if not entry:
            self._text(step, "INFO", "config", json.dumps(settings, indent=2, default=str))
        return {
            "folder": "tensorboard"
        }, f"look at it with: tensorboard --logdir {folder.parent}"

    def _numbers(self, step, numbers):
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def _text(self, step, level, title, text):
        self._writer.add_text(title, _markdown(text), step)

    def _table(self, step, table):
        lines = [
            " | ".join(map(_markdown, row))
            for row in (table, *zip(*table.values(), strict=True))
        ]
        lines.insert(1, " | ".join(["---"] * len(table)))
        self._writer.add_text("completions", "\n".join(f"| {line} |" for line in lines), step)

    def _close(self, failed):
        self._writer.close()


class Trackio(_Tracker):
    """A run in a project of trackio. project: its name. space_id: of the Hugging Face Space that gets the rows too.

    Besides, a Space, a server or a webhook gets them where TRACKIO_SPACE_ID, TRACKIO_SERVER_URL or TRACKIO_WEBHOOK_URL
    names one. No dashboard is opened in a notebook: on a hosted one it would have a public address.
    """

    name = "trackio"

    def __init__(self, project: str = "grpo_kit", *, space_id: str | None = None) -> None:
        super().__init__()
        self.project, self.space_id = project, space_id

    def _open(self, folder, settings, entry, step):
        import trackio

        self._trackio, project = trackio, entry.get("project") or self.project
        run = entry.get("run") or self._free_name(project, folder.absolute().name)
        self._run = trackio.init(
            project,
            name=run,
            config=settings,
            space_id=self.space_id,
            resume="allow",
            embed=False,
        )
        place = f"project {project!r}, run {run!r}; look at it with: trackio show --project {project}"
        return {"project": project, "run": run}, place

    def _numbers(self, step, numbers):
        self._run.log(dict(numbers), step=step)

    def _text(self, step, level, title, text):
        self._run.alert(title, text, self._trackio.AlertLevel[level], step=step)

    def _table(self, step, table):
        rows = self._trackio.Table(dataframe=pd.DataFrame(table, dtype=object))
        self._run.log({"completions": rows}, step=step)

    def _close(self, failed):
        self._trackio.finish()

    def _free_name(self, project: str, name: str) -> str:
        """A name that no run of the project has: trackio finds a run again by its name."""
        try:
            names = {run.name for run in self._trackio.Api().runs(project)}
        except ValueError:  # no such project yet
            return name
        candidates = [name, *(f"{name}-{number}" for number in range(2, len(names) + 2))]
        return next(candidate for candidate in candidates if candidate not in names)


class Wandb(_Tracker):
    """A run of wandb. project: its name; None: WANDB_PROJECT, else grpo_kit.

    mode: "offline" writes into <run folder>/wandb and sends nothing; "online" sends, for whoever is logged in. None:
    WANDB_MODE, else offline. A run that you began yourself (wandb.init) is used, and left open.
    """

    name = "wandb"

    def __init__(self, project: str | None = None, *, mode: str | None = None) -> None:
        super().__init__()
        self.project = project or os.getenv("WANDB_PROJECT") or "grpo_kit"
        self.mode = mode or os.getenv("WANDB_MODE") or "offline"

    def _open(self, folder, settings, entry, step):
        import wandb

        self._wandb, self._opened_here = wandb, wandb.run is None
        if self._opened_here:
            self._mode_before = wandb.setup().settings.mode
            # As init's mode alone, telemetry would be sent.
            wandb.setup(settings=wandb.Settings(mode=self.mode))
            names = {
                "project": self.project,
                "name": folder.absolute().name,
                "id": uuid.uuid4().hex[:8],
            }
            wandb.init(dir=folder, resume="allow", **(names | entry))
        self._run = run = wandb.run
        run.define_metric(_WANDB_STEP)
        run.define_metric("*", step_metric=_WANDB_STEP, step_sync=True)
        run.config.update(settings, allow_val_change=True)
        offline = (
            f"{Path(run.dir).parent}; nothing is sent; `wandb sync` on that folder does it"
        )
        place = offline if run.offline else run.url
        return {"project": run.project, "name": run.name, "id": run.id}, place

    def _numbers(self, step, numbers):
        self._run.log({**numbers, _WANDB_STEP: step})

    def _text(self, step, level, title, text):
        self._run.alert(title, f"Step {step}: {text}", level, wait_duration=0.001)

    def _table(self, step, table):
        rows = [list(row) for row in zip(*table.values(), strict=True)]
        completions = self._wandb.Table(columns=list(table), data=rows, allow_mixed_types=True)
        self._run.log({"completions": completions, _WANDB_STEP: step})

    def _close(self, failed):
        if self._opened_here:
            self._run.finish(exit_code=int(failed))
            self._wandb.setup(settings=self._wandb.Settings(mode=self._mode_before or "online"))


_BY_NAME = {tracker.name: tracker for tracker in (TensorBoard, Trackio, Wandb)}
TRACKERS = tuple(_BY_NAME)


def by_name(name: str) -> _Tracker:
    """The tracker of this name, one of TRACKERS. Raises ValueError for another, and for one that is not installed."""
    check_choice("tracker", name, TRACKERS)
    return _BY_NAME[name]()


def _numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Those of a row of metrics.jsonl, by their names in every tracker: train/<column>; eval/... stays as it is."""
    numbers = {}
    for column, value in row.items():
        if column != "step" and isinstance(value, (int, float)) and value == value:
            prefix = "" if column.startswith("eval/") else "train/"
            numbers[prefix + column] = value
    return numbers


def _markdown(value: Any) -> str:
    """So that TensorBoard, which reads Markdown, shows just this text; html.unescape gives it back."""
    text = "" if value is None else str(value)
    return "".join(c if c.isalnum() or c in " .,:;!?()" else f"&#{ord(c)};" for c in text)


def _table_is_due(step: int, steps: int) -> bool:
    """Does a tracker get this step's table? The first step's, and at most _TABLES of the others', evenly."""
    return step == 1 or step % max(1, -(-steps // _TABLES)) == 0


def _table_of(completions: Mapping[str, list]) -> dict[str, list]:
    """The columns of completions.jsonl but _TOKEN_COLUMNS: whole groups, at least one, up to _ROWS or _CHARACTERS."""
    columns = {
        n: [*map(plain, cells)] for n, cells in completions.items() if n not in _TOKEN_COLUMNS
    }
    groups, n_rows, characters = columns["group"], 0, 0
    for row, group in enumerate(groups):
        characters += sum(
            len(values[row]) for values in columns.values() if isinstance(values[row], str)
        )
        if n_rows and (row >= _ROWS or characters > _CHARACTERS):
            break
        if row + 1 == len(groups) or groups[row + 1] != group:
            n_rows = row + 1
    return {name: values[:n_rows] for name, values in columns.items()}

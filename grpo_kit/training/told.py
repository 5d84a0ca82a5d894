"""What report_to's trackers are told: rows, completions, flags, changes and the config, in the order of the run folder.

A tracker that fails never ends the training: what it was not told waits, and is told again after 1, 2, 4, ... more
things to tell, at the end, and by the next train(). trackers.json in the run folder says which tracker's run is this
one's, and up to which step it was told.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from grpo_kit.record.control import read_changes
from grpo_kit.record.files import read_completions, read_metrics, write_whole
from grpo_kit.trackers.names import TRACKERS

if TYPE_CHECKING:
    from grpo_kit.watch.flags import Flag

TRACKERS_FILE = "trackers.json"
_NOTHING = -1  # the step up to which a new tracker's run was told
Message = tuple[int, str, tuple]  # step that it is told with, method of the tracker, its arguments


class Told:
    """The trackers of one trainer. Begun lazily: a run that fails before there is anything to tell leaves no trace."""

    def __init__(self, trainer: Any, names: list[str], say: Any) -> None:
        self.trainer, self._say = trainer, say
        self._open = [_Open(_make(name)) for name in dict.fromkeys(names)]
        self._waiting: list[tuple[str, tuple]] = []  # of the step that is not done yet
        self._going = False
        for one in self._open:
            trainer.add_callback(one.tracker)

    def begin(self, folder: Path, config: Mapping[str, Any]) -> None:
        """train() begins or goes on in this folder, whose files end with the last whole step."""
        self._folder, self._waiting = folder, []
        self._config = json.loads(json.dumps(config, default=str))  # as run.json holds it
        self._going = bool(self._open)
        try:
            kept = json.loads((folder / TRACKERS_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            kept = {}
        step = self.trainer.state.global_step
        for one in self._open:
            one.go_on(kept.pop(one.tracker.name, {}), step, self._say)
        self._others = kept  # that this train() does not report to
        if any(one.told < step for one in self._open):
            self._catch_up()

    def completions(self, table: Mapping[str, list]) -> None:
        """Of a rollout; told with its step's row."""
        if self._going:
            self._waiting.append(("table", (table,)))

    def change(self, text: str) -> None:
        """A change that takes effect with the step that is being done, or was refused."""
        if self._going:
            self._waiting.append(("alert", ("INFO", "change", text)))

    def row(self, row: Mapping[str, Any], flags: list[Flag]) -> None:
        """A step is done: its row, and what came before it."""
        if not self._going:
            return
        step, waiting, self._waiting = int(row["step"]), self._waiting, []
        for method, given in waiting:
            if method == "alert":
                self._add(step, method, step, *given)
        self._add(step, "row", step, row)
        self._tell_tables(step, [given[0] for method, given in waiting if method == "table"])
        self._tell_flags(step, flags)
        self._deliver()

    def evaluation(self, row: Mapping[str, Any], flags: list[Flag]) -> None:
        """The eval/... columns of a step whose row was told; before the first step, the whole of row 0."""
        if not self._going:
            return
        step = int(row["step"])
        some = {name: value for name, value in row.items() if name.startswith("eval/")} if step else row
        self._add(step, "row", step, some)
        self._tell_flags(step, flags)
        self._deliver()

    def end(self, *, failed: bool) -> None:
        """train() ends, whether all is done or not: every tracker's run is left whole."""
        if not self._going:
            return
        self._going = False
        for one in self._open:
            one.skip = 0
        self._deliver()
        for one in self._open:
            if one.begun:
                one.try_to(lambda one=one: one.tracker.end(failed=failed), self._say)
                one.begun = False
            if one.queue:
                self._say(
                    f"{one.tracker.name} was not told of step {one.queue[0][0]} and what followed; metrics.csv has "
                    "all, and the next train() of this folder tells the rest."
                )
        self._write()
        for one in self._open:
            one.queue.clear()

    # ---- what is told -------------------------------------------------------------------------------------------

    def _add(self, step: int, method: str, *given: Any) -> None:
        for one in self._open:
            one.queue.append((step, method, given))

    def _tell_tables(self, step: int, tables: list[Mapping[str, list]]) -> None:
        from grpo_kit.trackers.tracker_table import is_told, table_of

        if tables and is_told(step, self.trainer.state.max_steps):
            self._add(step, "table", step, table_of(_joined(tables)))

    def _tell_flags(self, step: int, flags: list[Flag]) -> None:
        for (
            flag
        ) in flags:  # at the step since when: steps after that may be done again, and it is raised once
            self._add(step, "row", flag.step, {f"flags/{flag.name.replace(' ', '_')}": 1.0})
            self._add(step, "alert", flag.step, "WARN", f"red flag: {flag.name}", str(flag))

    def _catch_up(self) -> None:
        """What the run folder has beyond the step up to which a tracker was told."""
        from grpo_kit.watch.monitor import read_flags

        rows, changes = read_metrics(self._folder).to_dict("records"), read_changes(self._folder)
        flags, step = read_flags(self._folder), self.trainer.state.global_step
        completions = read_completions(self._folder)
        queues = [one.queue for one in self._open]
        for row in (row for row in rows if row["step"] <= step):
            now = int(row["step"])
            for line in changes:
                if line["step"] == now:
                    self._add(now, "alert", now, "INFO", "change", _in_words(line))
            self._add(now, "row", now, row)
            of_step = completions[completions["step"] == now]
            self._tell_tables(now, [_as_lists(of_step)] if len(of_step) else [])
            self._tell_flags(now, [flag for flag in flags if flag.step == now])
        for one, queue in zip(self._open, queues, strict=True):
            one.queue = [message for message in queue if message[0] > one.told]

    # ---- telling ------------------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        for one in self._open:
            if one.skip > 0:
                one.skip -= 1
                continue
            failing = one.failing
            if not one.try_to(lambda one=one: self._tell(one), self._say) or failing:
                self._write()

    def _tell(self, one: _Open) -> None:
        tracker, trainer = one.tracker, self.trainer
        if one.queue and not one.begun:
            model = trainer.accelerator.unwrap_model(trainer.model)
            one.kept = tracker.begin(trainer.args, trainer.state, model, self._config, one.kept, one.told)
            one.begun = True
            if not one.said_where:
                one.said_where = True
                self._say(f"{tracker.name}: {tracker.where}")
        while one.queue:
            step, method, given = one.queue[0]
            if step > one.told:
                one.told, one.sent = step, []
                self._write()
            getattr(tracker, method)(*given)
            one.sent.append(one.queue.pop(0))

    def _write(self) -> None:
        """Before a step is told: after a kill the number is never below what a tracker has. Failing: what it has."""
        told = {one: one.queue[0][0] - 1 if one.failing and one.queue else one.told for one in self._open}
        kept = {
            one.tracker.name: {**one.kept, "step": step, "open": one.begun}
            for one, step in told.items()
            if step > _NOTHING
        }
        kept = self._others | kept
        try:
            write_whole(self._folder / TRACKERS_FILE, (json.dumps(kept, indent=2) + "\n").encode())
        except OSError:
            pass  # the row's own disk: RunFolder says so


class _Open:
    """One tracker, what it was told and what waits to be told."""

    def __init__(self, tracker: Any) -> None:
        self.tracker = tracker
        self.kept: dict[str, Any] = {}
        self.queue: list[Message] = []
        self.sent: list[Message] = []  # of step `told`
        self.told = _NOTHING
        self.begun = self.said_where = False
        self.skip = self._failed = 0

    def go_on(self, kept: dict[str, Any], step: int, say: Any) -> None:
        """From the step that the run goes on from, as trackers.json has it."""
        self.queue, self.sent, self.begun, self.skip, self._failed = [], [], False, 0, 0
        self.told, killed = kept.pop("step", _NOTHING), kept.pop("open", False)
        self.kept = kept
        if self.told > step and self.tracker.takes_back:
            self.told = step
        elif self.told > step or killed:  # wandb keeps rows in memory for a while, which a kill loses
            why = "The last train() was killed" if killed else f"Steps after {step} are done again"
            say(
                f"{why}, so what {self.tracker.name} has is not what the run folder has: a new run of it begins, with "
                f"everything up to step {step}; the old one stays ({', '.join(map(str, kept.values()))})."
            )
            self.told, self.kept = _NOTHING, {}

    @property
    def failing(self) -> bool:
        return self._failed > 0

    def try_to(self, tell: Any, say: Any) -> bool:
        """Tell; of a failure the rest waits, and the tracker is begun anew: with the whole step, if it takes that back.

        Returns whether it went well.
        """
        try:
            tell()
        except Exception as error:  # a tracker's own, of any kind: no reason to end a training
            if not self._failed:
                say(
                    f"{self.tracker.name} failed ({type(error).__name__}: {str(error)[:200]}). Training goes on, and "
                    "the run folder has every row; what it was not told is kept and tried again."
                )
            self.skip, self._failed = 2**self._failed - 1, self._failed + 1
            if self.tracker.takes_back and self.queue:
                self.queue, self.sent = self.sent + self.queue, []
                self.told = self.queue[0][0] - 1
            if self.begun:
                self.begun = False
                try:
                    self.tracker.end(failed=False)
                except Exception:  # it has failed already
                    pass
        else:
            if self._failed and not self.queue:
                self._failed = 0
                say(f"{self.tracker.name} has everything again.")
        return not self.failing


def _make(name: str) -> Any:
    if name == "tensorboard":
        from grpo_kit.trackers.tensorboard import TensorBoard as Tracker
    elif name == "trackio":
        from grpo_kit.trackers.trackio import Trackio as Tracker
    else:
        from grpo_kit.trackers.wandb import Wandb as Tracker
    return Tracker()


def own_trackers(report_to: list[str]) -> tuple[list[str], list[str]]:
    """Those that the kit tells itself, and the others, which transformers tells.

    >>> own_trackers(["mlflow", "wandb"])
    (['wandb'], ['mlflow'])
    """
    return [n for n in report_to if n in TRACKERS], [n for n in report_to if n not in TRACKERS]


def _joined(tables: list[Mapping[str, list]]) -> dict[str, list]:
    """Of the buffers of one step one table; columns that one of them lacks are None there."""
    names = dict.fromkeys(name for table in tables for name in table)
    return {n: [v for t in tables for v in t.get(n, [None] * len(t["step"]))] for n in names}


def _as_lists(table: pd.DataFrame) -> dict[str, list]:
    return {name: table[name].astype(object).tolist() for name in table}


def _in_words(line: Mapping[str, Any]) -> str:
    if "refused" in line:
        return f"refused: {line['why']}"
    return ", ".join(f"{name} {line['was'].get(name)} -> {value}" for name, value in line["change"].items())

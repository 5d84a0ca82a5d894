"""What a person asks of a run that trains, and what is done of itself between two steps.

kit.control sends requests to a run through its folder; ControlFolder obeys them between two steps. Autosave saves by
time.
"""

from __future__ import annotations

import json
import math
import os
import time
import uuid
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from grpo_kit.loop.batch import Batch
from grpo_kit.loop.checkpoint import CheckpointNotSaved
from grpo_kit.loop.config import Config, as_json, from_json
from grpo_kit.loop.protocols import Hook
from grpo_kit.loop.run_checks import check_names
from grpo_kit.record._digests import newest_whole
from grpo_kit.record._lines import read_json
from grpo_kit.record._run_folder import is_locked, path_of
from grpo_kit.record.files import ACTIONS, CONTROL, RunFolderError, holds_run, write_whole
from grpo_kit.schedules import schedule_from

_LOOK = 0.1  # seconds between two looks while paused


class ControlFolder(Hook):
    """Takes up change, pause, go on, stop and save. A refused change stands in metrics.jsonl with its reason.

    A request that no run was there to hear is named and thrown away: what is given with the run is newer.
    say: is given each answer, a sentence; default: printed.
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self._say = say or partial(print, flush=True)
        # `grpo-kit train` evaluates between this and its first step
        self._hears_since = time.time()

    def begin(self, trainer: Any) -> None:
        """Throw away what waited for another run, and obey what came since this one was made."""
        self._throw_away(trainer, self._hears_since, "It was sent while no run went on")
        self._hears_since = math.inf
        (trainer.folder / CONTROL).mkdir(exist_ok=True)  # pages write files, not folders
        if self._obey(trainer, False):
            self._pause(trainer)

    def after_step(self, trainer: Any, row: dict[str, Any], batch: Batch) -> None:
        """Obey what came during the step."""
        if self._obey(trainer, False):
            self._pause(trainer)

    def end(self, trainer: Any, error: BaseException | None) -> None:
        """What came too late is named. An empty folder is not left behind."""
        self._throw_away(trainer, math.inf, "The run had ended")
        try:
            (trainer.folder / CONTROL).rmdir()
        except OSError:  # a request came in just now: the next train() names it
            pass

    def _throw_away(self, trainer: Any, before: float, reason: str) -> None:
        for request in take_requests(trainer.folder, before):
            self._say(
                f"Not obeyed: {json.dumps(request)}. {reason}; ask again, or set it in the trainer."
            )

    def _pause(self, trainer: Any) -> None:
        """Wait until a request ends the pause, or the stop button."""
        start = time.monotonic()
        self._say(f"Paused after step {trainer.step}.")
        while self._obey(trainer, True):
            time.sleep(_LOOK)
            trainer.guard.raise_if_pending()
        self._say(
            f"Going on after step {trainer.step}, {time.monotonic() - start:.0f} s later."
        )

    def _obey(self, trainer: Any, paused: bool) -> bool:
        """Is the run paused afterwards? Raises KeyboardInterrupt for a stop, when the other requests are obeyed."""
        stops = False
        for request in take_requests(trainer.folder):
            fields = request if isinstance(request, dict) else {}
            action = fields.get("do")
            if action in ("pause", "go on"):
                paused = action == "pause"
            elif action == "stop":
                stops = True
            elif action == "save":
                self._save(trainer)
            elif "change" in fields:
                self._change(trainer, fields)
            else:
                requests = ", ".join(f'{{"do": "{action}"}}' for action in ACTIONS)
                self._say(f'Refused: {request!r}; use {requests} or {{"change": {{...}}}}.')
        if stops:
            raise KeyboardInterrupt
        return paused

    def _save(self, trainer: Any) -> None:
        try:
            self._say(f"Saved {trainer.save()}.")
        except CheckpointNotSaved as error:
            self._say(f"{error}. Training goes on; free some space and ask again.")

    def _change(self, trainer: Any, request: dict[str, Any]) -> None:
        try:
            if not isinstance(request["change"], dict):
                raise ValueError(
                    f"request {request!r} is not known; write {{'change': {{'learning_rate': 1e-5}}}}"
                )
            values = request["change"].items()
            trainer.change(**{name: from_json(name, value, None) for name, value in values})
        except ValueError as error:
            trainer.log.write(
                trainer.step, {"refused": {"change": request["change"], "why": str(error)}}
            )
            self._say(f"Refused: {error}")


class Control:
    """Sends requests to a running trainer, which handles them between two steps. Made by `control`.

    metrics.jsonl in the run's folder records both accepted and refused changes; see read_changes. Where no process of
    this machine trains into the folder a warning says that nobody hears the request: the next run throws it away.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def change(self, **values: Any) -> None:
        """New values from the next step on: see GRPOTrainer.change.

        Raises ValueError for an unknown name, an invalid value, and a schedule that is not the kit's: a file
        can hold no other.
        """
        check_names(values)
        config = Config(
            **{name: from_json(name, value, None) for name, value in values.items()}
        )
        for value in filter(callable, values.values()):
            schedule_from(repr(value))
        self._ask({"change": {name: as_json(getattr(config, name)) for name in values}})

    def pause(self) -> None:
        """Wait after this step, with the model in memory, until go_on() or stop()."""
        self._ask({"do": "pause"})

    def go_on(self) -> None:
        """Continue after a pause."""
        self._ask({"do": "go on"})

    def stop(self) -> None:
        """End after this step and save, like the stop button."""
        self._ask({"do": "stop"})

    def save(self) -> None:
        """Save a checkpoint after this step."""
        self._ask({"do": "save"})

    def _ask(self, request: Mapping[str, Any]) -> None:
        if not is_locked(self.folder):
            warnings.warn(
                f"No process of this machine trains into {self.folder}, so nobody hears {json.dumps(request)}: set it "
                "in the trainer, or with grpo-kit train --resume",
                UserWarning,
                stacklevel=3,
            )
        target = self.folder / CONTROL / f"{time.time_ns():020d}-{uuid.uuid4().hex[:6]}.json"
        target.parent.mkdir(exist_ok=True)
        write_whole(target, json.dumps(request).encode())


def control(folder: str | Path) -> Control:
    """Steer a running training from any process: change(...), pause(), go_on(), stop(), save().

    Raises RunFolderError (a ValueError) if the folder holds no run.

    >>> control("runs/full").change(learning_rate=5e-6)  # doctest: +SKIP
    """
    if not holds_run(folder):
        raise RunFolderError(
            f"folder={str(folder)!r} holds no run; give a run's folder, like 'runs/full'."
        )
    return Control(path_of(folder))


class Autosave(Hook):
    """With save_steps=0: saves after each 5 minutes of training, and spends at most 2 % of the time on it.

    The newest one is kept (save_total_limit). A shorter run has none. The steps are the same with and without it.
    quiet: prints no line where a run ends.
    """

    EVERY, SHARE = 300.0, 0.02  # seconds of training; of the time

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet

    def begin(self, trainer: Any) -> None:
        """From here on time counts."""
        self._due = trainer.seconds + self.EVERY

    def after_step(self, trainer: Any, row: dict[str, Any], batch: Batch) -> None:
        """Save if it is due. Training goes on where a disk does not take it."""
        if trainer.config.save_steps or trainer.seconds < self._due:
            return
        start = time.monotonic()
        try:
            trainer.save()
        except CheckpointNotSaved as error:
            warnings.warn(
                f"{error}. Training goes on, and tries again.", RuntimeWarning, stacklevel=2
            )
        self._due = trainer.seconds + max(self.EVERY, (time.monotonic() - start) / self.SHARE)

    def end(self, trainer: Any, error: BaseException | None) -> None:
        """All steps are done: where the run is, and which of it is in memory alone."""
        if error is not None or self._quiet or not trainer.step:
            return
        folder = trainer.folder
        if folder.is_relative_to(Path.cwd()):
            folder = folder.relative_to(Path.cwd())
        if (trainer.folder / "model").is_dir():
            print(f"The run is in {folder}, its model in {folder / 'model'}.", flush=True)
            return
        newest = newest_whole(trainer.folder, digests=False)
        saved = 0 if newest is None else int(newest.name.removeprefix("checkpoint-"))
        if newest is None:
            content = ". Not saved in it: any weights"
        elif saved >= trainer.step:
            content = f", the weights of its last step in {newest.name}"
        else:
            steps = (
                f"steps {saved + 1} to {trainer.step}"
                if saved + 1 < trainer.step
                else f"step {trainer.step}"
            )
            content = f". Not saved in it: the weights of {steps}; the newest is {newest.name}"
        cure = f"trainer.save_model({str(folder / 'model')!r}) saves the model."
        print(f"The run is in {folder}{content}. {cure}", flush=True)


def take_requests(folder: Path, before: float = math.inf) -> list[Any]:
    """Reads and deletes the waiting requests, in the order of their names.

    before: leaves those alone that were written at this time or later, in seconds as time.time() has them. A file that
    is not complete yet waits for the next call. Its JSON may be anything that a person wrote by hand.
    """
    requests = []
    for path in sorted((folder / CONTROL).glob("[!.]*.json")):
        with suppress(OSError):
            if path.stat().st_mtime >= before:
                continue
            try:
                request = read_json(path, object)
            except RunFolderError as error:
                if type(error.__cause__) is not ValueError:
                    continue
                request = str(error)  # too large or too deep: it will never be complete
            os.remove(path)
            requests.append(request)
    return requests

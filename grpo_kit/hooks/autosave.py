"""Autosave: a checkpoint by time where none is due by steps, and in the end a line on what the folder lacks."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

from grpo_kit.loop.checkpoint import CheckpointNotSaved
from grpo_kit.loop.hooks import Hook
from grpo_kit.loop.step_batch import Batch
from grpo_kit.record.digests import newest_whole


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
        began = time.monotonic()
        try:
            trainer.save()
        except CheckpointNotSaved as error:
            warnings.warn(f"{error}. Training goes on, and tries again.", RuntimeWarning, stacklevel=2)
        self._due = trainer.seconds + max(self.EVERY, (time.monotonic() - began) / self.SHARE)

    def end(self, trainer: Any, error: BaseException | None) -> None:
        """All steps are done: where the run is, and which of it is in memory alone."""
        if error is not None or self._quiet or not trainer.step:
            return
        folder, newest = trainer.folder, newest_whole(trainer.folder, digests=False)
        if folder.is_relative_to(Path.cwd()):
            folder = folder.relative_to(Path.cwd())
        saved = 0 if newest is None else int(newest.name[11:])
        lost = f"steps {saved + 1} to {trainer.step}" if saved + 1 < trainer.step else f"step {trainer.step}"
        what, cure = "", f" trainer.save_model({str(folder / 'model')!r}) saves the model."
        if (trainer.folder / "model").is_dir():
            what, cure = f", its model in {folder / 'model'}", ""
        elif newest is None:
            what = ". Not saved in it: any weights"
        elif saved < trainer.step:
            what = f". Not saved in it: the weights of {lost}; the newest is {newest.name}"
        else:
            what = f", the weights of its last step in {newest.name}"
        print(f"The run is in {folder}{what}.{cure}", flush=True)

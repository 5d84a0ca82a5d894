"""Autosave: a checkpoint by time where none is due by steps, so that a crash loses minutes and not the run."""

from __future__ import annotations

import time
import warnings
from typing import Any

from grpo_kit.loop.checkpoint import CheckpointNotSaved
from grpo_kit.loop.hooks import Hook
from grpo_kit.loop.step_batch import Batch


class Autosave(Hook):
    """With save_steps=0: saves after each 5 minutes of training, and spends at most 2 % of the time on it.

    The newest one is kept (save_total_limit). A shorter run has none. The steps are the same with and without it.
    """

    EVERY, SHARE = 300.0, 0.02  # seconds of training; of the time

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

"""What comes by the control folder while a run goes on: a pause, a stop, a checkpoint, a change."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from grpo_kit.record.control import ACTIONS, CONTROL, take_requests

_LOOK = 0.1  # seconds between two looks while paused


class Requests:
    """Of one trainer: taken up as a step ends, and obeyed at once, but for changes, which wait for a rollout buffer.

    paused_seconds: in this train().
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.paused_seconds = 0.0
        self._folder: Path | None = None
        self._paused = False

    def hear_what_waits(self, folder: Path) -> None:
        """Before a run begins or goes on: changes are taken; a stop or a pause was meant for an earlier one."""
        self._folder = folder
        for request in self._take():
            if isinstance(request, dict) and "change" in request:
                self.trainer.changes.hear(request)

    def open(self) -> None:
        """A run begins."""
        self._paused, self.paused_seconds = False, 0.0
        if self.trainer.accelerator.is_main_process:
            (self._folder / CONTROL).mkdir(parents=True, exist_ok=True)  # pages write files, not folders

    def close(self) -> None:
        """The run ended; an empty folder is not left behind."""
        if self._folder is not None and self.trainer.accelerator.is_main_process:
            try:
                (self._folder / CONTROL).rmdir()
            except OSError:  # a request came in just now: the next train() looks at it
                pass

    def take_up(self) -> None:
        """At the end of a step, before it is saved."""
        for request in self._take():
            self._obey(request)

    def wait_while_paused(self) -> None:
        """After the step; the stop button ends the pause too. The device's caches are free meanwhile."""
        if not self._paused:
            return
        trainer, began = self.trainer, time.monotonic()
        if trainer.control.should_training_stop:
            self._paused = False
            return
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        trainer.recorder.status(f"Paused after step {trainer.state.global_step}.")
        try:
            while self._paused:
                time.sleep(_LOOK)
                trainer.control.should_save = False
                self.take_up()
                if trainer.control.should_save:
                    trainer.session.save_between_steps()
                trainer.session.heed_interrupt()
        finally:
            self._paused = False
            self.paused_seconds += time.monotonic() - began
        trainer.recorder.status(f"Going on after step {trainer.state.global_step}.")

    def _obey(self, request: Any) -> None:
        do = request.get("do") if isinstance(request, dict) else None
        if do in ("pause", "go on"):
            self._paused = do == "pause"
        elif do == "stop":
            self._paused = False
            self.trainer.session.guard.pending = True
        elif do == "save":
            self.trainer.control.should_save = True
            self.trainer.recorder.status(f"Saving a checkpoint of step {self.trainer.state.global_step}.")
        elif isinstance(request, dict) and "change" in request:
            self.trainer.changes.hear(request)
        else:
            known = ", ".join(f'{{"do": "{action}"}}' for action in ACTIONS)
            self.trainer.recorder.status(f'Refused: {request!r}; use {known} or {{"change": {{...}}}}.')

    def _take(self) -> list[Any]:
        """The main process looks, all obey."""
        return self.trainer.ranks.from_main(lambda: take_requests(self._folder))

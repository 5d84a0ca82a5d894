"""ControlFolder: what a person asks of a run by way of its folder, obeyed between two steps. See record/control.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from grpo_kit.loop.grpo_config import from_json
from grpo_kit.loop.hooks import Hook
from grpo_kit.loop.step_batch import Batch
from grpo_kit.record.control import ACTIONS, CONTROL, take_requests

_LOOK = 0.1  # seconds between two looks while paused


class ControlFolder(Hook):
    """Takes up change, pause, go on, stop and save. A refused change stands in metrics.jsonl with its reason.

    say: is given each answer, a sentence; default: printed.
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self._say = say or partial(print, flush=True)

    def begin(self, trainer: Any) -> None:
        """Changes that wait are made; a stop or a pause was meant for an earlier run."""
        for request in take_requests(trainer.folder):
            if isinstance(request, dict) and "change" in request:
                self._change(trainer, request)
        (trainer.folder / CONTROL).mkdir(exist_ok=True)  # pages write files, not folders

    def after_step(self, trainer: Any, row: dict[str, Any], batch: Batch) -> None:
        """Obey what came during the step; while paused, wait for more. The stop button ends a pause too."""
        paused, began = self._obey(trainer, False), time.monotonic()
        if not paused:
            return
        self._say(f"Paused after step {trainer.step}.")
        while paused:
            time.sleep(_LOOK)
            trainer.guard.raise_if_pending()
            paused = self._obey(trainer, paused)
        self._say(f"Going on after step {trainer.step}, {time.monotonic() - began:.0f} s later.")

    def end(self, trainer: Any, error: BaseException | None) -> None:
        """An empty folder is not left behind."""
        try:
            (trainer.folder / CONTROL).rmdir()
        except OSError:  # a request came in just now: the next train() looks at it
            pass

    def _obey(self, trainer: Any, paused: bool) -> bool:
        """Is the run paused afterwards? Raises KeyboardInterrupt for a stop."""
        for request in take_requests(trainer.folder):
            do = request.get("do") if isinstance(request, dict) else None
            if do in ("pause", "go on"):
                paused = do == "pause"
            elif do == "stop":
                raise KeyboardInterrupt
            elif do == "save":
                self._say(f"Saved {trainer.save()}.")
            elif isinstance(request, dict) and "change" in request:
                self._change(trainer, request)
            else:
                known = ", ".join(f'{{"do": "{action}"}}' for action in ACTIONS)
                self._say(f'Refused: {request!r}; use {known} or {{"change": {{...}}}}.')
        return paused

    def _change(self, trainer: Any, request: dict[str, Any]) -> None:
        try:
            if not isinstance(request["change"], dict):
                raise ValueError(
                    f"request {request!r} is not known; write {{'change': {{'learning_rate': 1e-5}}}}"
                )
            values = request["change"].items()
            trainer.change(**{name: from_json(name, value, None) for name, value in values})
        except ValueError as error:
            trainer.log.write(trainer.step, {"refused": {"change": request["change"], "why": str(error)}})
            self._say(f"Refused: {error}")

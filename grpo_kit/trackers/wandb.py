"""Weights & Biases: offline in the run folder, unless online is asked for."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_kit.trackers.tracker_hook import TrackerHook
from grpo_kit.trackers.tracker_table import rows_of

_STEP = "train/global_step"  # the axis of every chart: wandb's own step counts calls


class Wandb(TrackerHook):
    """A run of wandb. project: its name; None: WANDB_PROJECT, else grpo_kit.

    mode: "offline" writes into <run folder>/wandb and sends nothing; "online" sends, for whoever is logged in. None:
    WANDB_MODE, else offline. A run that you began yourself (wandb.init) is used, and left open.
    """

    name = "wandb"

    def __init__(self, project: str | None = None, *, mode: str | None = None) -> None:
        super().__init__()
        self.project = project or os.getenv("WANDB_PROJECT") or "grpo_kit"
        self.mode = mode or os.getenv("WANDB_MODE") or "offline"

    def _open(
        self, folder: Path, settings: dict[str, Any], kept: dict[str, Any], step: int
    ) -> tuple[dict, str]:
        import wandb

        self._wandb, self._own = wandb, wandb.run is None
        if self._own:
            self._mode_before = wandb.setup().settings.mode
            wandb.setup(
                settings=wandb.Settings(mode=self.mode)
            )  # as init's mode alone, telemetry would be sent
            known = {"project": self.project, "name": folder.absolute().name, "id": uuid.uuid4().hex[:8]}
            wandb.init(dir=folder, resume="allow", **(known | kept))
        self._run = run = wandb.run
        run.define_metric(_STEP)
        run.define_metric("*", step_metric=_STEP, step_sync=True)
        run.config.update(settings, allow_val_change=True)
        offline = f"{Path(run.dir).parent}; nothing is sent; `wandb sync` on that folder does it"
        return {"project": run.project, "name": run.name, "id": run.id}, offline if run.offline else run.url

    def _numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({**numbers, _STEP: step})

    def _text(self, step: int, level: str, title: str, text: str) -> None:
        self._run.alert(title, f"Step {step}: {text}", level, wait_duration=0.001)

    def _table(self, step: int, table: Mapping[str, list]) -> None:
        rows = self._wandb.Table(columns=list(table), data=rows_of(table), allow_mixed_types=True)
        self._run.log({"completions": rows, _STEP: step})

    def _close(self, failed: bool) -> None:
        if self._own:
            self._run.finish(exit_code=int(failed))
            self._wandb.setup(settings=self._wandb.Settings(mode=self._mode_before or "online"))

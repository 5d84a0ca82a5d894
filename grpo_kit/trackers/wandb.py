"""Weights & Biases: offline in the run folder, unless somebody is logged in or WANDB_MODE says otherwise."""

from __future__ import annotations

import netrc
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from transformers.integrations import WandbCallback

from grpo_kit.trackers.names import is_told_otherwise, numbers_of
from grpo_kit.trackers.tracker_table import rows_of


class Wandb(WandbCallback):
    """transformers' callback, which is told the kit's rows; WANDB_PROJECT, WANDB_WATCH and WANDB_LOG_MODEL are its own.

    Each log has train/global_step, which the charts go by. A run that you began yourself (wandb.init) is used, and
    left open.
    """

    name, takes_back = "wandb", False
    _own = _offline_by_us = False

    def begin(
        self, args: Any, state: Any, model: Any, config: Mapping[str, Any], kept: Mapping[str, Any], step: int
    ) -> dict[str, Any]:
        """Write on, or begin. Returns what finds the run again."""
        wandb = self._wandb
        self._own = wandb.run is None
        if self._own:
            folder = os.getenv("WANDB_DIR") or args.output_dir
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._offline_by_us = stays_offline(wandb.setup().settings)
            if self._offline_by_us:  # as init's mode alone, telemetry would be sent all the same
                wandb.setup(settings=wandb.Settings(mode="offline"))
            wandb.init(
                project=kept.get("project") or os.getenv("WANDB_PROJECT", "huggingface"),
                name=kept.get("name") or args.run_name or Path(args.output_dir).absolute().name,
                id=kept.get("id") or uuid.uuid4().hex[:8],
                resume="allow",
                dir=folder,
            )
        self.setup(args, state, model)
        wandb.config.update(dict(config), allow_val_change=True)
        self.where = self._where()
        return {"project": wandb.run.project, "name": wandb.run.name, "id": wandb.run.id} if self._own else {}

    def row(self, step: int, row: Mapping[str, Any]) -> None:
        """Numbers of a step."""
        self._wandb.log(numbers_of(row) | {"train/global_step": step})

    def alert(self, step: int, level: str, title: str, text: str) -> None:
        """An alert; level: "INFO" or "WARN"."""
        self._wandb.run.alert(title=title, text=f"Step {step}: {text}", level=level, wait_duration=0.001)

    def table(self, step: int, table: Mapping[str, list]) -> None:
        """A table under `completions`."""
        rows = self._wandb.Table(columns=list(table), data=rows_of(table), allow_mixed_types=True)
        self._wandb.log({"completions": rows, "train/global_step": step})

    def end(self, *, failed: bool) -> None:
        """Write what waits; a run that an error ended is marked so."""
        if self._initialized:
            self._initialized = False
            if self._own and self._wandb.run is not None:
                self._wandb.run.finish(exit_code=int(failed))
            if self._offline_by_us:  # who logs in from here on is online again
                self._wandb.setup(settings=self._wandb.Settings(mode="online"))
                self._offline_by_us = False

    def _where(self) -> str:
        run = self._wandb.run
        if not run.settings._offline:
            return f"{run.url}, as somebody is logged in here or WANDB_MODE says so; WANDB_MODE=offline keeps runs here"
        return f"{Path(run.dir).parent}; nothing is sent; `wandb sync` on that folder does it"

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: begin() begins, once there is something to tell."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """What is no row of metrics.csv goes transformers' way."""
        if self._initialized and not is_told_otherwise(logs):
            super().on_log(args, state, control, logs=logs, **kwargs)


def stays_offline(settings: Any) -> bool:
    """Nobody is logged in, and neither WANDB_MODE nor `wandb offline` says where a run goes.

    settings: wandb's own. With online runs in mind that nobody is logged in for, wandb would ask for a key.
    """
    chosen = os.getenv("WANDB_MODE") or settings.mode not in (None, "online")
    return not chosen and not _logged_in(settings)


def _logged_in(settings: Any) -> bool:
    """By WANDB_API_KEY, or as `wandb login` leaves it in ~/.netrc. Asks nobody."""
    if settings.api_key or os.getenv("WANDB_API_KEY") or os.getenv("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    homes = [os.getenv("NETRC"), "~/.netrc", "~/_netrc"]
    for path in (Path(home).expanduser() for home in homes if home):
        try:
            kept = netrc.netrc(path).hosts
            if {urlsplit(settings.base_url).netloc, "api.wandb.ai"} & set(kept):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False

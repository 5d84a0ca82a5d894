"""trackio: a run of the folder's name in its local database; nothing leaves the machine unless it is asked to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from transformers.integrations import TrackioCallback
from transformers.integrations.integration_utils import rewrite_logs

from grpo_kit.trackers.names import is_told_otherwise, numbers_of


class Trackio(TrackioCallback):
    """transformers' callback, which is told the kit's rows.

    A Space, a server or a webhook gets them only where trackio_space_id, TRACKIO_SPACE_ID, TRACKIO_SERVER_URL or
    TRACKIO_WEBHOOK_URL name one. No dashboard is opened in the notebook: on a hosted one that is a public address.
    """

    name, takes_back = "trackio", False

    def begin(
        self, args: Any, state: Any, model: Any, config: Mapping[str, Any], kept: Mapping[str, Any], step: int
    ) -> dict[str, Any]:
        """Write on, or begin. Returns what finds the run again."""
        project = kept.get("project") or args.project
        name = kept.get("name") or (args.run_name or Path(args.output_dir).absolute().name)
        if not kept:
            name = self._free_name(project, name)
        self._trackio.init(
            project=project,
            name=name,
            space_id=args.trackio_space_id,
            bucket_id=args.trackio_bucket_id,
            private=args.hub_private_repo,
            resume="allow",
            embed=False,
        )
        self._space_id = self._trackio.context_vars.current_space_id.get()
        self._trackio.config.update(dict(config))
        self._initialized = True
        self.where = f"project {project!r}, run {name!r}; look at it with: trackio show --project {project}"
        return {"project": project, "name": name}

    def row(self, step: int, row: Mapping[str, Any]) -> None:
        """Numbers of a step."""
        self._trackio.log(numbers_of(row), step=step)

    def alert(self, step: int, level: str, title: str, text: str) -> None:
        """An alert at its step; level: "INFO" or "WARN"."""
        run = self._trackio.context_vars.current_run.get()
        run.alert(title=title, text=text, level=self._trackio.AlertLevel[level], step=step)

    def table(self, step: int, table: Mapping[str, list]) -> None:
        """A table under `completions`."""
        rows = self._trackio.Table(dataframe=pd.DataFrame(table, dtype=object))
        self._trackio.log({"completions": rows}, step=step)

    def end(self, *, failed: bool) -> None:
        """Write what waits."""
        if self._initialized:
            self._initialized = False
            self._trackio.finish()

    def _free_name(self, project: str, name: str) -> str:
        """Another run's name is not taken: trackio would go on with that run."""
        from trackio.sqlite_storage import SQLiteStorage

        taken, number = set(SQLiteStorage.get_runs(project)), 1
        while (free := name if number == 1 else f"{name}-{number}") in taken:
            number += 1
        return free

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: begin() begins, once there is something to tell."""

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """A Space that was asked for is frozen, as transformers does."""
        if self._initialized and self._space_id:
            super().on_train_end(args, state, control, model=model, **kwargs)

    def on_push_begin(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        """Numbers and completions follow a pushed model to the hub only where a Space for them was named."""
        if args.trackio_static_space_id:
            super().on_push_begin(args, state, control, model, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """What is no row of metrics.csv goes as transformers has it, but at its step."""
        if self._initialized and not is_told_otherwise(logs):
            self._trackio.log(rewrite_logs(logs), step=state.global_step)

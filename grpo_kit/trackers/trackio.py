"""trackio: a run of the folder's name in its local database; nothing leaves the machine unless it is asked to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from grpo_kit.trackers.tracker_hook import TrackerHook


class Trackio(TrackerHook):
    """A run in a project of trackio. project: its name. space_id: of the Hugging Face Space that gets the rows too.

    Besides, a Space, a server or a webhook gets them where TRACKIO_SPACE_ID, TRACKIO_SERVER_URL or TRACKIO_WEBHOOK_URL
    names one. No dashboard is opened in a notebook: on a hosted one it would have a public address.
    """

    name = "trackio"

    def __init__(self, project: str = "grpo_kit", *, space_id: str | None = None) -> None:
        super().__init__()
        self.project, self.space_id = project, space_id

    def _open(
        self, folder: Path, settings: dict[str, Any], kept: dict[str, Any], step: int
    ) -> tuple[dict, str]:
        import trackio

        self._trackio, project = trackio, kept.get("project") or self.project
        run = kept.get("run") or self._free_name(project, folder.absolute().name)
        given = {"config": settings, "space_id": self.space_id, "resume": "allow", "embed": False}
        self._run = trackio.init(project, name=run, **given)
        where = f"project {project!r}, run {run!r}; look at it with: trackio show --project {project}"
        return {"project": project, "run": run}, where

    def _numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def _text(self, step: int, level: str, title: str, text: str) -> None:
        self._run.alert(title, text, self._trackio.AlertLevel[level], step=step)

    def _table(self, step: int, table: Mapping[str, list]) -> None:
        rows = self._trackio.Table(dataframe=pd.DataFrame(table, dtype=object))
        self._run.log({"completions": rows}, step=step)

    def _close(self, failed: bool) -> None:
        self._trackio.finish()

    def _free_name(self, project: str, name: str) -> str:
        """A name that no run of the project has: trackio finds a run again by its name."""
        try:
            taken = {run.name for run in self._trackio.Api().runs(project)}
        except ValueError:  # no such project yet
            taken = set()
        names = [name, *(f"{name}-{number}" for number in range(2, len(taken) + 2))]
        return next(free for free in names if free not in taken)

"""After a restart: which run of a name can go on?"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from grpo_kit.record.files import RUN, next_run_folder
from grpo_kit.record.lines import METRICS_LINES, last_step
from grpo_kit.record.run_lock import is_locked


def unfinished_run(root: str | Path, name: str) -> Path | None:
    """The newest of root/name, root/name-2, ... that can go on: it has a checkpoint, fewer steps than its settings ask
    for, and no process that trains it. None where there is none; `train(resume=True)` in that folder goes on.
    """
    free, found, number = next_run_folder(root, name), None, 1
    while (path := Path(root) / (name if number == 1 else f"{name}-{number}")) != free:
        number += 1
        if next(path.glob("checkpoint-*"), None) and is_locked(path) is not True:
            settings = [
                path / RUN,
                *sorted(path.glob("run-resumed-*.json"), key=lambda file: file.stat().st_mtime),
            ]
            with suppress(OSError, ValueError, KeyError):  # of a run that is damaged, or not the kit's
                steps = json.loads(settings[-1].read_text(encoding="utf-8"))["config"]["steps"]
                found = path if last_step(path / METRICS_LINES) < steps else found
    return found

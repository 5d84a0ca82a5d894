"""After a restart: which run of a name can go on?"""

from __future__ import annotations

from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from grpo_kit.record.files import RunFolderError, next_run_folder, numbered
from grpo_kit.record.lines import METRICS_LINES, last_step
from grpo_kit.record.run_lock import is_locked
from grpo_kit.watch.terminal import steps_asked_for


def unfinished_run(root: str | Path, name: str) -> Path | None:
    """The newest of root/name, root/name-2, ... that can go on: it has a checkpoint, fewer steps than it was last asked
    for, and no process that trains it. None where there is none; `train(resume=True)` in that folder goes on.
    """
    free, found = next_run_folder(root, name), None
    for path in takewhile(lambda path: path != free, numbered(root, name)):
        if next(path.glob("checkpoint-*"), None) and is_locked(path) is not True:
            with suppress(RunFolderError):  # of a run that is damaged
                found = path if last_step(path / METRICS_LINES) < steps_asked_for(path) else found
    return found

"""Requests of a person to a running training, through its folder: from a widget, notebook, terminal or web page.

    runs/<name>/control/<any name>.json   one request a file: {"change": {"learning_rate": 1e-5}} or {"do": "pause"}
                metrics.jsonl             the outcome of each change, in the line of its first step

The trainer reads requests between two steps, in the order of their names, and deletes them (trainer/control_folder.py).
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_kit.record._lines import METRICS_LINES, RunFolderError, lines_of, read_json, reading
from grpo_kit.record.run_path import path_of

CONTROL = "control"
ACTIONS = ("pause", "go on", "stop", "save")


def take_requests(folder: str | Path, before: float = math.inf) -> list[Any]:
    """Reads and deletes the waiting requests, in the order of their names.

    before: leaves those alone that were written at this time or later, in seconds as time.time() has them. A file that
    is not complete yet waits for the next call. Its JSON may be anything that a person wrote by hand.
    """
    requests = []
    for path in sorted((path_of(folder) / CONTROL).glob("[!.]*.json")):
        with suppress(OSError):
            if path.stat().st_mtime >= before:
                continue
            try:
                request = read_json(path, object)
            except RunFolderError as error:
                if type(error.__cause__) is not ValueError:
                    continue
                request = str(error)  # too large or too deep: it will never be complete
            os.remove(path)
            requests.append(request)
    return requests


def read_changes(folder: str | Path) -> list[dict[str, Any]]:
    """The changes of a run: {"step": the first step trained with it, "change": {name: value}, "was": {...}}.

    A refused change has "refused" in place of "change", and "why". A line cut short is left out.
    """
    entries = []
    path = path_of(folder) / METRICS_LINES
    with reading(path):
        for row in lines_of(path):
            changes = row.get("changes")
            refusal = row.get("refused")
            if changes:
                change = {name: after for name, (_, after) in changes.items()}
                before = {name: was for name, (was, _) in changes.items()}
                entries.append({"step": row["step"], "change": change, "was": before})
            if refusal:
                entries.append({"step": row["step"] + 1, "refused": refusal["change"], "why": refusal["why"]})
    return entries

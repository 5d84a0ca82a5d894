"""Where the seconds of an executed notebook 05 went: papermill's clock of each cell, added up by what the cell does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat

from grpo_kit.record.files import read_metrics

# The first part one of whose words a cell holds; cells between two such belong to "data" or "rest".
CELLS = {
    "imports": ("import grpo_kit",),
    "loading": ("kit.load_policy(",),
    "first evaluation": ("before = kit.evaluate(",),
    "trainer": ("kit.GRPOTrainer(",),
    "training": ("trainer.train()",),
    "last evaluation": ("after = kit.evaluate(",),
}
PARTS = (
    "kernel",
    "imports",
    "data",
    "loading",
    "first evaluation",
    "trainer",
    "to the first step",
    "training",
    "last evaluation",
    "rest",
)


def part_of(source: str) -> str | None:
    """The part that a cell of this text is, None for one between the parts."""
    return next(
        (part for part, words in CELLS.items() if any(word in source for word in words)), None
    )


def seconds_by_part(notebook: Any, step_seconds: float | None = None) -> dict[str, float]:
    """Seconds of each of PARTS, and their sum as "all", of a notebook that papermill executed.

    step_seconds: what the steps took by themselves; the rest of the training cell, evaluations in it included, is then
    counted as "to the first step". None: all of that cell is "training".
    "kernel": papermill's whole time less that of the cells: start, messages, saving. "data": other cells before
    training; "rest": those after it.
    """
    found = dict.fromkeys(PARTS, 0.0)
    trained = False
    for cell in notebook.cells:
        took = cell.metadata.get("papermill", {}).get("duration")
        if cell.cell_type != "code" or not took:
            continue
        part = part_of(cell.source)
        trained |= part == "training"
        found[part or ("rest" if trained else "data")] += took
    if step_seconds is not None:
        found["to the first step"] = max(0.0, found["training"] - step_seconds)
        found["training"] -= found["to the first step"]
    whole = notebook.metadata.get("papermill", {}).get("duration") or sum(found.values())
    found["kernel"] = max(0.0, whole - sum(found.values()))
    return found | {"all": sum(found.values())}


def seconds_of_run(folder: Path, notebook: Path) -> dict[str, float]:
    """`seconds_by_part` of a run folder, the training cell parted where the record has its first step.

    A row's seconds are those of its step and all before it; the first step counts as "to the first step".
    """
    executed = nbformat.read(notebook, as_version=4)
    # a row of an evaluation alone has none
    seconds = read_metrics(folder)["seconds"].dropna().tolist()
    return seconds_by_part(executed, seconds[-1] - seconds[0] if seconds else None)

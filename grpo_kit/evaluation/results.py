"""What the runs of a folder came to, side by side."""

from __future__ import annotations

import warnings
from pathlib import Path

import pandas as pd

from grpo_kit.evaluation.intervals import Estimate
from grpo_kit.record._lines import RunFolderError, read_json, reading
from grpo_kit.record.run_path import path_of


def results(root: str | Path) -> pd.DataFrame:
    """One row for each run under root that was evaluated (Comparison.save), by name, oldest first.

    preset, model, seed, n, steps; before and after as text with 95 % intervals (a mean reward where nothing is right
    or wrong); minutes of training; peak GiB (see cuda.peak_gib); None for what a results.json of your own leaves out.
    Empty where no run was evaluated. A results.json that cannot be read gives a RuntimeWarning and no row.

    >>> results("runs")  # doctest: +SKIP
    """
    found = {}
    for path in sorted(path_of(root, "root").glob("*/results.json"), key=lambda path: path.stat().st_mtime):
        try:
            with reading(path):
                row = _row(read_json(path))
        except RunFolderError as error:
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)
            continue
        if row:
            found[path.parent.name] = row
    return pd.DataFrame.from_dict(found, orient="index").rename_axis("run")


def _row(one: dict) -> dict | None:
    if not {"before", "after"} <= one.keys():
        return None
    took, peak = one.get("train_seconds"), one.get("peak_gib")
    return {name: one.get(name) for name in ("preset", "model", "seed", "n", "steps")} | {
        "before": _words(one, "before"),
        "after": _words(one, "after"),
        "minutes": None if took is None else round(took / 60, 1),
        "peak GiB": None if peak is None else round(peak, 1),
    }


def _words(one: dict, who: str) -> str:
    measured, rate = one[who], "accuracy" in one[who]
    value = measured["accuracy" if rate else "reward"]
    return Estimate(value, measured["low"], measured["high"], one.get("n")).words(rate)

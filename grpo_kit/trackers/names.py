"""Which trackers the kit tells itself, and under which name each column of metrics.csv stands there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any

TRACKERS = ("tensorboard", "trackio", "wandb")


def name_of(column: str) -> str:
    """A column of metrics.csv in every tracker: train/<column>; eval/... and flags/... stay as they are.

    >>> name_of("reward"), name_of("reward/format"), name_of("eval/accuracy")
    ('train/reward', 'train/reward/format', 'eval/accuracy')
    """
    return column if column.startswith(("eval/", "flags/")) else f"train/{column}"


def numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    """A row of metrics.csv by the trackers' names; an empty cell (None, NaN) is left out."""
    found = {name_of(column): value for column, value in row.items() if isinstance(value, (int, float))}
    return {name: value for name, value in found.items() if not math.isnan(value)}


def is_told_otherwise(logs: Mapping[str, Any]) -> bool:
    """Are these logs of transformers a row of metrics.csv, an evaluation, or the run's summary?"""
    return "loss" in logs or "train_runtime" in logs or any(name.startswith("eval_") for name in logs)


def check_installed(report_to: str | Iterable[str] | None) -> None:
    """Raises ValueError for one of TRACKERS that is asked for and not installed; transformers checks the others.

    report_to: as TrainingArguments takes it.
    """
    asked = [report_to] if isinstance(report_to, str) else list(report_to or ())
    for name in asked:
        if name in TRACKERS and find_spec(name) is None:
            raise ValueError(
                f"report_to={name!r}, but {name} is not installed; pip install {name} (or grpo-kit[trackers]), or "
                "leave report_to out: the run folder has everything"
            )

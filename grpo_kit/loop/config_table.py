"""A Config as a table: value, unit and reason of what a preset sets and of what is not at its default."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pandas as pd

_TASKS_OWN = "the task's"  # how a table shows that the config has no max_completion_tokens of its own


def table_of(config: Any) -> pd.DataFrame:
    """Columns value, unit, reason; index: the field's name. A value that no preset gave is marked "set by you"."""
    rows, defaults, presets = [], type(config)(), config.reasons
    its_task = all(
        name not in presets or getattr(config, name) == presets[name][0] for name in ("task", "task_options")
    )
    for name, unit in [(each.name, each.metadata["unit"]) for each in fields(config) if each.metadata]:
        value, default = getattr(config, name), getattr(defaults, name)
        was, reason = presets.get(name, (default, "set by you"))
        if value == was == default and reason in ("set by you", f"{config.loss}'s own"):
            continue
        if value != was:
            goes_with_it = name == "task_options" and config.task != presets.get("task", (None,))[0]
            who = "for this task" if goes_with_it else "set by you"
            reason = f"{who} (was {_shown(name, was)})"
        elif name == "max_completion_tokens" and value is None and not its_task:
            reason = "see the task"  # the preset's reason is about the preset's task
        rows.append((name, _shown(name, value), unit.partition(";")[0], reason))
    return pd.DataFrame(rows, columns=["name", "value", "unit", "reason"]).set_index("name")


def text_of(config: Any) -> str:
    """The table in columns."""
    table = table_of(config).astype(str).reset_index()
    widths = {column: table[column].str.len().max() for column in ("name", "value", "unit")}
    return "\n".join(
        "  ".join([*(f"{getattr(row, column):<{width}}" for column, width in widths.items()), row.reason])
        for row in table.itertuples(index=False)
    )


def _shown(name: str, value: object) -> object:
    if value is None:
        return _TASKS_OWN if name == "max_completion_tokens" else "None"
    return value

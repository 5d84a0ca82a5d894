"""The completions of a step as a table for people: what completions.jsonl holds, in a size that a tracker bears."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_kit.record.lines import plain

TABLES = 100  # of a run: every so many steps
ROWS, CHARACTERS = 64, 200_000  # of a table
LEFT_OUT = ("tokens", "logprobs")  # a value a token: for kit.browse


def table_is_due(step: int, steps: int) -> bool:
    """Does a tracker get this step's table? The first step's, and at most TABLES of the others', evenly.

    >>> [step for step in range(1, 1001) if table_is_due(step, 1000)][:4]
    [1, 10, 20, 30]
    """
    return step == 1 or step % max(1, -(-steps // TABLES)) == 0


def table_of(completions: Mapping[str, list]) -> dict[str, list]:
    """The columns of completions.jsonl without LEFT_OUT; of large ones the first whole groups.

    completions: one value a completion, by column; `group` among them. At least one group stays, at most ROWS rows or
    CHARACTERS of text.
    """
    columns = {name: list(map(plain, values)) for name, values in completions.items() if name not in LEFT_OUT}
    groups, kept, characters = columns["group"], 0, 0
    for row, group in enumerate(groups):
        characters += sum(len(values[row]) for values in columns.values() if isinstance(values[row], str))
        if kept and (row >= ROWS or characters > CHARACTERS):
            break
        if row + 1 == len(groups) or groups[row + 1] != group:
            kept = row + 1
    return {name: values[:kept] for name, values in columns.items()}


def rows_of(table: Mapping[str, list]) -> list[list[Any]]:
    """Its rows, a value a column."""
    return [list(row) for row in zip(*table.values(), strict=True)]

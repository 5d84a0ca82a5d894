"""Draws distinct rows: worked episodes, train and held-out."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from grpo_kit.argument_checks import check_whole

_TRIES = 1000  # draws without a new row, after which no more are assumed


def draw_rows(
    draw: Callable[[int], tuple[Hashable, dict[str, Any]]], n_worked: int, n_train: int, n_held_out: int
) -> tuple[list[dict], list[dict], list[dict]]:
    """(worked, train, held out) rows, no two with the same key.

    draw: place, from 0 over the worked, then the held-out, then the train rows -> (the row's key, the row).
    Raises ValueError for a split without rows, and if draws give nothing new.

    >>> draw_rows(lambda place: (place, {"n": place}), 1, 2, 1)
    ([{'n': 0}], [{'n': 2}, {'n': 3}], [{'n': 1}])
    """
    for name, count in (("n_train", n_train), ("n_held_out", n_held_out)):
        check_whole(name, count)
    rows: dict[Hashable, dict[str, Any]] = {}
    failed = 0
    while len(rows) < n_worked + n_train + n_held_out:
        key, row = draw(len(rows))
        failed = failed + 1 if key in rows else 0
        if failed == _TRIES:
            raise ValueError(
                f"n_train={n_train} and n_held_out={n_held_out} are more rows than there seem to be: {len(rows)} with "
                "those of the worked episodes; take fewer"
            )
        rows.setdefault(key, row)
    made = list(rows.values())
    begun = n_worked + n_held_out
    return made[:n_worked], made[begun:], made[n_worked:begun]

"""Prompts beyond those that a step was given."""

from __future__ import annotations

import random
from typing import Any

from datasets import Dataset


def check_can_draw(data: Any, option: str) -> None:
    """Raises ValueError, naming the option that draws rows, for train data that has no row by number."""
    if not isinstance(data, Dataset):
        raise ValueError(
            f"{option} draws rows, which needs a datasets.Dataset as train_dataset, not {type(data).__name__}"
        )


def draw_rows(data: Dataset, prompts: int, group_size: int, *, seed: int, name: str) -> list[dict[str, Any]]:
    """`prompts` distinct rows of the data set, each group_size times, adjacent: what a trainer samples from.

    name: what they are for. The same seed and name give the same rows, so a resumed run needs no record of them.
    Raises ValueError if the data set holds fewer rows.

    >>> draw_rows(Dataset.from_dict({"prompt": ["a"]}), 1, 2, seed=0, name="ahead")
    [{'prompt': 'a'}, {'prompt': 'a'}]
    """
    if prompts > len(data):
        raise ValueError(
            f"prompts={prompts} is more than the data set's {len(data)} rows; add rows, or draw fewer"
        )
    chosen = random.Random(f"{name} {seed}").sample(range(len(data)), prompts)
    return [dict(data[i]) for i in chosen for _ in range(group_size)]

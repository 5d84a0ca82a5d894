"""Batch: what flows through a step of GRPO, from the rows of the task to the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any

import torch
from torch.nn.functional import pad


@dataclass
class Batch:
    """N completions, those of one prompt adjacent. Each stage of a step fills in its fields.

    By `sample`:  rows, the task's row of each completion; groups, the number of its prompt; prompt_ids, completion_ids
                  (with the end token); completions, the text; cut_off, whether it ended by its length.
                  Where the sampler knows them: sampler_logprobs and entropies, one number a token, in nats, at the
                  temperature of the step; old_logprobs, where weights older than today's sampled.
                  loss_mask: 1 at the tokens to train on, None for all. extra: more columns for the record.
    By `score`:   parts, the scores of each reward by name; rewards, the weighted totals. None: cannot judge.
    By `advantages`: advantages.
    By the update: ref_logprobs (N, T), of the reference model; old_logprobs (N, T), where rollouts are used twice.

    A sampler of episodes gives a turn each entry, and fills in parts, rewards and advantages itself.
    """

    rows: list[dict[str, Any]]
    groups: list[int]
    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    completions: list[str]
    cut_off: list[bool]
    sampler_logprobs: list[list[float]] | None = None
    entropies: list[list[float]] | None = None
    old_logprobs: torch.Tensor | None = None
    loss_mask: list[list[int]] | None = None
    extra: dict[str, list[Any]] = field(default_factory=dict)
    parts: dict[str, list[float | None]] = field(default_factory=dict)
    rewards: list[float | None] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    ref_logprobs: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def width(self) -> int:
        """T: tokens of the longest completion."""
        return max(map(len, self.completion_ids), default=0)

    def mask(self, device: Any = None) -> torch.Tensor:
        """(N, T): 1 at the tokens that are trained on, 0 behind a completion's end."""
        mask = self.loss_mask or [[1] * len(ids) for ids in self.completion_ids]
        return padded(mask, self.width, device)

    def select(self, places: Sequence[int]) -> Batch:
        """The batch of these completions, in this order. Tensors keep their width of the longest of these."""
        columns: dict[str, Any] = {}
        width = max((len(self.completion_ids[i]) for i in places), default=0)
        for name in _COLUMNS:
            column = getattr(self, name)
            if isinstance(column, dict):
                columns[name] = {key: [values[i] for i in places] for key, values in column.items()}
            elif isinstance(column, torch.Tensor):
                columns[name] = column[list(places), :width]
            else:
                columns[name] = [column[i] for i in places] if column else column
        return Batch(**columns)

    def split(self, parts: int) -> list[Batch]:
        """The batch cut into so many parts of whole groups, as even as they can be."""
        if parts == 1:
            return [self]
        groups = list(dict.fromkeys(self.groups))
        size = math.ceil(len(groups) / parts)
        batches = []
        for start in range(0, len(groups), size):
            part = set(groups[start : start + size])
            batches.append(self.select([i for i, group in enumerate(self.groups) if group in part]))
        return batches

    @staticmethod
    def join(batches: Sequence[Batch]) -> Batch:
        """One batch of several, before the update: their groups keep their numbers."""
        if len(batches) == 1:
            return batches[0]
        return Batch(**{name: _joined([getattr(batch, name) for batch in batches]) for name in _COLUMNS})


_COLUMNS = [field.name for field in fields(Batch)]


def _joined(columns: Sequence[Any]) -> Any:
    """One column of several batches' columns; None where one of them is."""
    first = columns[0]
    if isinstance(first, dict):
        return {name: _joined([column[name] for column in columns]) for name in first}
    if any(column is None for column in columns):
        return None
    if isinstance(first, torch.Tensor):
        width = max(column.size(1) for column in columns)
        return torch.cat([pad(column, (0, width - column.size(1))) for column in columns])
    return list(chain.from_iterable(columns))


def padded(rows: Sequence[Sequence[float]], width: int, device: Any = None) -> torch.Tensor:
    """(N, width): the rows, with zeros behind their ends; long, or float32 where they are no whole numbers.

    >>> padded([[1, 2], [3]], 2).tolist()
    [[1, 2], [3, 0]]
    """
    is_whole = all(isinstance(number, int) for row in rows for number in row[:1])
    lines = [[*row, *[0] * (width - len(row))] for row in rows]
    return torch.tensor(lines, dtype=torch.long if is_whole else torch.float32, device=device)

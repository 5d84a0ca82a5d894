"""Attention of rows that share their prompts, on a card: few kernels over shapes that rarely change.

A prompt's keys meet the queries of all its rows in one product; these and the rows' own scores share one softmax.
Everything that a graph reads lies at a fixed address. Equal to attention.py's two parts, which it needs no joining of.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kit.rollout.attention import float32_product


class BucketAttention:
    """Over P prompts with G seats each, and `rows` rows of H key heads with `groups` query heads to each."""

    def __init__(
        self, prompts: int, seats: int, rows: int, heads: int, groups: int, device: torch.device
    ) -> None:
        self._heads, self._groups = heads, groups
        integers = lambda size: torch.zeros(size, dtype=torch.long, device=device)  # noqa: E731
        self._queries = integers((prompts * seats + rows) * heads * groups)  # in the grid, then by row
        self._to_rows, self._to_grid = integers(rows * heads), integers(prompts * seats * heads)

    def arrange(self, grid: Tensor, cell: Tensor, seats: int) -> None:
        """grid long (P * G,): the row in each seat. cell long (rows,): each row's seat."""
        heads, groups, rows = self._heads, self._groups, len(cell)
        device, self._rows, self._cell, self._seats = grid.device, rows, cell, seats
        head = torch.arange(heads, device=device)
        query = torch.arange(heads * groups, device=device).view(heads, 1, groups)
        by_prompt = grid.view(-1, 1, seats)  # (P, 1, G)
        in_grid = by_prompt[..., None] * (heads * (groups + 1)) + query  # (P, H, G, groups)
        by_row = torch.arange(rows, device=device)[:, None] * (heads * (groups + 1)) + query.view(1, -1)
        self._count = in_grid.numel()
        self._queries[: self._count] = in_grid.flatten()
        self._queries[self._count : self._count + by_row.numel()] = by_row.flatten()
        self._to_grid[: by_prompt.numel() * heads] = (by_prompt * heads + head[:, None]).flatten()
        place = (cell // seats)[:, None] * heads + head  # (rows, H): prompt and head
        self._to_rows[: rows * heads] = (place * seats + (cell % seats)[:, None]).flatten()

    def begin_step(self, prefix_bias: Tensor, suffix_bias: Tensor) -> None:
        """Masks of a step: prefix_bias (P, T), suffix_bias (W,), 0 or -inf; part of what a graph captures."""
        own = suffix_bias.expand(self._rows, -1)
        self._bias = torch.cat([prefix_bias.index_select(0, self._cell // self._seats), own], dim=-1)[:, None]

    def __call__(self, both: Tensor, prefix: Tensor, suffix: Tensor) -> Tensor:
        """both (rows, H * (groups + 1), D): scaled queries, then keys, which are not read. Returns (rows, Hq * D).

        prefix (2, P, H, T, D) and suffix (2, rows, H, W, D): keys and values.
        """
        rows, heads, groups, dim = self._rows, self._heads, self._groups, both.size(-1)
        length = prefix.size(3)
        (key, value), (own_key, own_value) = prefix.flatten(1, 2), suffix.flatten(1, 2)
        queries = self._queries[: self._count + rows * heads * groups]
        queries = both.view(-1, dim).index_select(0, queries)
        over = float32_product(
            queries[: self._count].view(len(key), -1, dim), key.mT
        )  # (P * H, G * groups, T)
        own = float32_product(
            queries[self._count :].view(-1, groups, dim), own_key.mT
        )  # (rows * H, groups, W)
        to_rows = self._to_rows[: rows * heads]
        scores = torch.cat([over.view(-1, groups, length).index_select(0, to_rows), own], dim=-1)
        scores.view(rows, heads * groups, -1).add_(self._bias)
        weights = torch.softmax(scores, dim=-1).to(value.dtype)
        over = weights[..., :length].index_select(0, self._to_grid[: self._count // groups])
        found = torch.bmm(over.view(len(key), -1, length), value).view(-1, groups, dim)
        found = torch.baddbmm(found.index_select(0, to_rows), weights[..., length:], own_value)
        return found.view(rows, heads * groups * dim)

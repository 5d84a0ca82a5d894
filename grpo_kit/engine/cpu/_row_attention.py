"""Attention of one decode step on a CPU: plain batched products over exactly the live rows, one softmax for all keys.

torch's fused kernel spends most of its time on its start when a step has one query a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_kit.engine._attention import float32_product


class RowAttention:
    """Rows over the prompt they share and their own completions; float32. Buffers are kept between steps.

    Queries come by row and are computed on a grid of (prompt, key head, seat), a seat for each of a prompt's
    rows, so that a prompt's keys are read once for all of them.
    """

    def __init__(self, heads: int) -> None:
        self._heads = heads
        self._held: dict[str, torch.Tensor] = {}

    def arrange(self, prompts: int, seats: int, cell: Sequence[int], lengths: Sequence[int]) -> None:
        """Row r sits in cell[r] of the grid, prompt * seats + seat; prompts have these lengths in tokens."""
        heads, rows = self._heads, len(cell)
        self._prompts, self._seats, self._rows = prompts, seats, rows
        self._length = max(lengths)
        row_of = torch.zeros(prompts * seats, dtype=torch.long)  # an empty seat computes row 0; never read
        row_of[torch.tensor(cell)] = torch.arange(rows)
        head = torch.arange(heads)
        grid = row_of.view(prompts, 1, seats) * heads + head[:, None]  # (P, H, seats) -> row * H + head
        self._to_grid = grid.flatten()
        place = torch.tensor(cell)[:, None]
        self._to_rows = ((place // seats * heads + head) * seats + place % seats).flatten()  # (R * H,)
        self._in_order = torch.equal(self._to_rows, torch.arange(rows * heads)) and seats == 1
        # Only columns that some prompt does not reach need a mask.
        self._full = min(lengths)
        outside = torch.arange(self._full, self._length) >= torch.tensor(lengths)[:, None]
        self._bias = outside.float().masked_fill_(outside, -torch.inf)[:, None]  # (P, 1, T - full)

    def begin_step(self, groups: int, dim: int, width: int) -> None:
        """Shared by the layers of this step: groups query heads to a key head, width columns of completions."""
        self._width = width
        heads, rows, length = self._heads, self._rows, self._length
        cells, pairs = self._prompts * self._seats * heads, self._prompts * heads
        self._scores = self._buffer("scores", cells, groups * length)
        self._row_scores = self._buffer("row_scores", rows * heads, groups, width)
        self._all = self._buffer("all", cells, groups, length + width)
        self._weights = self._buffer("weights", cells, groups, length + width)
        self._grid_scores = self._scores.view(pairs, self._seats * groups, length)
        self._grid_found = self._buffer("found", pairs, self._seats * groups, dim)

    def __call__(
        self,
        query: torch.Tensor,
        prefix: tuple[torch.Tensor, torch.Tensor],
        suffix: tuple[torch.Tensor, torch.Tensor],
        scale: float,
    ) -> torch.Tensor:
        """query (R, H, G, D) -> (R, H * G * D).

        Keys and values: prefix (P, H, at least T, D), suffix (at least R, H, at least width, D).
        """
        rows, heads, groups, dim = query.shape
        query = query.reshape(rows * heads, groups * dim)
        grid = query if self._in_order else query.index_select(0, self._to_grid)
        key, value = (x[: self._prompts, :, : self._length].flatten(0, 1) for x in prefix)
        scores = self._grid_scores
        grid = grid.view(len(scores), -1, dim)
        torch.baddbmm(scores, grid, key.mT, beta=0, alpha=scale, out=scores)
        if self._full < self._length:
            ragged = scores.view(self._prompts, -1, self._length)[..., self._full :]
            ragged += self._bias
        key, row_value = (x[:rows, :, : self._width].flatten(0, 1) for x in suffix)
        own = self._row_scores
        torch.baddbmm(own, query.view(-1, groups, dim), key.mT, beta=0, alpha=scale, out=own)
        own_grid = own if self._in_order else own.index_select(0, self._to_grid)
        torch.cat([self._scores.view(-1, groups, self._length), own_grid], dim=-1, out=self._all)
        torch.softmax(self._all, dim=-1, out=self._weights)
        weights = self._weights
        over_prompt = weights[..., : self._length].view(len(scores), -1, self._length)
        found = torch.bmm(over_prompt, value, out=self._grid_found).view(-1, groups * dim)
        over_own = weights[..., self._length :]
        if not self._in_order:
            found, over_own = found.index_select(0, self._to_rows), over_own.index_select(0, self._to_rows)
        return found.view(-1, groups, dim).baddbmm_(over_own, row_value).view(rows, heads * groups * dim)

    def _buffer(self, name: str, *shape: int) -> torch.Tensor:
        size = torch.Size(shape).numel()
        if name not in self._held or self._held[name].numel() < size:
            self._held[name] = torch.empty(size + size // 4, dtype=torch.float32)  # room to grow
        return self._held[name][:size].view(shape)


# ---- on a card: few kernels over shapes that rarely change --------------------------------------------------------
# A prompt's keys meet the queries of all its rows in one product; these and the rows' own scores share one softmax.
# Everything that a graph reads lies at a fixed address. Equal to _attention.py's two parts, which it need not join.


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

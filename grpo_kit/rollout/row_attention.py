"""Attention of one decode step on a CPU: plain batched products over exactly the live rows, one softmax for all keys.

torch's fused kernel spends most of its time on its start when a step has one query a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


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

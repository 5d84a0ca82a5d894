"""The keys and values of a rollout: each prompt's once, each row's own completion in a static slot.

Rows (completions being written) are in slots 0..R-1 and prompts in prefix slots 0..P-1. A finished one leaves a
hole that the last one fills, so the live ones are always a slice and linear layers process live rows only.
All rows have written equally many tokens: one column index serves them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch
from transformers import Cache

from grpo_kit.engine._attention import OUTSIDE, BucketAttention, RowAttention, attend, attend_fused, join


def fill_holes(live: Sequence[bool]) -> list[tuple[int, int]]:
    """Moves (to, from) after which the live entries come first; each one moves at most once.

    >>> fill_holes([True, False, True, False, True])
    [(1, 4)]
    """
    count = sum(live)
    holes = (i for i in range(count) if not live[i])
    return [(next(holes), i) for i in range(count, len(live)) if live[i]]


def row_bucket(rows: int) -> int:
    """The smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that holds so many rows.

    >>> [row_bucket(n) for n in (1, 5, 17, 33)]
    [1, 6, 24, 48]
    """
    power = 1 << (rows - 1).bit_length()
    return power * 3 // 4 if power >= 4 and rows <= power * 3 // 4 else power


class KVCache(Cache):
    """Keys and values of P prompts and up to `rows` completions of at most `width` tokens, in every layer.

    prefix (2, layers, P, Hkv, T, D) and suffix (2, layers, rows, Hkv, width, D): keys at 0, values at 1.
    bucketed: decode over padded shapes that rarely change, as CUDA graphs need; dead rows and columns not yet
    written are masked. Otherwise over exactly the live ones. The result is the same.
    groups: query heads to a key head, where fused layers decode (attend_fused_rows); 0: where modules do.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        *,
        prompts: int,
        rows: int,
        prompt_length: int,
        group: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        bucketed: bool,
        groups: int = 0,
    ) -> None:
        super().__init__(layers=[])
        layers, heads, dim = shape
        # Zeros, since unwritten entries are still read under a mask in bucketed decoding.
        self.prefix = torch.zeros(2, layers, prompts, heads, prompt_length, dim, dtype=dtype, device=device)
        self.suffix = torch.zeros(2, layers, rows, heads, width, dim, dtype=dtype, device=device)
        self.bucketed = bucketed
        self.group, self.width_held, self.groups = group, width, groups
        self._size = dict(prompts=prompts, rows=rows, prompt_length=prompt_length, group=group, width=width)
        self._attend = attend if bucketed else attend_fused
        integers = lambda *size: torch.zeros(size, dtype=torch.long, device=device)  # noqa: E731
        # Inputs of a decode step at fixed addresses, so that a captured graph finds them.
        self.input_ids, self.position_ids = integers(rows, 1), integers(rows, 1)
        self.column = integers(1)
        self._grid, self._cell = integers(prompts * group), integers(rows)
        self._prefix_bias = torch.zeros(prompts, 1, 1, prompt_length, dtype=torch.float32, device=device)
        self._suffix_order = torch.arange(width, device=device)
        self._suffix_bias: torch.Tensor | None = None
        self._prompt_order = torch.arange(prompt_length, device=device)
        self._prompt_lengths = integers(prompts)
        self._in_window: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # biases of a step, by window
        self._lengths: list[int] = []
        self._in_buckets = BucketAttention(prompts, group, rows, heads, groups, device) if groups else None
        self._by_rows = RowAttention(heads) if not bucketed and dtype == torch.float32 else None

    @property
    def prompt_count(self) -> int:
        """Number of prompts that some row still needs."""
        return len(self._lengths)

    def fits(self, dtype: torch.dtype, **wanted: int) -> bool:
        """Does a batch of this size (the constructor's arguments) fit in the allocated memory?"""
        return self.prefix.dtype == dtype and all(n <= self._size[name] for name, n in wanted.items())

    def nbytes(self) -> int:
        """Bytes held on the device."""
        return sum(t.numel() * t.element_size() for t in (self.prefix, self.suffix))

    # ---- before a step --------------------------------------------------------------------------------------

    def set_prompts(self, lengths: Sequence[int]) -> None:
        """From here on the prompts in prefix slots 0..P-1 have these lengths."""
        self._lengths = list(lengths)
        lengths = torch.tensor(self._lengths, device=self.prefix.device)
        self._prompt_lengths[: len(lengths)] = lengths
        outside = self._prompt_order >= lengths[:, None]  # (P, T)
        bias = self._prefix_bias[: len(self._lengths), 0, 0]
        bias.zero_().masked_fill_(outside, -torch.inf)

    def arrange(self, prompt_of_row: Sequence[int], rows: int) -> None:
        """Rows 0..R-1 belong to these prefix slots; a step computes `rows` >= R rows."""
        counts: Counter[int] = Counter()
        members = []
        for prompt in prompt_of_row:
            members.append(counts[prompt])
            counts[prompt] += 1
        if self.bucketed:
            self.prompts, self.seats, self.prompt_length = (
                self.prefix.size(2),
                self.group,
                self.prefix.size(4),
            )
        else:
            self.prompts, self.seats = len(self._lengths), max(counts.values())
            self.prompt_length = max(self._lengths)
        ragged = self.bucketed or min(self._lengths) < self.prompt_length
        self._bias = self._prefix_bias[: self.prompts, ..., : self.prompt_length] if ragged else None
        self.rows = rows
        cells = [p * self.seats + m for p, m in zip(prompt_of_row, members, strict=True)]
        grid = [0] * (self.prompts * self.seats)  # an empty seat computes row 0 again; never read
        for row, cell in enumerate(cells):
            grid[cell] = row
        self._grid[: len(grid)] = torch.tensor(grid, device=self._grid.device)
        self._cell[:rows] = torch.tensor(cells + [0] * (rows - len(cells)), device=self._cell.device)
        if self._in_buckets is not None:
            self._in_buckets.arrange(self._grid[: len(grid)], self._cell[:rows], self.seats)
        if self._by_rows is not None:
            self._by_rows.arrange(self.prompts, self.seats, cells, self._lengths)

    def set_step(self, tokens: torch.Tensor, positions: torch.Tensor, column: int, width: int) -> None:
        """The next step reads these tokens, long (R,), at these positions and writes this column; attends `width`."""
        self.input_ids[: len(tokens), 0] = tokens
        self.position_ids[: len(tokens), 0] = positions
        self.column.fill_(column)
        self.width, self._written = width, column

    def begin_step(self) -> None:
        """Masks that depend on the column; part of what a graph captures."""
        self._in_window.clear()
        if self.bucketed:
            unwritten = self._suffix_order[: self.width] > self.column
            self._suffix_bias = torch.zeros_like(unwritten, dtype=torch.float32).masked_fill_(
                unwritten, -torch.inf
            )
        if self._in_buckets is not None:
            prefix = self._prefix_bias[:, 0, 0]  # (P, T)
            self._in_buckets.begin_step(prefix, self._suffix_bias)

    # ---- inside a step: called by the model's layers ------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the column of this step; key_states, value_states (rows, Hkv, 1, D)."""
        for part, states in enumerate((key_states, value_states)):
            self.suffix[part, layer_idx, : self.rows].index_copy_(
                2, self.column, states.to(self.suffix.dtype)
            )
        return key_states, value_states

    def _biases(self, window: int | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Of prompts (P, 1, 1, T) and of completions (..., W), with what lies outside the window, in tokens."""
        if window is None or window >= self.prompt_length + self.width:
            return self._bias, self._suffix_bias
        if window not in self._in_window:
            first = self.column + 1 - window  # the first column inside
            places = self._prompt_order[: self.prompt_length] - self._prompt_lengths[: self.prompts, None]
            prefix = self._prefix_bias[: self.prompts, ..., : self.prompt_length]
            prefix = torch.where((places < first)[:, None, None], OUTSIDE, prefix)
            outside = self._suffix_order[: self.width] < first
            suffix = prefix.new_zeros(()) if self._suffix_bias is None else self._suffix_bias
            suffix = torch.where(outside, OUTSIDE, suffix)
            self._in_window[window] = prefix, suffix[None, None, None]
        return self._in_window[window]

    def attend(
        self,
        query: torch.Tensor,
        layer: int,
        scale: float,
        *,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query (rows, Hq, 1, D) over its prompt and its own completion so far; returns (rows, 1, Hq, D).

        window: tokens that a query sees, itself included. softcap, sinks (Hq,): see _attention.py.
        """
        rows, query_heads, _, dim = query.shape
        heads = self.suffix.size(3)
        shared = query_heads // heads  # query heads to a key head
        query = query.to(self.suffix.dtype).reshape(rows, heads, shared, dim)
        prompts, seats = self.prompts, self.seats
        grid = query.index_select(0, self._grid[: prompts * seats])
        grid = grid.view(prompts, seats, heads, shared, dim).transpose(1, 2)
        grid = grid.reshape(prompts, heads, seats * shared, dim)
        with torch.autocast(query.device.type, enabled=False):
            before, own = self._biases(window)
            windowed = before is not self._bias
            plain = softcap is None and not (windowed and self.bucketed)
            attention = self._attend if plain else partial(attend, softcap=softcap, windowed=windowed)
            key, value = self.prefix[:, layer, :prompts, :, : self.prompt_length]
            prefix, prefix_lse = attention(grid, key, value, scale, before)
            key, value = self.suffix[:, layer, :rows, :, : self.width]
            suffix = attention(query, key, value, scale, own)
            prefix = self._to_rows(prefix.reshape(prompts, heads, seats, shared, dim), rows)
            prefix_lse = self._to_rows(prefix_lse.reshape(prompts, heads, seats, shared), rows)
            sinks = None if sinks is None else sinks.float().view(heads, shared)
            joined = join((prefix, prefix_lse), suffix, sinks)  # (rows, Hkv, shared, D)
        return joined.to(query.dtype).view(rows, 1, query_heads, dim)

    def begin_rows(self, groups: int) -> None:
        """Before the layers of a step call `attend_rows`; groups: query heads to a key head."""
        self._by_rows.begin_step(groups, self.suffix.size(5), self.width)

    def attend_rows(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, scale: float
    ) -> torch.Tensor:
        """Write this step's column and attend, as plain functions of layers call it: float32, not bucketed.

        query (R, H, G, D), key and value (R, H, D), R at least the number of live rows: further rows return zeros.
        Returns (R, H * G * D).
        """
        for part, states in enumerate((key, value)):
            self.suffix[part, layer, : self.rows, :, self._written] = states[: self.rows]
        found = self._by_rows(query[: self.rows], self.prefix[:, layer], self.suffix[:, layer], scale)
        if len(query) == self.rows:
            return found
        return torch.nn.functional.pad(found, (0, 0, 0, len(query) - self.rows))

    def attend_fused_rows(self, both: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
        """Write this step's column and attend, as fused layers call it; bucketed.

        both (rows, Hq + Hkv, D): scaled queries, then keys. value (rows, Hkv * D). Returns (rows, Hq * D).
        """
        heads, dim = self.suffix.size(3), self.suffix.size(5)
        for part, states in enumerate((both[:, -heads:], value.view(self.rows, heads, dim))):
            self.suffix[part, layer, : self.rows].index_copy_(2, self.column, states[:, :, None])
        prefix, suffix = self.prefix[:, layer], self.suffix[:, layer, : self.rows, :, : self.width]
        return self._in_buckets(both, prefix, suffix)

    def _to_rows(self, grid: torch.Tensor, rows: int) -> torch.Tensor:
        """(P, Hkv, seats, ...) -> (rows, Hkv, ...)."""
        return grid.transpose(1, 2).flatten(0, 1).index_select(0, self._cell[:rows])

    # ---- between steps ------------------------------------------------------------------------------------------

    def move_rows(self, moves: Sequence[tuple[int, int]], written: int) -> None:
        """Copy rows' first `written` columns, (to, from), in every layer."""
        if moves:
            to, source = zip(*moves, strict=True)
            self.suffix[:, :, list(to), :, :written] = self.suffix[:, :, list(source), :, :written]

    def keep_prompts(self, live: Sequence[bool]) -> list[int]:
        """Drop prompts that no row needs; returns each old prefix slot's new one (meaningless for dropped ones)."""
        place = list(range(len(live)))
        for to, source in fill_holes(live):
            self.prefix[:, :, to] = self.prefix[:, :, source]
            self._lengths[to] = self._lengths[source]
            place[source] = to
        self.set_prompts(self._lengths[: sum(live)])
        return place

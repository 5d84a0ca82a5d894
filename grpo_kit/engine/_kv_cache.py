"""The keys and values of a rollout: each prompt's once, each row's own completion in a static slot.

Rows (completions being written) are in slots 0..R-1 and prompts in prefix slots 0..P-1. A finished one leaves a
hole that the last one fills, so the live ones are always a slice and linear layers process live rows only.
All rows have written equally many tokens: one column index serves them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from transformers import Cache

from grpo_kit.engine._attention import (
    OUTSIDE,
    BucketAttention,
    attend,
    attend_fused,
    join,
)


def fill_holes(live: Sequence[bool]) -> list[tuple[int, int]]:
    """Moves (to, from) after which the live entries come first; each one moves at most once.

    >>> fill_holes([True, False, True, False, True])
    [(1, 4)]
    """
    count = sum(live)
    holes = [slot for slot in range(count) if not live[slot]]
    sources = [slot for slot in range(count, len(live)) if live[slot]]
    return list(zip(holes, sources, strict=True))


def row_bucket(rows: int) -> int:
    """The smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that holds so many rows.

    >>> [row_bucket(n) for n in (1, 5, 17, 33)]
    [1, 6, 24, 48]
    """
    power = 1 << (rows - 1).bit_length()
    three_quarters = power * 3 // 4
    return three_quarters if power >= 4 and rows <= three_quarters else power


class CacheSize(NamedTuple):
    """What a KV cache has room for: prompts of prompt_length tokens, rows (group of one prompt) of width new tokens."""

    prompts: int
    rows: int
    prompt_length: int
    group: int
    width: int


class KVCache(Cache):
    """Keys and values of prompts and rows, in every layer.

    shape: layers, key heads, their dimension. prefix (2, layers, P, Hkv, T, D) and suffix (2, layers, rows, Hkv, width,
    D): keys at 0, values at 1.
    bucketed: decode over padded shapes that rarely change, as CUDA graphs need; dead rows and columns not yet
    written are masked. Otherwise over exactly the live ones. The result is the same.
    groups: query heads to a key head, where the kit's fused layers decode on a card; 0: elsewhere.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        size: CacheSize,
        *,
        dtype: torch.dtype,
        device: torch.device,
        bucketed: bool,
        groups: int = 0,
    ) -> None:
        super().__init__(layers=[])
        layers, heads, dim = shape
        prompts, rows, prompt_length, group, width = size
        # Zeros, since unwritten entries are still read under a mask in bucketed decoding.
        self.prefix = torch.zeros(
            2, layers, prompts, heads, prompt_length, dim, dtype=dtype, device=device
        )
        self.suffix = torch.zeros(
            2, layers, rows, heads, width, dim, dtype=dtype, device=device
        )
        self.size, self.bucketed, self.groups = size, bucketed, groups
        zeros = partial(torch.zeros, dtype=torch.long, device=device)
        # Inputs of a decode step at fixed addresses, so that a captured graph finds them.
        self.input_ids, self.position_ids, self.column = (
            zeros(rows, 1),
            zeros(rows, 1),
            zeros(1),
        )
        self._row_of_seat, self._seat_of_row = zeros(prompts * group), zeros(rows)
        self._prefix_bias = torch.zeros(
            prompts, 1, 1, prompt_length, dtype=torch.float32, device=device
        )
        self._prompt_order = torch.arange(prompt_length, device=device)
        self.prompt_lengths = zeros(prompts)
        self._suffix_bias: torch.Tensor | None = None
        self._suffix_order = torch.arange(width, device=device)
        self._window_biases: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of a step
        self._lengths: list[int] = []
        self._bucket_attention = None
        if groups:
            self._bucket_attention = BucketAttention(
                prompts, group, rows, heads, groups, device
            )

    def fits(self, size: CacheSize, dtype: torch.dtype, groups: int) -> bool:
        """Does such a batch fit in the allocated memory?"""
        has_room = all(n <= room for n, room in zip(size, self.size, strict=True))
        return has_room and self.prefix.dtype == dtype and self.groups == groups

    def nbytes(self) -> int:
        """Bytes held on the device."""
        return self.prefix.nbytes + self.suffix.nbytes

    # ---- before a step --------------------------------------------------------------------------------------

    def set_prompts(self, lengths: Sequence[int]) -> None:
        """From here on the prompts in prefix slots 0..P-1 have these lengths."""
        self._lengths = list(lengths)
        device_lengths = torch.tensor(self._lengths, device=self.prefix.device)
        self.prompt_lengths[: len(lengths)] = device_lengths
        is_padding = self._prompt_order >= device_lengths[:, None]  # (P, T)
        bias = self._prefix_bias[: len(lengths), 0, 0]
        bias.zero_().masked_fill_(is_padding, -torch.inf)

    def arrange(self, prompt_of_row: Sequence[int], rows: int) -> None:
        """Rows 0..R-1 belong to these prefix slots; a step computes `rows` >= R rows."""
        prompt = torch.tensor(prompt_of_row, device="cpu")
        self.rows, self.prompt_of_row = rows, prompt
        # rows of the same prompt before this one
        before = (prompt[:, None] == prompt).tril(-1).sum(1)
        if self.bucketed:
            self.prompts, self.prompt_length = self.size.prompts, self.size.prompt_length
            seats, ragged = self.size.group, True
        else:
            self.prompts, self.prompt_length = len(self._lengths), max(self._lengths)
            seats = int(before.max()) + 1
            ragged = min(self._lengths) < self.prompt_length
        self.seats = seats
        self._bias = (
            self._prefix_bias[: self.prompts, ..., : self.prompt_length] if ragged else None
        )
        seat = (prompt * seats + before).to(self.prefix.device)
        row_of_seat = self._row_of_seat[: self.prompts * seats].zero_()
        seat_of_row = self._seat_of_row[:rows]
        # Never read: an empty seat computes row 0 again, a row too many reads a seat of an earlier arrangement.
        row_of_seat[seat] = torch.arange(len(seat), device=seat.device)
        seat_of_row[: len(seat)] = seat
        if self._bucket_attention is not None:
            self._bucket_attention.arrange(row_of_seat, seat_of_row, seats)

    def set_step(
        self, tokens: torch.Tensor, positions: torch.Tensor, column: int, width: int
    ) -> None:
        """The next step reads these tokens, long (R,), at these positions and writes this column; attends `width`."""
        self.input_ids[: len(tokens), 0] = tokens
        self.position_ids[: len(tokens), 0] = positions
        self.column.fill_(column)
        self.width, self.written = width, column

    def begin_step(self) -> None:
        """Masks that depend on the column; part of what a graph captures."""
        self._window_biases.clear()
        if self.bucketed:
            unwritten = self._suffix_order[: self.width] > self.column
            bias = torch.zeros_like(unwritten, dtype=torch.float32)
            self._suffix_bias = bias.masked_fill_(unwritten, -torch.inf)
        if self._bucket_attention is not None:
            self._bucket_attention.begin_step(self._prefix_bias[:, 0, 0], self._suffix_bias)

    # ---- inside a step: called by the model's layers ------------------------------------------------------------

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args,
        **kwargs,
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
        if window not in self._window_biases:
            first = self.column + 1 - window  # the first column inside
            places = (
                self._prompt_order[: self.prompt_length]
                - self.prompt_lengths[: self.prompts, None]
            )
            prefix = self._prefix_bias[: self.prompts, ..., : self.prompt_length]
            prefix = torch.where((places < first)[:, None, None], OUTSIDE, prefix)
            is_outside = self._suffix_order[: self.width] < first
            suffix = self._suffix_bias
            if suffix is None:
                suffix = prefix.new_zeros(())
            suffix = torch.where(is_outside, OUTSIDE, suffix)
            self._window_biases[window] = prefix, suffix[None, None, None]
        return self._window_biases[window]

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
        heads, prompts, seats = self.suffix.size(3), self.prompts, self.seats
        groups = query_heads // heads  # query heads to a key head
        query = query.to(self.suffix.dtype).reshape(rows, heads, groups, dim)
        grid = query.index_select(0, self._row_of_seat[: prompts * seats])
        grid = grid.view(prompts, seats, heads, groups, dim).transpose(1, 2)
        grid = grid.reshape(prompts, heads, seats * groups, dim)
        with torch.autocast(query.device.type, enabled=False):
            prefix_bias, suffix_bias = self._biases(window)
            windowed = prefix_bias is not self._bias
            attention = attend_fused
            if self.bucketed or softcap is not None:
                attention = partial(attend, softcap=softcap, windowed=windowed)
            key, value = self.prefix[:, layer, :prompts, :, : self.prompt_length]
            prefix, prefix_lse = attention(grid, key, value, scale, prefix_bias)
            key, value = self.suffix[:, layer, :rows, :, : self.width]
            suffix = attention(query, key, value, scale, suffix_bias)
            prefix = self._to_rows(prefix.reshape(prompts, heads, seats, groups, dim), rows)
            prefix_lse = self._to_rows(prefix_lse.reshape(prompts, heads, seats, groups), rows)
            if sinks is not None:
                sinks = sinks.float().view(heads, groups)
            joined = join((prefix, prefix_lse), suffix, sinks)  # (rows, Hkv, groups, D)
        return joined.to(query.dtype).view(rows, 1, query_heads, dim)

    def attend_rows(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        scale: float,
    ) -> torch.Tensor:
        """Write this step's column and attend, as plain functions of layers call it: float32, not bucketed.

        query (R, H, G, D), key and value (R, H, D). Returns (R, H * G * D).
        """
        for part, states in enumerate((key, value)):
            self.suffix[part, layer, : self.rows, :, self.written] = states
        return self.attend(query.flatten(1, 2)[:, :, None], layer, scale).flatten(1)

    def attend_fused_rows(
        self, query_and_key: torch.Tensor, value: torch.Tensor, layer: int
    ) -> torch.Tensor:
        """Write this step's column and attend, as fused layers call it; bucketed.

        query_and_key (rows, Hq + Hkv, D): scaled queries, then keys. value (rows, Hkv * D). Returns (rows, Hq * D).
        """
        heads, dim = self.suffix.size(3), self.suffix.size(5)
        self.update(
            query_and_key[:, -heads:, None], value.view(self.rows, heads, 1, dim), layer
        )
        suffix = self.suffix[:, layer, : self.rows, :, : self.width]
        return self._bucket_attention(query_and_key, self.prefix[:, layer], suffix)

    def _to_rows(self, grid: torch.Tensor, rows: int) -> torch.Tensor:
        """(P, Hkv, seats, ...) -> (rows, Hkv, ...)."""
        return grid.transpose(1, 2).flatten(0, 1).index_select(0, self._seat_of_row[:rows])

    # ---- between steps ------------------------------------------------------------------------------------------

    def move_rows(self, moves: Sequence[tuple[int, int]], columns: int) -> None:
        """Copy rows' first `columns` columns, (to, from), in every layer."""
        if moves:
            targets, sources = map(list, zip(*moves, strict=True))
            self.suffix[:, :, targets, :, :columns] = self.suffix[:, :, sources, :, :columns]

    def drop_prompts(self, prompt_of_row: Sequence[int]) -> list[int]:
        """Drop the prompts that no row needs; returns each row's new prefix slot."""
        live = [prompt in prompt_of_row for prompt in range(len(self._lengths))]
        new_slot = list(range(len(live)))
        for target, source in fill_holes(live):
            self.prefix[:, :, target] = self.prefix[:, :, source]
            self._lengths[target] = self._lengths[source]
            new_slot[source] = target
        if not all(live):
            self.set_prompts(self._lengths[: sum(live)])
        return [new_slot[prompt] for prompt in prompt_of_row]

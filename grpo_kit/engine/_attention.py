"""Attention of rows that share their prompts, in two parts that are joined exactly.

A part is softmax attention over some of a query's keys together with the log-sum-exp of its scores. Two parts over
disjoint keys give attention over their union: part 2 weighs sigmoid(lse2 - lse1) (FlashDecoding; Milakov and
Gimelshein, arXiv:1805.02867). The shared prefix is thus a matrix product over all rows of a prompt, read once.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo_kit.engine._supported_models import attention_named

NAME = "grpo_kit_shared_prefix"
# Of keys outside a window. Not -inf: where a part holds no key inside, its softmax must stay finite.
OUTSIDE = -1e30


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    bias: torch.Tensor | None = None,
    *,
    softcap: float | None = None,
    windowed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and the log-sum-exp of its scores, from plain products.

    query (B, H, M, D); key, value (B, H, N, D) of the same dtype; bias broadcasts to (B, H, M, N), added to the
    scaled scores, 0 or -inf; 0 for the first key, unless windowed: then OUTSIDE or 0 for some key.
    softcap: scaled scores become softcap * tanh(score / softcap). Returns float32 (B, H, M, D) and (B, H, M).
    Written for few kernels: torch's logsumexp alone would be nine.
    """
    scores = float32_product(query, key.mT)  # (B, H, M, N)
    if softcap is not None:
        scores = torch.tanh(scores * (scale / softcap))
        scale = softcap
    if bias is None:
        scores = scores * scale
    else:
        scores = torch.add(bias, scores, alpha=scale)
    log_weights = torch.log_softmax(scores, dim=-1)
    if windowed:  # a first key outside the window has numbers too large to subtract
        lse = scores.amax(-1) - log_weights.amax(-1)
    else:
        lse = scores[..., 0] - log_weights[..., 0]
    weights = log_weights.exp_().to(value.dtype)
    return float32_product(weights, value), lse


def attend_fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend` in torch's fused CPU kernel, the one behind its scaled_dot_product_attention: 1.6 times faster."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, False, attn_mask=bias, scale=scale
    )


def join(
    first: tuple[torch.Tensor, torch.Tensor],
    second: tuple[torch.Tensor, torch.Tensor],
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention over the keys of both parts, float32; a part is (..., D) and its log-sum-exp (...).

    sinks: scores of one more key, whose value is 0; broadcasts to (...).
    """
    first_values, first_lse = first
    second_values, second_lse = second
    share = torch.sigmoid(second_lse - first_lse)[..., None]
    joined = torch.lerp(first_values.float(), second_values.float(), share)
    if sinks is None:
        return joined
    lse = torch.logaddexp(first_lse, second_lse)
    return joined * torch.sigmoid(lse - sinks)[..., None]


def float32_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """float32 (..., M, K) @ (..., K, N); 16-bit inputs are not rounded on the way out."""
    # CUDA only: 16-bit inputs, 32-bit sums, no copies
    if a.is_cuda and a.dtype != torch.float32:
        product = torch.bmm(a.flatten(0, -3), b.flatten(0, -3), out_dtype=torch.float32)
        return product.unflatten(0, a.shape[:-2])
    return torch.matmul(a.float(), b.float())


def _forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers calls this in each layer: query (B, Hq, 1, D) -> (B, 1, Hq, D); keys and values are in the slots."""
    cache = module.config.handed_to_attention
    output = cache.attend(
        query, module.layer_idx, scaling, window=sliding_window, softcap=softcap, sinks=s_aux
    )
    return output, None


ALL_ATTENTION_FUNCTIONS.register(NAME, _forward)


# ---- a grid of (prompt, key head, seat) ------------------------------------------------------------------------------
# A prompt has a seat for each of its rows, so that its keys are read once for all of them.


def seat_indices(
    row_of_seat: torch.Tensor, seat_of_row: torch.Tensor, seats: int, heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices from rows to the grid, long (P * heads * seats,), and from the grid to rows, long (R * heads,).

    row_of_seat: long (P * seats,). seat_of_row: long (R,), prompt * seats + seat. A row's head: row * heads + head.
    """
    head = torch.arange(heads, device=row_of_seat.device)
    to_grid = row_of_seat.view(-1, 1, seats) * heads + head[:, None]  # (P, H, seats)
    pair = (seat_of_row // seats)[:, None] * heads + head  # (R, H): prompt and head
    to_rows = pair * seats + (seat_of_row % seats)[:, None]
    return to_grid.flatten(), to_rows.flatten()


# ---- on a card: few kernels over shapes that rarely change --------------------------------------------------------
# A prompt's keys meet the queries of all its rows in one product; these and the rows' own scores share one softmax.
# Everything that a graph reads lies at a fixed address. Equal to the two parts above, which it need not join.


class BucketAttention:
    """Over P prompts with G seats each, and `rows` rows of H key heads with `groups` query heads to each."""

    def __init__(
        self, prompts: int, seats: int, rows: int, heads: int, groups: int, device: torch.device
    ) -> None:
        self._heads, self._groups = heads, groups
        zeros = partial(torch.zeros, dtype=torch.long, device=device)
        # Places of the queries in the grid, then by row.
        self._queries = zeros((prompts * seats + rows) * heads * groups)
        self._to_rows = zeros(rows * heads)
        self._to_grid = zeros(prompts * seats * heads)

    def arrange(self, row_of_seat: torch.Tensor, seat_of_row: torch.Tensor, seats: int) -> None:
        """Place rows in the grid, see seat_indices."""
        heads, groups, rows = self._heads, self._groups, len(seat_of_row)
        # a graph reads the last one
        self._rows, self._seats, self._seat_of_row = rows, seats, seat_of_row
        to_grid, to_rows = seat_indices(row_of_seat, seat_of_row, seats, heads)
        self._to_grid[: len(to_grid)] = to_grid
        self._to_rows[: rows * heads] = to_rows
        # A row's queries are followed by its keys, heads * (groups + 1) vectors in all.
        query = torch.arange(heads * groups, device=row_of_seat.device).view(heads, 1, groups)
        first = row_of_seat.view(-1, 1, seats, 1) * (heads * (groups + 1))
        in_grid = (first + query).flatten()  # (P, H, G, groups)
        first = torch.arange(rows, device=row_of_seat.device)[:, None] * (heads * (groups + 1))
        by_row = (first + query.view(1, -1)).flatten()
        self._count = len(in_grid)
        self._queries[: self._count] = in_grid
        self._queries[self._count : self._count + len(by_row)] = by_row

    def begin_step(self, prefix_bias: torch.Tensor, suffix_bias: torch.Tensor) -> None:
        """Masks of a step: prefix_bias (P, T), suffix_bias (W,), 0 or -inf; part of what a graph captures."""
        row_bias = suffix_bias.expand(self._rows, -1)
        prompt_bias = prefix_bias.index_select(0, self._seat_of_row // self._seats)
        self._bias = torch.cat([prompt_bias, row_bias], dim=-1)[:, None]

    def __call__(
        self, query_and_key: torch.Tensor, prefix: torch.Tensor, suffix: torch.Tensor
    ) -> torch.Tensor:
        """query_and_key (rows, H * (groups + 1), D): scaled queries, then keys, which are not read.

        Returns (rows, Hq * D). prefix (2, P, H, T, D) and suffix (2, rows, H, W, D): keys and values.
        """
        rows, heads, groups, dim = self._rows, self._heads, self._groups, query_and_key.size(-1)
        length = prefix.size(3)
        prompt_key, prompt_value = prefix.flatten(1, 2)
        row_key, row_value = suffix.flatten(1, 2)
        to_rows = self._to_rows[: rows * heads]
        places = self._queries[: self._count + rows * heads * groups]
        queries = query_and_key.view(-1, dim).index_select(0, places)
        grid_query = queries[: self._count].view(len(prompt_key), -1, dim)
        prompt_scores = float32_product(grid_query, prompt_key.mT)  # (P * H, G * groups, T)
        row_query = queries[self._count :].view(-1, groups, dim)
        row_scores = float32_product(row_query, row_key.mT)  # (rows * H, groups, W)
        prompt_scores = prompt_scores.view(-1, groups, length).index_select(0, to_rows)
        scores = torch.cat([prompt_scores, row_scores], dim=-1)
        scores.view(rows, heads * groups, -1).add_(self._bias)
        weights = torch.softmax(scores, dim=-1).to(prompt_value.dtype)
        to_grid = self._to_grid[: self._count // groups]
        grid_weights = weights[..., :length].index_select(0, to_grid)
        output = torch.bmm(grid_weights.view(len(prompt_key), -1, length), prompt_value)
        output = output.view(-1, groups, dim).index_select(0, to_rows)
        output = torch.baddbmm(output, weights[..., length:], row_value)
        return output.view(rows, heads * groups * dim)


# ---- prompts on a card without the flash kernel: attention that stays one kernel there ----------------------------
# transformers leaves shared key heads to SDPA where nothing is masked. Only the flash kernel takes them: 16 bits, a
# card from capability 8.0 on. Elsewhere torch would silently make all scores, gigabytes for long prompts. With keys and
# values repeated for the query heads the memory-efficient kernel does it.

REPEATED_HEADS = "grpo_kit_repeated_heads"


def _repeated_heads(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *mask: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' SDPA over as many key heads as query heads; query (B, Hq, T, D), key and value (B, Hkv, S, D)."""
    groups = query.size(1) // key.size(1)
    key = key.repeat_interleave(groups, dim=1)
    value = value.repeat_interleave(groups, dim=1)
    # A module without groups of its own, so that transformers repeats nothing.
    module = SimpleNamespace(is_causal=getattr(module, "is_causal", True))
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, *mask, **options)


ALL_ATTENTION_FUNCTIONS.register(REPEATED_HEADS, _repeated_heads)
ALL_MASK_ATTENTION_FUNCTIONS.register(REPEATED_HEADS, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def attention_over_prompts(base: PreTrainedModel) -> AbstractContextManager[None]:
    """Inside, SDPA of shared key heads takes a fused kernel on any card."""
    device, dtype = base.device.type, base.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    name = base.config._attn_implementation
    if name == "sdpa" and device == "cuda":
        if dtype == torch.float32 or torch.cuda.get_device_capability(base.device) < (8, 0):
            name = REPEATED_HEADS
    return attention_named(base, name)

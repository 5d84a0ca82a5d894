"""Attention of rows that share their prompts, in two parts that are joined exactly.

A part is softmax attention over some of a query's keys together with the log-sum-exp of its scores. Two parts over
disjoint keys give attention over their union: part 2 weighs sigmoid(lse2 - lse1) (FlashDecoding; Milakov and
Gimelshein, arXiv:1805.02867). The shared prefix is thus a matrix product over all rows of a prompt, read once.
Longer than 300 lines because the same attention is there three times, for modules, for a CPU and in a graph of a card.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

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
    scores = float32_product(query, key.transpose(-1, -2))  # (B, H, M, N)
    if softcap is not None:
        scores, scale = torch.tanh(scores * (scale / softcap)), softcap
    scores = scores * scale if bias is None else torch.add(bias, scores, alpha=scale)
    logs = torch.log_softmax(scores, dim=-1)
    if windowed:  # of a first key outside both are too large to subtract
        lse = scores.amax(-1) - logs.amax(-1)
    else:
        lse = scores[..., 0] - logs[..., 0]
    return float32_product(logs.exp_().to(value.dtype), value), lse


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
    share = torch.sigmoid(second[1] - first[1])[..., None]
    joined = torch.lerp(first[0].float(), second[0].float(), share)
    if sinks is None:
        return joined
    return joined * torch.sigmoid(torch.logaddexp(first[1], second[1]) - sinks)[..., None]


def float32_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """float32 (..., M, K) @ (..., K, N); 16-bit inputs are not rounded on the way out."""
    if a.is_cuda and a.dtype != torch.float32:  # CUDA only: 16-bit inputs, 32-bit sums, no copies
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
    how = {"window": sliding_window, "softcap": softcap, "sinks": s_aux}
    return module.config.handed_to_attention.attend(query, module.layer_idx, scaling, **how), None


ALL_ATTENTION_FUNCTIONS.register(NAME, _forward)


@contextmanager
def attention_named(base: PreTrainedModel, name: str) -> Iterator[None]:
    """Inside, the model's layers call the attention of this name; for a name of the kit transformers builds no mask."""
    before = base.config._attn_implementation
    base.config._attn_implementation = name
    try:
        yield
    finally:
        base.config._attn_implementation = before
        vars(base.config).pop(
            "handed_to_attention", None
        )  # keys, or a mask: StableLM's layers hand no keywords on


# ---- a decode step on a CPU: plain batched products over exactly the live rows, one softmax for all keys -------------
# torch's fused kernel spends most of its time on its start when a step has one query a row.


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
# Everything that a graph reads lies at a fixed address. Equal to the two parts above, which it need not join.


class BucketAttention:
    """Over P prompts with G seats each, and `rows` rows of H key heads with `groups` query heads to each."""

    def __init__(
        self, prompts: int, seats: int, rows: int, heads: int, groups: int, device: torch.device
    ) -> None:
        self._heads, self._groups = heads, groups
        integers = lambda size: torch.zeros(size, dtype=torch.long, device=device)  # noqa: E731
        self._queries = integers((prompts * seats + rows) * heads * groups)  # in the grid, then by row
        self._to_rows, self._to_grid = integers(rows * heads), integers(prompts * seats * heads)

    def arrange(self, grid: torch.Tensor, cell: torch.Tensor, seats: int) -> None:
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

    def begin_step(self, prefix_bias: torch.Tensor, suffix_bias: torch.Tensor) -> None:
        """Masks of a step: prefix_bias (P, T), suffix_bias (W,), 0 or -inf; part of what a graph captures."""
        own = suffix_bias.expand(self._rows, -1)
        self._bias = torch.cat([prefix_bias.index_select(0, self._cell // self._seats), own], dim=-1)[:, None]

    def __call__(self, both: torch.Tensor, prefix: torch.Tensor, suffix: torch.Tensor) -> torch.Tensor:
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
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' SDPA over as many key heads as query heads; query (B, Hq, T, D), key and value (B, Hkv, S, D)."""
    groups = query.size(1) // key.size(1)
    key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    alone = SimpleNamespace(is_causal=getattr(module, "is_causal", True))
    return ALL_ATTENTION_FUNCTIONS["sdpa"](alone, query, key, value, *mask, **given)


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

"""Score a batch of completions with all that they share computed once, and nothing padded.

TRL scores B*G rows of prompt + completion, so a prompt's tokens are computed G times, forward and backward, and what
all prompts of a task begin with B*G times. Here the rows of a step are one row of tokens, their tree of shared prefixes
(engine/tree.py), under a mask in which a token sees what it continues. Log-probabilities and gradients are the same
up to rounding.

Three ways of attention: rectangles (CPU), a block mask (FlexAttention, CUDA), a dense mask (SDPA, anywhere).
Decoders whose only state is keys and values; layers may see a sliding window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo_kit.engine._supported_models import shared_problem
from grpo_kit.engine.cpu._tree_attention import dense_attention
from grpo_kit.engine.tree import PrefixTree, build_tree, common_length
from grpo_kit.models._model_facts import base_model

_ATTENTIONS = ("sdpa", "eager", "flex_attention", "flash_attention_2")
FLEX_BLOCK = 128  # FlexAttention's block; the row is padded to a multiple of it
# What a chunk costs besides its tokens, in tokens: gradients of all weights are added up once more.
CHUNK_COST = 32

Row = tuple[tuple[int, ...], list[int]]  # prompt tokens, completion tokens


@dataclass(frozen=True)
class PackedBatch:
    """R completions as one row of L positions: their tree of shared prefixes, then padding.

    input_ids, position_ids, labels: long (1, L), labels already shifted, -100 where nothing is scored.
    end: long (L,), who sees whom: the query at q sees the key at k if k <= q < end[k].
    places: long (R, C), where each completion's scores lie; length: long (R,), how many they are.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    end: torch.Tensor
    places: torch.Tensor
    length: torch.Tensor
    tree: PrefixTree

    def dense_mask(self, window: int | None = None) -> torch.Tensor:
        """bool (1, 1, L, L), True where a query (row) may see a key (column). window: tokens that a query sees."""
        order = torch.arange(len(self.end), device=self.end.device)
        sees = (order <= order[:, None]) & (order[:, None] < self.end)
        if window is not None:
            sees &= self.position_ids.mT - self.position_ids < window
        return sees[None, None]

    def block_mask(self, window: int | None = None) -> BlockMask:
        """The same mask for FlexAttention, which skips blocks that no query sees; of a length that blocks fill.

        From each block's ends: torch's create_block_mask would take 3 L^2 bytes, 0.8 GB for 16,384 positions.
        """
        end, place, length = self.end, self.position_ids[0], len(self.end)

        def sees(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            continues = (k <= q) & (q < end[k])
            return continues if window is None else continues & (place[q] - place[k] < window)

        ends = end.view(-1, FLEX_BLOCK)
        block = torch.arange(length // FLEX_BLOCK, device=end.device)
        first_query = block[:, None] * FLEX_BLOCK  # of a block of queries
        earlier = block < block[:, None]  # blocks of keys in front of it
        full = earlier & (ends.amin(1) >= first_query + FLEX_BLOCK)
        partial = (earlier & (ends.amax(1) > first_query) & ~full) | (block == block[:, None])
        if window is not None:  # it may cut through any block
            partial |= full
            full = torch.zeros_like(full)

        def count_and_order(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            order = blocks.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
            return blocks.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]

        return BlockMask.from_kv_blocks(
            *count_and_order(partial),
            *count_and_order(full),
            BLOCK_SIZE=FLEX_BLOCK,
            mask_mod=sees,
            seq_lengths=(length, length),
        )

    def unpack(self, scores: torch.Tensor, width: int) -> torch.Tensor:
        """float (1, L) -> (R, width), zeros past each completion's end; differentiable."""
        mask = torch.arange(width, device=scores.device) < self.length[:, None]  # (R, width)
        places = torch.nn.functional.pad(self.places, (0, width - self.places.size(1)))
        return scores[0, places] * mask


def why_not_packed(model: Any) -> str | None:
    """None if this model can be computed packed, else one sentence that says why not."""
    config = base_model(model).config
    if config._attn_implementation not in _ATTENTIONS:
        return f"attention {config._attn_implementation!r} is not one of {', '.join(_ATTENTIONS)}"
    return shared_problem(model)


def _positions(rows: Sequence[Row], order: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of rows in sorted order: positions each takes alone, and the most it adds to those before it; long (R,)."""
    alone, added = [], []
    previous: tuple[int, ...] = ()
    for i in order:
        prompt, completion = rows[i]
        tokens = (*prompt, *completion)
        read = len(tokens) - 1
        shared = common_length(previous, tokens)
        if shared < len(tokens) and (shared >= len(prompt) or shared == len(previous)):
            shared -= 1  # the token before the branch is there once more
        alone.append(read)
        added.append(max(0, read - max(0, shared)))
        previous = tokens
    return torch.tensor(alone), torch.tensor(added)


def make_chunks(rows: list[Row], max_tokens: int) -> list[list[int]]:
    """Indices of rows, cut into chunks of at most max_tokens packed positions: the cut that costs least in all.

    Cost: positions, of which what rows share in a chunk counts once, and CHUNK_COST for each chunk; of cuts that cost
    the same the most even one. A row larger than max_tokens is a chunk of its own.

    >>> make_chunks([((5, 6), [7, 8]), ((4,), [1]), ((5, 6), [9])], max_tokens=4)
    [[1], [0, 2]]
    """
    scored = [i for i, (_, completion) in enumerate(rows) if completion]
    unscored = [i for i, (_, completion) in enumerate(rows) if not completion]
    if not scored:
        return [unscored] if unscored else []
    order = sorted(scored, key=lambda i: (*rows[i][0], *rows[i][1]))
    alone, added = _positions(rows, order)
    total = torch.cat([torch.zeros(1, dtype=torch.long), added.cumsum(0)])
    least_costs, last_begins = [0.0], [0]  # of the first n rows: the cost, and where the last chunk begins
    for n in range(1, len(order) + 1):
        # Positions of rows i..n - 1 as one chunk, for each i: the first alone, the others on top of it.
        tokens = alone[:n] + total[n] - total[1 : n + 1]
        tokens = tokens.masked_fill(tokens > max_tokens, 2**60)
        tokens[n - 1] = alone[n - 1]
        even = (tokens / total[-1].clamp(min=1)) ** 2 / 2  # over all chunks less than one token
        costs = torch.tensor(least_costs, dtype=torch.float64) + tokens + CHUNK_COST + even
        begin = int(costs.argmin())
        last_begins.append(begin)
        least_costs.append(float(costs[begin]))
    chunks, n = [], len(order)
    while n:
        begin = last_begins[n]
        chunks.append(sorted(order[begin:n]))
        n = begin
    chunks[-1] = sorted(chunks[-1] + unscored)
    return chunks[::-1]


def pack_rows(rows: list[Row], device: torch.device, *, multiple: int = 1) -> PackedBatch:
    """Pack completions, in any order; the row of positions is padded to a multiple.

    A token that several completions continue differently is there once for each, since its output scores what follows.

    >>> pack_rows([((5, 6), [7, 8]), ((5, 6), [9, 9])], torch.device("cpu")).input_ids.tolist()
    [[5, 6, 7, 6, 9]]
    """
    scored = [i for i, (_, completion) in enumerate(rows) if completion]
    tree = build_tree([rows[i] for i in scored] or [((0,), ())])  # nothing scored: one token to hang zeros on
    length = -(-len(tree) // multiple) * multiple
    table = torch.zeros(4, length, dtype=torch.long)
    table[2] = -100
    table[3] = torch.arange(1, length + 1)  # padding sees itself alone
    columns = (tree.input_ids, tree.positions, tree.labels, tree.end)
    table[:, : len(tree)] = torch.from_numpy(np.stack(columns))
    ids, positions, labels, end = table.to(device)
    lengths = [len(completion) for _, completion in rows]
    places = torch.zeros(len(rows), max([1, *lengths]), dtype=torch.long)
    if scored:
        for i, place in zip(scored, tree.places, strict=True):
            places[i, : lengths[i]] = torch.from_numpy(place[-lengths[i] :])
    return PackedBatch(
        ids[None],
        positions[None],
        labels[None],
        end,
        places.to(device),
        torch.tensor(lengths, device=device),
        tree,
    )


# ---- the packed row's attention for models whose layers differ: each layer's own window, soft cap and sinks ---------
# transformers hands these to the attention function of a layer, so that no model's name is needed here. On a CPU
# engine/cpu/_tree_attention.py does it; this is for FlexAttention, and for plain products under a dense mask.

PACKED = "grpo_kit_packed"


class PackedMasks:
    """The masks of one packed row, by window. attention: "flex_attention" or "sdpa"."""

    def __init__(self, packed: PackedBatch, attention: str) -> None:
        self.attention = attention
        self._make_mask = packed.block_mask if attention == "flex_attention" else packed.dense_mask
        self._masks: dict[int | None, Any] = {}

    def __getitem__(self, window: int | None) -> Any:
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]


def _packed_forward(
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
    """transformers calls this in each layer; the PackedMasks lie in the config."""
    masks = module.config.handed_to_attention
    mask = masks[sliding_window]
    if masks.attention == "flex_attention":
        kwargs |= {"softcap": softcap, "s_aux": s_aux}
    elif softcap is not None or s_aux is not None:
        return dense_attention(query, key, value, mask, scaling, softcap=softcap, sinks=s_aux), None
    attention = ALL_ATTENTION_FUNCTIONS[masks.attention]
    return attention(module, query, key, value, mask, scaling=scaling, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(PACKED, _packed_forward)

"""Attention over a tree of shared prefixes in rectangles of queries and keys, skipping pairs that are masked.

A stretch attends to itself causally; all its continuations lie behind it and attend to all of it: one rectangle. For
many short stretches side by side, one masked square is cheaper than a call for each. The parts of a query's attention
are joined by their log-sum-exps (FlashDecoding; Milakov and Gimelshein, arXiv:1805.02867), and the backward pass of
each rectangle uses the joined output and log-sum-exp, which makes it exact. On a CPU, with torch's fused kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo_kit.engine._attention import OUTSIDE
from grpo_kit.engine.tree import PrefixTree, Stretch

NAME = "grpo_kit_prefix_tree"
_CALL = 3000  # fixed cost of a call, in pairs of a query and a key
_JOIN = 10  # cost of joining per query, in keys
_LARGEST = 256  # a larger causal square is cut: torch's kernel computes its masked half


class Block(NamedTuple):
    """Queries first..last - 1 over keys start..stop - 1.

    kind "whole": each query sees each key. "causal": the same tokens, each sees itself and those before it. "masked":
    the same tokens, by the tree.
    """

    kind: str
    first: int
    last: int
    start: int
    stop: int


class TreePlan:
    """The blocks of attention over one tree; the same in every layer.

    blocks: first those that begin a query's attention, then those that are joined to it.
    window: tokens that a query sees, itself included; None: all that it continues.
    """

    def __init__(self, tree: PrefixTree, window: int | None = None) -> None:
        self.tokens, self._tree = len(tree), tree
        self._masks: dict[Block, Tensor | None] = {}
        self._biases: dict[tuple[Block, torch.dtype], Tensor] = {}
        self._windows: dict[int | None, TreePlan] = {window: self}
        for block in sorted(
            plan_blocks(tree.stretches), key=lambda block: block.kind == "whole"
        ):
            self._add(block, window)
        self.blocks = list(self._masks)

    def within(self, window: int | None) -> TreePlan:
        """The plan of layers with this window."""
        if window not in self._windows:
            self._windows[window] = TreePlan(self._tree, window)
        return self._windows[window]

    def of_queries(self, needed: np.ndarray) -> TreePlan:
        """The plan without the blocks none of whose queries is needed. needed: bool (N,)."""
        plan = copy(self)
        plan.blocks = [block for block in self.blocks if needed[block.first : block.last].any()]
        return plan

    def _add(self, block: Block, window: int | None) -> None:
        """Add a block without the keys that lie outside the window of all its queries; mask others that lie outside."""
        mask = self._tree.sees(block.start, block.stop) if block.kind == "masked" else None
        if window is not None:
            positions = torch.from_numpy(self._tree.positions)
            queries, keys = (
                positions[block.first : block.last],
                positions[block.start : block.stop],
            )
            inside = queries[:, None] - keys < window  # (queries, keys)
            if block.kind == "whole":
                if not inside.any():
                    return
                # keys that lie outside for every query
                skipped = int(inside.any(0).int().argmax())
                block, inside = block._replace(start=block.start + skipped), inside[:, skipped:]
            if block.kind == "causal" and not inside.all():
                mask = self._tree.sees(block.start, block.stop)
                block = block._replace(kind="masked")
            if not inside.all():
                mask = inside if mask is None else inside & mask
        self._masks[block] = mask

    def sees(self) -> Tensor:
        """bool (N, N), True where a query (row) sees a key (column)."""
        sees = torch.zeros(self.tokens, self.tokens, dtype=torch.bool)
        for block in self.blocks:
            mask = self._masks[block]
            if block.kind == "causal":
                mask = self._tree.sees(block.start, block.stop)
            sees[block.first : block.last, block.start : block.stop] |= (
                True if mask is None else mask
            )
        return sees

    def bias(self, block: Block, dtype: torch.dtype) -> Tensor | None:
        """The bias of the block's scores, (1, 1, queries, keys)."""
        mask = self._masks.get(block)
        if mask is None:
            return None
        if (block, dtype) not in self._biases:
            # A query that sees nothing of a block which is joined to others must stay finite.
            never = OUTSIDE if block.kind == "whole" else -torch.inf
            bias = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, never)
            self._biases[block, dtype] = bias[None, None]
        return self._biases[block, dtype]


def plan_blocks(stretches: Sequence[Stretch]) -> list[Block]:
    """Rectangles that cover every query and each key it sees once, chosen by cost.

    >>> from grpo_kit.engine.tree import build_tree
    >>> [block.kind for block in plan_blocks(build_tree([([5] * 300, [7, 8]), ([5] * 300, [9, 9])]).stretches)]
    ['causal', 'causal', 'whole', 'whole', 'masked']
    """
    subtrees: list[_Subtree] = []  # those without a parent yet, the first of them last
    for stretch in reversed(stretches):
        children = []
        while subtrees and subtrees[-1].start < stretch.end:
            children.append(subtrees.pop())
        cost, blocks = _causal(stretch.start, stretch.stop)
        if stretch.end > stretch.stop:
            block = Block("whole", stretch.stop, stretch.end, stretch.start, stretch.stop)
            blocks.append(block)
            cost += _whole_cost(block)
        inner_cost, inner_blocks = _side_by_side(children)
        subtrees.append(
            _Subtree(stretch.start, stretch.end, cost + inner_cost, blocks + inner_blocks)
        )
    return _side_by_side(subtrees[::-1])[1]


class _Subtree(NamedTuple):
    """A stretch and all its continuations, tokens start..end - 1; the cost of their attention, and its blocks."""

    start: int
    end: int
    cost: float
    blocks: list[Block]


def _side_by_side(subtrees: list[_Subtree]) -> tuple[float, list[Block]]:
    """Subtrees side by side, in order: runs of small ones in one masked square, if that is cheaper."""
    runs: list[list[_Subtree]] = []
    for subtree in subtrees:
        if runs and _square_cost([*runs[-1], subtree]) <= _square_cost(runs[-1]) + subtree.cost:
            runs[-1].append(subtree)
        else:
            runs.append([subtree])
    total, blocks = 0.0, []
    for run in runs:
        cost = sum(subtree.cost for subtree in run)
        if _square_cost(run) < cost:
            start, end = run[0].start, run[-1].end
            total += _square_cost(run)
            blocks.append(Block("masked", start, end, start, end))
        else:
            total += cost
            for subtree in run:
                blocks.extend(subtree.blocks)
    return total, blocks


def _square_cost(run: list[_Subtree]) -> float:
    return _CALL + float(run[-1].end - run[0].start) ** 2


def _causal(start: int, stop: int) -> tuple[float, list[Block]]:
    """A stretch over itself, cut in halves if that is cheaper."""
    length = stop - start
    if length <= _LARGEST:
        return _CALL + float(length) ** 2, [Block("causal", start, stop, start, stop)]
    middle = start + length // 2
    first_cost, first_blocks = _causal(start, middle)
    second_cost, second_blocks = _causal(middle, stop)
    block = Block("whole", middle, stop, start, middle)
    return first_cost + second_cost + _whole_cost(block), [*first_blocks, *second_blocks, block]


def _whole_cost(block: Block) -> float:
    queries, keys = block.last - block.first, block.stop - block.start
    return _CALL + queries * (keys + _JOIN)


class _TreeAttention(torch.autograd.Function):
    """query (1, H, N, D), key and value (1, Hkv, N, D), sinks (H,) or None -> (1, N, H, D)."""

    @staticmethod
    def forward(ctx, query, key, value, sinks, plan: TreePlan, scale: float):
        groups = query.size(1) // key.size(1)
        keys, values = _repeat(key, groups), _repeat(value, groups)
        out = torch.empty_like(
            query.transpose(1, 2), memory_format=torch.contiguous_format
        ).transpose(1, 2)
        lse = torch.empty(
            query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32)
        )
        for block in plan.blocks:
            rows, columns = slice(block.first, block.last), slice(block.start, block.stop)
            part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query[:, :, rows], keys[:, :, columns], values[:, :, columns], 0.0, block.kind == "causal",
                attn_mask=plan.bias(block, query.dtype), scale=scale,
            )  # fmt: skip
            if block.kind == "whole":
                share = torch.sigmoid(part_lse - lse[:, :, rows])[..., None].to(out.dtype)
                out[:, :, rows].lerp_(part, share)
                torch.logaddexp(lse[:, :, rows], part_lse, out=lse[:, :, rows])
            else:
                out[:, :, rows], lse[:, :, rows] = part, part_lse
        if sinks is not None:  # one more key, whose value is 0: the others' share falls
            total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            out = out * (lse - total).exp()[..., None].to(out.dtype)
            lse = total
        ctx.save_for_backward(query, key, value, out, lse, sinks)
        ctx.plan, ctx.scale = plan, scale
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, out, lse, sinks = ctx.saved_tensors
        plan, groups = ctx.plan, query.size(1) // key.size(1)
        keys, values = _repeat(key, groups), _repeat(value, groups)
        gradient = gradient.transpose(1, 2)
        by_query, by_key, by_value = (torch.zeros_like(x) for x in (query, keys, values))
        for block in plan.blocks:
            rows, columns = slice(block.first, block.last), slice(block.start, block.stop)
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient[:, :, rows], query[:, :, rows], keys[:, :, columns], values[:, :, columns],
                out[:, :, rows], lse[:, :, rows], 0.0, block.kind == "causal",
                attn_mask=plan.bias(block, query.dtype), scale=ctx.scale,
            )  # fmt: skip
            by_query[:, :, rows] += parts[0]
            by_key[:, :, columns] += parts[1]
            by_value[:, :, columns] += parts[2]
        by_key, by_value = (x.unflatten(1, (-1, groups)).sum(2) for x in (by_key, by_value))
        by_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            share = (sinks.to(lse.dtype)[:, None] - lse).exp()  # (1, H, N)
            by_sinks = -(share * (gradient * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
        return by_query, by_key, by_value, by_sinks, None, None


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: TreePlan,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of a tree's tokens to all tokens that they continue; differentiable. CPU.

    query (1, H, N, D); key, value (1, Hkv, N, D), H a multiple of Hkv; scale: of the scores. Returns (1, N, H, D).
    sinks (H,): scores of one more key a head, whose value is 0.
    """
    if torch.is_autocast_enabled("cpu"):  # as in torch's own attention
        query, key, value = (x.to(torch.get_autocast_dtype("cpu")) for x in (query, key, value))
    return _TreeAttention.apply(query, key, value, sinks, plan, scale)


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sees: Tensor,
    scale: float,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same by plain products under a mask, bool (N, N), for what no kernel has: scores capped by a tanh."""
    groups = query.size(1) // key.size(1)
    scores = (query @ _repeat(key, groups).mT).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~sees, -torch.inf)
    if sinks is not None:
        scores = torch.cat(
            [scores, sinks.float().view(-1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1
        )
    weights = scores.softmax(-1).to(value.dtype)[..., : key.size(2)]
    return (weights @ _repeat(value, groups)).transpose(1, 2).contiguous()


def _repeat(states: Tensor, groups: int) -> Tensor:
    """(1, Hkv, N, D) -> (1, Hkv * groups, N, D): query heads share a key head with their neighbours."""
    return states if groups == 1 else states.repeat_interleave(groups, dim=1)


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers calls this in each layer; the TreePlan lies in the config."""
    plan = module.config.handed_to_attention.within(options.get("sliding_window"))
    softcap, sinks = options.get("softcap"), options.get("s_aux")
    if softcap is not None:
        return dense_attention(
            query, key, value, plan.sees(), scaling, softcap=softcap, sinks=sinks
        ), None
    return tree_attention(query, key, value, plan, scaling, sinks), None


ALL_ATTENTION_FUNCTIONS.register(NAME, _forward)

"""Attention over a tree of shared prefixes in rectangles of queries and keys, skipping pairs that are masked.

A stretch attends to itself causally; all its continuations lie behind it and attend to all of it: one rectangle. For
many short stretches side by side, one masked square is cheaper than a call for each. The parts of a query's attention
are joined by their log-sum-exps (FlashDecoding; Milakov and Gimelshein, arXiv:1805.02867), and the backward pass of
each rectangle uses the joined output and log-sum-exp, which makes it exact. On a CPU, with torch's fused kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
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
        blocks = plan_blocks(tree.stretches)
        own = [block for block in blocks if block.kind != "whole"]
        self.blocks = own + [block for block in blocks if block.kind == "whole"]
        self.tokens, self._tree = len(tree), tree
        self._sees = {block: tree.sees(block.start, block.stop) for block in own if block.kind == "masked"}
        self._biases: dict[tuple[Block, torch.dtype], torch.Tensor] = {}
        self._windows: dict[int | None, TreePlan] = {None: self, window: self}
        if window is not None:
            self._cut(window)

    def within(self, window: int | None) -> TreePlan:
        """The plan of layers with this window."""
        if window not in self._windows:
            self._windows[window] = TreePlan(self._tree, window)
        return self._windows[window]

    def _cut(self, window: int) -> None:
        """Leave out keys outside the window of all of a rectangle's queries, and mask what is left to mask."""
        positions, kept = torch.from_numpy(self._tree.positions), []
        for block in self.blocks:
            query, key = positions[block.first : block.last], positions[block.start : block.stop]
            inside = query[:, None] - key < window  # (queries, keys)
            if block.kind == "whole":
                if not inside.any():
                    continue
                skipped = int(inside.any(0).int().argmax())  # keys that lie outside for every query
                block, inside = block._replace(start=block.start + skipped), inside[:, skipped:]
            if not inside.all():
                if block.kind == "causal":
                    inside &= self._tree.sees(block.start, block.stop)
                    block = block._replace(kind="masked")
                self._sees[block] = inside & self._sees.get(block, torch.tensor(True))
            kept.append(block)
        self.blocks = kept

    def sees(self) -> torch.Tensor:
        """bool (N, N), True where a query (row) sees a key (column)."""
        found = torch.zeros(self.tokens, self.tokens, dtype=torch.bool)
        for block in self.blocks:
            part = found[block.first : block.last, block.start : block.stop]
            part |= (
                self._tree.sees(block.start, block.stop)
                if block.kind == "causal"
                else self._sees.get(block, True)
            )
        return found

    def bias(self, block: Block, dtype: torch.dtype) -> torch.Tensor | None:
        """The bias of the block's scores, (1, 1, queries, keys)."""
        sees = self._sees.get(block)
        if sees is None:
            return None
        if (block, dtype) not in self._biases:
            # A query that sees nothing of a block which is joined to others must stay finite.
            never = OUTSIDE if block.kind == "whole" else -torch.inf
            bias = torch.zeros(sees.shape, dtype=dtype).masked_fill_(~sees, never)
            self._biases[block, dtype] = bias[None, None]
        return self._biases[block, dtype]


def plan_blocks(stretches: Sequence[Stretch]) -> list[Block]:
    """Rectangles that cover every query and each key it sees once, chosen by cost.

    >>> from grpo_kit.engine.tree import build_tree
    >>> [block.kind for block in plan_blocks(build_tree([([5] * 300, [7, 8]), ([5] * 300, [9, 9])]).stretches)]
    ['causal', 'causal', 'whole', 'whole', 'masked']
    """
    done: list[tuple[float, list[Block], Stretch]] = []  # whole subtrees, the first of them last
    for stretch in reversed(stretches):
        below = []
        while done and done[-1][2].start < stretch.end:
            below.append(done.pop())
        below_cost, blocks = _side_by_side(below)
        own_cost, own = _causal(stretch.start, stretch.stop)
        if stretch.end > stretch.stop:
            block = Block("whole", stretch.stop, stretch.end, stretch.start, stretch.stop)
            own, own_cost = [*own, block], own_cost + _whole_cost(block)
        done.append((own_cost + below_cost, own + blocks, stretch))
    return _side_by_side(done[::-1])[1]


def _side_by_side(parts: list[tuple[float, list[Block], Stretch]]) -> tuple[float, list[Block]]:
    """Subtrees side by side, in order: runs of small ones in one masked square, if that is cheaper."""
    total, blocks = 0.0, []
    run: list[tuple[float, list[Block], Stretch]] = []

    def square(some: list) -> float:
        return _CALL + float(some[-1][2].end - some[0][2].start) ** 2

    def close() -> None:
        nonlocal total
        apart = sum(cost for cost, _, _ in run)
        if run and square(run) < apart:
            start, stop = run[0][2].start, run[-1][2].end
            total += square(run)
            blocks.append(Block("masked", start, stop, start, stop))
        else:
            total += apart
            blocks.extend(block for _, own, _ in run for block in own)
        run.clear()

    for part in parts:
        if run and square([*run, part]) > square(run) + part[0]:
            close()
        run.append(part)
    close()
    return total, blocks


def _causal(start: int, stop: int) -> tuple[float, list[Block]]:
    """A stretch over itself, cut in halves if that is cheaper."""
    length = stop - start
    if length <= _LARGEST:
        return _CALL + float(length) ** 2, [Block("causal", start, stop, start, stop)]
    middle = start + length // 2
    (one, first), (other, second) = _causal(start, middle), _causal(middle, stop)
    block = Block("whole", middle, stop, start, middle)
    return one + other + _whole_cost(block), [*first, *second, block]


def _whole_cost(block: Block) -> float:
    queries, keys = block.last - block.first, block.stop - block.start
    return _CALL + queries * (keys + _JOIN)


class _TreeAttention(torch.autograd.Function):
    """query (1, H, N, D), key and value (1, Hkv, N, D), sinks (H,) or None -> (1, N, H, D)."""

    @staticmethod
    def forward(ctx, query, key, value, sinks, plan: TreePlan, scale: float):
        groups = query.size(1) // key.size(1)
        keys, values = _repeat(key, groups), _repeat(value, groups)
        out = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        lse = torch.empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
        for block in plan.blocks:
            first, last = slice(block.first, block.last), slice(block.start, block.stop)
            part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query[:, :, first], keys[:, :, last], values[:, :, last], 0.0, block.kind == "causal",
                attn_mask=plan.bias(block, query.dtype), scale=scale,
            )  # fmt: skip
            if block.kind != "whole":
                out[:, :, first], lse[:, :, first] = part, part_lse
            else:
                before = lse[:, :, first]
                share = torch.sigmoid(part_lse - before)[..., None].to(out.dtype)
                out[:, :, first].lerp_(part, share)
                torch.logaddexp(before, part_lse, out=before)
        if sinks is not None:  # one more key, whose value is 0: the others' share falls
            total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            out, lse = out * (lse - total).exp()[..., None].to(out.dtype), total
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
            first, last = slice(block.first, block.last), slice(block.start, block.stop)
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient[:, :, first], query[:, :, first], keys[:, :, last], values[:, :, last],
                out[:, :, first], lse[:, :, first], 0.0, block.kind == "causal",
                attn_mask=plan.bias(block, query.dtype), scale=ctx.scale,
            )  # fmt: skip
            by_query[:, :, first] += parts[0]
            by_key[:, :, last] += parts[1]
            by_value[:, :, last] += parts[2]
        by_key, by_value = (x.unflatten(1, (-1, groups)).sum(2) for x in (by_key, by_value))
        by_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            share = (sinks.to(lse.dtype)[:, None] - lse).exp()  # (1, H, N)
            by_sinks = -(share * (gradient * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
        return by_query, by_key, by_value, by_sinks, None, None


def tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: TreePlan,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of a tree's tokens to all tokens that they continue; differentiable. CPU.

    query (1, H, N, D); key, value (1, Hkv, N, D), H a multiple of Hkv; scale: of the scores. Returns (1, N, H, D).
    sinks (H,): scores of one more key a head, whose value is 0.
    """
    if torch.is_autocast_enabled("cpu"):  # as in torch's own attention
        query, key, value = (x.to(torch.get_autocast_dtype("cpu")) for x in (query, key, value))
    return _TreeAttention.apply(query, key, value, sinks, plan, scale)


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sees: torch.Tensor,
    scale: float,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same by plain products under a mask, bool (N, N), for what no kernel has: scores capped by a tanh."""
    groups = query.size(1) // key.size(1)
    scores = (query @ _repeat(key, groups).mT).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~sees, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(-1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    weights = scores.softmax(-1).to(value.dtype)[..., : key.size(2)]
    return (weights @ _repeat(value, groups)).transpose(1, 2).contiguous()


def _repeat(states: torch.Tensor, groups: int) -> torch.Tensor:
    """(1, Hkv, N, D) -> (1, Hkv * groups, N, D): query heads share a key head with their neighbours."""
    return states if groups == 1 else states.repeat_interleave(groups, dim=1)


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
    """transformers calls this in each layer; the TreePlan lies in the config."""
    plan = module.config.handed_to_attention.within(sliding_window)
    if softcap is not None:
        return dense_attention(query, key, value, plan.sees(), scaling, softcap=softcap, sinks=s_aux), None
    return tree_attention(query, key, value, plan, scaling, s_aux), None


ALL_ATTENTION_FUNCTIONS.register(NAME, _forward)

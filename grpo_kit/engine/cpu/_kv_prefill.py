"""Prompts on a CPU: one tree of all their shared tokens, each computed once, and a cache for tokens that return.

The keys and values of the common beginning of a batch's prompts (a task's system text and worked example) stay until
the next batch, which uses them if no weight has changed. If the next prompts continue these, like turns of
episodes, those of all prompts stay.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Sequence
from os.path import commonprefix
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from grpo_kit.engine._supported_models import signature
from grpo_kit.engine.cpu._layers import PlainLayers
from grpo_kit.engine.cpu._tree_attention import Block, TreePlan, tree_attention
from grpo_kit.engine.tree import build_tree

_WORTH_KEEPING = 96  # tokens whose keys take three times as long to compute as the weights' fingerprint


class _Prefilled(NamedTuple):
    """The input of decoding for P prompts.

    keys, values: a tensor (H, N, D) a layer; places: long (T,) for each prompt, its tokens among the N;
    hidden: (P, E), behind each prompt's last token; computed: how many of the N were not cached.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    places: list[torch.Tensor]
    hidden: torch.Tensor
    computed: int


class _Kept(NamedTuple):
    """Prompts, sorted; the places of their tokens among the N computed keys and values (as in _Prefilled),
    and the weights and settings they were computed with."""

    prompts: list[tuple[int, ...]]
    places: list[np.ndarray]
    weights: tuple
    settings: tuple
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def known(self, prompt: Sequence[int]) -> np.ndarray:
        """Places of the cached tokens that the prompt begins with, without its last token, whose output
        is needed."""
        prompt = tuple(prompt)
        at = bisect_left(self.prompts, prompt)  # the one that shares most is a neighbour in order
        found = (
            (len(commonprefix([self.prompts[i], prompt])), i)
            for i in (at - 1, at)
            if 0 <= i < len(self.prompts)
        )
        length, i = max(found, default=(0, 0))
        return self.places[i][: min(length, len(prompt) - 1)]


class TreeKVPrefill:
    """Computes batches of prompts; keeps one prefix, or all prompts of a batch, until `release`."""

    def __init__(self) -> None:
        self._kept: _Kept | None = None
        self._versions: tuple | None = None

    def release(self) -> None:
        """Drop the cache."""
        self._kept = None

    def __call__(
        self,
        base: PreTrainedModel,
        layers: PlainLayers,
        prompts: Sequence[Sequence[int]],
        *,
        keep: bool = False,
    ) -> _Prefilled:
        """Distinct prompts, each of at least one token. keep: the next batch's prompts continue these."""
        weights, kept = None, self._kept
        known = [kept.known(prompt) for prompt in prompts] if kept else []
        if max(map(len, known), default=0) < _WORTH_KEEPING or (kept.weights[0], kept.settings) != (
            versions(base),
            layers.settings,
        ):
            known = []
        else:
            weights = weight_version(base)
            known = known if weights == kept.weights else []
        made = self._compute(layers, prompts, kept, known)
        self._keep(base, layers, prompts, made, weights, used=bool(known), everything=keep)
        return made

    def _keep(
        self,
        base: PreTrainedModel,
        layers: PlainLayers,
        prompts: Sequence[Sequence[int]],
        made: _Prefilled,
        weights: tuple | None,
        *,
        used: bool,
        everything: bool,
    ) -> None:
        """Keep all prompts, or their common prefix if it is long and the weights do not change between batches."""
        before, self._versions = self._versions, versions(base)
        if everything:
            order = sorted(range(len(prompts)), key=lambda i: tuple(prompts[i]))
            rows, places = [tuple(prompts[i]) for i in order], [made.places[i].numpy() for i in order]
            keys, values = made.keys, made.values
        else:
            shared = tuple(prompts[0][: common_length(prompts)])
            if (
                used
                and len(self._kept.prompts) == 1
                and commonprefix([*self._kept.prompts, shared]) == shared
            ):
                return  # a cached prefix has all of it, and maybe more for the next batch
            self._kept = None
            if len(shared) < _WORTH_KEEPING or before not in (None, self._versions):
                return
            place = made.places[0][: len(shared)]
            keys, values = ([x.index_select(1, place) for x in part] for part in (made.keys, made.values))
            rows, places = [shared], [np.arange(len(shared))]
        self._kept = _Kept(rows, places, weights or weight_version(base), layers.settings, keys, values)

    def _compute(
        self,
        layers: PlainLayers,
        prompts: Sequence[Sequence[int]],
        kept: _Kept | None,
        known: Sequence[np.ndarray],
    ) -> _Prefilled:
        """All prompts. known: for each the cached places of its first tokens; [] if none is cached."""
        tree = build_tree([(prompt, ()) for prompt in prompts])
        source = np.full(len(tree), -1)  # where a token's keys are cached
        for place, there in zip(tree.places, known, strict=False):
            source[place[: len(there)]] = there
        source[[place[-1] for place in tree.places]] = -1
        new = np.flatnonzero(source < 0)
        plan = TreePlan(tree) if len(new) == len(tree) else _Asked(TreePlan(tree), source < 0)
        fresh, old = torch.from_numpy(new), torch.from_numpy(np.flatnonzero(source >= 0))
        taken = torch.from_numpy(source[source >= 0])
        keys, values = [], []

        def whole(part: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:  # (H, n, D) -> (H, N, D)
            if before is None:
                return part.contiguous()
            every = part.new_empty(part.size(0), len(tree), part.size(2))
            every[:, fresh] = part
            every[:, old] = before.index_select(1, taken)
            return every

        def attend(query, key, value, layer, scale):  # (n, H, G, D), (n, H, D) twice
            some = bool(len(old))
            keys.append(whole(key.transpose(0, 1), kept.keys[layer] if some else None))
            values.append(whole(value.transpose(0, 1), kept.values[layer] if some else None))
            query = query.flatten(1, 2).transpose(0, 1)
            if some:  # the other queries are not needed
                asked = query.new_zeros(query.size(0), len(tree), query.size(2))
                asked[:, fresh] = query
                query = asked
            found = tree_attention(query[None], keys[-1][None], values[-1][None], plan, scale)[0]
            return (found.index_select(0, fresh) if some else found).flatten(1)

        ids, positions = torch.from_numpy(tree.input_ids[new]), torch.from_numpy(tree.positions[new])
        hidden = layers.hidden(ids, positions, attend)
        last = torch.from_numpy(np.searchsorted(new, [place[-1] for place in tree.places]))
        places = [torch.from_numpy(place) for place in tree.places]
        return _Prefilled(keys, values, places, hidden.index_select(0, last), len(new))


class _Asked:
    """The blocks of a plan whose outputs are needed. asked: bool (N,)."""

    def __init__(self, plan: TreePlan, asked: np.ndarray) -> None:
        self._plan, before = plan, np.concatenate([[0], np.cumsum(asked)])
        self.blocks = [block for block in plan.blocks if before[block.last] > before[block.first]]

    def bias(self, block: Block, dtype: torch.dtype) -> torch.Tensor | None:
        return self._plan.bias(block, dtype)


def common_length(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens with which all prompts begin, at least one left to each.

    >>> common_length([[5, 6, 7], [5, 6, 8, 9]]), common_length([[5, 6], [5, 6, 7]])
    (2, 1)
    """
    # The common prefix of all is that of the smallest and the largest, which commonprefix compares.
    return min(len(commonprefix([list(p) for p in prompts])), min(map(len, prompts)) - 1)


# ---- a number that changes when weights change, so that a stale cache of keys and values is found -------------------


def versions(model: torch.nn.Module) -> tuple:
    """Addresses of the weights, torch's counts of writes to them, adapters and autocast: free, but blind to writes
    through `.data` and to memory that others write."""
    return signature(model), tuple(0 if t.is_inference() else t._version for t in _tensors(model))


@torch.no_grad()
def weight_version(model: torch.nn.Module) -> tuple:
    """`versions` and two numbers of each weight's values, whoever wrote them; costs about two reads of all weights.

    The exclusive or of all bits detects any change not made an even number of times; the product with two fixed
    vectors detects the others (changed signs, rows in another order) unless they are so small that rounding hides them.
    """
    values = []
    for tensor in _tensors(model):
        rows = tensor.detach().flatten(1) if tensor.dim() > 1 else tensor.detach().reshape(1, -1)
        by_row = (rows @ _vector(rows.size(1)).to(rows)).double()
        values += [_bits(rows), by_row @ _vector(len(by_row)).to(by_row)]
    return versions(model), tuple(value.item() for value in values)


def _bits(rows: torch.Tensor) -> torch.Tensor:
    if hasattr(torch, "hash_tensor"):
        return torch.hash_tensor(rows)
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()]
    return rows.view(whole).sum(dtype=torch.int64)  # torch 2.8: the sum of all bits read as whole numbers


def _tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


@functools.cache
def _vector(size: int) -> torch.Tensor:
    return torch.arange(1, size + 1, dtype=torch.float64).sin_()

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
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_kit.engine._supported_models import signature
from grpo_kit.engine.cpu._layers import PlainLayers
from grpo_kit.engine.cpu._tree_attention import TreePlan, tree_attention
from grpo_kit.engine.tree import build_tree

# tokens whose keys take three times as long to compute as the weights' fingerprint
_WORTH_KEEPING = 96


class _Prefilled(NamedTuple):
    """The input of decoding for P prompts.

    keys, values: a tensor (H, N, D) a layer; places: long (T,) for each prompt, its tokens among the N;
    hidden: (P, E), behind each prompt's last token; computed: how many of the N were not cached.
    """

    keys: list[Tensor]
    values: list[Tensor]
    places: list[Tensor]
    hidden: Tensor
    computed: int


class _Cache(NamedTuple):
    """Prompts, sorted; the places of their tokens among the N computed keys and values (as in _Prefilled),
    and the weights and settings they were computed with."""

    prompts: list[tuple[int, ...]]
    places: list[np.ndarray]
    weights: tuple
    settings: tuple
    keys: list[Tensor]
    values: list[Tensor]

    def places_of(self, prompt: Sequence[int]) -> np.ndarray:
        """Places of the cached tokens that the prompt begins with, without its last token, whose output
        is needed."""
        prompt = tuple(prompt)
        longest = self.places[0][:0]
        # the prompt that shares most is a neighbour in order
        index = bisect_left(self.prompts, prompt)
        for neighbour in range(max(index - 1, 0), min(index + 1, len(self.prompts))):
            shared = len(commonprefix([self.prompts[neighbour], prompt]))
            places = self.places[neighbour][: min(shared, len(prompt) - 1)]
            longest = max(places, longest, key=len)
        return longest


class TreeKVPrefill:
    """Computes batches of prompts; keeps one prefix, or all prompts of a batch, until `release`."""

    def __init__(self) -> None:
        self._cache: _Cache | None = None
        self._versions: tuple | None = None

    def release(self) -> None:
        """Drop the cache."""
        self._cache = None

    def __call__(
        self,
        base: PreTrainedModel,
        layers: PlainLayers,
        prompts: Sequence[Sequence[int]],
        *,
        keep: bool = False,
    ) -> _Prefilled:
        """Distinct prompts, each of at least one token. keep: the next batch's prompts continue these."""
        cached = self._cached_places(base, layers, prompts)
        prefilled = self._compute(layers, prompts, cached)
        shared = tuple(prompts[0][: common_length(prompts)])
        previous, self._versions = self._versions, versions(base)
        # reading all weights again would give the same
        weights = self._cache.weights if cached else None
        if keep:
            order = sorted(range(len(prompts)), key=lambda i: tuple(prompts[i]))
            sorted_prompts = [tuple(prompts[i]) for i in order]
            places = [prefilled.places[i].numpy() for i in order]
            keys, values = prefilled.keys, prefilled.values
        elif cached and self._has_prefix(shared):
            return prefilled
        elif len(shared) < _WORTH_KEEPING or previous not in (None, self._versions):
            self._cache = None  # too short, or weights change between batches
            return prefilled
        else:
            of_prefix = prefilled.places[0][: len(shared)]
            sorted_prompts = [shared]
            places = [np.arange(len(shared))]
            keys = [layer.index_select(1, of_prefix) for layer in prefilled.keys]
            values = [layer.index_select(1, of_prefix) for layer in prefilled.values]
        self._cache = None  # its memory goes before the weights are read
        weights = weights or weight_version(base)
        self._cache = _Cache(sorted_prompts, places, weights, layers.settings, keys, values)
        return prefilled

    def _cached_places(
        self, base: PreTrainedModel, layers: PlainLayers, prompts: Sequence[Sequence[int]]
    ) -> list[np.ndarray]:
        """For each prompt, the cached places of its first tokens; [] if too few are cached, or for other weights."""
        cache = self._cache
        if cache is None or (cache.weights[0], cache.settings) != (
            versions(base),
            layers.settings,
        ):
            return []
        places = [cache.places_of(prompt) for prompt in prompts]
        if max(map(len, places)) < _WORTH_KEEPING or weight_version(base) != cache.weights:
            return []
        return places

    def _has_prefix(self, prefix: tuple[int, ...]) -> bool:
        """Whether the cache is one prefix that begins with this one, and maybe has more for the next batch."""
        prompts = self._cache.prompts
        return len(prompts) == 1 and prompts[0][: len(prefix)] == prefix

    def _compute(
        self,
        layers: PlainLayers,
        prompts: Sequence[Sequence[int]],
        cached: Sequence[np.ndarray],
    ) -> _Prefilled:
        """All prompts. cached: for each the cached places of its first tokens; [] if none is cached."""
        tree = build_tree([(prompt, ()) for prompt in prompts])
        cached_at = np.full(len(tree), -1)  # a token's place in the cache
        for places, cached_places in zip(tree.places, cached, strict=False):
            cached_at[places[: len(cached_places)]] = cached_places
        last = [places[-1] for places in tree.places]
        cached_at[last] = -1
        is_new = cached_at < 0
        new = np.flatnonzero(is_new)
        computed = torch.from_numpy(new) if cached else slice(None)
        reused = torch.from_numpy(np.flatnonzero(~is_new))
        source = torch.from_numpy(cached_at[~is_new])
        plan = TreePlan(tree).of_queries(is_new)
        old_keys, old_values = (self._cache.keys, self._cache.values) if cached else ([], [])
        keys, values = [], []

        def in_tree(part: Tensor) -> Tensor:  # (H, n, D) -> (H, N, D), zeros for reused tokens
            states = part.new_zeros(part.size(0), len(tree), part.size(2))
            states[:, computed] = part
            return states

        def attend(query, key, value, layer, scale):  # (n, H, G, D), (n, H, D) twice
            keys.append(in_tree(key.transpose(0, 1)))
            values.append(in_tree(value.transpose(0, 1)))
            if cached:
                keys[-1][:, reused] = old_keys[layer].index_select(1, source)
                values[-1][:, reused] = old_values[layer].index_select(1, source)
            queries = in_tree(query.flatten(1, 2).transpose(0, 1))
            output = tree_attention(
                queries[None], keys[-1][None], values[-1][None], plan, scale
            )[0]
            return output[computed].flatten(1)

        ids = torch.from_numpy(tree.input_ids[new])
        positions = torch.from_numpy(tree.positions[new])
        hidden = layers.hidden(ids, positions, attend)
        last_computed = torch.from_numpy(np.searchsorted(new, last))
        places = [torch.from_numpy(row) for row in tree.places]
        return _Prefilled(keys, values, places, hidden.index_select(0, last_computed), len(new))


def common_length(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens with which all prompts begin, at least one left to each.

    >>> common_length([[5, 6, 7], [5, 6, 8, 9]]), common_length([[5, 6], [5, 6, 7]])
    (2, 1)
    """
    # The common prefix of all is that of the smallest and the largest, which commonprefix compares.
    return min(len(commonprefix([list(p) for p in prompts])), min(map(len, prompts)) - 1)


# ---- a number that changes when weights change, so that a stale cache of keys and values is found -------------------


def versions(model: nn.Module) -> tuple:
    """Addresses of the weights, torch's counts of writes to them, adapters and autocast: free, but blind to writes
    through `.data` and to memory that others write."""
    return signature(model), tuple(
        0 if t.is_inference() else t._version for t in (*model.parameters(), *model.buffers())
    )


@torch.no_grad()
def weight_version(model: nn.Module) -> tuple:
    """`versions` and two numbers of each weight's values, whoever wrote them; costs about two reads of all weights.

    The exclusive or of all bits detects any change not made an even number of times; the product with two fixed
    vectors detects the others (changed signs, rows in another order) unless they are so small that rounding hides them.
    """
    values = []
    for tensor in (*model.parameters(), *model.buffers()):
        rows = (
            tensor.detach().flatten(1) if tensor.dim() > 1 else tensor.detach().reshape(1, -1)
        )
        by_row = (rows @ _vector(rows.size(1)).to(rows)).double()
        values += [_bits(rows), by_row @ _vector(len(by_row)).to(by_row)]
    return versions(model), tuple(value.item() for value in values)


def _bits(rows: Tensor) -> Tensor:
    if hasattr(torch, "hash_tensor"):
        return torch.hash_tensor(rows)
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[
        rows.element_size()
    ]
    # torch 2.8: the sum of all bits read as whole numbers
    return rows.view(integers).sum(dtype=torch.int64)


@functools.cache
def _vector(size: int) -> Tensor:
    return torch.arange(1, size + 1, dtype=torch.float64).sin_()

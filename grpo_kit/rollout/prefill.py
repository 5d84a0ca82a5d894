"""Prompts on a CPU: one tree of all that they share, every token of it computed once, and what all share kept.

The keys and values of what all prompts of a batch begin with (a task's system text and worked example) stay until
the next batch, which uses them if it begins alike and not one weight has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from grpo_kit.rollout.fingerprint import fingerprint, versions
from grpo_kit.rollout.layers import PlainLayers
from grpo_kit.rollout.tree import build_tree
from grpo_kit.rollout.tree_attention import Block, TreePlan, tree_attention

_WORTH_KEEPING = 96  # tokens whose keys take three times as long to compute as the weights' fingerprint


class Prefill(NamedTuple):
    """What decoding needs of P prompts.

    keys, values: a tensor (H, N, D) a layer; places: long (T,) for each prompt, its tokens among the N;
    hidden: (P, E), behind each prompt's last token; computed: how many of the N were not known before.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    places: list[torch.Tensor]
    hidden: torch.Tensor
    computed: int


class _Kept(NamedTuple):
    """The tokens of a prefix, what it was computed with, and its keys and values as in Prefill."""

    ids: list[int]
    weights: tuple
    settings: tuple
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


class TreePrefill:
    """Computes batches of prompts; keeps one prefix until `release`."""

    def __init__(self) -> None:
        self._kept: _Kept | None = None
        self._versions: tuple | None = None

    def release(self) -> None:
        """Drop what is kept."""
        self._kept = None

    def __call__(
        self, base: PreTrainedModel, layers: PlainLayers, prompts: Sequence[Sequence[int]]
    ) -> Prefill:
        """Distinct prompts, each of at least one token."""
        shared = list(prompts[0][: common_length(prompts)])
        weights, kept = None, self._kept
        known = len(commonprefix([kept.ids, shared])) if kept else 0
        if known < _WORTH_KEEPING or (kept.weights[0], kept.settings) != (versions(base), layers.settings):
            known = 0
        else:
            weights = fingerprint(base)
            known = known if weights == kept.weights else 0
        made = self._compute(layers, prompts, kept, known)
        if known < len(shared):
            self._keep(base, layers, shared, made, weights)
        return made

    def _keep(
        self,
        base: PreTrainedModel,
        layers: PlainLayers,
        shared: list[int],
        made: Prefill,
        weights: tuple | None,
    ) -> None:
        """Keep the shared prefix if it is long, and if the weights do not move between batches anyway."""
        before, self._versions = self._versions, versions(base)
        self._kept = None
        if len(shared) < _WORTH_KEEPING or before not in (None, self._versions):
            return
        place = made.places[0][: len(shared)]
        keys, values = ([x.index_select(1, place) for x in part] for part in (made.keys, made.values))
        self._kept = _Kept(shared, weights or fingerprint(base), layers.settings, keys, values)

    def _compute(
        self, layers: PlainLayers, prompts: Sequence[Sequence[int]], kept: _Kept | None, known: int
    ) -> Prefill:
        """All prompts, the first `known` tokens of which are kept."""
        tree = build_tree([(prompt[known:], ()) for prompt in prompts])
        plan = _Behind(TreePlan(tree), known) if known else TreePlan(tree)
        keys, values = [], []

        def attend(query, key, value, layer, scale):  # (n, H, G, D), (n, H, D) twice
            key, value = key.transpose(0, 1), value.transpose(0, 1)
            query = query.flatten(1, 2).transpose(0, 1)
            if known:
                key = torch.cat([kept.keys[layer][:, :known], key], dim=1)
                value = torch.cat([kept.values[layer][:, :known], value], dim=1)
                query = torch.nn.functional.pad(query, (0, 0, known, 0))  # queries that nobody asks
            keys.append(key.contiguous())
            values.append(value.contiguous())
            found = tree_attention(query[None], keys[-1][None], values[-1][None], plan, scale)
            return found[0, known:].flatten(1)

        ids, positions = torch.from_numpy(tree.input_ids), torch.from_numpy(tree.positions + known)
        hidden = layers.hidden(ids, positions, attend)
        last = torch.tensor([place[-1] for place in tree.places])
        before = np.arange(known)
        places = [torch.from_numpy(np.concatenate([before, place + known])) for place in tree.places]
        return Prefill(keys, values, places, hidden.index_select(0, last), len(tree))


class _Behind:
    """A plan for the tokens behind a prefix that all of them see, which comes before them."""

    def __init__(self, plan: TreePlan, known: int) -> None:
        self._plan, self._known = plan, known
        moved = [Block(block.kind, *(place + known for place in block[1:])) for block in plan.blocks]
        own = [block for block in moved if block.kind != "whole"]
        whole = [block for block in moved if block.kind == "whole"]
        self.blocks = [*own, Block("whole", known, known + plan.tokens, 0, known), *whole]

    def bias(self, block: Block, dtype: torch.dtype) -> torch.Tensor | None:
        if block.kind != "masked":
            return None
        return self._plan.bias(Block(block.kind, *(place - self._known for place in block[1:])), dtype)


def common_length(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens with which all prompts begin, at least one left to each.

    >>> common_length([[5, 6, 7], [5, 6, 8, 9]]), common_length([[5, 6], [5, 6, 7]])
    (2, 1)
    """
    # The common prefix of all is that of the smallest and the largest, which is what commonprefix looks at.
    return min(len(commonprefix([list(p) for p in prompts])), min(map(len, prompts)) - 1)

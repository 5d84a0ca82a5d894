"""The packed row's attention for models whose layers differ: each layer's own window, soft cap and sinks.

transformers hands these to the attention function of a layer, so that no model's name is needed here. On a CPU
rollout/tree_attention.py does it; this is for FlexAttention, and for plain products under a dense mask.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo_kit.engine.packing import PackedBatch
from grpo_kit.rollout.tree_attention import dense_attention

NAME = "grpo_kit_packed"


class PackedMasks:
    """The masks of one packed row, by window. attention: "flex_attention" or "sdpa"."""

    def __init__(self, packed: PackedBatch, attention: str) -> None:
        self._packed, self.attention = packed, attention
        self._made: dict[int | None, Any] = {}

    def __getitem__(self, window: int | None) -> Any:
        if window not in self._made:
            make = self._packed.block_mask if self.attention == "flex_attention" else self._packed.dense_mask
            self._made[window] = make(window)
        return self._made[window]


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
    """transformers calls this in each layer; the PackedMasks lie in the config."""
    masks = module.config.handed_to_attention
    mask = masks[sliding_window]
    if masks.attention != "flex_attention" and (softcap is not None or s_aux is not None):
        found = dense_attention(query, key, value, mask, scaling, softcap=softcap, sinks=s_aux)
        return found, None
    only = {"softcap": softcap, "s_aux": s_aux} if masks.attention == "flex_attention" else {}
    return ALL_ATTENTION_FUNCTIONS[masks.attention](
        module, query, key, value, mask, scaling=scaling, **only, **kwargs
    )


ALL_ATTENTION_FUNCTIONS.register(NAME, _forward)

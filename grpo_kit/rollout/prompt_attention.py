"""Prompts on a card without the flash kernel: attention that stays one kernel there.

transformers leaves shared key heads to SDPA where nothing is masked. Only the flash kernel takes them: 16 bits, a card
from capability 8.0 on. Elsewhere torch would silently make all scores, some gigabytes for long prompts. With keys and
values repeated for the query heads the memory-efficient kernel does it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo_kit.rollout.attention import attention_named

NAME = "grpo_kit_repeated_heads"


def _forward(
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


ALL_ATTENTION_FUNCTIONS.register(NAME, _forward)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def attention_over_prompts(base: PreTrainedModel) -> AbstractContextManager[None]:
    """Inside, SDPA of shared key heads takes a fused kernel on any card."""
    device, dtype = base.device.type, base.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    name = base.config._attn_implementation
    if name == "sdpa" and device == "cuda":
        if dtype == torch.float32 or torch.cuda.get_device_capability(base.device) < (8, 0):
            name = NAME
    return attention_named(base, name)

"""Attention of rows that share their prompts, in two parts that are joined exactly.

A part is softmax attention over some of a query's keys together with the log-sum-exp of its scores. Two parts over
disjoint keys give attention over their union: part 2 weighs sigmoid(lse2 - lse1) (FlashDecoding; Milakov and
Gimelshein, arXiv:1805.02867). The shared prefix is thus a matrix product over all rows of a prompt, read once.
"""

from __future__ import annotations

from collections.abc import Iterator
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

"""Precision: the dtype and the memory in which weights lie, and how far a fast way may be from a plain one.

transformers loads weights in the requested dtype, or in one that the card can hold and compute in. Every part that is
compared with its plain way goes by one rule, and one table of limits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from grpo_kit._support.cuda import has_bf16
from grpo_kit.models._adapters import Tuning

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FLOAT32_TRAINING = 16  # bytes a weight in float32, with its gradient and AdamW's moments
# share of the card that they may fill; the rest is for activations, keys and values
_SHARE_OF_CARD = 0.5


@contextmanager
def float32_by_default() -> Iterator[None]:
    """Inside, torch's default dtype is float32, so that weights are drawn alike; afterwards it is restored."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        # transformers leaves another one where it is interrupted
        torch.set_default_dtype(before)


def resolve_dtype(dtype: str | torch.dtype | None, tuning: Tuning) -> torch.dtype | None:
    """The dtype for load_policy; None if it depends on the model's size, which from_pretrained then settles.

    Raises ValueError for an unknown dtype.
    """
    if dtype is None:
        if not has_bf16():
            return torch.float32
        return None if tuning == "full" else torch.bfloat16
    resolved = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if resolved not in _DTYPES.values():
        raise ValueError(f"dtype={dtype!r} is not known; use one of {', '.join(_DTYPES)}")
    return resolved


def from_pretrained(source: Path | str, kwargs: dict[str, Any]) -> PreTrainedModel:
    """transformers' from_pretrained, with a dtype by size if resolve_dtype left it open.

    On a CPU parameters and buffers are copied into memory of the process: transformers maps them from their file, and
    whoever writes over that changes them, or ends the process.
    """
    config = AutoConfig.from_pretrained(source)
    if kwargs["dtype"] is None:
        kwargs = {**kwargs, "dtype": dtype_that_fits(config)}
    # transformers 5.17 picks SDPA, which leaves it out
    if getattr(config, "attn_logit_softcapping", None):
        kwargs = {**kwargs, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(source, **kwargs)
    # a quantised weight is of another class, and keeps more beside its numbers
    plain = [
        weight
        for weight in (*model.parameters(), *model.buffers())
        if weight.is_cpu and type(weight) in (Tensor, nn.Parameter)
    ]
    for weight, copy in zip(plain, in_huge_pages(plain), strict=True):
        weight.data = copy
    return model


def in_huge_pages(
    tensors: Sequence[Tensor], dtype: torch.dtype | None = None
) -> Iterator[Tensor]:
    """Copies on the CPU, in another dtype if one is given, in pages of 2 MB where Linux has them.

    All weights are read once a token, and each page's address is looked up, which pages of 4 kB make 500 times as
    often. The copies lie in one block, since most weights are smaller than a large page; numpy asks Linux
    for large pages in blocks from 4 MB on. Each is made when it is asked for, so that its original can go before the
    next; the block goes with the last of them.
    """
    metas = [torch.empty_like(t, dtype=dtype, device="meta") for t in tensors]
    memory = np.empty(sum((meta.nbytes + 64 for meta in metas), 64), np.uint8)
    start = -memory.ctypes.data % 64
    for tensor, meta in zip(tensors, metas, strict=True):
        own = torch.from_numpy(memory[start : start + meta.nbytes])
        yield own.view(meta.dtype).view_as(meta).copy_(tensor.data)
        start += meta.nbytes + -meta.nbytes % 64


def dtype_that_fits(config: Any) -> torch.dtype:
    """float32 if training in it leaves the card room for the rest; else bfloat16, and prints a line with the reason."""
    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(config).num_parameters()
    training_gib = weights * _FLOAT32_TRAINING / 2**30
    card_gib = (
        torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / 2**30
    )
    if training_gib <= _SHARE_OF_CARD * card_gib:
        return torch.float32
    print(
        f"bfloat16 weights: in float32 they would take {training_gib:.3g} GiB with gradients and moments, of this "
        f"card's {card_gib:.3g}. Config(optimizer=None) takes 'adamw-8bit-split', which keeps what bfloat16 rounds "
        "away; any other loses most of each small update. Or load with dtype='float32'."
    )
    return torch.bfloat16


# Part -> what two right ways may be apart: in float32, in fewer bits, and in multiples of what rounding makes.
# Nats a token of the worst completion for the engine, else the norm of the difference by that of the plain way's.
# SmolLM2-135M on a CPU (python -m benchmarks.check_card --model smollm2-135m-instruct): engine and update are 1e-5 and
# 1.5e-4 off in float32, with a wrong mask 0.1 to 0.5 and 0.9, at a temperature of 1.25 instead of 1 0.5 and 0.2. In
# bfloat16 a right engine was at most 1.7 times as far off as rounding, one with a wrong mask 3.5 times and more.
# Of AdamW's change in the second step 8-bit moments are 0.07 to 0.12 off, fused AdamW under 1e-5; steps three times as
# long are 1.9 off, a wrong sign 2.
_LIMITS = {
    "engine": (1e-4, 1e-2, 2.5),
    "packed update": (1e-3, 5e-2, 2.5),
    "optimizer": (0.4, 0.4, 0.0),
}
_CANNOT_TELL = 0.4  # a limit above this would let a wrong mask through


@dataclass(frozen=True)
class Finding:
    """One part beside its plain way. outcome: "equal", "differs", "cannot tell" or "failed".

    apart: how far off, in the part's unit. most: what two right ways may be apart. why: what failed, or what hides a
    difference.
    """

    part: str
    outcome: str
    apart: float = math.nan
    most: float = math.nan
    why: str = ""

    def __str__(self) -> str:
        if self.outcome in ("equal", "differs"):
            return f"{self.part}: {self.outcome} (off by {self.apart:.2g}, at most {self.most:.2g})"
        return f"{self.part}: {self.outcome} ({self.why})"


def judged(part: str, error: float, rounding: float, narrow: bool) -> Finding:
    """The finding of a difference. rounding: how far two right ways were seen to be apart. narrow: see is_narrow."""
    float32, fewer_bits, times = _LIMITS[part]
    limit = max(fewer_bits if narrow else float32, times * rounding)
    if not error <= limit:  # larger, or NaN
        return Finding(part, "differs", error, limit)
    if limit > _CANNOT_TELL:
        why = f"rounding alone is {rounding:.2g}, so that off by {error:.2g} says nothing"
        return Finding(part, "cannot tell", error, limit, why)
    return Finding(part, "equal", error, limit)


def is_narrow(model: nn.Module, *, autocast: bool = False) -> bool:
    """Is any of the model's arithmetic in fewer bits than float32's?"""
    if hasattr(torch.backends, "fp32_precision"):
        tf32 = "tf32" in (
            torch.backends.cuda.matmul.fp32_precision,
            torch.backends.fp32_precision,
        )
    else:  # torch 2.8
        tf32 = torch.backends.cuda.matmul.allow_tf32
    if autocast or tf32:
        return True
    return any(p.dtype not in (torch.float32, torch.float64) for p in model.parameters())


def relative(changed: Sequence[Tensor], plain: Sequence[Tensor]) -> float:
    """Norm of the difference by the norm of the plain way's; infinite where that is 0, and for a NaN."""
    difference = sum(
        (a - b).double().square().sum().item() for a, b in zip(changed, plain, strict=True)
    )
    size = sum(b.double().square().sum().item() for b in plain)
    error = math.sqrt(difference / size) if size else math.inf
    return error if math.isfinite(error) else math.inf

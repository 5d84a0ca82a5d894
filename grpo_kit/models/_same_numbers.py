"""Does a fast way give a plain one's numbers? One rule for every part that is compared, and one table of limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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
        tf32 = "tf32" in (torch.backends.cuda.matmul.fp32_precision, torch.backends.fp32_precision)
    else:  # torch 2.8
        tf32 = torch.backends.cuda.matmul.allow_tf32
    if autocast or tf32:
        return True
    return any(p.dtype not in (torch.float32, torch.float64) for p in model.parameters())


def relative(changed: Sequence[Tensor], plain: Sequence[Tensor]) -> float:
    """Norm of the difference by the norm of the plain way's; infinite where that is 0, and for a NaN."""
    difference = sum((a - b).double().square().sum().item() for a, b in zip(changed, plain, strict=True))
    size = sum(b.double().square().sum().item() for b in plain)
    error = math.sqrt(difference / size) if size else math.inf
    return error if math.isfinite(error) else math.inf

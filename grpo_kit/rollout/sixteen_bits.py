"""Products in bfloat16 for the rollouts of a CPU that has them, over float32 weights that are trained.

The weights are rounded again before each rollout, into a copy half their size that goes when it ends. Embeddings,
norms, attention, adapters, biases and the sampler stay float32. What samples is then another policy by that rounding,
with log-probabilities of its own; the loss weighs each token by them (Config.sampler_weight_cap).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from grpo_kit.rollout.cpu_matmul import Projection

_ROWS = 16  # of the products for which oneDNN lays out the weights; others are as right


@dataclass(frozen=True)
class RoundedProjection(Projection):
    """A linear layer whose weight is there in bfloat16 besides, laid out for oneDNN; called as Projection is."""

    packed: Any = None

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x (R, K) @ weight.T, a new float32 tensor (R, N); summed in float32, rounded once."""
        return torch.ops.mkldnn._linear_pointwise(x.bfloat16(), self.packed, None, "none", [], "").float()


def _rounded(one: Projection) -> RoundedProjection:
    packed = torch.ops.mkldnn._reorder_linear_weight(one.weight.detach().bfloat16(), _ROWS)
    return RoundedProjection(one.weight, one.bias, one.adapters, packed)


def rounded(part: Any, projection: Callable[[Projection], Projection] = _rounded) -> Any:
    """A layer or a whole model's Parts with each Projection in them made another, from its weight as it is now."""
    if isinstance(part, Projection):
        return projection(part)
    if isinstance(part, list):
        return [rounded(each, projection) for each in part]
    found = {f.name: getattr(part, f.name) for f in fields(part)}
    others = {name: each for name, each in found.items() if isinstance(each, Projection | list)}
    return replace(part, **{name: rounded(each, projection) for name, each in others.items()})


def why_not_here() -> str | None:
    """None if this processor multiplies bfloat16 faster than float32, else why not."""
    has = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    if torch.ops.mkldnn._is_mkldnn_bf16_supported() and (has.get("avx512_bf16") or has.get("amx_bf16")):
        return None
    return "this processor has no products of bfloat16 (AVX512-BF16 or AMX), which would be slower here"

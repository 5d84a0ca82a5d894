"""Does an optimizer behave like AdamW on this machine? Two steps on copies, compared with torch's float32 AdamW."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from grpo_kit.optim.choose import new_optimizer

_LEAST_RATE = 1e-4  # below this, float32's own rounding of a weight is visible in the change
# Measured on SmolLM2-135M's weights and policy gradients: 8-bit moments are 0.07 to 0.12 off in the second step, fused
# AdamW under 1e-5; steps three times as long are 1.9 off, a wrong sign 2.
MOST = 0.4


def beside_adamw(
    name: str,
    weights: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: Sequence[float],
) -> float:
    """Norm of the difference in the change of all weights, divided by the norm of AdamW's change; infinite for a NaN.

    name: a key of choose.OPTIMIZERS. weights, gradients: 1-d tensors, copied first; weight_decay: one a tensor.
    Two steps with one gradient: the second reads the moments stored by the first. A result up to MOST is rounding.
    """
    options = {"lr": max(learning_rate, _LEAST_RATE), "betas": betas, "eps": eps}
    narrow = [w.dtype != torch.float32 for w in weights]
    copies = [torch.nn.Parameter(w.detach().clone()) for w in weights]
    optimizer = new_optimizer(name, _groups(copies, weight_decay), **options)
    master = getattr(optimizer, "master", None)
    for copy, short in zip(copies, narrow, strict=True):
        if (
            short and master is None
        ):  # its other bits cannot be read: on a weight of 0 a change keeps its own 8 bits
            copy.data.zero_()
    plain = [torch.nn.Parameter(copy.detach().float().clone()) for copy in copies]
    reference = torch.optim.AdamW(_groups(plain, weight_decay), **options, foreach=False, fused=False)
    starts = [p.detach().clone() for p in plain]
    for _ in range(2):
        for copy, p, gradient in zip(copies, plain, gradients, strict=True):
            copy.grad, p.grad = gradient.to(copy.dtype, copy=True), gradient.float()
        optimizer.step(), reference.step()
    apart = size = 0.0
    for copy, p, start in zip(copies, plain, starts, strict=True):
        found = copy.detach().float() if master is None else master(copy)
        apart += (found - p.detach()).double().square().sum().item()
        size += (p.detach() - start).double().square().sum().item()
    error = math.sqrt(apart / size) if size else math.inf
    return error if math.isfinite(error) else math.inf


def _groups(parameters: Sequence[torch.nn.Parameter], decay: Sequence[float]) -> list[dict]:
    return [{"params": [p], "weight_decay": d} for p, d in zip(parameters, decay, strict=True)]

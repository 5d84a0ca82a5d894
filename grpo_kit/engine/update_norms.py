"""RMSNorm as one kernel each way, inside the packed update on a card.

By transformers' module it is some 20 kernels over every token, in float32, and two copies are kept for the backward
pass. torch's own rms_norm computes the same in float32, rounds once in place of twice, and keeps its input and
a number a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import rms_norm

from grpo_kit.rollout.layers import shipped_norms


@contextmanager
def norms_in_one_kernel(model: torch.nn.Module) -> Iterator[None]:
    """Inside, the model's norms are torch's; also while the backward pass recomputes layers. Not on a CPU."""
    before = {kind: kind.forward for kind in shipped_norms(model)}
    for kind, forward in before.items():
        kind.forward = _in_one_kernel(forward)
    try:
        yield
    finally:
        for kind, forward in before.items():
            kind.forward = forward


def _in_one_kernel(forward: Any) -> Any:
    def norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if hidden_states.dtype != weight.dtype:
            return forward(self, hidden_states)
        with torch.autocast(hidden_states.device.type, enabled=False):  # which would make 16 bits float32
            return rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon)

    return norm

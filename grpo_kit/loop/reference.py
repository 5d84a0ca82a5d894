"""The reference of the KL: the weights that a run began with, in the model's own place while they are asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch


def start_weights(
    trained: Mapping[str, torch.nn.Parameter], beta: float | Callable[[float], float]
) -> dict[str, torch.Tensor] | None:
    """A copy of what is trained, by name. None where beta is 0 throughout: no reference is needed."""
    return {name: p.detach().clone() for name, p in trained.items()} if callable(beta) or beta else None


@contextmanager
def weights_of(
    trained: Mapping[str, torch.nn.Parameter], weights: Mapping[str, torch.Tensor]
) -> Iterator[None]:
    """Inside, the model has these weights: nothing is copied, tensors change places."""
    now = {name: p.data for name, p in trained.items()}
    try:
        for name, p in trained.items():
            p.data = weights[name]
        yield
    finally:
        for name, p in trained.items():
            p.data = now[name]

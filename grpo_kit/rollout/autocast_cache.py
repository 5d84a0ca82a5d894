"""Autocast's 16-bit copies of trained weights at addresses that stay, so that CUDA graphs may read them again.

Autocast keeps its own copies in a cache that goes when its outermost context ends, at the end of every rollout. The
copies here hold the same numbers, live from rollout to rollout and are refreshed where one begins: 2 bytes for each
weight that autocast would keep (float32, trained, in a linear layer), nothing for weights that are 16-bit already.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class AutocastCache:
    """The copies of one model's weights, made where a linear layer first needs them."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id: the weight and its copy

    def clear(self) -> None:
        """Give the copies back."""
        self._copies.clear()  # the one dict: a rollout that goes on fills it again

    def nbytes(self) -> int:
        """Bytes held."""
        return sum(copy.numel() * copy.element_size() for _, copy in self._copies.values())

    @contextmanager
    def instead_of_autocasts(self, device: str) -> Iterator[None]:
        """In here linear layers under autocast read these copies, of the weights as they are now.

        The numbers are autocast's. What it would cache of anything else is cast each time, in a graph too.
        """
        if not torch.is_autocast_enabled(device):
            yield
            return
        for weight, copy in self._copies.values():
            copy.copy_(weight)
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, dtype, cache_enabled=False), _Linear(self._copies, dtype):
            yield


class _Linear(TorchFunctionMode):
    """Hands linear() the copies; leaves all else alone."""

    def __init__(self, copies: dict[int, tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype) -> None:
        super().__init__()
        self._copies, self._dtype = copies, dtype

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is functional.linear:
            args = (args[0], *map(self._cast, args[1:]))
        return func(*args, **(kwargs or {}))

    def _cast(self, weight: torch.Tensor | None) -> torch.Tensor | None:
        kept = (
            weight is not None and weight.dtype == torch.float32 and weight.requires_grad and weight.is_leaf
        )
        if not kept or weight._is_view():
            return weight
        if id(weight) not in self._copies:
            self._copies[id(weight)] = weight, weight.detach().to(self._dtype)
        return self._copies[id(weight)][1]

"""Autocast's 16-bit copies of trained weights at fixed addresses, so that CUDA graphs may read them again.

Autocast caches its own copies until its outermost context ends, at the end of every rollout. The
copies here hold the same numbers, stay from rollout to rollout and are refreshed at the start of each: 2 bytes for
each weight that autocast would cache (float32, trained, in a linear layer), nothing for 16-bit weights.
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
        """Release the copies."""
        self._copies.clear()  # the same dict: a continued rollout fills it again

    def nbytes(self) -> int:
        """Bytes held."""
        return sum(copy.numel() * copy.element_size() for _, copy in self._copies.values())

    @contextmanager
    def instead_of_autocasts(self, device: str) -> Iterator[None]:
        """Inside, linear layers under autocast read these copies of the present weights.

        The numbers equal autocast's. Other tensors that it would cache are cast each time, in a graph too.
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
    """Gives linear() the copies; leaves all else unchanged."""

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

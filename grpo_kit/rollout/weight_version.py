"""Have the weights changed? Checked before results computed from them are used again."""

from __future__ import annotations

import functools

import torch

from grpo_kit.rollout.graphs import signature


def versions(model: torch.nn.Module) -> tuple:
    """Addresses of the weights, torch's counts of writes to them, adapters and autocast: free, but blind to writes
    through `.data` and to memory that others write."""
    return signature(model), tuple(0 if t.is_inference() else t._version for t in _tensors(model))


@torch.no_grad()
def weight_version(model: torch.nn.Module) -> tuple:
    """`versions` and two numbers of each weight's values, whoever wrote them; costs about two reads of all weights.

    The exclusive or of all bits detects any change not made an even number of times; the product with two fixed
    vectors detects the others (changed signs, rows in another order) unless they are so small that rounding hides them.
    """
    values = []
    for tensor in _tensors(model):
        rows = tensor.detach().flatten(1) if tensor.dim() > 1 else tensor.detach().reshape(1, -1)
        by_row = (rows @ _vector(rows.size(1)).to(rows)).double()
        values += [_bits(rows), by_row @ _vector(len(by_row)).to(by_row)]
    return versions(model), tuple(value.item() for value in values)


def _bits(rows: torch.Tensor) -> torch.Tensor:
    if hasattr(torch, "hash_tensor"):
        return torch.hash_tensor(rows)
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()]
    return rows.view(whole).sum(dtype=torch.int64)  # torch 2.8: the sum of all bits read as whole numbers


def _tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


@functools.cache
def _vector(size: int) -> torch.Tensor:
    return torch.arange(1, size + 1, dtype=torch.float64).sin_()

"""Products of few rows with the model's own weights, at about twice the speed of torch's linear layer on a CPU.

A linear layer multiplies the rows by the transposed weights, for which libraries rearrange all the weights for a
handful of rows. Here the weights are the left factor, as stored in memory, and only the rows are rearranged: no
copy of the weights, nothing to keep in sync.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch.nn.functional import linear
from torch.nn.modules import module as torch_module

_FEW = 4  # up to this number of rows BLAS has its own kernels
_MANY = 96  # from this number of rows on the usual product is as fast
_EVERY_MODULES = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
# transformers' own: for gradients of checkpointed inputs, and for requested hidden states. Here neither applies. The
# kit's on a head: the rows that it closes are left out here (models/_token_rows.py).
_IDLE = {"make_inputs_require_grads", "output_capturing_hook", "no_probability"}


def available() -> bool:
    """Does this build of torch have oneDNN's product?"""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def padded_rows(rows: int) -> int:
    """The number of rows computed for so many: that of the fastest product that holds them. Equal on all machines.

    >>> [padded_rows(n) for n in (1, 3, 5, 12, 17, 33, 49)]
    [2, 4, 8, 12, 32, 48, 64]
    """
    step = 2 if rows <= _FEW else 4 if rows <= 16 else 16
    return -(-rows // step) * step


def product(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """x @ weight.T for weight (N, K) and x (R, K), as (R, N) in whatever layout was fastest."""
    rows = x.size(0)
    if rows <= _FEW:
        return torch.mm(weight, x.contiguous().t()).t()
    if rows < _MANY:  # (N, K) as the rows, x as the weights
        return torch.ops.mkldnn._linear_pointwise(weight, x, None, "none", [], "").t()
    return linear(x, weight)


@dataclass(frozen=True)
class Projection:
    """A linear layer as its tensors: x (R, K) -> x W^T + b + the sum of scaling * B A x over its active adapters."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    adapters: tuple[tuple[torch.Tensor, torch.Tensor, float], ...]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(R, N), a new tensor in whatever layout was fastest."""
        y = self.product(x)
        if self.bias is not None:
            y = y.add_(self.bias)
        for a, b, scaling in self.adapters:
            y = y.add_(product(b, product(a, x)), alpha=scaling)
        return y

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x (R, K) @ weight.T, a new tensor (R, N) in whatever layout was fastest."""
        return product(self.weight, x)


def projection(module: torch.nn.Module, dtype: torch.dtype = torch.float32) -> Projection | None:
    """A plain linear layer, or one under plain LoRA adapters that are not merged; None for any other.

    dtype: of the layer; adapters are of it, or float32.
    """
    if type(module) is torch.nn.Linear:
        tensors = [t for t in (module.weight, module.bias) if t is not None]
        plain = is_plain(module) and all(is_plain_weight(t, dtype) for t in tensors)
        return Projection(module.weight, module.bias, ()) if plain else None
    lora = sys.modules.get("peft.tuners.lora")  # where nobody has imported it, no layer is of it
    if lora is None or type(module) is not lora.Linear:
        return None
    if not is_plain(module) or module.merged or module.fan_in_fan_out:
        return None
    base = projection(module.base_layer, dtype)
    names = [] if module.disable_adapters else [n for n in module.active_adapters if n in module.lora_A]
    if base is None or any(name in module.lora_variant for name in names):
        return None
    adapters = []
    for name in names:
        pair = [part[name] for part in (module.lora_A, module.lora_B)]
        parts = [projection(one, dtype) or projection(one) for one in pair]
        if any(part is None or part.bias is not None for part in parts):
            return None
        adapters.append((parts[0].weight, parts[1].weight, float(module.scaling[name])))
    return Projection(base.weight, base.bias, tuple(adapters))


def is_plain(module: torch.nn.Module) -> bool:
    """Does calling it only run its class's forward: no hooks, no forward of its own?"""
    hooks = (module._forward_hooks, module._forward_pre_hooks, *_EVERY_MODULES)
    named = {getattr(hook, "__name__", "") for some in hooks for hook in some.values()}
    return "forward" not in vars(module) and named <= _IDLE


def is_plain_weight(tensor: torch.Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Is it a parameter of the plain class and of this dtype, not a quantised one that only claims to be?"""
    return type(tensor) is torch.nn.Parameter and tensor.dtype == dtype

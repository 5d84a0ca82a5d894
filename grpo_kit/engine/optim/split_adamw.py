"""AdamW for bfloat16 weights that rounds nothing away, with 8-bit moments.

A float32 weight is its nearest bfloat16 plus 16 bits. The model holds the first, the optimizer the second, as
int16: together the exact float32 master weight, in 4 bytes instead of 6. The moments and their kernels (CPU and CUDA)
are bitsandbytes' AdamW8bit, which receives float32 only.

Simplification: the master of at most _CHUNK weights at a time is put together, updated, and split again, with plain
torch operations rather than one fused kernel. They work in one scratch of SCRATCH_BYTES, taken before a weight moves:
where a card has no such room, a smaller one is taken, and the step is the same bit for bit.
"""

from __future__ import annotations

import math
from typing import Any

import bitsandbytes.functional as F
import torch
from bitsandbytes.optim import AdamW8bit
from torch import Tensor

_BLOCK = 256  # weights that share one scale in bitsandbytes' 8-bit moments
_CHUNK = 2**24  # a multiple of _BLOCK
_LEAST_CHUNK = 2**16
# of master, gradient, whether it is a number
_SCRATCH_DTYPES = (torch.int32, torch.float32, torch.bool)
SCRATCH_BYTES = _CHUNK * sum(dtype.itemsize for dtype in _SCRATCH_DTYPES)


def join(weights: Tensor, low_bits: Tensor) -> Tensor:
    """bfloat16 weights and int16 low_bits of one shape -> the float32 master that they represent, exactly.

    >>> join(*split(torch.tensor([0.1, -3.7e-5]))).tolist() == torch.tensor([0.1, -3.7e-5]).tolist()
    True
    """
    return ((weights.view(torch.int16).to(torch.int32) << 16) + low_bits).view(torch.float32)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """float32 -> (nearest bfloat16, ties away from zero; int16 remainder in units of the last float32 bit)."""
    # Adding to the largest NaN patterns would carry into the sign; the quiet NaN is safe.
    bits = master.view(torch.int32).masked_fill(master.isnan(), 0x7FC00000)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


class SplitAdamW8bit(AdamW8bit):
    """bitsandbytes' AdamW8bit over the exact float32 master of bfloat16 weights.

    State, 4.03 bytes a weight: two 8-bit moments with a float32 scale a 256 weights, and `low_bits` (int16), all in
    state_dict(): a checkpoint of model and optimizer continues bit for bit. Weights saved without the optimizer are
    the rounded master, and lose at most half a bfloat16 step, once. Tensors under 4096 elements have float32 moments;
    float32 parameters (adapters) need no low_bits and are updated as in AdamW8bit.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        # else loading would cast them to the weights' dtype
        self.non_castable_tensor_keys.add("low_bits")

    def master(self, p: Tensor) -> Tensor:
        """float32 master of a parameter of this optimizer, same shape."""
        low_bits = self.state[p].get("low_bits") if p in self.state else None
        return p.detach().float() if low_bits is None else join(p.detach(), low_bits)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step. All states are made before any weight moves: without memory for them, none does."""
        if not self.initialized:
            self.check_overrides()
            self.to_gpu()
            self.initialized = True
        for gindex, group in enumerate(self.param_groups):
            for pindex, p in enumerate(group["params"]):
                if p.grad is not None and not self.state[p]:
                    self.init_state(group, p, gindex, pindex)
        return super().step(closure)

    @torch.no_grad()
    def init_state(self, group: dict, p: Tensor, gindex: int, pindex: int) -> None:
        super().init_state(group, p, gindex, pindex)
        if p.dtype == torch.bfloat16:
            self.state[p]["low_bits"] = torch.zeros_like(p, dtype=torch.int16)

    @torch.no_grad()
    def update_step(self, group: dict, p: Tensor, gindex: int, pindex: int) -> None:
        state = self.state[p]
        if "low_bits" not in state:
            super().update_step(group, p, gindex, pindex)
            return
        # Whole blocks, so that a chunk begins where a scale does.
        scratch = _scratch(min(math.ceil(p.numel() / _BLOCK) * _BLOCK, _CHUNK), p.device)
        chunk = len(scratch[0])
        p.data = p.data.contiguous()
        weights, low_bits = p.data.view(-1), state["low_bits"].view(-1)
        gradient = p.grad.reshape(-1)
        state["step"] += 1
        for start in range(0, p.numel(), chunk):
            part = slice(start, start + chunk)
            bits, g, is_nan = (buffer[: len(weights[part])] for buffer in scratch)
            # join
            bits.copy_(weights[part].view(torch.int16)).bitwise_left_shift_(16).add_(
                low_bits[part]
            )
            master = bits.view(torch.float32)
            g.copy_(gradient[part])
            _update_part(group, state, part, master, g)
            # split, with the gradient's memory for the upper half
            bits.masked_fill_(torch.ne(master, master, out=is_nan), 0x7FC00000)
            high = torch.add(bits, 0x8000, out=g.view(torch.int32)).bitwise_right_shift_(16)
            weights[part].view(torch.int16).copy_(high)
            low_bits[part].copy_(bits.sub_(high.bitwise_left_shift_(16)))


def _update_part(group: dict, state: dict, part: slice, master: Tensor, g: Tensor) -> None:
    """bitsandbytes' update of some of a parameter's weights, in their float32 master; g: their gradient."""
    beta1, beta2 = group["betas"]
    m, v = state["state1"].view(-1)[part], state["state2"].view(-1)[part]
    eps, step, lr, decay = group["eps"], state["step"], group["lr"], group["weight_decay"]
    if m.dtype != torch.uint8:
        F.optimizer_update_32bit(
            "adam", g, master, m, beta1, eps, step, lr, v, beta2, weight_decay=decay
        )
        return
    blocks = slice(part.start // _BLOCK, part.stop // _BLOCK)
    maps = state["qmap1"], state["qmap2"], state["absmax1"][blocks], state["absmax2"][blocks]
    F.optimizer_update_8bit_blockwise(
        "adam",
        g,
        master,
        m,
        v,
        beta1,
        beta2,
        0.0,
        0.0,
        eps,
        step,
        lr,
        *maps,
        weight_decay=decay,
    )


def _scratch(count: int, device: torch.device) -> list[Tensor]:
    """int32, float32 and bool of so many weights, whole blocks; of half as many and less, where memory is short."""
    try:
        return [torch.empty(count, dtype=kind, device=device) for kind in _SCRATCH_DTYPES]
    except torch.OutOfMemoryError:
        if count <= _LEAST_CHUNK:
            raise
    return _scratch(max(_LEAST_CHUNK, count // 2 // _BLOCK * _BLOCK), device)

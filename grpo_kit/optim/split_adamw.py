"""AdamW for bfloat16 weights that rounds nothing away, with 8-bit moments.

A float32 weight is its nearest bfloat16 plus 16 bits. The model holds the first, the optimizer the second, as
int16: together the exact float32 master weight, in 4 bytes instead of 6. The moments and their kernels (CPU and CUDA)
are bitsandbytes' AdamW8bit, which receives float32 only.

Simplification: the master of at most _CHUNK weights at a time is put together, updated, and split again, with plain
torch operations rather than one fused kernel: about 40 bytes of memory traffic a weight and step, 0.3 GiB at once.
"""

from __future__ import annotations

from typing import Any

import bitsandbytes.functional as F
import torch
from bitsandbytes.optim import AdamW8bit

_BLOCK = 256  # weights that share one scale in bitsandbytes' 8-bit moments
_CHUNK = 2**24  # a multiple of _BLOCK


def join(weights: torch.Tensor, low_bits: torch.Tensor) -> torch.Tensor:
    """bfloat16 weights and int16 low_bits of one shape -> the float32 master that they represent, exactly.

    >>> join(*split(torch.tensor([0.1, -3.7e-5]))).tolist() == torch.tensor([0.1, -3.7e-5]).tolist()
    True
    """
    return ((weights.view(torch.int16).to(torch.int32) << 16) + low_bits).view(torch.float32)


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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
        self.non_castable_tensor_keys.add("low_bits")  # else loading would cast them to the weights' dtype

    def master(self, p: torch.Tensor) -> torch.Tensor:
        """float32 master of a parameter of this optimizer, same shape."""
        low_bits = self.state[p].get("low_bits") if p in self.state else None
        return p.detach().float() if low_bits is None else join(p.detach(), low_bits)

    @torch.no_grad()
    def init_state(self, group: dict, p: torch.Tensor, gindex: int, pindex: int) -> None:
        super().init_state(group, p, gindex, pindex)
        if p.dtype == torch.bfloat16:
            self.state[p]["low_bits"] = torch.zeros_like(p, dtype=torch.int16)

    @torch.no_grad()
    def update_step(self, group: dict, p: torch.Tensor, gindex: int, pindex: int) -> None:
        state = self.state[p]
        if "low_bits" not in state:
            super().update_step(group, p, gindex, pindex)
            return
        p.data = p.data.contiguous()
        state["step"] += 1
        (beta1, beta2), eps, lr, decay = (group[k] for k in ("betas", "eps", "lr", "weight_decay"))
        step, quantised = state["step"], state["state1"].dtype == torch.uint8
        weights, low_bits, gradient = p.data.view(-1), state["low_bits"].view(-1), p.grad.reshape(-1)
        first, second = state["state1"].view(-1), state["state2"].view(-1)
        for start in range(0, p.numel(), _CHUNK):
            part, blocks = slice(start, start + _CHUNK), slice(start // _BLOCK, (start + _CHUNK) // _BLOCK)
            master, g = join(weights[part], low_bits[part]), gradient[part].float()
            m, v = first[part], second[part]
            if quantised:
                maps = state["qmap1"], state["qmap2"], state["absmax1"][blocks], state["absmax2"][blocks]
                F.optimizer_update_8bit_blockwise(
                    "adam", g, master, m, v, beta1, beta2, 0.0, 0.0, eps, step, lr, *maps, weight_decay=decay
                )
            else:
                F.optimizer_update_32bit(
                    "adam", g, master, m, beta1, eps, step, lr, v, beta2, weight_decay=decay
                )
            weights[part], low_bits[part] = split(master)

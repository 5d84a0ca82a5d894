"""flashoptim's own kernels on a CPU, through Triton's interpreter: their arithmetic without a GPU.

Not a command of its own: it measures the flashoptim rows of `python -m benchmarks.precision`. It stays because those
rows are why `make_optimizer("flash-adamw")` asks for 32 bits and not for flashoptim's own 24, and nothing else can
measure them again without a GPU.
Needs `pip install --no-deps flashoptim triton`. What is put in the place of CUDA, nothing else: the number of
processors, pow and copysign of CUDA's libdevice, one block a launch instead of autotuning, and rounding to bfloat16
to nearest, where the interpreter truncates. A GPU may differ in the last bit of pow and division; speed, streams
and the compiled code are not covered.

Import it before anything else imports triton.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import types
from collections.abc import Callable
from unittest import mock

import flashoptim.optimizers as flash
import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

from grpo_kit.more.lab.rounding import Arm

_BLOCK = 2**15  # elements; multiple of the 32 that share a scale


def _round_to_nearest(
    values: np.ndarray, source: tl.dtype, target: tl.dtype, mode: object
) -> np.ndarray:
    if (source, target) != (tl.float32, tl.bfloat16):
        return _truncate(values, source, target, mode)
    rounded = torch.from_numpy(np.ascontiguousarray(values).view(np.float32)).bfloat16()
    return rounded.view(torch.int16).numpy().view(np.uint16)


class _OneLaunch:
    """kernel[grid](...) in one program of _BLOCK elements a turn."""

    def __init__(self, kernel: object) -> None:
        self.kernel = getattr(kernel, "fn", kernel) if hasattr(kernel, "configs") else kernel

    def __getitem__(self, grid: object) -> Callable:
        return lambda *args, **kwargs: self.kernel[(1,)](
            *args, **{**kwargs, "BLOCK_SIZE_N": _BLOCK}
        )


class _Quantized(flash._MaybeQuantizedTensor):
    """Quantises where the original asks for CUDA first."""

    def __init__(
        self, data: torch.Tensor | None, try_quantize: bool = True, **options: object
    ) -> None:
        with mock.patch("torch.cuda.is_available", lambda: True):
            super().__init__(None, try_quantize=try_quantize, **options)
        if data is not None:
            self.set_data(data)

    def set_data(self, data: torch.Tensor) -> None:
        if not self._try_quantize:
            super().set_data(data)
            return
        self._quantized, self._scales = flash.quantize(
            data, signed=self._signed, sqrt=self._sqrt, softsign=self._softsign
        )


_truncate = interpreter._convert_float
interpreter._convert_float = _round_to_nearest
flash._get_sm_count = lambda device=None: 1
flash.libdevice = types.SimpleNamespace(
    pow=lambda base, power: tl.exp2(tl.log2(base) * power.to(tl.float32)),
    copysign=lambda size, sign: tl.where(sign < 0, -size, size),
)
flash._MaybeQuantizedTensor = _Quantized
for _name in ("_triton_quantize_kernel", "_triton_dequantize_kernel", "_triton_adam_kernel"):
    setattr(flash, _name, _OneLaunch(getattr(flash, _name)))


def flash_adamw(params: object, **options: object) -> flash.FlashAdamW:
    """FlashAdamW over CPU parameters."""
    with mock.patch("torch.cuda.is_available", lambda: True):
        return flash.FlashAdamW(params, **options)


def flash_arm(bits: int) -> Callable[[torch.Tensor, float], Arm]:
    """An arm for `grpo_kit.more.lab.rounding.update_survival`; bits: width of the master weight, 24 or 32."""

    def arm(weights: torch.Tensor, lr: float) -> Arm:
        p = torch.nn.Parameter(weights.clone())
        optimizer = flash_adamw([p], lr=lr, weight_decay=0.0, master_weight_bits=bits)
        return Arm(
            p,
            optimizer,
            lambda: flash.reconstruct_fp32_param(p.detach(), optimizer.state[p]["error_bits"]),
        )

    return arm

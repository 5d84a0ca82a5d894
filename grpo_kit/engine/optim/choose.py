"""Which optimizer for which weights: every choice here preserves the changes of a small learning rate.

A bfloat16 weight has 8 significant bits. At a learning rate of 1e-6 a step is far below half of its last bit.
Rounding to nearest therefore restores the old weight, step after step: about 1 % of a float32 run's change survives
(`rounding.update_survival` measures it). So use float32 weights, or bfloat16 weights and an optimizer that
keeps the rest.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from grpo_kit._support.argument_checks import check_choice, check_model, check_number, is_number

_BFLOAT16, _FLOAT32 = torch.bfloat16, torch.float32
# of a parameter group; the rate is the step's
SETTINGS = ("betas", "eps", "weight_decay", "momentum")


@dataclass(frozen=True)
class OptimizerChoice:
    """One optimizer.

    weights: dtype of the trained weights it is made for; float32 adapters suit all but flash-adamw.
    state_bytes: bytes of optimizer state a trained parameter, besides weight and gradient.
    cuda_only: whether a CPU cannot run it. description: one line.
    """

    weights: torch.dtype
    state_bytes: float
    cuda_only: bool
    description: str

    def state_of(self, itemsize: int) -> float:
        """Bytes of state for a parameter of itemsize bytes; a float32 weight has no extra bits to store."""
        return self.state_bytes - (2 if self.weights is _BFLOAT16 and itemsize == 4 else 0)


OPTIMIZERS: dict[str, OptimizerChoice] = {
    "adamw": OptimizerChoice(
        _FLOAT32, 8.0, False, "torch's AdamW: float32 weights and moments, the reference"
    ),
    "adamw-8bit": OptimizerChoice(
        _FLOAT32,
        2.03,
        False,
        "bitsandbytes' AdamW8bit: float32 weights, 8-bit moments, one scale a 256 weights",
    ),
    "adamw-8bit-split": OptimizerChoice(
        _BFLOAT16,
        4.03,
        False,
        "the same update on bfloat16 weights whose other 16 bits the optimizer keeps: an exact float32 master",
    ),
    "flash-adamw": OptimizerChoice(
        _BFLOAT16,
        4.13,
        True,
        "flashoptim's fused AdamW: bfloat16 weights, 16 correction bits, 8-bit moments; "
        "gradients under about 1e-5 take steps too large (its scales are float16)",
    ),
}


def make_optimizer(
    name: str,
    model: nn.Module,
    *,
    learning_rate: float,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> torch.optim.Optimizer:
    """An AdamW over the trainable parameters of the model; weight decay on matrices only, as in transformers.

    name: a key of OPTIMIZERS. learning_rate: the highest of the schedule, >= 0.
    Move the model to its device first.
    Raises ValueError for an unknown name, a missing package or card, no trainable parameter, and for weights on which
    this optimizer would round most of every update away.

    >>> from grpo_kit import load_policy
    >>> model, _ = load_policy("tiny-random", dtype="bfloat16", quiet=True)
    >>> type(make_optimizer("adamw-8bit-split", model, learning_rate=1e-6)).__name__
    'SplitAdamW8bit'
    """
    check_choice("name", name, OPTIMIZERS)
    check_model(model)
    for label, value in (
        ("learning_rate", learning_rate),
        ("weight_decay", weight_decay),
        ("eps", eps),
    ):
        check_number(label, value, 0)
    is_pair = isinstance(betas, tuple | list) and len(betas) == 2
    if not is_pair or not all(is_number(beta) and 0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas={betas!r} must be two numbers in [0, 1)")
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError(
            "model has no trainable parameter; load it with tuning='full' or 'lora'"
        )
    check_bitsandbytes(name)
    _check_weights(name, parameters, learning_rate)
    if OPTIMIZERS[name].cuda_only:
        _check_flash(parameters)

    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return new_optimizer(name, groups, lr=learning_rate, betas=tuple(betas), eps=eps)


def new_optimizer(
    name: str, groups: list[dict[str, Any]], **options: Any
) -> torch.optim.Optimizer:
    """The optimizer of that name over torch's parameter groups; options: lr, betas, eps. Unchecked."""
    if name == "adamw":
        return torch.optim.AdamW(groups, **options, fused=True)
    if name == "adamw-8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(groups, **options)
    if name == "adamw-8bit-split":
        from grpo_kit.engine.optim.split_adamw import SplitAdamW8bit

        return SplitAdamW8bit(groups, **options)
    from flashoptim import FlashAdamW

    # Its default, 24 bits, loses 15 to 78 % of the change at a learning rate of 1e-6: benchmarks/results/precision.json
    return FlashAdamW(groups, **options, master_weight_bits=32)


def choose_optimizer(name: str | None, model: nn.Module) -> str:
    """The name of the optimizer. None: AdamW, for trained bfloat16 weights the one that keeps the rounded-off part.

    Raises ValueError for an unknown name and a missing package.
    """
    if name is not None:
        check_choice("optimizer", name, OPTIMIZERS)
    else:
        narrow = any(p.requires_grad and p.dtype == _BFLOAT16 for p in model.parameters())
        name = "adamw-8bit-split" if narrow else "adamw"
    check_bitsandbytes(name)
    return name


def check_bitsandbytes(name: str) -> None:
    """Raises ValueError for an optimizer with 8-bit moments if the package with their kernels is missing."""
    if "8bit" in name and importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(
            f"optimizer {name!r}, which bfloat16 weights are trained by unless another is named, needs the package "
            "bitsandbytes: run `pip install \"grpo-kit[cuda]\"`, or load with dtype='float32' and use 'adamw'"
        )


def share_that_moves(parameters: list[Tensor], learning_rate: float) -> float:
    """Share, in [0, 1], of weights that a step of size learning_rate changes when rounded to nearest.

    A weight in [2**e, 2**(e + 1)), stored with machine epsilon u, moves for a step of at least 2**e * u / 2.

    >>> round(share_that_moves([torch.tensor([1.0, 1e-4], dtype=torch.bfloat16)], 1e-6), 1)
    0.5
    """
    moved = 0
    for p in parameters:
        # the next power of two
        limit = 2.0 ** math.frexp(2 * learning_rate / torch.finfo(p.dtype).eps)[1]
        moved += (p.detach().abs() < limit).sum().item()
    return moved / sum(p.numel() for p in parameters)


def _check_weights(name: str, parameters: list[nn.Parameter], learning_rate: float) -> None:
    if any(p.dtype == torch.float16 for p in parameters):
        raise ValueError(
            "trained weights of float16: AdamW's eps and most squared gradients are 0 there, so that a step may be of "
            "any size; load with dtype='float32', with dtype='bfloat16', or with tuning='lora', whose adapters are "
            "float32 over weights of any dtype. autocast='float16' computes products of float32 weights in float16"
        )
    narrow = [p for p in parameters if p.dtype != _FLOAT32]
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in narrow})
    if OPTIMIZERS[name].weights == _BFLOAT16:
        if any(p.dtype != _BFLOAT16 for p in narrow):
            raise ValueError(
                f"optimizer {name!r} is for bfloat16 weights, these are {dtypes}; load with dtype='bfloat16'"
            )
        return
    if not narrow or learning_rate == 0:
        return
    share = share_that_moves(narrow, learning_rate)
    if share < 0.5:
        dtype = dtypes[0]
        raise ValueError(
            f"optimizer {name!r} on {dtype} weights at learning_rate={learning_rate:g} would not learn: a step changes "
            f"{share:.1%} of the weights, the rest round back; use 'adamw-8bit-split', or load with dtype='float32'"
        )


def _check_flash(parameters: list[nn.Parameter]) -> None:
    if importlib.util.find_spec("flashoptim") is None:
        raise ValueError(
            "optimizer 'flash-adamw' needs the package flashoptim: run `pip install \"grpo-kit[flash]\"`, "
            "or use 'adamw-8bit-split'"
        )
    if any(p.device.type != "cuda" for p in parameters):
        raise ValueError(
            "optimizer 'flash-adamw' needs CUDA and the model on it; use 'adamw-8bit-split'"
        )
    if any(p.dtype != _BFLOAT16 for p in parameters):
        raise ValueError(
            "optimizer 'flash-adamw' has correction bits for bfloat16 weights, some here are float32; use 'adamw-8bit'"
        )

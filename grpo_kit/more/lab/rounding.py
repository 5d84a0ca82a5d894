"""How much of a small update survives: optimizers on bfloat16 weights, compared with float32 on the same gradients.

Two shares of the float32 run's change, because they differ. `kept` counts what optimizer and weights hold together:
what is lost here is lost for good. `in_weights` counts the stored weights alone, with which the model computes. A
change smaller than half a step of the format waits in the optimizer, as in float32 training under autocast.

Simplification: the gradients are given (a constant signal in noise), so an arm's own errors do not feed back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import pandas as pd
import torch

from grpo_kit._support.argument_checks import check_whole
from grpo_kit.engine.optim.choose import check_bitsandbytes, new_optimizer

if TYPE_CHECKING:
    pass


class Arm(NamedTuple):
    """A parameter under training, its optimizer, and a function returning the float32 values both hold together."""

    parameter: torch.nn.Parameter
    optimizer: torch.optim.Optimizer
    master: Callable[[], torch.Tensor]


def _arm(
    name: str,
    dtype: torch.dtype,
    weights: torch.Tensor,
    lr: float,
) -> Arm:
    """name: of an optimizer in OPTIMIZERS, made for these weights or not."""
    parameter = torch.nn.Parameter(weights.to(dtype, copy=True))
    if name == "adamw":
        optimizer = torch.optim.AdamW([parameter], lr=lr, weight_decay=0.0)
    else:
        check_bitsandbytes(name)
        optimizer = new_optimizer(name, [{"params": [parameter]}], lr=lr, weight_decay=0.0)
    if name == "adamw-8bit-split":
        return Arm(parameter, optimizer, lambda: optimizer.master(parameter))
    return Arm(parameter, optimizer, lambda: parameter.detach().float())


def _stochastic(weights: torch.Tensor, lr: float) -> Arm:
    """Rounds up or down to a neighbouring bfloat16 with the probability that keeps the mean; float32 moments."""
    arm = _arm("adamw", torch.float32, weights, lr)
    generator = torch.Generator(weights.device).manual_seed(0)

    def round_weights(*_: object) -> None:
        bits = arm.parameter.data.view(torch.int32)
        bits += torch.randint(
            2**16,
            bits.shape,
            generator=generator,
            dtype=torch.int32,
            device=bits.device,
        )
        bits &= -(2**16)

    arm.optimizer.register_step_post_hook(round_weights)
    return arm


_REFERENCE = partial(_arm, "adamw", torch.float32)
ARMS: dict[str, Callable[[torch.Tensor, float], Arm]] = {
    "adamw, float32 weights": _REFERENCE,
    "adamw-8bit, float32 weights": partial(_arm, "adamw-8bit", torch.float32),
    "adamw-8bit-split, bfloat16 weights": partial(_arm, "adamw-8bit-split", torch.bfloat16),
    "adamw, bfloat16 rounded at random": _stochastic,
    "adamw, bfloat16 rounded to nearest": partial(_arm, "adamw", torch.bfloat16),
}


def update_survival(
    learning_rates: Sequence[float] = (1e-6, 5e-6, 1e-5),
    *,
    steps: int = 100,
    weights: torch.Tensor | None = None,
    gradients: torch.Tensor | None = None,
    gradient_rms: float = 2.5e-5,
    signal: float = 0.1,
    seed: int = 0,
    arms: Mapping[str, Callable[[torch.Tensor, float], Arm]] = ARMS,
) -> pd.DataFrame:
    """Share of a float32 AdamW run's weight change that each optimizer keeps, on the same gradients.

    weights: (N,) start values, rounded to bfloat16 first, like published checkpoints; None draws 2**15 from a
    normal distribution of standard deviation 0.03.
    gradients: (S, N) real ones, one row a step; None draws `steps` rows: a constant of spread `signal` plus noise of
    spread 1, times gradient_rms. Its default is the size after clipping 1.5 billion gradients at norm 1.
    Returns one row an arm and rate: optimizer, learning_rate; kept and in_weights, the change projected on the float32
    run's, 1 = all of it; error, the norm of the difference over the norm of the change (counts noise, too).
    Seconds on a CPU.

    >>> table = update_survival([1e-6], steps=20)
    >>> bool(table.set_index("optimizer").kept["adamw, bfloat16 rounded to nearest"] < 0.05)
    True
    """
    check_whole("steps", steps)
    draw = partial(
        torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float32
    )
    if weights is None:
        weights = 0.03 * draw(2**15 if gradients is None else gradients.shape[1])
    if gradients is None:
        mean = signal * draw(weights.numel())
        noise = draw(steps, weights.numel())
        gradients = gradient_rms * (mean + noise)  # (S, N)
    if gradients.ndim != 2 or gradients.shape[1] != weights.numel():
        shapes = tuple(gradients.shape), tuple(weights.shape)
        raise ValueError(f"gradients, weights have shapes {shapes}; give (S, N) and (N,)")
    start = weights.detach().flatten().to(torch.bfloat16)
    rows = []
    for lr in learning_rates:
        reference, _ = _changes(_REFERENCE, start, lr, gradients)
        for name, arm in arms.items():
            change, stored_change = _changes(arm, start, lr, gradients)
            rows.append(
                {
                    "optimizer": name,
                    "learning_rate": lr,
                    "kept": float(change @ reference / (reference @ reference)),
                    "in_weights": float(stored_change @ reference / (reference @ reference)),
                    "error": float((change - reference).norm() / reference.norm()),
                }
            )
    return pd.DataFrame(rows)


def _changes(
    make_arm: Callable[[torch.Tensor, float], Arm],
    start: torch.Tensor,
    lr: float,
    gradients: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The change that optimizer and weights hold together, and that of the stored weights; float64 (N,)."""
    arm = make_arm(start, lr)
    for gradient in gradients:
        arm.parameter.grad = gradient.to(arm.parameter.dtype)
        arm.optimizer.step()
    change = arm.master().double() - start.double()
    stored_change = arm.parameter.detach().double() - start.double()
    return change, stored_change

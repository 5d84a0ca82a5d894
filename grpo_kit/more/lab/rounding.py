"""How much of a small update survives: optimizers on bfloat16 weights, compared with float32 on the same gradients.

Two shares of the float32 run's change, because they differ. `kept` counts what optimizer and weights hold together:
what is lost here is lost for good. `in_weights` counts the stored weights alone, with which the model computes. A
change smaller than half a step of the format waits in the optimizer, as in float32 training under autocast.

Simplification: the gradients are given (a constant signal in noise), so an arm's own errors do not feed back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import pandas as pd
import torch

from grpo_kit._support.argument_checks import check_whole
from grpo_kit.engine.optim.choose import check_bitsandbytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Arm(NamedTuple):
    """A parameter under training, its optimizer, and a function returning the float32 values both hold together."""

    parameter: torch.nn.Parameter
    optimizer: torch.optim.Optimizer
    master: Callable[[], torch.Tensor]


def _arm(weights: torch.Tensor, optimizer: Callable[..., torch.optim.Optimizer], lr: float) -> Arm:
    parameter = torch.nn.Parameter(weights)
    return Arm(parameter, optimizer([parameter], lr=lr, weight_decay=0.0), lambda: parameter.detach().float())


def _adamw(weights: torch.Tensor, lr: float) -> Arm:
    return _arm(weights.float(), torch.optim.AdamW, lr)


def _rounded(weights: torch.Tensor, lr: float) -> Arm:
    return _arm(weights.clone(), torch.optim.AdamW, lr)


def _stochastic(weights: torch.Tensor, lr: float) -> Arm:
    """Rounds up or down to a neighbouring bfloat16 with the probability that keeps the mean; float32 moments."""
    arm = _adamw(weights, lr)
    generator = torch.Generator(weights.device).manual_seed(0)

    def round_weights(*_: object) -> None:
        bits = arm.parameter.data.view(torch.int32)
        bits += torch.randint(2**16, bits.shape, generator=generator, dtype=torch.int32, device=bits.device)
        bits &= -(2**16)

    arm.optimizer.register_step_post_hook(round_weights)
    return arm


def _adamw_8bit(weights: torch.Tensor, lr: float) -> Arm:
    check_bitsandbytes("adamw-8bit")
    from bitsandbytes.optim import AdamW8bit

    return _arm(weights.float(), AdamW8bit, lr)


def _split(weights: torch.Tensor, lr: float) -> Arm:
    check_bitsandbytes("adamw-8bit-split")
    from grpo_kit.engine.optim import SplitAdamW8bit

    arm = _arm(weights.clone(), SplitAdamW8bit, lr)
    return arm._replace(master=lambda: arm.optimizer.master(arm.parameter))


ARMS: dict[str, Callable[[torch.Tensor, float], Arm]] = {
    "adamw, float32 weights": _adamw,
    "adamw-8bit, float32 weights": _adamw_8bit,
    "adamw-8bit-split, bfloat16 weights": _split,
    "adamw, bfloat16 rounded at random": _stochastic,
    "adamw, bfloat16 rounded to nearest": _rounded,
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
    generator = torch.Generator().manual_seed(seed)
    if weights is None:
        n = 2**15 if gradients is None else gradients.shape[1]
        weights = 0.03 * torch.randn(n, generator=generator, dtype=torch.float32)
    if gradients is None:
        mean = signal * torch.randn(weights.numel(), generator=generator, dtype=torch.float32)
        noise = torch.randn(steps, weights.numel(), generator=generator, dtype=torch.float32)
        gradients = gradient_rms * (mean + noise)  # (S, N)
    if gradients.ndim != 2 or gradients.shape[1] != weights.numel():
        shapes = tuple(gradients.shape), tuple(weights.shape)
        raise ValueError(f"gradients, weights have shapes {shapes}; give (S, N) and (N,)")
    start = weights.detach().flatten().to(torch.bfloat16)
    rows = []
    for lr in learning_rates:
        wanted = _change(_adamw, start, lr, gradients)[0]
        for name, arm in arms.items():
            kept, in_weights = _change(arm, start, lr, gradients)
            share = lambda change, wanted=wanted: float(change @ wanted / (wanted @ wanted))  # noqa: E731
            rows.append(
                {
                    "optimizer": name,
                    "learning_rate": lr,
                    "kept": share(kept),
                    "in_weights": share(in_weights),
                    "error": float((kept - wanted).norm() / wanted.norm()),
                }
            )
    return pd.DataFrame(rows)


def _change(
    make: Callable, start: torch.Tensor, lr: float, gradients: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    arm = make(start, lr)
    for gradient in gradients:
        arm.parameter.grad = gradient.to(arm.parameter.dtype)
        arm.optimizer.step()
    begin = start.double()
    return arm.master().double() - begin, arm.parameter.detach().double() - begin


def survival_plot(table: pd.DataFrame) -> Figure:
    """A bar for each optimizer and learning rate: kept, in percent of the float32 change; logarithmic.

    The black tick on a bar is the part already in the stored weights, if it differs. Noise is `error`, if large.
    """
    from grpo_kit._support.display import COLOURS, new_figure

    names, rates = list(dict.fromkeys(table.optimizer)), sorted(set(table.learning_rate))
    figure = new_figure(8, 0.9 + 0.62 * len(names))
    axes = figure.add_subplot()
    height, floor, ticked = 0.8 / len(rates), 0.1, False
    for j, rate in enumerate(rates):
        rows = table[table.learning_rate == rate].set_index("optimizer").loc[names]
        at = [i - 0.4 + (j + 0.5) * height for i in range(len(names))]
        kept = (100 * rows.kept).clip(lower=floor)
        axes.barh(at, kept, 0.9 * height, left=0, color=COLOURS[j % len(COLOURS)], label=f"{rate:g}")
        for y, row in zip(at, rows.itertuples(), strict=True):
            share, now = row.kept, row.in_weights
            noise = f", and noise of {row.error:.1f} x that" if share > 0.5 and row.error > 0.5 else ""
            text = f"{100 * share:.{0 if share >= 0.1 else 1}f} %{noise}"
            axes.text(max(100 * share, floor) * 1.08, y, text, va="center", fontsize=7.5)
            if abs(now - share) > 0.02:
                style = dict(color="black", lw=1.5, label=None if ticked else "already in the weights")
                axes.plot([100 * now] * 2, [y - 0.45 * height, y + 0.45 * height], **style)
                ticked = True
    axes.set_xscale("log")
    axes.set_xlim(floor, 8000 if (table.error > 0.5).any() else 300)
    axes.set_xticks([0.1, 1, 10, 100], ["0.1 %", "1 %", "10 %", "100 %"])
    axes.set_yticks(range(len(names)), [name.replace(", ", "\n") for name in names])
    axes.invert_yaxis()
    axes.set_xlabel("share of the float32 run's weight change that is kept")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(title="learning rate", loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure

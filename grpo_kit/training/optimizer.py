"""Stage 8 of a step: the optimizer that the weights need, and a warmup whose first step trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from trl import GRPOTrainer

from grpo_kit.optim.choose import make_optimizer
from grpo_kit.training.knobs import schedule_anew


def own_optimizer(trainer: Any, name: str | None, *, asked: bool, say: Callable[[str], None]) -> Any:
    """The optimizer of grpo_kit.optim of that name; None leaves the choice to transformers (args.optim).

    asked: did the user name it? Says what happens to bfloat16 weights.
    """
    args = trainer.args
    if name is None:
        if any(p.requires_grad and p.dtype == torch.bfloat16 for p in trainer.model.parameters()):
            optim = getattr(args.optim, "value", args.optim)
            say(
                f"bfloat16 weights under optim={optim!r}: what they round away is lost; optimizer='adamw-8bit-split' "
                "keeps it"
            )
        return None
    if not asked:
        say(f"bfloat16 weights: optimizer {name!r}, which keeps the bits that args.optim would round away")
    return make_optimizer(
        name,
        trainer.model,
        learning_rate=args.learning_rate,
        weight_decay=args.weight_decay,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
    )


def start_above_zero(scheduler: Any, warmup: int) -> Any:
    """A schedule of transformers whose warmup begins at 0 and reaches its height after `warmup` steps, begun above 0.

    Of 3 steps: 1/4, 1/2, 3/4 of the height in place of 0, 1/3, 2/3. From the last one on nothing changes, and a
    resumed run stands where it stood: the rate is a function of the step alone.
    """
    if not isinstance(scheduler, LambdaLR) or warmup < 1:
        return scheduler

    def shifted(rate: Callable[[float], float]) -> Callable[[int], float]:
        return lambda step: rate((step + 1) * warmup / (warmup + 1) if step < warmup else step)

    scheduler.lr_lambdas = [shifted(rate) for rate in scheduler.lr_lambdas]
    for group, base, rate in zip(
        scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
    ):
        group["lr"] = base * rate(scheduler.last_epoch)
    scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]
    return scheduler


def to_transformers_own(trainer: Any) -> None:
    """Before any weight moved: transformers' own optimizer (args.optim) with new moments takes the other one's place.

    The schedule goes on where it stands.
    """
    old, scheduler = trainer.optimizer, trainer.lr_scheduler
    trainer.optimizer = trainer.optimizer_name = None
    made = GRPOTrainer.create_optimizer(trainer)  # trl's: the kit's would name the one that failed
    trainer.optimizer = trainer.callback_handler.optimizer = trainer.accelerator.prepare(made)
    trainer.accelerator._optimizers.remove(old)
    if old.scaler is not None:  # float16: these gradients are unscaled already
        states = old.scaler._per_optimizer_states
        states[id(made)] = states.pop(id(old.optimizer))
    for group in trainer.optimizer.param_groups:
        group["lr"] = old.param_groups[0]["lr"]
    if not schedule_anew(trainer, trainer.state.max_steps):
        scheduler.optimizer = trainer.optimizer

"""Is there room for the checkpoints of a run? Asked before the first step, not by the disk at the fiftieth."""

from __future__ import annotations

import math
import shutil
from typing import Any

import torch
from peft import PeftModel

from grpo_kit.memory.plan_table import GIB
from grpo_kit.optim.choose import OPTIMIZERS
from grpo_kit.training.checkpoints import checkpoints


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of the weights that are saved: all of them, of adapters what is trained."""
    adapters = isinstance(model, PeftModel)
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad or not adapters)


def checkpoint_bytes(model: torch.nn.Module, optimizer: str | None, optim: str) -> int:
    """Bytes of one checkpoint: what is saved of the weights, and the optimizer's state of those that are trained.

    optimizer: a name of optim.choose.OPTIMIZERS, or None: transformers' optim, of which the AdamWs in 8 and 32 bits are
    known; of others no state is counted.
    """
    states = 0.0
    for p in (p for p in model.parameters() if p.requires_grad):
        itemsize, state = p.element_size(), 0.0
        if optimizer:
            state = OPTIMIZERS[optimizer].state_of(itemsize)
        elif "adamw" in optim:
            state = 2.0 if "8bit" in optim else 2.0 * itemsize
        states += p.numel() * state
    return int(weight_bytes(model) + states)


def lacks_room(trainer: Any) -> str | None:
    """One line where the disk of args.output_dir is too small for what the run will keep; None where it is not."""
    args, steps = trainer.args, trainer.state.max_steps - trainer.state.global_step
    one = checkpoint_bytes(
        trainer.model, trainer.optimizer_name, str(getattr(args.optim, "value", args.optim))
    )
    due = 1  # where it is stopped
    if args.save_strategy == "steps" and args.save_steps >= 1:
        due = max(1, math.ceil(steps / args.save_steps))
    there = len(checkpoints(args.output_dir))
    # The next one is written before the oldest goes.
    most = min(there + due, (args.save_total_limit or math.inf) + 1)
    needs, free = (most - there) * one, shutil.disk_usage(args.output_dir).free
    if needs <= free:
        return None
    return (
        f"The disk of {args.output_dir} is too small: a checkpoint takes {one / GIB:.1f} GiB, {most - there:.0f} more "
        f"will lie there at a time, and {free / GIB:.1f} GiB are free. Free some, save less often (save_steps) or "
        "keep fewer (save_total_limit); what cannot be saved where it is stopped stays in memory alone."
    )

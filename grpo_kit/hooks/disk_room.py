"""DiskRoom: is there room for the checkpoints of a run? Said before the first step, not by the disk at the fiftieth."""

from __future__ import annotations

import math
import shutil
from typing import Any

import torch
from peft import PeftModel

from grpo_kit.loop.checkpoint import checkpoints
from grpo_kit.loop.hooks import Hook
from grpo_kit.optim.choose import OPTIMIZERS

_GIB = 2**30


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of the weights that are saved: all of them, of adapters what is trained."""
    adapters = isinstance(model, PeftModel)
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad or not adapters)


def checkpoint_bytes(model: torch.nn.Module, optimizer: str) -> int:
    """Bytes of one checkpoint: the weights that are saved, and the optimizer's state of those that are trained.

    optimizer: a name of grpo_kit.optim.
    """
    state_of, trained = OPTIMIZERS[optimizer].state_of, [p for p in model.parameters() if p.requires_grad]
    return weight_bytes(model) + int(sum(p.numel() * state_of(p.element_size()) for p in trained))


class DiskRoom(Hook):
    """Prints one line where the disk of the run's folder is too small for the checkpoints that the run will keep."""

    def begin(self, trainer: Any) -> None:
        """Compare what will lie there at a time with what is free."""
        config, folder = trainer.config, trainer.folder
        one, there = checkpoint_bytes(trainer.model, trainer.optimizer_name), len(checkpoints(folder))
        due = 1  # where it is stopped
        if config.save_steps:
            due = max(1, math.ceil((config.steps - trainer.step) / config.save_steps))
        more = (
            min(there + due, config.save_total_limit + 1) - there
        )  # the next is written before the oldest goes
        free = shutil.disk_usage(folder).free
        if more * one > free:
            print(
                f"The disk of {folder} is too small: a checkpoint takes {one / _GIB:.1f} GiB, {more} more will lie "
                f"there at a time, and {free / _GIB:.1f} GiB are free. Free some, save less often (save_steps) or keep "
                "fewer (save_total_limit); what cannot be saved where it is stopped stays in memory alone.",
                flush=True,
            )

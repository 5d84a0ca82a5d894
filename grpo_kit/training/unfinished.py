"""What a checkpoint keeps of a step that is not at its end: stop_and_go.pt, beside transformers' files.

Of several processes each has a file of its own, the second one stop_and_go_1.pt. It is there where the next step goes
on inside a rollout buffer (the buffer, and its temperature), or where the step's evaluation was not made to its end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def _file(trainer: Any, folder: str | Path) -> Path:
    index = trainer.ranks.index
    return Path(folder) / ("stop_and_go.pt" if index == 0 else f"stop_and_go_{index}.pt")


def begins_buffer(trainer: Any) -> bool:
    """Does the next step begin a rollout buffer?"""
    args = trainer.args
    length = args.steps_per_generation * trainer.num_iterations  # micro-batches that are trained on one
    return trainer.state.global_step * args.gradient_accumulation_steps % length == 0


def keep_unfinished(trainer: Any, folder: Path, *, owes_evaluation: bool) -> None:
    """Write it into a checkpoint, where there is anything to keep."""
    buffer = None if begins_buffer(trainer) else trainer._buffered_inputs
    if buffer is None and not owes_evaluation:
        return
    state = {
        "buffer": buffer,
        "shape": _shape(trainer),
        "temperature": trainer.temperature,
        "owes_evaluation": owes_evaluation,
    }
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(state, _file(trainer, folder))


def take_up_unfinished(trainer: Any, folder: str) -> bool:
    """Give the trainer the buffer that a checkpoint has, if it fits; does the checkpoint owe an evaluation?"""
    file = _file(trainer, folder)
    kept = {"buffer": None, "owes_evaluation": False}
    if file.is_file():
        device = trainer.accelerator.device  # of several processes "cpu:0", which torch.load does not know
        kept = torch.load(file, map_location="cpu" if device.type == "cpu" else device, weights_only=True)
    fits = kept["buffer"] is not None and kept["shape"] == _shape(trainer)
    if not trainer.ranks.any(not fits):  # each process has its part of it, or they make another
        trainer._buffered_inputs = kept["buffer"]
        trainer.temperatures.set(kept["temperature"])
    return trainer.ranks.any(kept["owes_evaluation"])


def _shape(trainer: Any) -> list[int]:
    """A buffer fits a trainer that has the same."""
    args, processes = trainer.args, trainer.ranks.count
    return [
        args.per_device_train_batch_size,
        args.gradient_accumulation_steps,
        args.steps_per_generation,
        trainer.num_iterations,
        trainer.num_generations,
        *([processes] if processes > 1 else []),
    ]

"""What a checkpoint keeps of a step that is not at its end: stop_and_go.pt, beside transformers' files.

It is there where the next step goes on inside a rollout buffer (the buffer, and its temperature), or where the step's
evaluation was not made to its end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_FILE = "stop_and_go.pt"


def begins_buffer(trainer: Any) -> bool:
    """Does the next step begin a rollout buffer?"""
    args = trainer.args
    length = args.steps_per_generation * trainer.num_iterations  # micro-batches that are trained on one
    return trainer.state.global_step * args.gradient_accumulation_steps % length == 0


def keep_unfinished(trainer: Any, folder: Path, *, owes_evaluation: bool) -> None:
    """Write it into a checkpoint, where there is anything to keep."""
    # Of several processes each has a buffer of its own: they begin a new one.
    alone = trainer.accelerator.num_processes == 1
    buffer = trainer._buffered_inputs if alone and not begins_buffer(trainer) else None
    if not trainer.args.should_save or (buffer is None and not owes_evaluation):
        return
    state = {
        "buffer": buffer,
        "shape": _shape(trainer),
        "temperature": trainer.temperature,
        "owes_evaluation": owes_evaluation,
    }
    torch.save(state, folder / _FILE)


def take_up_unfinished(trainer: Any, folder: str) -> bool:
    """Give the trainer the buffer that a checkpoint has, if it fits; does the checkpoint owe an evaluation?"""
    file = Path(folder) / _FILE
    if not file.is_file():
        return False
    kept = torch.load(file, map_location=trainer.accelerator.device, weights_only=True)
    if kept["buffer"] is not None and kept["shape"] == _shape(trainer):
        trainer._buffered_inputs = kept["buffer"]
        trainer._temperature.set(kept["temperature"])
    return kept["owes_evaluation"]


def _shape(trainer: Any) -> list[int]:
    """A buffer fits a trainer that has the same."""
    args = trainer.args
    return [
        args.per_device_train_batch_size,
        args.gradient_accumulation_steps,
        args.steps_per_generation,
        trainer.num_iterations,
        trainer.num_generations,
    ]

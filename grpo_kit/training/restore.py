"""What training borrows and must put back: random state, weights, dtypes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import set_seed

from grpo_kit.training.trl_internals import LOSS_STATE


def dtypes_of(model: Any) -> dict[str, torch.dtype]:
    """Every parameter's dtype by name, for `restore_dtypes`; {} for a model given by name."""
    return {n: p.dtype for n, p in model.named_parameters()} if isinstance(model, torch.nn.Module) else {}


def restore_dtypes(model: Any, dtypes: dict[str, torch.dtype]) -> None:
    """Give every parameter its dtype by name.

    trl casts the adapters of a quantised base to bfloat16, where small updates are lost; they become float32 again.
    """
    quantised = getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False)
    for name, parameter in model.named_parameters():
        wanted = dtypes.get(name)
        if wanted is None and quantised and parameter.requires_grad:
            wanted = torch.float32
        if wanted is not None and parameter.dtype != wanted:
            parameter.data = parameter.data.to(wanted)


@contextmanager
def weights_come_back(model: torch.nn.Module) -> Iterator[None]:
    """Continuous batching casts the model for good; keep every tensor and put it back, bit for bit."""
    parameters = [(p, p.data) for p in model.parameters()]
    buffers = [(m, name, b) for m in model.modules() for name, b in m.named_buffers(recurse=False)]
    try:
        yield
    finally:
        for parameter, tensor in parameters:
            parameter.data = tensor
        for module, name, tensor in buffers:
            module._buffers[name] = tensor


def get_random_state() -> tuple[Any, ...]:
    """Of Python, NumPy, torch and every CUDA card; for `set_random_state`."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def set_random_state(state: tuple[Any, ...]) -> None:
    """Put back what `get_random_state` returned."""
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    if state[3] is not None:
        torch.cuda.set_rng_state_all(state[3])


@contextmanager
def random_state_of_its_own(name: str) -> Iterator[None]:
    """Inside, random numbers are a function of the name; afterwards they go on as if nothing had been drawn."""
    state = get_random_state()
    set_seed(random.Random(name).getrandbits(32))
    try:
        yield
    finally:
        set_random_state(state)


@contextmanager
def undone(trainer: Any, *, always: bool = True) -> Iterator[None]:
    """A loss and its gradients inside leave no trace: random state, .grad, metrics, trl's controllers are as before.

    always: False keeps them, unless an exception ends it.
    """
    gradients = [(p, p.grad) for p in trainer.model.parameters()]
    state, metrics = get_random_state(), trainer._metrics["train"]
    lengths = {name: len(values) for name, values in metrics.items()}
    kept = {name: getattr(trainer, name) for name in LOSS_STATE}
    skipped = trainer.update.skipped
    if always:
        for parameter, _ in gradients:
            parameter.grad = None
    try:
        yield
    except BaseException:
        always = True
        raise
    finally:
        if always:
            for name in list(metrics):
                del metrics[name][lengths.get(name, 0) :]
                if name not in lengths:
                    del metrics[name]
            vars(trainer).update(kept)
            trainer.update.skipped = skipped
            set_random_state(state)
            for parameter, gradient in gradients:
                parameter.grad = gradient

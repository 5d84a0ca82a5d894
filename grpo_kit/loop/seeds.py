"""What a run draws, prompts and random numbers, as functions of (seed, step); and the modes that it computes in."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from grpo_kit.loop.config import Config


def _seed_of(*parts: Any) -> int:
    """A seed that is a function of its parts alone, such as (seed, step, "sample").

    >>> _seed_of(0, 1) == _seed_of(0, 1) != _seed_of(0, 2)
    True
    """
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "big")


def rows_of_step(
    rows: Sequence[dict[str, Any]], config: Config, step: int, attempt: int = 0
) -> list[dict[str, Any]]:
    """The prompts of a step, by (seed, step, attempt) alone: pass after pass over all rows, each in its own order.

    What is left of a pass, fewer than a step needs, is dropped. attempt: above 0 where groups are drawn anew; those
    come from anywhere.
    """
    count = config.prompts_per_step
    per_pass = len(rows) // count
    generator = torch.Generator()
    if attempt:
        generator.manual_seed(_seed_of(config.seed, step, "again", attempt))
        places = torch.randperm(len(rows), generator=generator)[:count]
    else:
        generator.manual_seed(_seed_of(config.seed, "order", step // per_pass))
        order = torch.randperm(len(rows), generator=generator)
        places = order[step % per_pass * count :][:count]
    return [rows[place] for place in places.tolist()]


def seed_everything(*parts: Any) -> None:
    """Python's, NumPy's and torch's random numbers, as a function of the parts, such as (seed, step, "sample")."""
    number = _seed_of(*parts)
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


@contextmanager
def random_state_comes_back() -> Iterator[None]:
    """Training draws what it likes inside; the notebook's own random numbers go on as if it had not."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(range(torch.cuda.device_count()), device_type="cuda"):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


@contextmanager
def modes_of_training(device: str) -> Iterator[None]:
    """Gradients on and autocast off inside, whatever the notebook has set. device: the model's, by type.

    Torch drops autocast's copies of the weights where the outermost autocast ends. So none is opened here, and inside
    a notebook's own no copies are kept: those of the first step would be read in all later ones.
    """
    enabled, keeps_copies = torch.is_autocast_enabled(device), torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled(device, False)
    torch.set_autocast_cache_enabled(keeps_copies and not enabled)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_cache_enabled(keeps_copies)


def autocast(config: Config, device: torch.device) -> Any:
    """The context in which the model's products are computed in config.autocast."""
    if config.autocast == "none":
        return nullcontext()
    torch.clear_autocast_cache()  # inside a caller's context it would hold copies of weights before their last step
    return torch.autocast(device.type, getattr(torch, config.autocast))

"""What all arms of one step share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.step.workload import Workload

TINY_RATE = 1e-9  # the optimizer does all its work and the weights stay where they are


@dataclass(frozen=True)
class Setup:
    """What all arms share.

    model: the weights on the CPU, copied for each measurement; cuda: where to train; bf16: autocast;
    warmup: unmeasured steps before the measured one; tuned: (micro-batch, checkpointing) of TRL at its best.
    """

    model: Any
    tokenizer: Any
    workload: Workload
    cuda: bool
    bf16: bool
    warmup: int
    tuned: tuple[int, bool]

    @property
    def rows(self) -> int:
        """Completions of a step."""
        return len(self.workload.completion_ids)

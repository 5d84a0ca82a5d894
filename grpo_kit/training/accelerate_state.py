"""accelerate's state of one trainer. It is one of the whole process, and every new GRPOConfig or trainer resets it."""

from __future__ import annotations

from typing import Any

from accelerate import PartialState


class AccelerateState:
    """What accelerate held as a trainer was made; accelerator: the trainer's.

    transformers empties accelerate's state whenever a GRPOConfig looks for its device. A cell that fails before its new
    trainer is whole would else leave an earlier trainer with an AttributeError ("no attribute `device`").
    """

    def __init__(self, accelerator: Any) -> None:
        self._shared = [vars(accelerator.state), vars(PartialState())]
        self._kept = [dict(shared) for shared in self._shared]

    def put_back(self) -> None:
        """accelerate's state is this trainer's again, whatever was made since."""
        for shared, kept in zip(self._shared, self._kept, strict=True):
            shared.clear()
            shared.update(kept)

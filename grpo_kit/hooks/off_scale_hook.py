"""OffScale: a line, once, about a reward whose scores lie outside [0, 1]."""

from __future__ import annotations

from typing import Any

from grpo_kit.loop.hooks import Hook
from grpo_kit.loop.step_batch import Batch
from grpo_kit.rewards.off_scale import off_scale


class OffScale(Hook):
    """Prints the line once a reward; none about a reward that states its range. Any finite score is taken."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._seen: dict[str, tuple[float, float]] = {}  # lowest and highest score of each reward

    def after_step(self, trainer: Any, row: dict[str, Any], batch: Batch) -> None:
        """Look at the step's scores."""
        for (name, scores), reward in zip(
            batch.parts.items(), getattr(trainer.task, "rewards", ()), strict=False
        ):
            there = [score for score in scores if score is not None]
            if not there or name in self._said:
                continue
            low, high = self._seen.get(name, (there[0], there[0]))
            self._seen[name] = min(low, *there), max(high, *there)
            if said := off_scale(name, reward, scores, self._seen[name]):
                self._said.add(name)
                print(f"{said}; choose reward_weights by its scale.", flush=True)

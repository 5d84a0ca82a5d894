"""StillStep: a line, once, about a step whose gradient was zero, with why. The red flags wait for several steps."""

from __future__ import annotations

from typing import Any

from grpo_kit.loop.hooks import Hook
from grpo_kit.loop.step_batch import Batch


class StillStep(Hook):
    """Prints the line at the first step that moved no weight, and no more."""

    def __init__(self) -> None:
        self._said = False

    def after_step(self, trainer: Any, row: dict[str, Any], batch: Batch) -> None:
        """Look at the step's gradient and rewards."""
        if self._said or row.get("grad_norm"):
            return
        self._said, totals = True, {reward for reward in batch.rewards if reward is not None}
        groups = len(set(batch.groups))
        why = "no completion has tokens that count, or weights and epsilon leave no gradient"
        if row.get("frac_reward_zero_std") == 1:
            why = f"in none of its {groups} groups do the rewards differ"
            why += f", all are {totals.pop():g}" if len(totals) == 1 else ""
        print(
            f"Step {trainer.step} moved no weight: {why}. If it stays so nothing is learned; kit.readiness(...) counts "
            "how many groups would have a signal.",
            flush=True,
        )

"""StillStep: a line, once, about a step whose gradient was zero, with why. The red flags wait for several steps."""

from __future__ import annotations

from typing import Any

import torch

from grpo_kit.loop.hooks import Hook
from grpo_kit.loop.step_batch import Batch


class StillStep(Hook):
    """Prints the line at the first step without a gradient, and no more.

    Such a step is made as TRL makes it: the optimizer's moments move the weights on. The line says how far, the root
    mean square of up to 64 weights of each tensor.
    """

    def __init__(self) -> None:
        self._said, self._weights, self._moved = False, None, None

    def before_step(self, trainer: Any) -> None:
        """Keep some of the weights that the step begins with."""
        if not self._said:
            self._weights = _some_weights(trainer)

    def after_step(self, trainer: Any, row: dict[str, Any], batch: Batch) -> None:
        """Look at the step's gradient, rewards and weights."""
        if self._said:
            return
        moved = (_some_weights(trainer) - self._weights).square().mean().sqrt().item()
        before, self._moved = self._moved, moved
        if row.get("grad_norm"):
            return
        self._said, totals = True, {reward for reward in batch.rewards if reward is not None}
        groups = len(set(batch.groups))
        why = "no completion has tokens that count, or weights and epsilon leave no gradient"
        if row.get("frac_reward_zero_std") == 1:
            why = f"in none of its {groups} groups do the rewards differ"
            why += f", all are {totals.pop():g}" if len(totals) == 1 else ""
        how_far = "No weight moved."
        if moved:
            beside = f", {moved / before:.2f} times as far as step {trainer.step - 1}" if before else ""
            how_far = f"The optimizer's moments still moved each weight by {moved:.1e} on average{beside}."
        print(
            f"Step {trainer.step} has no gradient: {why}. {how_far} If it stays so nothing is learned; "
            "kit.readiness(...) counts how many groups would have a signal.",
            flush=True,
        )


def _some_weights(trainer: Any) -> torch.Tensor:
    """Up to 64 of each tensor that is trained."""
    few = [p.detach().flatten()[:: max(p.numel() // 64, 1)][:64] for p in trainer.trained.values()]
    return torch.cat([weights.float() for weights in few])

"""How completions are made."""

from grpo_kit.rollout.engine import RolloutEngine, Rollouts

__all__ = ["RolloutEngine", "Rollouts"]

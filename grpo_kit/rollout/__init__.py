"""How completions are made."""

from grpo_kit.rollout.engine import RolloutEngine, Rollouts
from grpo_kit.rollout.shared_prefill import generate_shared_prefill

__all__ = ["RolloutEngine", "Rollouts", "generate_shared_prefill"]

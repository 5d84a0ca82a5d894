"""How completions are made."""

from grpo_kit.rollout.shared_prefill import generate_shared_prefill

__all__ = ["generate_shared_prefill"]

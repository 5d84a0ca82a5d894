"""Rewards: completions -> list of float in [0, 1], or None for "cannot judge"."""

from grpo_kit.rewards.answers import ExactAnswer, MathAnswer, NumericAnswer
from grpo_kit.rewards.check import Case, RewardCheckError, check_rewards, crafted_cases
from grpo_kit.rewards.combine import WeightedSum
from grpo_kit.rewards.format import SoftFormat
from grpo_kit.rewards.response import Reward, extract_answer, last_number, on_response

__all__ = [
    "Case",
    "ExactAnswer",
    "MathAnswer",
    "NumericAnswer",
    "Reward",
    "RewardCheckError",
    "SoftFormat",
    "WeightedSum",
    "check_rewards",
    "crafted_cases",
    "extract_answer",
    "last_number",
    "on_response",
]

"""Rewards: completions -> list of float, or None for "cannot judge". The kit's own lie in [0, 1]."""

from typing import TYPE_CHECKING

from grpo_kit._support.lazy import lazy

if TYPE_CHECKING:
    from grpo_kit.more.code._code_runner import CodeRunner
    from grpo_kit.more.code.code_answer import extract_code
    from grpo_kit.more.code.code_rewards import CodeFormat, CodeRuns, CodeTests
    from grpo_kit.more.episodes.tool_calls import (
        CallAccuracy,
        CallEfficiency,
        CallShape,
        CallValidity,
        call_reward,
    )
    from grpo_kit.more.tasks.bleu_rouge import Bleu, Rouge
    from grpo_kit.rewards._parts import Reward
    from grpo_kit.rewards.answers import ExactAnswer, MathAnswer, NumericAnswer
    from grpo_kit.rewards.auditing import Audit, audit
    from grpo_kit.rewards.cancel import cancelled_groups
    from grpo_kit.rewards.cheat_cases import Case, RewardCheckError, crafted_cases
    from grpo_kit.rewards.check import check_rewards
    from grpo_kit.rewards.combine import Clipped, Gated, WeightedSum
    from grpo_kit.rewards.form import Language, Repetition, RightSize, SoftFormat
    from grpo_kit.rewards.response import extract_answer, last_number, on_response, own_answer
    from grpo_kit.rewards.scoring import RewardError, total

__all__ = lazy(__name__)

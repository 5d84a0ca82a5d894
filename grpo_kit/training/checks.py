"""What is checked of the settings before training starts; of data and rewards see data.py."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from transformers.trainer_utils import IntervalStrategy
from trl import GRPOConfig

from grpo_kit.rewards.judge import Asked, RewardError


def default_args() -> GRPOConfig:
    """trl's own defaults; a machine without bfloat16, which they ask for, computes in float32."""
    cpu = not torch.cuda.is_available()
    return GRPOConfig("runs/grpo", use_cpu=cpu, bf16=not cpu and torch.cuda.is_bf16_supported())


def check_extra_lengths(logged: Mapping[str, Sequence], completions: int) -> None:
    """Raises RewardError for a column of log_extra that has not one value a completion."""
    for column, values in logged.items():
        if len(values) != completions:
            raise RewardError(
                f"log_extra({column!r}, ...) was given {len(values)} values for {completions} completions; give "
                "one for each, once a call"
            )


def check_other_scores(scores: torch.Tensor, rewards: Sequence[Any], names: Sequence[str]) -> str:
    """What the judge did not ask: reward models, whose scale is their own, and environments' rewards.

    scores: (B*G, rewards), NaN where a reward cannot judge. Returns a notice where a reward model leaves [0, 1].
    Raises RewardError for an infinite score, and for an environment's outside [0, 1].
    """
    notice = ""
    for column, reward, name in zip(scores.T, rewards, names, strict=True):
        if isinstance(reward, Asked):
            continue
        model = isinstance(reward, torch.nn.Module)
        judged = column[~column.isnan()]
        low, high = (judged.min().item(), judged.max().item()) if len(judged) else (0.0, 1.0)
        if math.isinf(low) or math.isinf(high) or not (model or (low >= 0 and high <= 1)):
            wanted = "a finite number" if model else "a value in [0, 1], or None"
            raise RewardError(f"reward {name!r} gave {low:.3g} to {high:.3g}; use {wanted}")
        if low < 0 or high > 1:
            notice = (
                f"reward model {name!r} scores outside [0, 1] (here {low:.3g} to {high:.3g}), where the other rewards "
                "lie: choose reward_weights by its scale"
            )
    return notice


_ROLLOUTS = ("kit", "hf", "vllm", "continuous")


def choose_rollout(rollout: str | None, args: Any) -> str:
    """The engine's name; sets what trl reads of args (use_vllm, use_transformers_continuous_batching).

    Raises ValueError for an unknown name, one that contradicts args, and for vllm where it is not installed.
    """
    asked = "vllm" if args.use_vllm else "continuous" if args.use_transformers_continuous_batching else None
    if rollout is None:
        return asked or "kit"
    if rollout not in _ROLLOUTS:
        raise ValueError(f"rollout={rollout!r} is not known; use one of {', '.join(map(repr, _ROLLOUTS))}")
    if asked not in (None, rollout):
        raise ValueError(f"rollout={rollout!r}, but args ask for {asked!r}; say one of the two")
    if rollout == "vllm" and asked is None:
        if find_spec("vllm") is None:
            raise ValueError(
                "rollout='vllm', but vllm is not installed; pip install grpo-kit[vllm], or use 'kit'"
            )
        args.use_vllm, args.vllm_mode = True, "colocate"
    args.use_transformers_continuous_batching = rollout == "continuous"
    return rollout


def one_card(args: Any) -> None:
    """One card a process: transformers would copy the model to every card that it sees (DataParallel), trl refuses."""
    if args.n_gpu > 1:
        print(
            f"{args.n_gpu} cards are visible, and this process trains on {args.device} alone. To use all of them start "
            f"the script by `accelerate launch --num_processes {args.n_gpu}`, or in a notebook put everything from "
            f"loading the model on into a function for accelerate.notebook_launcher(f, num_processes={args.n_gpu})."
        )
        args._n_gpu = 1


def buffer_steps(args: Any) -> int:
    """Optimizer steps that share one rollout buffer."""
    return max(1, args.steps_per_generation * args.num_iterations // args.gradient_accumulation_steps)


def align(args: Any, warmup: float) -> None:
    """One row a step, and warmup."""
    if not 0 <= warmup < 1:
        raise ValueError(f"warmup={warmup} must be a fraction of the steps in [0, 1)")
    if args.logging_strategy != IntervalStrategy.STEPS:
        was = IntervalStrategy(args.logging_strategy).value
        print(f"logging_strategy is now 'steps', not {was!r}: metrics.csv has a row a step")
    args.logging_strategy, args.logging_steps = IntervalStrategy.STEPS, 1
    if args.warmup_steps == 0:
        args.warmup_steps = warmup


def check_temperature(value: float, name: str) -> float:
    """value as a float; raises ValueError, naming it, unless it is above 0."""
    if not value > 0:
        raise ValueError(f"{name}={value} must be above 0; greedy decoding has no gradient to learn from")
    return float(value)

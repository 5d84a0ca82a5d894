"""What is checked before training starts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from transformers.trainer_utils import IntervalStrategy

from grpo_kit.rewards.judge import Asked, RewardError
from grpo_kit.rewards.parts import all_parts, check_columns


def check_training_data(
    data: Dataset | IterableDataset | None, rewards: Sequence[Callable], prompts_per_step: int
) -> None:
    """Refuse data that TRL would fail on late, or train 0 steps on with only a warning.

    prompts_per_step: unique prompts of one rollout buffer.
    Raises ValueError naming what is missing; an IterableDataset is only checked for columns it declares.
    """
    named = {id(p): n for r in rewards for p, n in zip(all_parts(r), getattr(r, "names", ()), strict=False)}
    twice = sorted(name for name, count in Counter(named.values()).items() if count > 1)
    if twice:
        raise ValueError(
            f"reward_funcs has several parts named {twice}; metrics are kept by name, so set __name__ on one"
        )
    if data is None:
        return
    if isinstance(data, Dataset):
        if len(data) == 0:
            raise ValueError("train_dataset is empty; give it at least one prompt a step")
        if len(data) < prompts_per_step:
            raise ValueError(
                f"train_dataset has {len(data)} prompts, but one step needs {prompts_per_step} different ones "
                "(generation_batch_size / num_generations); add rows or lower the batch"
            )
    columns = data.column_names
    if columns is None:
        return
    if "prompt" not in columns:
        raise ValueError(
            f"train_dataset has columns {columns} but no 'prompt'; build it with grpo_kit.build_dataset"
        )
    check_columns(rewards, columns, "train_dataset")


def check_prompt_lengths(data: Any, tokenizer: Any, model: Any, completion: int) -> None:
    """Refuse prompts that leave no room for a completion: TRL never truncates, the model would read past its end.

    completion: tokens. Only rendered (str) prompts of a Dataset are checked, for models that say their context.
    """
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(data, Dataset) or not context or not isinstance(data[0]["prompt"], str):
        return
    for row, ids in enumerate(tokenizer(list(data["prompt"]))["input_ids"]):
        if len(ids) + completion > context:
            raise ValueError(
                f"train_dataset row {row}: its prompt has {len(ids)} tokens, which with max_completion_length="
                f"{completion} exceeds the model's context of {context}; drop the row or shorten the completion"
            )


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

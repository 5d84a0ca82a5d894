"""What is checked before training starts, and around every reward call."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from datasets import Dataset, IterableDataset

from grpo_kit.rewards.combine import all_parts

# What TRL hands every reward function besides the columns of the data set.
_GIVEN_BY_TRL = frozenset(
    {
        "self",
        "prompts",
        "completions",
        "completion_ids",
        "trainer_state",
        "log_extra",
        "log_metric",
        "environments",
    }
)


class RewardError(ValueError):
    """A reward raised, returned NaN or the wrong number of values; names the reward, the row and the completion."""


class CheckedReward:
    """A reward function as the trainer calls it: same name, same columns, its output verified.

    Returns list[float | None] of the batch's length; None stays None ("cannot judge").
    Raises RewardError, which carries the reward's name, the row and its completion.
    """

    def __init__(self, reward: Callable[..., list[float | None]]) -> None:
        self.reward = reward
        self.__name__ = reward_name(reward)

    def __call__(self, *, prompts: list, completions: list, **columns: Any) -> list[float | None]:
        try:
            scores = self.reward(prompts=prompts, completions=completions, **columns)
        except Exception as error:
            row, completion = self._culprit(prompts, completions, columns)
            raise RewardError(
                f"reward {self.__name__!r} raised {type(error).__name__}: {error}\nrow {row}, completion {completion!r}"
            ) from error
        if not isinstance(scores, Sequence) and not hasattr(scores, "__len__"):
            raise RewardError(
                f"reward {self.__name__!r} returned {type(scores).__name__}; "
                "it must return one float or None for each completion"
            )
        if len(scores) != len(completions):
            row = min(len(scores), len(completions) - 1)
            raise RewardError(
                f"reward {self.__name__!r} returned {len(scores)} values for {len(completions)} completions\n"
                f"first row without a partner: {row}, completion {completions[row]!r}"
            )
        for row, score in enumerate(scores):
            if score is not None and not math.isfinite(float(score)):
                raise RewardError(
                    f"reward {self.__name__!r} returned {score} (use None for 'cannot judge')\n"
                    f"row {row}, completion {completions[row]!r}"
                )
        return list(scores)

    def _culprit(self, prompts: list, completions: list, columns: dict[str, Any]) -> tuple[int | str, Any]:
        """The first row that raises on its own; rewards are pure, so asking again is safe."""
        quiet = {**columns, "log_extra": lambda *_: None, "log_metric": lambda *_: None}
        for row in range(len(completions)):
            one = {
                k: v[row : row + 1] if isinstance(v, list) and len(v) == len(completions) else v
                for k, v in quiet.items()
            }
            try:
                self.reward(prompts=prompts[row : row + 1], completions=completions[row : row + 1], **one)
            except Exception:
                return row, completions[row]
        return "unknown (each passes alone)", completions[0] if completions else ""


def part_scores(
    rewards: Sequence[Callable],
    *,
    prompts: Sequence[str],
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]],
) -> list[list[float | None]]:
    """Each reward's scores, asked outside training as the trainer asks: by keyword, its output verified.

    All arguments have one entry a completion; columns: those of the data set, `prefill` too. Returns a list a reward.
    Raises RewardError.

    >>> def brief(completions, **columns):
    ...     return [1 / len(ids) for ids in columns["completion_ids"]]
    >>> part_scores([brief], prompts=["2 + 2?"], completions=["4"], completion_ids=[[52, 2]], columns={})
    [[0.5]]
    """
    given = {name: list(values) for name, values in columns.items()}
    given |= {"completion_ids": [list(ids) for ids in completion_ids]}
    return [
        CheckedReward(reward)(prompts=list(prompts), completions=list(completions), **given)
        for reward in rewards
    ]


def weighted_score(weights: Sequence[float], scores: Sequence[float]) -> float:
    """Sum of weight x score, rounded to 6 digits so that equal sums are equal.

    >>> weighted_score([0.8, 0.2], [0.1, 0.6]) == weighted_score([0.8, 0.2], [0.2, 0.2])
    True
    """
    return round(math.fsum(w * s for w, s in zip(weights, scores, strict=True)), 6)


def reward_name(reward: Callable) -> str:
    """The name TRL logs a reward under."""
    return getattr(reward, "__name__", None) or type(reward).__name__


def check_training_data(
    data: Dataset | IterableDataset | None, rewards: Sequence[Callable], prompts_per_step: int
) -> None:
    """Refuse data that TRL would fail on late, or train 0 steps on with only a warning.

    prompts_per_step: unique prompts of one rollout buffer.
    Raises ValueError naming what is missing; an IterableDataset is only checked for columns it declares.
    """
    names = [reward_name(r) for r in rewards]
    inside = {id(part): reward_name(part) for r in rewards for part in [r, *all_parts(r)]}
    counts = Counter(names), Counter(inside.values())  # one object may be a part and a reward by itself
    twice = sorted({n for count in counts for n in count if count[n] > 1})
    if twice:
        raise ValueError(
            f"reward_funcs has several rewards named {twice}; metrics are kept by name, so rename one"
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
    for reward in rewards:
        missing = [c for c in required_columns(reward) if c not in columns]
        if missing:
            raise ValueError(
                f"reward {reward_name(reward)!r} asks for the column{'s' * (len(missing) > 1)} {missing}, "
                f"which train_dataset does not have (it has {columns})"
            )


def required_columns(reward: Callable) -> list[str]:
    """Columns a reward cannot do without: its `columns` attribute and its parameters that have no default.

    >>> def right(completions, answer, **columns): ...
    >>> required_columns(right)
    ['answer']
    """
    columns = list(getattr(reward, "columns", ()))
    for p in inspect.signature(reward).parameters.values():
        named = p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        if named and p.default is p.empty and p.name not in _GIVEN_BY_TRL and p.name not in columns:
            columns.append(p.name)
    return columns


def check_prompt_lengths(
    data: Dataset, tokenize: Callable[[list[str]], list[list[int]]], context: int, completion: int
) -> None:
    """Refuse prompts that leave no room for a completion: TRL never truncates, the model would read past its end.

    context, completion: tokens. Only rendered (str) prompts are checked.
    """
    prompts = list(data["prompt"])
    if not isinstance(prompts[0], str):
        return
    for row, ids in enumerate(tokenize(prompts)):
        if len(ids) + completion > context:
            raise ValueError(
                f"train_dataset row {row}: its prompt has {len(ids)} tokens, which with max_completion_length="
                f"{completion} exceeds the model's context of {context}; drop the row or shorten the completion"
            )


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
    """One row a step, warmup, and checkpoints where a rollout buffer ends (elsewhere resuming is not exact)."""
    args.logging_steps = 1
    if args.warmup_steps == 0:
        args.warmup_steps = warmup
    size = buffer_steps(args)
    if args.save_strategy == "steps" and args.save_steps >= 1 and args.save_steps % size:
        args.save_steps = int(-(-args.save_steps // size) * size)
        print(
            f"save_steps is now {args.save_steps}, a multiple of the {size} steps that share a rollout buffer"
        )


def check_temperature(value: float, name: str) -> float:
    """value as a float; raises ValueError, naming it, unless it is above 0."""
    if not value > 0:
        raise ValueError(f"{name}={value} must be above 0; greedy decoding has no gradient to learn from")
    return float(value)

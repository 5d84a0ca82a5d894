"""What a trainer takes from its task: rewards and their weights, rows, and the length of a completion."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from trl import GRPOConfig

# Who gives a task has loaded its kind; a trainer of rewards and rows needs neither.
if TYPE_CHECKING:
    from grpo_kit.episodes.episode_task import EpisodeTask
    from grpo_kit.tasks.task import Task

_LENGTH = next(f.default for f in fields(GRPOConfig) if f.name == "max_completion_length")


@dataclass(frozen=True)
class FromTask:
    """The task of a run with the run's own length, None where rewards and rows were given without one."""

    task: Task | EpisodeTask | None
    reward_funcs: Any
    train_dataset: Any


def from_task(
    task: Any,
    args: GRPOConfig,
    tokenizer: Any,
    *,
    reward_funcs: Any,
    train_dataset: Any,
    rewards_of: Callable[[Any], list],
) -> FromTask:
    """What the trainer trains on. args gets the task's reward weights and length; anything but a task is rewards.

    tokenizer: renders the task's prompts. train_dataset: rows of the task to train on, instead of all of them.
    rewards_of: the task's rewards, as this kind of trainer takes them.
    The length is the one that args were given, else the task's.
    Raises ValueError for rewards or weights beside a task that has others, and for a task without a tokenizer.
    """
    from grpo_kit.episodes.episode_task import EpisodeTask
    from grpo_kit.tasks.task import Task

    if not isinstance(task, Task | EpisodeTask):
        if task is not None and reward_funcs is not None:
            raise ValueError(
                f"reward_funcs={reward_funcs!r:.200} beside a second argument of type {type(task).__name__}, which is "
                "no Task and so is taken for rewards; give one of the two"
            )
        return FromTask(None, reward_funcs if task is None else task, train_dataset)
    rewards = rewards_of(task)
    if reward_funcs is not None:
        raise ValueError(
            f"reward_funcs={reward_funcs!r:.200} beside task {task.name!r}, which has rewards of its own; leave them "
            "out, or give a task with others: dataclasses.replace(task, rewards=..., reward_weights=...)"
        )
    if isinstance(task, Task):
        _take_weights(task, args)
    if tokenizer is None:
        raise ValueError(
            f"processing_class=None, but the prompts of task {task.name!r} are rendered with the model's tokenizer; "
            "give it"
        )
    data = task.dataset(tokenizer) if train_dataset is None else train_dataset
    return FromTask(_with_the_runs_length(task, args), rewards, data)


def _take_weights(task: Task, args: GRPOConfig) -> None:
    own = list(task.reward_weights)
    if args.reward_weights is not None and list(args.reward_weights) != own:
        raise ValueError(
            f"reward_weights={args.reward_weights!r}, but task {task.name!r} has {own}; leave them out, or give a task "
            "with others: dataclasses.replace(task, reward_weights=...)"
        )
    args.reward_weights = own


def _with_the_runs_length(task: Task | EpisodeTask, args: GRPOConfig) -> Task | EpisodeTask:
    """The task as this run samples it. trl's default in args is no choice, unless grpo_config was given it."""
    length, own = args.max_completion_length, task.max_completion_tokens
    chosen = getattr(args, "has_length", False) or length not in (None, _LENGTH)
    if not chosen:
        args.max_completion_length = own
        return task
    if length == own:
        return task
    warnings.warn(
        f"max_completion_length={length} is this run's own, but task {task.name!r} has max_completion_tokens={own}, "
        "which evaluate, readiness and held_out use. For one length give it to the task: "
        f"dataclasses.replace(task, max_completion_tokens={length})",
        UserWarning,
        stacklevel=4,
    )
    return replace(task, max_completion_tokens=length)

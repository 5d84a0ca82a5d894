"""What run.json of a run says: what the trainer was asked for, of which model, on what."""

from __future__ import annotations

import shlex
import sys
from importlib.metadata import version
from typing import Any

from grpo_kit.display import in_notebook
from grpo_kit.models import hardware, model_name
from grpo_kit.rewards.parts import all_parts, range_of
from grpo_kit.rewards.scoring import PendingScores
from grpo_kit.training.logged import names_inside


def config_of(trainer: Any) -> dict[str, Any]:
    """The settings of a trainer, for RunFolder.open."""
    from grpo_kit.tasks.task import Task

    schedule, task = trainer.temperatures.schedule, trainer.task
    return {
        "reward_parts": _parts(trainer),
        "reward_weights": trainer.reward_weights.tolist(),
        "reward_ranges": _ranges(trainer),
        "answer_parts": _answer_parts(trainer),
        "best_constant": task.best_constant_parts() if isinstance(task, Task) else None,
        "temperature_schedule": trainer.changes.keep(schedule) if schedule else None,
        "trainer": {"class": type(trainer).__name__, **trainer.own_options()},
        "rollout": trainer.rollout,
        "optimizer": trainer.optimizer_name or getattr(trainer.args.optim, "value", trainer.args.optim),
        "model": model_name(trainer.model),
        "starts_from": trainer.starts_from,
        "data": _data_of(task, trainer.train_dataset),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "trainable_parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "device": hardware(),
        "command": None if in_notebook() else shlex.join(["python", *sys.orig_argv[1:]]),
        "versions": {name: version(name) for name in ("torch", "transformers", "trl", "peft", "datasets")},
        "args": trainer.args.to_dict() | {"report_to": trainer.reports_to},
    }


def _data_of(task: Any, data: Any) -> dict[str, Any]:
    """The name of the task that the trainer was given, and how many rows there are."""
    named = {} if task is None else {"task": task.name}
    return named | ({"rows": len(data)} if hasattr(data, "__len__") else {})


def _parts(trainer: Any) -> list[str]:
    """Every reward by name, and the parts of those that are sums (WeightedSum reports them by `names`)."""
    return list(dict.fromkeys([*trainer.reward_func_names, *names_inside(trainer)]))


def _ranges(trainer: Any) -> dict[str, tuple[float, float]]:
    """What rewards, and the parts of those that are sums, state of their range, by name."""
    asked = [r.reward if isinstance(r, PendingScores) else r for r in trainer.reward_funcs]
    inside = [pair for r in asked for pair in zip(getattr(r, "names", ()), all_parts(r), strict=False)]
    named = [*zip(trainer.reward_func_names, asked, strict=True), *inside]
    return {name: stated for name, reward in named if (stated := range_of(reward))}


def _answer_parts(trainer: Any) -> list[str]:
    """Names of the parts that judge the answer; of reward models that cannot be told."""
    from grpo_kit.rewards.combine import answer_parts

    asked = [r for r in trainer.reward_funcs if isinstance(r, PendingScores)]
    return list(answer_parts([r.reward for r in asked], [r.__name__ for r in asked]))

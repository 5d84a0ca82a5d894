"""What config.json keeps of a trainer: rewards by name, settings, versions."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch

from grpo_kit.models import model_name
from grpo_kit.rewards.combine import answer_parts
from grpo_kit.rewards.judge import Asked
from grpo_kit.tasks.task import constant_of


def run_config(trainer: Any) -> dict[str, Any]:
    """All that a run was asked for, as JSON values."""
    schedule = trainer._temperature.schedule
    return {
        "reward_parts": list(dict.fromkeys([*trainer.reward_func_names, *names_inside(trainer)])),
        "reward_weights": trainer.reward_weights.tolist(),
        "answer_parts": _answer_parts(trainer),
        "best_constant": constant_of(trainer.train_dataset),
        "temperature_schedule": repr(schedule) if schedule else None,
        "trainer": {"class": type(trainer).__name__, **trainer.own_options()},
        "rollout": trainer.rollout,
        "optimizer": trainer._optimizer_name or getattr(trainer.args.optim, "value", trainer.args.optim),
        "model": model_name(trainer.model),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "trainable_parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": {name: version(name) for name in ("torch", "transformers", "trl", "peft", "datasets")},
        "args": trainer.args.to_dict(),
    }


def names_inside(trainer: Any) -> list[str]:
    """The parts of rewards that are sums, as they report them (WeightedSum, by `names`)."""
    sums = [getattr(r, "reward", r) for r in trainer.reward_funcs]
    return [name for reward in sums for name in getattr(reward, "names", [])]


def _answer_parts(trainer: Any) -> list[str]:
    """Names of the parts that judge the answer; reward models and asynchronous rewards cannot be told."""
    asked = [r for r in trainer.reward_funcs if isinstance(r, Asked)]
    return list(answer_parts([r.reward for r in asked], [r.__name__ for r in asked]))

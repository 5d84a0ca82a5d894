"""What run.json of a run holds: its config, its task and rewards, the model and the machine. Readers go by it."""

from __future__ import annotations

import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from grpo_kit.display import in_notebook
from grpo_kit.loop.grpo_config import Config, as_json
from grpo_kit.models import base_model, hardware, model_name
from grpo_kit.rewards.combine import answer_parts
from grpo_kit.rewards.parts import all_parts, range_of, reward_names

_MARK = "_grpo_kit_trained"  # of a model in memory: the run that made its weights


def settings_of(
    model: Any, task: Any, config: Config, weights: list[float], optimizer: str
) -> dict[str, Any]:
    """The settings of a run, for RunLog.open.

    reward_parts: each reward by name, then the parts of those that are sums. reward_ranges: what rewards and parts
    state of their range. answer_parts: the parts that judge the answer. best_constant: what the best constant answer
    earns.
    """
    rewards = getattr(task, "rewards", [])  # episodes have none: they are paid by their environment
    names = reward_names(rewards)
    inside = [pair for r in rewards for pair in zip(getattr(r, "names", ()), all_parts(r), strict=False)]
    known = [*zip(names, rewards, strict=True), *inside]
    constant = getattr(task, "best_constant_parts", None)
    return {
        "config": config.values(),
        "reward_parts": list(dict.fromkeys([*names, *(name for name, _ in inside)])) or ["episode_return"],
        "reward_weights": weights,
        "reward_ranges": {name: stated for name, reward in known if (stated := range_of(reward))},
        "answer_parts": list(answer_parts(rewards, names)),
        "best_constant": constant() if constant else None,
        "temperature_schedule": as_json(config.temperature) if callable(config.temperature) else None,
        "optimizer": optimizer,
        "model": model_name(model),
        "data": {"task": task.name, "rows": len(task.train)},
        "parameters": sum(p.numel() for p in model.parameters()),
        "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "device": hardware(),
        "command": None if in_notebook() else shlex.join(["python", *sys.orig_argv[1:]]),
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
    }


def mark_trained(model: Any, folder: Path, steps: int) -> None:
    """The model in memory has the weights that this run made."""
    setattr(base_model(model), _MARK, (str(folder), steps))


def trained_before(model: Any, folder: Path) -> str | None:
    """The run, other than the one in `folder`, that made a model's weights in memory; None for one as it was loaded."""
    mark = getattr(base_model(model), _MARK, None)
    return f"{mark[1]} steps in {mark[0]}" if mark is not None and mark[0] != str(folder) else None

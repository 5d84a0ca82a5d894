"""What run.json of a run holds: its config, its task and rewards, the model and the machine. Readers go by it."""

from __future__ import annotations

import shlex
import sys
from dataclasses import is_dataclass
from importlib.metadata import version
from typing import Any

from grpo_kit.loop.grpo_config import Config, as_json
from grpo_kit.models.model_facts import hardware, model_name
from grpo_kit.record.kernel import in_notebook
from grpo_kit.rewards.parts import all_parts, answer_parts, range_of, reward_names
from grpo_kit.tasks.same_task import task_digest


def settings_of(
    model: Any, task: Any, config: Config, weights: list[float], optimizer: str, sample: Any
) -> dict[str, Any]:
    """The settings of a run, for RunLog.open.

    reward_parts: each reward by name, then the parts of those that are sums. reward_ranges: what rewards and parts
    state of their range. answer_parts: the parts that judge the answer. best_constant: what the best constant answer
    earns. sample: the sampler by its name; of a dataclass (OlderWeights) with its options. task: the file that it was
    read from, if any, the digest of what the config makes of it (a command finds the task by these, or by the config's
    name of it), and its prompt's system text and prefill.
    """
    rewards = getattr(task, "rewards", [])  # episodes have none: they are paid by their environment
    names = reward_names(rewards)
    inside = [pair for r in rewards for pair in zip(getattr(r, "names", ()), all_parts(r), strict=False)]
    known = [*zip(names, rewards, strict=True), *inside]
    constant = getattr(task, "best_constant_parts", None)
    prompt = getattr(task, "view", task)
    return {
        "config": config.values(),
        "reward_parts": list(dict.fromkeys([*names, *(name for name, _ in inside)])) or ["episode_return"],
        "reward_weights": weights,
        "reward_ranges": {name: stated for name, reward in known if (stated := range_of(reward))},
        "answer_parts": list(answer_parts(rewards, names)),
        "best_constant": constant() if constant else None,
        "temperature_schedule": as_json(config.temperature) if callable(config.temperature) else None,
        "optimizer": optimizer,
        "sample": repr(sample)
        if is_dataclass(sample)
        else getattr(sample, "__name__", type(sample).__name__),
        "model": model_name(model),
        "task": {"file": getattr(task, "file", None), "system": prompt.system, "prefill": prompt.prefill}
        | {"digest": task_digest(config.cut(task)) if is_dataclass(task) else None},
        "data": {"task": task.name, "rows": len(task.train)},
        "parameters": sum(p.numel() for p in model.parameters()),
        "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "device": hardware(),
        "command": None if in_notebook() else shlex.join(["python", *sys.orig_argv[1:]]),
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
    }

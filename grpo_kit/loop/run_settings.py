"""What run.json holds of a run: config, task, rewards, model, machine; and what its checkpoints were made with."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import is_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from grpo_kit._support.kernel import in_notebook
from grpo_kit.engine.optim.choose import SETTINGS
from grpo_kit.loop.config import Config, Preset, as_json
from grpo_kit.loop.protocols import Sampler, Task, optional
from grpo_kit.models._model_facts import base_model, hardware, model_name, weights_digest
from grpo_kit.models.token_lists import end_ids
from grpo_kit.record._digests import file_digest
from grpo_kit.rewards._parts import all_parts, answer_parts, range_of, reward_names
from grpo_kit.tasks._same_task import content_digest, reward_digest, task_digest

_ADAPTER = (
    "peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save", "rank_pattern",
    "alpha_pattern", "use_rslora", "use_dora", "bias",
)  # fmt: skip


def settings_of(
    model: Any, task: Task, config: Config, weights: list[float], optimizer: str, sample: Sampler
) -> dict[str, Any]:
    """The settings of a run, for RunLog.open.

    reward_parts: each reward by name, then the parts of those that are sums. reward_ranges: what rewards and parts
    state of their range. answer_parts: the parts that judge the answer. best_constant: what the best constant answer
    earns. sample: the sampler by its name; of a dataclass (OlderWeights) with its options. task: its file, if any, with
    that file's SHA-256, and the digest of what the config makes of it (a command finds it by these, or by name); its
    system text and prefill.
    """
    rewards, names = task.rewards, reward_names(task.rewards)
    inside = [pair for r in rewards for pair in zip(getattr(r, "names", ()), all_parts(r), strict=False)]
    known = [*zip(names, rewards, strict=True), *inside]
    return {
        "config": Preset.of(config).values(),
        "reward_parts": list(dict.fromkeys([*names, *(name for name, _ in inside)])) or list(task.paid_parts),
        "reward_weights": weights,
        "reward_ranges": {name: stated for name, reward in known if (stated := range_of(reward))},
        "answer_parts": list(answer_parts(rewards, names)),
        "best_constant": task.best_constant_parts(),
        "temperature_schedule": as_json(config.temperature) if callable(config.temperature) else None,
        "optimizer": optimizer,
        "sample": name_of_sample(sample),
        "model": model_name(model),
        "task": {
            "system": task.system, "prefill": task.prefill, "file": task.file, "sha256": _sha256_of(task.file),
            "digest": task_digest(Preset.of(config).cut(task)) if is_dataclass(task) else None,
        },
        "data": {"task": task.name, "rows": len(task.train)},
        "parameters": sum(p.numel() for p in model.parameters()),
        "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "device": hardware(),
        "command": None if in_notebook() else shlex.join(["python", *sys.orig_argv[1:]]),
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
    }  # fmt: skip


def _sha256_of(file: str | None) -> str | None:
    path = Path((file or "").rpartition(":")[0])
    return file_digest(path) if path.is_file() else None


def name_of_sample(sample: Sampler) -> str:
    """A sampler by its name; a dataclass with its options."""
    return repr(sample) if is_dataclass(sample) else getattr(sample, "__name__", type(sample).__name__)


def made_with(trainer: Any) -> dict[str, Any]:
    """What a step depends on besides the config and the weights, each as words or a digest that JSON can hold.

    A checkpoint keeps it, and a run that goes on compares; config_changes.OBEYED says what may be otherwise.
    """
    model, task, tokenizer = trainer.model, trainer.task, trainer.tokenizer
    rewards = task.rewards
    own = [(name, tuple(p.shape), str(p.dtype)) for name, p in trainer.trained.items()]
    adapter = next(iter(getattr(model, "peft_config", {}).values()), None)
    groups = trainer.optimizer.param_groups
    keeps_state = optional(trainer.sample, "state", None) is not None
    return {
        **{f"adapter.{name}": _plain(getattr(adapter, name, None)) for name in _ADAPTER},
        "trained": f"{type(base_model(model)).__name__}, {len(own)} tensors, {content_digest(own)}",
        **trainer.began_with,
        "optimizer_kind": type(trainer.optimizer).__name__,
        **{f"optimizer.{name}": [_plain(group.get(name)) for group in groups] for name in SETTINGS},
        "sample": name_of_sample(trainer.sample) if keeps_state else None,
        "rewards": (names := reward_names(rewards)),
        **{f"reward.{n}": f"code {reward_digest(one)}" for n, one in zip(names, rewards, strict=True)},
        "task.reward_weights": list(task.reward_weights),
        "rows": f"{len(task.train)} rows, {content_digest(task.train, lambda value: type(value).__name__)}",
        "system": task.system,
        "prefill": task.prefill,
        "examples": content_digest(task.examples, str),
        "tokenizer": _digest_of_tokenizer(tokenizer),
        "template": content_digest(getattr(tokenizer, "chat_template", None), str),
        "ends": end_ids(model, tokenizer),
    }


def began_with(model: torch.nn.Module, reference: Mapping[str, torch.Tensor] | None) -> dict[str, str]:
    """Digests of what a run keeps of the model that it began with: its frozen weights, the reference of a KL."""
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    tensors = {"frozen_weights": frozen, "reference": list((reference or {}).values())}
    return {name: weights_digest(each) for name, each in tensors.items() if each}


def _digest_of_tokenizer(tokenizer: Any) -> str:
    """Of how it cuts text into tokens; padding and truncation, which each call sets, stand before that."""
    if getattr(tokenizer, "is_fast", False):
        whole = tokenizer.backend_tokenizer.to_str()
        return content_digest(whole.partition('"added_tokens"')[2])
    return content_digest(getattr(tokenizer, "get_vocab", dict)())


def _plain(value: Any) -> Any:
    if isinstance(value, set):  # of modules: in which layers they lie, the trained tensors tell
        return sorted({name.rpartition(".")[2] for name in value})
    return list(value) if isinstance(value, tuple) else getattr(value, "value", value)

"""What a run is made with: as run.json and its checkpoints hold it, and what may be otherwise when it goes on."""

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
from grpo_kit.loop.config import (
    CANNOT_CHANGE,
    FIELDS,
    SETUP,
    Config,
    Preset,
    as_json,
    from_json,
)
from grpo_kit.loop.config_checks import LOSSES, UNCLIPPED, check_steps
from grpo_kit.loop.protocols import Sampler, Task, optional
from grpo_kit.loop.run_checks import check_values, trained_before
from grpo_kit.models._model_facts import (
    base_model,
    end_ids,
    hardware,
    model_name,
    weights_digest,
)
from grpo_kit.record._digests import file_digest
from grpo_kit.record.files import RunFolderError
from grpo_kit.rewards._parts import all_parts, answer_parts, range_of, reward_names
from grpo_kit.tasks._same_task import content_digest, reward_digest, task_digest

_ADAPTER = (
    "peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save", "rank_pattern",
    "alpha_pattern", "use_rslora", "use_dora", "bias",
)  # fmt: skip
# Of made_with: what a run that goes on obeys, besides the code of its rewards. The rest would make it another run.
_OBEYED = (
    *(f"optimizer.{name}" for name in SETTINGS), "rows", "system", "prefill", "examples", "tokenizer", "template",
    "ends", "weights", "task.reward_weights",
)  # fmt: skip
# Of a preset's fields, those that a run compares, where both are known. The others may be given otherwise.
_LOADED = ("model", "tuning", "dtype")


def settings_of(
    model: Any,
    task: Task,
    config: Config,
    weights: list[float],
    optimizer: str,
    sample: Sampler,
) -> dict[str, Any]:
    """The settings of a run, for RunLog.open.

    reward_parts: each reward by name, then the parts of those that are sums. reward_ranges: what rewards and parts
    state of their range. answer_parts: the parts that judge the answer. best_constant: what the best constant answer
    earns. sample: the sampler by its name; of a dataclass (OlderWeights) with its options. task: its file, if any, with
    that file's SHA-256, and the digest of what the config makes of it (a command finds it by these, or by name); its
    system text and prefill.
    """
    names = reward_names(task.rewards)
    rewards = list(zip(names, task.rewards, strict=True))
    parts = []
    for reward in task.rewards:
        parts += zip(getattr(reward, "names", ()), all_parts(reward), strict=False)
    part_names = [name for name, _ in parts]
    ranges = {name: range_of(reward) for name, reward in [*rewards, *parts]}
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return {
        "config": Preset.of(config).values(),
        "reward_parts": list(dict.fromkeys([*names, *part_names])) or list(task.paid_parts),
        "reward_weights": weights,
        "reward_ranges": {name: limits for name, limits in ranges.items() if limits},
        "answer_parts": list(answer_parts(task.rewards, names)),
        "best_constant": task.best_constant_parts(),
        "temperature_schedule": as_json(config.temperature)
        if callable(config.temperature)
        else None,
        "optimizer": optimizer,
        "sample": name_of_sample(sample),
        "model": model_name(model),
        "task": {
            "system": task.system,
            "prefill": task.prefill,
            "file": task.file,
            "sha256": _sha256_of(task.file),
            "digest": task_digest(Preset.of(config).cut(task)) if is_dataclass(task) else None,
        },
        "data": {"task": task.name, "rows": len(task.train)},
        "parameters": sum(size for size, _ in sizes),
        "trainable_parameters": sum(size for size, trains in sizes if trains),
        "device": hardware(),
        "command": None if in_notebook() else shlex.join(["python", *sys.orig_argv[1:]]),
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
    }


def _sha256_of(file: str | None) -> str | None:
    path = Path((file or "").rpartition(":")[0])
    return file_digest(path) if path.is_file() else None


def name_of_sample(sample: Sampler) -> str:
    """A sampler by its name; a dataclass with its options."""
    if is_dataclass(sample):
        return repr(sample)
    return getattr(sample, "__name__", type(sample).__name__)


def made_with(trainer: Any) -> dict[str, Any]:
    """What a step depends on besides the config and the weights, each as words or a digest that JSON can hold.

    A checkpoint keeps it, and a run that goes on compares; _OBEYED says what may be otherwise.
    """
    model, task, tokenizer = trainer.model, trainer.task, trainer.tokenizer
    trained = [(name, tuple(p.shape), str(p.dtype)) for name, p in trainer.trained.items()]
    adapter = next(iter(getattr(model, "peft_config", {}).values()), None)
    names = reward_names(task.rewards)
    keeps_state = optional(trainer.sample, "state", None) is not None
    settings: dict[str, Any] = {}
    for name in _ADAPTER:
        settings[f"adapter.{name}"] = _plain(getattr(adapter, name, None))
    settings["trained"] = (
        f"{type(base_model(model)).__name__}, {len(trained)} tensors, {content_digest(trained)}"
    )
    settings |= trainer.began_with
    settings["optimizer_kind"] = type(trainer.optimizer).__name__
    for name in SETTINGS:
        values = [_plain(group.get(name)) for group in trainer.optimizer.param_groups]
        settings[f"optimizer.{name}"] = values
    settings["sample"] = name_of_sample(trainer.sample) if keeps_state else None
    settings["rewards"] = names
    for name, reward in zip(names, task.rewards, strict=True):
        settings[f"reward.{name}"] = f"code {reward_digest(reward)}"
    rows_digest = content_digest(task.train, lambda value: type(value).__name__)
    return settings | {
        "task.reward_weights": list(task.reward_weights),
        "rows": f"{len(task.train)} rows, {rows_digest}",
        "system": task.system,
        "prefill": task.prefill,
        "examples": content_digest(task.examples, str),
        "tokenizer": _digest_of_tokenizer(tokenizer),
        "template": content_digest(getattr(tokenizer, "chat_template", None), str),
        "ends": end_ids(model, tokenizer),
    }


def began_with(
    model: torch.nn.Module, reference: Mapping[str, torch.Tensor] | None
) -> dict[str, str]:
    """Digests of the weights that a run keeps of the model that it began with: frozen ones, the reference of a KL."""
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    weights = {"frozen_weights": frozen, "reference": list((reference or {}).values())}
    return {name: weights_digest(tensors) for name, tensors in weights.items() if tensors}


def _digest_of_tokenizer(tokenizer: Any) -> str:
    """Of how it cuts text into tokens; padding and truncation, which each call sets, stand before that."""
    if getattr(tokenizer, "is_fast", False):
        text = tokenizer.backend_tokenizer.to_str()
        return content_digest(text.partition('"added_tokens"')[2])
    return content_digest(getattr(tokenizer, "get_vocab", dict)())


def _plain(value: Any) -> Any:
    """A setting of peft or an optimizer as JSON holds it."""
    if isinstance(value, set):  # of modules: in which layers they lie, the trained tensors tell
        return sorted({name.rpartition(".")[2] for name in value})
    return list(value) if isinstance(value, tuple) else getattr(value, "value", value)


# ---- what is otherwise than before ------------------------------------------------------------------------------


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[Any]]:
    """{name: [before, after]} of what both know and is not the same.

    >>> differences({"rows": "8 rows"}, {"rows": "9 rows", "ends": [2]})
    {'rows': ['8 rows', '9 rows']}
    """
    shared = [name for name in after if name in before]
    return {name: [before[name], after[name]] for name in shared if before[name] != after[name]}


def take_up(
    config: Config, saved: Mapping[str, Any], first: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Give a config the values that a checkpoint was saved with, but for those that are new to the run.

    saved: the values as the checkpoint was written; first: as the run began. Returns the values by which a later
    difference is a change, and the fields that cannot change and have another value: {name: [before, after]}.
    Where there are any of those nothing is set.
    """
    known, refused, unchanged = config.values(), {}, []
    for name, value in config.values().items():
        before = first.get(name, saved.get(name, value))
        if name in SETUP and (name not in _LOADED or None in (value, before)):
            continue
        known[name] = saved.get(name, value)
        if value == before:
            unchanged.append(name)
        elif not FIELDS[name].metadata["changes"]:
            refused[name] = [before, value]
    if not refused:
        for name in unchanged:
            setattr(config, name, from_json(name, known[name], getattr(config, name)))
    return known, refused


class Changes:
    """Compares what each step of a run is made with to what its last row was: the config's values, and made_with.

    begun: the config's values as the run began. known: all values, as of the last row.
    """

    def __init__(self, config: Config) -> None:
        self.begun, self.known = config.values(), config.values()
        self._made_with: dict[str, Any] = {}  # in this train()

    def take_up(self, trainer: Any, state: Mapping[str, Any], checkpoint: str) -> None:
        """Go on from a checkpoint's state. Raises RunFolderError, and sets nothing, where it is another run's."""
        current = made_with(trainer)
        saved, first = state.get("made_with", current), state.get("begun", state["config"])
        known, refused = take_up(trainer.config, state["config"], first)
        _check_same_run(refused | differences(saved, current), saved, checkpoint)
        self.begun, self.known = first, known | current | saved | {"weights": None}

    def begin(self, trainer: Any, *, first: bool) -> None:
        """train() begins, for the first time or not. Says what is otherwise than before; raises as take_up does.

        The model's weights may be those that another trainer made of it since.
        """
        config, current = trainer.config, made_with(trainer)
        if first:
            self.begun, self.known = config.values(), current | self.known
        _check_same_run(differences(self.known, current), self.known, str(trainer.folder))
        check_steps(config)
        self.known["weights"] = trainer.starts_from if first else None
        self._made_with = current | {"weights": trained_before(trainer.model, trainer.folder)}
        if not trainer.processes.is_main:
            return
        if first:
            _print_other_numbers(config)
        changes = differences(self.known, config.values() | self._made_with)
        if changes:
            texts = [
                f"{name} {before!r}, now {after!r}" for name, (before, after) in changes.items()
            ]
            print(
                f"From step {trainer.step + 1} on otherwise than before: {'; '.join(texts)}.",
                flush=True,
            )
        if "steps" in changes and trainer.step:
            _print_schedules(config, changes["steps"][0], trainer.step)

    def of_step(
        self, trainer: Any, repeated: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The changes of the next step, {"changes": {name: [before, after]}}, if any; and all values as they are.

        repeated: changes that a resumed run made at this step: made again, unless another value was assigned since.
        """
        config, values = trainer.config, trainer.processes.from_main(trainer.config.values)
        for name, value in values.items():
            if value == self.known[name]:
                value = repeated.get(name, value)
            if as_json(getattr(config, name)) != value:
                setattr(config, name, from_json(name, value, getattr(config, name)))
        current = config.values() | self._made_with
        changes = differences(self.known, current)
        if not changes:
            return {}, current
        check_values(
            trainer, {name: getattr(config, name) for name in changes if name in values}
        )
        return {"changes": changes}, current


def _check_same_run(
    changes: Mapping[str, list[Any]], before: Mapping[str, Any], checkpoint: str
) -> None:
    """Raises RunFolderError, with a table, for changes that would make it another run."""
    # Batches that wait were made of the rows that the task had then.
    obeyed = () if before.get("sample") else _OBEYED
    lines = [
        f"  {name}: {pair[0]!r}, now {pair[1]!r}"
        for name, pair in changes.items()
        if name not in obeyed and not name.startswith("reward.")
    ]
    if lines:
        raise RunFolderError(
            "\n".join([f"{checkpoint} was made otherwise. These {CANNOT_CHANGE}:", *lines])
            + f"\nGive what it was made with, or begin a new run from its weights: load_policy({checkpoint!r}) and "
            "another folder."
        )


def _print_other_numbers(config: Config) -> None:
    """A line where a loss is given other numbers than its own."""
    texts = []
    for name, (number, value) in differences(LOSSES[config.loss], config.values()).items():
        reason = f"its own: {number!r}"
        if name.startswith("epsilon") and config.loss in UNCLIPPED:
            reason = "it clips nothing"
        texts.append(f"{name}={value!r} ({reason})")
    if texts:
        print(f"loss={config.loss!r} with {', '.join(texts)}.", flush=True)


def _print_schedules(config: Config, steps_before: int, step: int) -> None:
    """A line for each schedule of a run that has other steps than before, after `step` of them: its new numbers."""
    following, last = config.at(step), config.at(config.steps - 1)
    for name in ("learning_rate", "temperature", "beta"):
        schedule = getattr(config, name)
        if callable(schedule):
            print(
                f"{name}: {schedule!r} runs over {config.steps} steps now, not {steps_before}: "
                f"{getattr(following, name):.3g} in step {step + 1}, {getattr(last, name):.3g} in the last.",
                flush=True,
            )

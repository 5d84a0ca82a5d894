"""Other numbers while a run trains: what may change to what, and the numbers of a run that goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_kit.loop.grpo_config import CANNOT_CHANGE, FIELDS, Config, check_fields, from_json

# What the loop does not read: where the model and the task came from. A run that goes on may say them otherwise.
_AROUND = ("preset", "task", "task_options", "held_out", "eval_batch")
_LOADED = ("model", "tuning", "dtype")  # None says nothing of them


def check_values(trainer: Any, values: Mapping[str, Any]) -> None:
    """Raises ValueError for a field that cannot change, or not to that value in this run. Nothing is set here."""
    check_fields(values)
    free = [name for name, each in FIELDS.items() if each.metadata["changes"]]
    if fixed := sorted(set(values) - set(free)):
        raise ValueError(f"{fixed[0]}={values[fixed[0]]!r} {CANNOT_CHANGE}; what can: {', '.join(free)}")
    if values.get("beta") and trainer.reference is None:
        raise ValueError(
            f"beta={values['beta']!r}: the trainer was made with beta=0, so it has no reference; make it with a "
            "small beta above 0"
        )
    check_weights(trainer.task, values.get("reward_weights"))
    if values.get("steps", trainer.step) < trainer.step:
        raise ValueError(f"steps={values['steps']!r}: {trainer.step} are done already; give more, or stop")


def check_weights(task: Any, weights: list[float] | None) -> None:
    """Raises ValueError unless there is one a reward of the task, or None."""
    if weights and len(weights) != (count := len(getattr(task, "rewards", [None]))):
        raise ValueError(f"reward_weights={weights!r}: the task has {count} rewards; give one number each")


def take_up(config: Config, saved: Mapping[str, Any], begun: Mapping[str, Any]) -> dict[str, Any]:
    """Give a config the values that a checkpoint was saved with, but for those that are new to the run.

    saved: the values as the checkpoint was written; begun: as the run began. Returns the values by which a later
    difference is a change.
    Raises ValueError for a field that cannot change and has another value.
    """
    given, kept = config.values(), {}
    for name, value in given.items():
        was = begun.get(name, value)
        if name in _AROUND or name in _LOADED and None in (value, was):
            continue
        if value == was:
            setattr(config, name, from_json(name, saved.get(name, value), getattr(config, name)))
        elif not FIELDS[name].metadata["changes"]:
            raise ValueError(f"{name}={value!r} {CANNOT_CHANGE}; this one was begun with {was!r}")
        if name in saved:
            kept[name] = saved[name]
    return config.values() | kept

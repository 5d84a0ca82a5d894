"""Other numbers while a run trains, and a run that goes on: what may be otherwise than before, and what may not."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from grpo_kit.engine.optim.choose import SETTINGS
from grpo_kit.loop.config import CANNOT_CHANGE, FIELDS, SETUP, Config, as_json, check_fields, from_json
from grpo_kit.loop.config_checks import LOSSES, UNCLIPPED, check_steps
from grpo_kit.loop.protocols import Task
from grpo_kit.loop.run_checks import trained_before
from grpo_kit.loop.run_settings import made_with
from grpo_kit.record.files import RunFolderError

# Of a preset's fields, those that a run compares; None says nothing of them. The others may be said otherwise.
_LOADED = ("model", "tuning", "dtype")
# Of made_with: what a run that goes on obeys, besides the code of its rewards. The rest would make it another run.
OBEYED = (
    *(f"optimizer.{name}" for name in SETTINGS), "rows", "system", "prefill", "examples", "tokenizer", "template",
    "ends", "weights", "task.reward_weights",
)  # fmt: skip


def check_names(values: Mapping[str, Any]) -> None:
    """Raises ValueError for a name that is no field, with the nearest one, and for a field that cannot change."""
    check_fields(values)
    for name, value in values.items():
        if not FIELDS[name].metadata["changes"]:
            free = ", ".join(field for field, each in FIELDS.items() if each.metadata["changes"])
            cure = f"what can: {free}. For another {name} make a new trainer, with a new folder"
            raise ValueError(f"{name}={value!r} {CANNOT_CHANGE}; {cure}")


def check_values(trainer: Any, values: Mapping[str, Any]) -> None:
    """Raises ValueError for a field that cannot change, or not to that value in this run. Nothing is set here."""
    check_names(values)
    if values.get("beta") and trainer.reference is None:
        raise ValueError(
            f"beta={values['beta']!r}: the trainer was made with beta=0, so it has no reference; make it with a "
            "small beta above 0"
        )
    check_weights(trainer.task, values.get("reward_weights"))
    changed = copy.copy(trainer.config)
    vars(changed).update(values)
    check_steps(changed)
    if values.get("steps", trainer.step) < trainer.step:
        raise ValueError(f"steps={values['steps']!r}: {trainer.step} are done already; give more, or stop")


def check_weights(task: Task, weights: list[float] | None) -> None:
    """Raises ValueError unless there is one a reward of the task, or None."""
    if weights and len(weights) != (count := len(task.reward_weights)):
        raise ValueError(f"reward_weights={weights!r}: the task has {count} rewards; give one number each")


def take_up(
    config: Config, saved: Mapping[str, Any], begun: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Give a config the values that a checkpoint was saved with, but for those that are new to the run.

    saved: the values as the checkpoint was written; begun: as the run began. Returns the values by which a later
    difference is a change, and the fields that cannot change and have another value: {name: [was, is]}.
    Where there are any of those nothing is set.
    """
    known, same, refused = {}, {}, {}
    for name, value in config.values().items():
        was = begun.get(name, saved.get(name, value))
        if name in SETUP and (name not in _LOADED or None in (value, was)):
            continue
        known[name] = saved.get(name, value)
        if value == was:
            same[name] = known[name]
        elif not FIELDS[name].metadata["changes"]:
            refused[name] = [was, value]
    for name, value in same.items() if not refused else ():
        setattr(config, name, from_json(name, value, getattr(config, name)))
    return config.values() | known, refused


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """{name: [was, is]} of what both know and is not the same.

    >>> differences({"rows": "8 rows"}, {"rows": "9 rows", "ends": [2]})
    {'rows': ['8 rows', '9 rows']}
    """
    return {name: [was[name], now[name]] for name in now if name in was and was[name] != now[name]}


class Changes:
    """What a run was made with as of its last row, to which its steps are compared: the config, and made_with.

    begun: the config's values as the run began. known: the config's and the others, as of the last row.
    """

    def __init__(self, config: Config) -> None:
        self.begun, self.known = config.values(), config.values()
        self._made: dict[str, Any] = {}  # besides the config, in this train()

    def take_up(self, trainer: Any, state: Mapping[str, Any], checkpoint: str) -> None:
        """Go on from a checkpoint's state. Raises RunFolderError, and sets nothing, where it is another run's."""
        now = made_with(trainer)
        was, begun = state.get("made_with", now), state.get("begun", state["config"])
        known, refused = take_up(trainer.config, state["config"], begun)
        _check_same_run(refused | differences(was, now), was, checkpoint)
        self.begun, self.known = begun, known | now | was | {"weights": None}

    def begin(self, trainer: Any, *, first: bool) -> None:
        """train() begins, for the first time or not. Says what is otherwise than before; raises as take_up does.

        The model's weights may be those that another trainer made of it since.
        """
        now = made_with(trainer)
        if first:
            self.begun, self.known = trainer.config.values(), now | self.known
        _check_same_run(differences(self.known, now), self.known, str(trainer.folder))
        check_steps(trainer.config)
        self.known["weights"] = trainer.starts_from if first else None
        self._made = now | {"weights": trained_before(trainer.model, trainer.folder)}
        if first and trainer.processes.is_main:
            _say_what_is_not_the_losss(trainer.config)
        found = differences(self.known, trainer.config.values() | self._made)
        if found and trainer.processes.is_main:
            each = "; ".join(f"{name} {was!r}, now {value!r}" for name, (was, value) in found.items())
            print(f"From step {trainer.step + 1} on otherwise than before: {each}.", flush=True)
            if "steps" in found and trainer.step:
                _say_what_schedules_become(trainer.config, found["steps"][0], trainer.step)

    def of_step(self, trainer: Any, again: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Make a resumed run's changes again, unless asked otherwise: {"changes": {name: [was, is]}}; all as it is."""
        config, asked = trainer.config, trainer.processes.from_main(trainer.config.values)
        for name, value in asked.items():
            value = again.get(name, value) if value == self.known[name] else value
            if as_json(getattr(config, name)) != value:
                setattr(config, name, from_json(name, value, getattr(config, name)))
        now = config.values() | self._made
        found = differences(self.known, now)
        if not found:
            return {}, now
        check_values(trainer, {name: getattr(config, name) for name in found if name in asked})
        return {"changes": found}, now


def _check_same_run(found: Mapping[str, list[Any]], was: Mapping[str, Any], checkpoint: str) -> None:
    obeyed = () if was.get("sample") else OBEYED  # batches that wait were made of the rows of then
    if refused := {n: pair for n, pair in found.items() if n not in obeyed and n[:7] != "reward."}:
        lines = [f"  {name}: {before!r}, now {now!r}" for name, (before, now) in refused.items()]
        raise RunFolderError(
            "\n".join([f"{checkpoint} was made otherwise. These {CANNOT_CHANGE}:", *lines])
            + f"\nGive what it was made with, or begin a new run from its weights: load_policy({checkpoint!r}) and "
            "another folder."
        )


def _say_what_is_not_the_losss(config: Config) -> None:
    """A line where a loss is given other numbers than its own."""
    others = []
    for name, number in differences(LOSSES[config.loss], config.values()).items():
        unread = name.startswith("epsilon") and config.loss in UNCLIPPED
        own = "it clips nothing" if unread else f"its own: {number[0]!r}"
        others.append(f"{name}={number[1]!r} ({own})")
    if others:
        print(f"loss={config.loss!r} with {', '.join(others)}.", flush=True)


def _say_what_schedules_become(config: Config, before: int, step: int) -> None:
    """A line for each schedule of a run of `before` steps, of which `step` are done, that now has another number."""
    following, last = config.at(step), config.at(config.steps - 1)
    for name in ("learning_rate", "temperature", "beta"):
        if callable(schedule := getattr(config, name)):
            print(
                f"{name}: {schedule!r} runs over {config.steps} steps now, not {before}: "
                f"{getattr(following, name):.3g} in step {step + 1}, {getattr(last, name):.3g} in the last.",
                flush=True,
            )

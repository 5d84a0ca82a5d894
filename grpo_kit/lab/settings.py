"""The settings of one run of the laboratory: flat settings -> its parts, and a fingerprint that compares settings.

Settings are compared in their written form: numbers and texts by value, data by a digest, everything else by its
repr. A function, a class or an object without its own repr is identified by name only: after changing its code,
rename the arm.
"""

from __future__ import annotations

import difflib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from grpo_kit.argument_checks import check_temperature, check_whole
from grpo_kit.loop.grpo import Sample
from grpo_kit.loop.grpo_config import FIELDS, Config
from grpo_kit.profiles import Profile, profile
from grpo_kit.rewards.parts import all_parts
from grpo_kit.tasks import Task
from grpo_kit.tasks.measure import has_accuracy
from grpo_kit.tasks.same_task import content_digest
from grpo_kit.watch.monitor import Monitor, OnFlag

_OWN = ("profile", "task", "tuning", "prepare", "sample", "on_flag", "eval_temperatures", "eval_samples")
_PROFILE = {f.name for f in fields(Profile)} - {"name", "picked", "seed"}
_CONFIG = set(FIELDS) - {"seed"}
_AS_OPTIONS = ("optimizer", "temperature", "on_flag")  # what stored laboratories call options.<name>
SAMPLES = 4  # of a held-out row, at each of eval_temperatures
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

Prepare = Callable[[Any, Any, Task, int], None]


@dataclass(frozen=True)
class Settings:
    """Everything that defines one run, except its seed. Made by resolve().

    config: the fields of Config that the profile does not set, or that are schedules.
    """

    profile: Profile
    task: Task
    tuning: str
    config: dict[str, Any]
    sample: Callable[[Sample], Sample] | None
    on_flag: OnFlag | None
    prepare: Prepare | None
    eval_temperatures: tuple[float, ...]
    eval_samples: int = SAMPLES
    own_length: int | None = None  # tokens of the profile's own task; None if a length was given

    @property
    def dtype(self) -> str:
        """The dtype in which weights are loaded."""
        return self.profile.dtype if self.tuning == "full" else self.profile.lora_dtype

    def of_seed(self, seed: int) -> Config:
        """The Config of one run; raises ValueError for values that cannot be."""
        return replace(self.profile, seed=seed).config(tuning=self.tuning, **self.config)


def resolve(changes: Mapping[str, Any]) -> Settings:
    """Flat settings by name: fields of Profile, of loop.Config, and a few of the laboratory's own.

    profile: its name, default "auto". task: a name, or a Task; its first held_out rows are evaluated.
    tuning: "full", "lora" or "qlora"; with adapters, lora_learning_rate and lora_dtype replace learning_rate and
    dtype. sample: f(the fast sample) -> the sample to train with, such as partial(OlderWeights, sync_every=5).
    prepare: f(model, tokenizer, task, seed), called before training, and again before a run continues from a
    checkpoint. on_flag: what a red flag does ("stop" ends the run); left out, flags are printed. eval_temperatures: the
    tuned model is also sampled at each of them, eval_samples (default 4) for each of the first 64 held-out rows.
    temperature, learning_rate and beta: a number, or a schedule.
    Raises ValueError for an unknown name, with the nearest known one, and for values of the wrong kind.

    >>> resolve({"profile": "smoke", "steps": 3, "loss": "dr_grpo"}).config["loss"]
    'dr_grpo'
    """
    changes = dict(changes)
    if unknown := sorted(set(changes) - set(_OWN) - _PROFILE - _CONFIG):
        near = difflib.get_close_matches(unknown[0], [*_OWN, *_PROFILE, *_CONFIG], 1)
        raise ValueError(
            f"{', '.join(unknown)}: no field of a profile or of loop.Config and no setting of the laboratory"
            + (f"; did you mean {near[0]!r}?" if near else "")
        )
    task, tuning = changes.pop("task", None), changes.pop("tuning", "full")
    prepare, name = changes.pop("prepare", None), changes.pop("profile", "auto")
    sample, on_flag = changes.pop("sample", None), changes.pop("on_flag", None)
    if prepare is not None and not callable(prepare):
        raise ValueError(f"prepare={prepare!r} must be a function f(model, tokenizer, task, seed)")
    if sample is not None and not callable(sample):
        raise ValueError(f"sample={sample!r} must be a function of the fast sample that returns another")
    Monitor("warn" if on_flag is None else on_flag)  # refuses what on_flag cannot be
    temperatures = _temperatures(changes.pop("eval_temperatures", ()))
    samples = changes.pop("eval_samples", SAMPLES)
    check_whole("eval_samples", samples)
    config = {key: changes.pop(key) for key in list(changes) if key not in _PROFILE or callable(changes[key])}
    numbers = dict(changes)
    if isinstance(task, str):
        numbers["task"] = task
    chosen = profile(name, **numbers)
    given = chosen.max_completion_tokens is not None
    if isinstance(task, Task):
        own_length = None if given else _length_of(chosen)
        length = chosen.max_completion_tokens or task.max_completion_tokens
        task = replace(task, held_out=task.held_out[: chosen.held_out], max_completion_tokens=length)
    elif task is None or isinstance(task, str):
        task = chosen.make_task()
        own_length = None if given else task.max_completion_tokens
    else:
        raise ValueError(f"task={task!r} must be a Task, or the name of one")
    chosen = replace(chosen, max_completion_tokens=task.max_completion_tokens)  # fingerprint() reads it
    if not has_accuracy(task):
        raise ValueError(
            f"task {task.name!r} has no right and wrong, which the laboratory compares arms by: no row has an answer, "
            "and no reward states its range; give the task correct=, or reward.range = (low, high)"
        )
    if tuning == "full" or "optimizer" in numbers:
        config["optimizer"] = chosen.optimizer
    return Settings(chosen, task, tuning, config, sample, on_flag, prepare, temperatures, samples, own_length)


def _length_of(chosen: Profile) -> int:
    """The answer length in tokens of the profile's task."""
    return chosen.task_options.get("max_completion_tokens") or chosen.make_task().max_completion_tokens


def as_json(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as given, as JSON values, the same in every process: for readers of result.json."""
    return json.loads(json.dumps({key: _plain(changes[key]) for key in sorted(changes)}))


def fingerprint(settings: Settings) -> dict[str, Any]:
    """Identifies settings however they were given: by every number, all data, the names of functions.

    JSON values, the same in every process.
    """
    numbers = {k: v for k, v in asdict(settings.profile).items() if k in _PROFILE - {"task", "task_options"}}
    task = settings.task
    length = settings.own_length
    # As stored laboratories have it: the length of the profile's own task, and the trainer, which was a choice.
    numbers["follows"] = None if length is None else [settings.profile.task, length, length]
    given = settings.config | ({} if settings.on_flag is None else {"on_flag": settings.on_flag})
    parts = {
        "profile": numbers,
        "task": {**_prompt(task), "train": digest(task.train), "reward_weights": task.reward_weights}
        | {"rewards": [[reward, *all_parts(reward)] for reward in task.rewards]},
        "run": {"tuning": settings.tuning, "trainer": "GRPOTrainer", "prepare": settings.prepare}
        | {"eval_temperatures": settings.eval_temperatures},
        "options": {name: value for name, value in given.items() if name in _AS_OPTIONS},
        "config": {name: value for name, value in given.items() if name not in _AS_OPTIONS},
    }
    if settings.sample is not None:
        parts["run"]["sample"] = settings.sample
    if settings.eval_samples != SAMPLES:  # older runs had as many
        parts["run"]["eval_samples"] = settings.eval_samples
    flat = {f"{part}.{key}": _plain(value) for part, values in parts.items() for key, value in values.items()}
    return json.loads(json.dumps(flat, sort_keys=True))


def prompt_fingerprint(settings: Settings) -> str:
    """Identifies everything that the untrained model's scores depend on: equal if `before` may be shared."""
    loaded = [settings.profile.model, settings.dtype, settings.tuning == "qlora"]
    return digest([loaded, _plain(_prompt(settings.task))])


def _prompt(task: Task) -> dict[str, Any]:
    names = ("name", "is_correct", "strategies", "system", "prefill", "examples", "max_completion_tokens")
    given = {name: getattr(task, name) for name in (*names, "answer_tag", "read_answer")}
    if judges := task.answer_rewards:
        given["answer_rewards"] = [[reward, *all_parts(reward)] for reward in judges]
    return {**given, "held_out": digest(task.held_out)}


def digest(value: Any) -> str:
    """content_digest; values that JSON cannot hold count by their names, as in the settings."""
    return content_digest(value, _plain)


def _temperatures(given: Any) -> tuple[float, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ValueError(f"eval_temperatures={given!r} must be a list of numbers above 0, such as (0.7, 1.0)")
    return tuple(check_temperature(value, f"eval_temperatures[{i}]") for i, value in enumerate(given))


def _plain(value: Any) -> Any:
    """A JSON value, or a text that is the same in every process (a repr may hold an address)."""
    if isinstance(value, Task):
        rewards = dict(zip([_plain(r) for r in value.rewards], value.reward_weights, strict=True))
        return {
            "task": value.name,
            "train": len(value.train),
            "held_out": len(value.held_out),
            "first": value.train[0]["question"],
            "rewards": rewards,
            "system": value.system,
            "prefill": value.prefill,
            "examples": [list(pair) for pair in value.examples],
            "max_completion_tokens": value.max_completion_tokens,
        }
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if inspect.ismethod(value):
        return [_plain(value.__self__), value.__qualname__]
    if isinstance(value, type) or inspect.isroutine(value):
        return value.__qualname__  # without its module: a notebook's is __main__
    if type(value).__repr__ is object.__repr__:
        return type(value).__qualname__
    return _ADDRESS.sub("", repr(value))

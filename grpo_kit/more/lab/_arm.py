"""An arm of a laboratory: a Config, the task and what the arm does besides; and a fingerprint that compares arms.

Arms are compared in their written form: numbers and texts by value, data by a digest, everything else by its repr. A
function, a class or an object without its own repr is identified by name only: after changing its code, rename the arm.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from grpo_kit._support.argument_checks import check_temperature, check_whole
from grpo_kit.loop.config import FIELDS, Config, Preset, check_fields
from grpo_kit.loop.protocols import Sampler
from grpo_kit.record.files import RENAMED
from grpo_kit.rewards._parts import all_parts
from grpo_kit.tasks import Task
from grpo_kit.tasks._measure import has_accuracy
from grpo_kit.tasks._same_task import content_digest
from grpo_kit.trainer.presets import preset
from grpo_kit.watch.monitor import Monitor, OnFlag

SAMPLES = 4  # of a held-out row, at each of eval_temperatures
# An arm's fields besides config and task.
_BESIDES = ("sample", "on_flag", "prepare", "eval_temperatures", "eval_samples")
# The seed is the run's; the task is compared by its data.
_NO_SETTING = {"preset", "seed", "task", "task_options"}
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

Prepare = Callable[[Any, Any, Task, int], None]


@dataclass(frozen=True)
class Arm:
    """The settings that all runs of an arm share. Made by arm_of(), which says what each field is."""

    config: Preset
    task: Task
    sample: Callable[[Sampler], Sampler] | None = None
    on_flag: OnFlag | None = None
    prepare: Prepare | None = None
    eval_temperatures: tuple[float, ...] = ()
    eval_samples: int = SAMPLES


def arm_of(config: Config | str, changes: Mapping[str, Any]) -> Arm:
    """An arm: a Config (or a preset's name), changed by name.

    changes: fields of Preset, as preset takes them: with tuning="lora" the rate is the adapters', unless one is given.
    task: a name, or a Task; its first held_out rows are evaluated.
    sample: f(the fast sample) -> the sample to train with, such as one of examples/older_weights.py.
    prepare: f(model, tokenizer, task, seed), called before training, and again before a run continues from a
    checkpoint. on_flag: what a red flag does ("stop" ends the run); left out, flags are printed. eval_temperatures: the
    tuned model is also sampled at each of them, eval_samples (default 4) for each of the first 64 held-out rows.
    Raises ValueError for an unknown name, with the nearest known one, and for values of the wrong kind.

    >>> arm_of("smoke", {"steps": 3, "loss": "dr_grpo"}).config.loss
    'dr_grpo'
    """
    settings = dict(changes)
    besides = {name: settings.pop(name) for name in _BESIDES if name in settings}
    check_fields(settings, besides=_BESIDES)
    if "seed" in settings:
        raise ValueError(
            f"seed={settings['seed']!r}: every arm is trained with the seeds that compare_arms is given"
        )
    task = None
    if isinstance(settings.get("task"), Task):
        task = settings.pop("task")
    config = preset(config, **settings)
    task = config.make_task() if task is None else config.cut(task)
    _check_besides(besides)
    if "eval_temperatures" in besides:
        besides["eval_temperatures"] = _temperatures(besides["eval_temperatures"])
    if not has_accuracy(task):
        raise ValueError(
            f"task {task.name!r} has no right and wrong, which the laboratory compares arms by: no row has an "
            "answer, and no reward states its range; give the task correct=, or reward.range = (low, high)"
        )
    return Arm(config.with_task(task), task, **besides)


def _check_besides(besides: Mapping[str, Any]) -> None:
    """Raises ValueError for a function that is none, an unknown on_flag, and eval_samples below 1."""
    for name, signature in (
        ("prepare", "a function f(model, tokenizer, task, seed)"),
        ("sample", "a function of the fast sample that returns another"),
    ):
        function = besides.get(name)
        if function is not None and not callable(function):
            raise ValueError(f"{name}={function!r} must be {signature}")
    if besides.get("on_flag") is not None:
        Monitor(besides["on_flag"])  # refuses what on_flag cannot be
    check_whole("eval_samples", besides.get("eval_samples", SAMPLES))


def _temperatures(values: Any) -> tuple[float, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(
            f"eval_temperatures={values!r} must be a list of numbers above 0, such as (0.7, 1.0)"
        )
    return tuple(
        check_temperature(value, f"eval_temperatures[{i}]") for i, value in enumerate(values)
    )


def fingerprint(arm: Arm) -> dict[str, Any]:
    """Identifies an arm however it was given: by every number, all data, the names of functions.

    JSON values, the same in every process and, but for a dtype of products that was asked for, on every machine.
    """
    config, task = arm.config, arm.task
    fields = FIELDS.keys() - _NO_SETTING
    if config.autocast == config.reasons.get("autocast", (None,))[0]:
        fields.remove("autocast")  # as this machine has it
    if config.rollout_bits == 32:
        fields.remove("rollout_bits")  # as arms were before there was a choice
    # Names as stored arms have them.
    former_names = {name: before for before, name in RENAMED.items()}
    # A task of several turns has its credit, which stored arms have among the config's numbers.
    of_turns = {
        "credit": getattr(task, "credit", "episode"),
        "discount": getattr(task, "discount", 1.0),
    }
    parts = {
        "config": {former_names.get(name, name): getattr(config, name) for name in fields}
        | of_turns,
        "task": {
            **_prompt(task),
            "train": digest(task.train),
            "reward_weights": task.reward_weights,
            "rewards": [[reward, *all_parts(reward)] for reward in task.rewards],
        },
        "run": {name: getattr(arm, name) for name in _BESIDES},
    }
    flat = {
        f"{part}.{key}": _plain(value)
        for part, values in parts.items()
        for key, value in values.items()
    }
    return json.loads(json.dumps(flat, sort_keys=True))


def prompt_fingerprint(arm: Arm) -> str:
    """Identifies everything that the untrained model's scores depend on: equal if `before` may be shared."""
    loaded = [arm.config.model, arm.config.dtype, arm.config.tuning == "qlora"]
    return digest([loaded, _plain(_prompt(arm.task))])


def _prompt(task: Task) -> dict[str, Any]:
    names = (
        "name", "is_correct", "strategies", "system", "prefill", "examples", "max_completion_tokens", "answer_tag",
        "read_answer",
    )  # fmt: skip
    prompt = {name: getattr(task, name) for name in names}
    if task.answer_rewards:
        prompt["answer_rewards"] = [
            [reward, *all_parts(reward)] for reward in task.answer_rewards
        ]
    prompt["held_out"] = digest(task.held_out)
    return prompt


def digest(value: Any) -> str:
    """content_digest; values that JSON cannot hold count by their names, as in the settings."""
    return content_digest(value, _plain)


def _plain(value: Any) -> Any:
    """A JSON value, or a text that is the same in every process (a repr may hold an address)."""
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


_EARLY = 5  # steps
_TOLERANCE = 0.1  # share by which tokens and completions may differ without being reported
_UNKNOWN = "not on record"
# Columns that must be equal, and their words.
_COUNTS = {"steps": "steps", "max_completion_tokens": "tokens at most", "n": "held-out rows"}


def outcomes(result: Mapping[str, Any], metrics: pd.DataFrame) -> dict[str, Any]:
    """Numbers and names, no lists; see Lab.runs."""
    row = {name: value for name, value in result.items() if not isinstance(value, (dict, list))}
    row.pop("right", None)
    row["accuracy"] = result["accuracy"]["value"]
    row["before"] = result["before"]["value"]
    for temperature, rate in result["sampled"].items():
        row[f"sampled_{temperature}"] = rate
    for temperature, counts in result.get("sampled_right", {}).items():
        solved = sum(count > 0 for count in counts)
        row[f"pass@{result['eval_samples']}_{temperature}"] = solved / len(counts)
    _, row["best_constant"] = result["constant"] or (None, None)
    row["seconds"] = result["prepare_seconds"] + result["train_seconds"]
    return row | _of_curve(metrics)


def _of_curve(metrics: pd.DataFrame) -> dict[str, float]:
    reward = _column(metrics, "reward")  # in old runs empty where a rollout was used again
    bend = reward - (reward.shift() + reward.shift(-1)) / 2
    norm, length = _column(metrics, "grad_norm"), _column(metrics, "completion_length")
    row = {
        "reward_mean": float(reward.mean()),
        "reward_last": last_quarter(reward),
        "reward_roughness": float(bend.abs().mean()),
        "grad_norm_max": float(norm.max()),
        "grad_norm_early": float(norm.head(_EARLY).mean()),
        "entropy_last": last_quarter(metrics["entropy"].astype(float)),
        "equal_groups": float(metrics["frac_reward_zero_std"].astype(float).mean()),
        "length_mean": float(length.mean()),
        "length_last": last_quarter(length),
        "kl_last": last_quarter(_column(metrics, "kl")),
    }
    for name in metrics:
        if name.startswith("reward/"):
            scores = _column(metrics, name)
            row[f"{name}_mean"] = float(scores.mean())
            row[f"{name}_last"] = last_quarter(scores)
    return row


def _column(metrics: pd.DataFrame, name: str) -> pd.Series:
    """The column's values without gaps; a run without a reference model has no kl."""
    return metrics.get(name, pd.Series()).astype(float).dropna()


def last_quarter(values: pd.Series) -> float:
    """The mean of the last quarter: a run's final level."""
    return float(values.tail(max(1, len(values) // 4)).mean())


def unlike(
    runs: pd.DataFrame,
    arm: str,
    against: str,
) -> list[str]:
    """Ends of sentences, the arm's value first: ["20 steps for 10", "2.0 x the tokens"]; [] without differences.

    runs: as Lab.runs; the seeds in both arms count, or all if they share none. Old runs did not record train rows and
    token limits: these are "not on record".
    """
    first, second = _means(runs, arm, against), _means(runs, against, arm)
    differences = []
    if _UNKNOWN in (first["train_rows"], second["train_rows"]):
        differences.append(f"train rows {_UNKNOWN}")
    elif first["train_rows"] != second["train_rows"]:
        differences.append("other train rows")
    for name, words in _COUNTS.items():
        if first[name] != second[name]:
            differences.append(f"{_number(first[name])} {words} for {_number(second[name])}")
    for name in ("completions", "tokens"):
        if not second[name]:
            continue
        ratio = first[name] / second[name]
        if abs(ratio - 1) > _TOLERANCE:
            digits = 1 if ratio >= 1 else 2
            differences.append(f"{ratio:.{digits}f} x the {name}")
    return differences


def _means(
    runs: pd.DataFrame,
    arm: str,
    against: str,
) -> dict[str, Any]:
    """Of an arm's runs, the train rows' digests as a text, and the means of the other columns.

    The seeds that the other arm has too count, or all if it has none of them.
    """
    rows = runs[runs["arm"] == arm]
    shared = rows[rows["seed"].isin(runs.loc[runs["arm"] == against, "seed"])]
    if len(shared):
        rows = shared
    rows = rows.reindex(columns=["train_rows", *_COUNTS, "completions", "tokens"])
    means: dict[str, Any] = {"train_rows": _UNKNOWN}
    if rows["train_rows"].notna().all():
        means["train_rows"] = ", ".join(sorted(set(rows["train_rows"])))
    for name in _COUNTS:
        means[name] = rows[name].mean() if rows[name].notna().all() else None
    return means | rows[["completions", "tokens"]].mean().to_dict()


def _number(mean: float | None) -> str:
    return _UNKNOWN if mean is None else f"{mean:g}"

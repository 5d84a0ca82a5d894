"""What a field of a Config may be, which fields mean something together, and what each loss takes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from functools import partial
from os import PathLike
from typing import Any

from grpo_kit import schedules
from grpo_kit._support.argument_checks import (
    COLDEST,
    FASTEST,
    HOTTEST,
    LARGEST_REWARD,
    SLOWEST,
    check_above_zero,
    check_choice,
    check_number,
    check_temperature,
    check_whole,
    nearest,
)
from grpo_kit.engine.optim.choose import OPTIMIZERS
from grpo_kit.tasks import _by_name as by_name

# ---- the losses ------------------------------------------------------------------------------------------------

_PPO = {"level": "token", "epsilon": 0.2, "epsilon_high": 0.2, "scale": "group"}
_DAPO = _PPO | {"epsilon_high": 0.28}
_SEQUENCE = _PPO | {"level": "sequence"}
# A loss and the numbers that it brings, those of its paper (see grpo_kit.objectives).
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": _PPO,
    "dr_grpo": _PPO | {"scale": "none"},
    "bnpo": _PPO,
    "dapo": _DAPO,
    "gspo": _SEQUENCE | {"epsilon": 3e-4, "epsilon_high": 4e-4},
    "cispo": _PPO | {"epsilon_high": 5.0},
    "sapo": _DAPO,
    "luspo": _SEQUENCE | {"epsilon": 2e-3, "epsilon_high": 2.5e-3},
    "vespo": _DAPO,
}
UNCLIPPED = ("sapo", "vespo")
# A loss and its own arguments, which loss_options may give; correct_kl is one of every loss.
_LOSS_OPTIONS = {
    "sapo": ("temperature_pos", "temperature_neg"),
    "vespo": ("k_pos", "lambda_pos", "k_neg", "lambda_neg"),
}
_FROM_LOOP = (  # arguments of a loss that are the loop's to give
    "level",
    "beta",
    "ref_logprobs",
    "epsilon",
    "epsilon_high",
    "max_ratio",
    "max_completion_tokens",
    "num_rows",
    "num_tokens",
)


def check_loss_options(loss: str, options: Mapping[str, Any], cure: str = "") -> None:
    """Raises ValueError for an argument that the loss does not take, or that is the loop's to give."""
    names = [*_LOSS_OPTIONS.get(loss, ()), "correct_kl"]
    for name, value in options.items():
        if name in _FROM_LOOP:
            raise ValueError(
                f"loss_options has {name!r}, which the loop gives itself; is {name}={value!r} a field?"
            )
        if name not in names:
            mend = f"it takes {', '.join(names)}{nearest(name, names)}"
            raise ValueError(
                f"loss_options has {name!r}, which {loss} does not take; {mend}{cure}"
            )
        if name != "correct_kl":
            check_above_zero(f"loss_options[{name!r}]", value)
        elif not isinstance(value, bool):
            raise ValueError(f"loss_options[{name!r}]={value!r} must be True or False")


# ---- one field -------------------------------------------------------------------------------------------------

SCHEDULED = ("temperature", "learning_rate", "beta")
_CHOICES = {
    "tuning": (None, "full", "lora", "qlora"),
    "dtype": (None, "float32", "bfloat16", "float16"),
    "loss": LOSSES,
    "level": ("token", "sequence"),
    "scale": ("group", "batch", "none"),
    "rollout_bits": (32, 16),
    "autocast": ("none", "bfloat16", "float16"),
    "optimizer": (None, *OPTIMIZERS),
}
# None: the loss's own, the task's, none, or what the trainer is given.
_MAY_BE_NONE = {
    *_PPO,
    "max_completion_tokens",
    "importance_sampling_cap",
    "reward_weights",
    "model",
    "task",
}


def checked(name: str, value: Any) -> Any:
    """The value of a field as it is kept, or ValueError with the field's name and what would do."""
    if value is None and name in _MAY_BE_NONE:
        return None
    if name == "dtype" and value is not None:
        value = str(value).removeprefix("torch.")
    if name in _CHOICES:
        check_choice(name, value, _CHOICES[name])
    return _CHECKS[name](name, value) if name in _CHECKS else value


def _above_zero(name: str, value: Any, most: float = math.inf) -> float:
    check_above_zero(name, value)
    if value > most:
        raise ValueError(f"{name}={value!r} must lie in (0, {most}]")
    return float(value)


def _min_p(name: str, value: Any) -> float:
    if not 0 <= check_number(name, value) < 1:
        raise ValueError(f"min_p={value!r} must lie in [0, 1)")
    return float(value)


def _epsilon(name: str, value: Any) -> float:
    if check_number(name, value, 0) > 1:
        raise ValueError(
            f"epsilon={value!r} must be at most 1, as no ratio falls below 0; 0.2 is usual"
        )
    return float(value)


def _top_k(name: str, value: Any) -> int:
    if value == -1:  # as elsewhere: all
        value = 0
    return check_whole(name, value, 0, hint="; 0 takes all tokens")


def _scheduled(name: str, value: Any) -> Any:
    return value if callable(value) else check_scheduled(name, value, name)


def _name_of(name: str, value: Any) -> Any:
    if not isinstance(value, str | PathLike):
        raise ValueError(
            f"{name}={value!r:.60} must be a name; the {name} itself goes to GRPOTrainer, None here"
        )
    if name == "task":
        check_choice(name, value, (*by_name.NAMES, None))
    return value


def _reward_weights(name: str, value: Any) -> list[float]:
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(
            f"reward_weights={value!r} must be a list of numbers, one a reward, or None"
        )
    weights = [check_number(name, weight) for weight in value]
    if not any(weights):
        raise ValueError(
            f"reward_weights={value!r} are all 0, so that no weight of the model would move"
        )
    if max(map(abs, weights)) > LARGEST_REWARD:
        raise ValueError(
            f"reward_weights={value!r} must be at most {LARGEST_REWARD:g} in size, as rewards must"
        )
    return weights


def _options(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(
            f"{name}={value!r} must be a dict of the {name.partition('_')[0]}'s arguments"
        )
    return value


def _true_or_false(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")
    return value


def check_scheduled(name: str, value: Any, label: str) -> float:
    """A number of a field that may have a schedule, or ValueError, with what would do, for one that harms.

    label: the number's name in the message, such as "temperature(0.5)".
    """
    if isinstance(value, list | tuple | str) and (mend := _as_schedule(value)):
        raise ValueError(f"{name}={value!r} must be a number{mend}")
    if name == "temperature":
        if not COLDEST <= check_temperature(value, label) <= HOTTEST:
            raise ValueError(
                f"{label}={value!r} must lie in [{COLDEST}, {HOTTEST}]: below all samples are alike, above they are "
                "noise"
            )
    elif check_number(label, value, 0) > FASTEST and name == "learning_rate":
        raise ValueError(
            f"{label}={value!r} destroys the weights in one step; 1e-06 to 0.001 is usual"
        )
    return float(value)


# The fields with another check than _CHOICES: f(name, value) gives the value as it is kept, or raises ValueError.
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("steps", "prompts_per_step", "iterations", "minibatches"), check_whole),
    **dict.fromkeys(("micro_batch", "save_total_limit", "held_out", "eval_batch"), check_whole),
    **dict.fromkeys(("seed", "dynamic_sampling", "save_steps"), partial(check_whole, least=0)),
    "group_size": partial(check_whole, least=2),
    "max_completion_tokens": partial(check_whole, hint=", or None for the task's"),
    "top_k": _top_k,
    **dict.fromkeys(SCHEDULED, _scheduled),
    **dict.fromkeys(
        ("epsilon_high", "entropy_bonus", "warmup"), partial(check_number, least=0)
    ),
    **dict.fromkeys(
        ("positive_weight", "negative_weight", "weight_decay"), partial(check_number, least=0)
    ),
    **dict.fromkeys(
        ("repetition_penalty", "max_grad_norm", "importance_sampling_cap"), _above_zero
    ),
    "top_p": partial(_above_zero, most=1),
    "min_p": _min_p,
    "epsilon": _epsilon,
    "reward_weights": _reward_weights,
    **dict.fromkeys(("loss_options", "task_options"), _options),
    **dict.fromkeys(("mask_truncated_completions", "gradient_checkpointing"), _true_or_false),
    **dict.fromkeys(("model", "task"), _name_of),
}


def _as_schedule(value: Any) -> str:
    """The end of a message: how a list or a text would be written as a schedule."""
    kinds = ("constant", "linear", "cosine", "exponential", "stepwise")
    if isinstance(value, str):
        if value in kinds:
            return f"; a schedule is written kit.{value}(start, end), without quotes"
        try:
            schedules.schedule_from(value)
            return f"; a schedule is written kit.{value.strip()}, without quotes"
        except ValueError:
            return nearest(value, kinds)
    ends = f"{value[0]!r}, {value[-1]!r}" if len(value) > 1 else "1.0, 0.6"
    return f"; a schedule is a function of progress, such as kit.linear({ends})"


# ---- several fields ----------------------------------------------------------------------------------------------

_MOST_TRIED = 10_000  # steps of a run at which its schedules are tried before it begins


def check_together(config: Any) -> None:
    """Raises ValueError for fields each of which may be, and which together mean nothing or move no weight."""
    check_loss_options(config.loss, config.loss_options)
    if getattr(config, "task_options", None):  # of a Preset
        if config.task is None:
            raise ValueError(
                f"task_options={config.task_options!r} are for a named task, and task=None; name one"
            )
        by_name.check_options(config.task, config.task_options)
    if config.minibatches > config.prompts_per_step:
        counts = (
            f"minibatches={config.minibatches} with prompts_per_step={config.prompts_per_step}"
        )
        raise ValueError(
            f"{counts}: each takes whole groups; use at most {config.prompts_per_step}"
        )
    if config.warmup > config.steps:
        counts = f"warmup={config.warmup:g} with steps={config.steps}"
        raise ValueError(
            f"{counts}: the learning rate is never reached; below 1 it is a share of the steps"
        )
    check_steps(config)


def check_steps(config: Any, **values: Any) -> None:
    """Raises ValueError for a schedule that gives no fitting number at a step, and for numbers that teach nothing.

    values: fields that are about to change. Every step is tried, of a run of more than 10,000 steps so many.
    """
    config = copy.copy(config)
    vars(config).update(values)
    steps = [*range(0, config.steps, math.ceil(config.steps / _MOST_TRIED)), config.steps - 1]
    if not any(callable(getattr(config, name)) for name in SCHEDULED):
        steps = steps[-1:]
    fastest = max(config.at(step).learning_rate for step in steps)
    if fastest < SLOWEST:
        raise ValueError(
            f"learning_rate={config.learning_rate!r} moves no weight: no step has a rate above {fastest:g}, which "
            "rounding takes away; 1e-06 to 0.001 is usual"
        )
    if (
        config.positive_weight == config.negative_weight == config.entropy_bonus == 0
        and config.beta == 0
    ):
        raise ValueError(
            "positive_weight=0 and negative_weight=0 move no weight of the model; raise one"
        )

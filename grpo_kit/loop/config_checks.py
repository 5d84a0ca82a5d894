"""What a field of a Config may be, and which fields mean something together."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from os import PathLike
from typing import Any

from grpo_kit import objectives, schedules
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
    is_number,
    nearest,
)
from grpo_kit.engine.optim.choose import OPTIMIZERS
from grpo_kit.tasks import _by_name as by_name

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
SCHEDULED = ("temperature", "learning_rate", "beta")
_MOST_TRIED = 10_000  # steps of a run at which its schedules are tried before it begins
_WHOLE = {
    "steps": 1, "prompts_per_step": 1, "group_size": 2, "iterations": 1, "minibatches": 1, "micro_batch": 1,
    "held_out": 1, "eval_batch": 1,
    "seed": 0, "top_k": 0, "dynamic_sampling": 0, "save_steps": 0, "save_total_limit": 1,
}  # fmt: skip
_AT_LEAST_0 = (
    "epsilon", "epsilon_high", "entropy_bonus", "positive_weight", "negative_weight", "warmup", "weight_decay",
)  # fmt: skip
_CHOICES = {
    "tuning": (None, "full", "lora", "qlora"),
    "dtype": (None, "float32", "bfloat16", "float16"),
    "loss": LOSSES,
    "level": ("token", "sequence"),
    "scale": ("group", "batch", "none"),
    "credit": ("episode", "return", "state"),
    "rollout_bits": (32, 16),
    "autocast": ("none", "bfloat16", "float16"),
    "optimizer": (None, *OPTIMIZERS),
}
_FROM_LOOP = (  # arguments of a loss that are the loop's to give
    "level", "beta", "ref_logprobs", "epsilon", "epsilon_high", "max_ratio", "max_completion_tokens", "num_rows",
    "num_tokens",
)  # fmt: skip


def checked(name: str, value: Any, label: str = "") -> Any:
    """The value of a field as it is kept, or ValueError with the field's name and what would do.

    label: what the message calls a number that a schedule gave.
    """
    if value is None and name in _PPO:
        return None  # the loss's own
    if name in _WHOLE:
        value = 0 if name == "top_k" and value == -1 else value  # as elsewhere: all
        return check_whole(name, value, _WHOLE[name], hint="; 0 takes all tokens" * (name == "top_k"))
    if name in _AT_LEAST_0:
        if check_number(name, value, 0) > 1 and name == "epsilon":
            raise ValueError(f"epsilon={value!r} must be at most 1, as no ratio falls below 0; 0.2 is usual")
        return float(value)
    if name in _CHOICES:
        value = str(value).removeprefix("torch.") if name == "dtype" and value is not None else value
        check_choice(name, value, _CHOICES[name])
    elif name in ("model", "task") and not isinstance(value, str | PathLike | None):
        raise ValueError(
            f"{name}={value!r:.60} must be a name; the {name} itself goes to GRPOTrainer, None here"
        )
    elif name == "task":
        check_choice(name, value, (*by_name.NAMES, None))
    elif name == "max_completion_tokens" and value is not None:
        return check_whole(name, value, hint=", or None for the task's")
    elif name == "importance_sampling_cap" and value is not None:
        check_above_zero(name, value)
    elif name in SCHEDULED:
        if label or not callable(value):
            _check_scheduled(name, value, label or name)
    elif name in ("top_p", "max_grad_norm", "repetition_penalty", "discount"):
        check_above_zero(name, value)
        if name in ("top_p", "discount") and value > 1:
            raise ValueError(f"{name}={value!r} must lie in (0, 1]")
    elif name == "min_p" and not 0 <= check_number(name, value) < 1:
        raise ValueError(f"min_p={value!r} must lie in [0, 1)")
    elif name == "reward_weights" and value is not None:
        if not isinstance(value, (list, tuple)) or not value:
            raise ValueError(f"reward_weights={value!r} must be a list of numbers, one a reward, or None")
        if not any(check_number("reward_weights", weight) for weight in value):
            raise ValueError(f"reward_weights={value!r} are all 0, so that no weight of the model would move")
        if max(map(abs, value)) > LARGEST_REWARD:
            raise ValueError(
                f"reward_weights={value!r} must be at most {LARGEST_REWARD:g} in size, as rewards must"
            )
        return [float(weight) for weight in value]
    elif name in ("task_options", "loss_options") and not isinstance(value, dict):
        raise ValueError(f"{name}={value!r} must be a dict of the {name.partition('_')[0]}'s arguments")
    elif name in ("mask_truncated_completions", "gradient_checkpointing") and not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")
    return float(value) if is_number(value) and not isinstance(value, int) else value  # NumPy's: no JSON


def _check_scheduled(name: str, value: Any, label: str) -> None:
    """Raises ValueError, with what would do, for a number that cannot be, or harms."""
    if isinstance(value, list | tuple | str) and (mend := _as_schedule(value)):
        raise ValueError(f"{name}={value!r} must be a number{mend}")
    if name != "temperature":
        if check_number(label, value, 0) > FASTEST and name == "learning_rate":
            raise ValueError(f"{label}={value!r} destroys the weights in one step; 1e-06 to 0.001 is usual")
    elif not COLDEST <= check_temperature(value, label) <= HOTTEST:
        raise ValueError(
            f"{label}={value!r} must lie in [{COLDEST}, {HOTTEST}]: below all samples are alike, above they are noise"
        )


def _as_schedule(value: Any) -> str:
    """How a list or a text would be written as a schedule."""
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


def check_together(config: Any) -> None:
    """Raises ValueError for fields each of which may be, and which together mean nothing or move no weight."""
    c = config
    check_loss_options(c.loss, c.loss_options)
    if getattr(c, "task_options", None):  # of a Preset
        if c.task is None:
            raise ValueError(f"task_options={c.task_options!r} are for a named task, and task=None; name one")
        by_name.check_options(c.task, c.task_options)
    if c.minibatches > c.prompts_per_step:
        counts = f"minibatches={c.minibatches} with prompts_per_step={c.prompts_per_step}"
        raise ValueError(f"{counts}: each takes whole groups; use at most {c.prompts_per_step}")
    if c.warmup > max(c.steps, 1):
        counts = f"warmup={c.warmup:g} with steps={c.steps}"
        raise ValueError(f"{counts}: the learning rate is never reached; below 1 it is a share of the steps")
    if c.discount != 1 and c.credit == "episode":
        raise ValueError(
            f"discount={c.discount!r} is not used by credit='episode'; use credit='return' or 'state'"
        )
    check_steps(c)


def check_steps(config: Any) -> None:
    """Raises ValueError for a schedule that gives no fitting number at a step, and for numbers that teach nothing.

    Every step is tried, of a run of more than 10,000 steps so many.
    """
    c = config
    steps = [*range(0, c.steps, math.ceil(c.steps / _MOST_TRIED)), c.steps - 1]
    if not any(callable(getattr(c, name)) for name in SCHEDULED):
        steps = steps[-1:]
    fastest = max(c.at(step).learning_rate for step in steps)
    if fastest < SLOWEST:
        raise ValueError(
            f"learning_rate={c.learning_rate!r} moves no weight: no step has a rate above {fastest:g}, which rounding "
            "takes away; 1e-06 to 0.001 is usual"
        )
    if c.positive_weight == c.negative_weight == c.entropy_bonus == 0 and is_number(c.beta) and c.beta == 0:
        raise ValueError("positive_weight=0 and negative_weight=0 move no weight of the model; raise one")


def check_loss_options(loss: str, options: Mapping[str, Any], cure: str = "") -> None:
    """Raises ValueError for an argument that the loss does not take, or that is the loop's to give."""
    named = inspect.signature(getattr(objectives, loss)).parameters.values()
    takes = [p.name for p in named if p.kind is p.KEYWORD_ONLY and p.name not in _FROM_LOOP] + ["correct_kl"]
    for name, value in options.items():
        if name in _FROM_LOOP:
            raise ValueError(
                f"loss_options has {name!r}, which the loop gives itself; is {name}={value!r} a field?"
            )
        if name not in takes:
            mend = f"it takes {', '.join(takes)}{nearest(name, takes)}"
            raise ValueError(f"loss_options has {name!r}, which {loss} does not take; {mend}{cure}")
        if name != "correct_kl":
            check_above_zero(f"loss_options[{name!r}]", value)
        elif not isinstance(value, bool):
            raise ValueError(f"loss_options[{name!r}]={value!r} must be True or False")

"""Config: every number of a run, each with its unit and what it is for; StepNumbers: the numbers of one step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from grpo_kit.argument_checks import (
    check_above_zero,
    check_choice,
    check_number,
    check_temperature,
    check_whole,
)
from grpo_kit.optim.choose import OPTIMIZERS
from grpo_kit.schedules import schedule_from

Schedule = Callable[[float], float]
"""f(progress in [0, 1]) -> value, such as those of grpo_kit.schedules."""
LOSSES = ("grpo", "dr_grpo", "bnpo", "dapo", "gspo", "cispo", "sapo", "luspo", "vespo")


def _number(default: Any, unit: str, *, changes: bool = False) -> Any:
    """A field. unit: what it counts. changes: whether it may change while the run trains."""
    return field(default=default, metadata={"unit": unit, "changes": changes})


@dataclass
class Config:
    """What a run does, apart from its model and its task.

    learning_rate, temperature and beta may each be a number or a schedule, a function of progress.
    A field that says changes=True may be assigned while the run trains: from the next step on the run obeys, and
    metrics.jsonl says so in that step's line. Assigning to any other field of a running config raises ValueError.
    Raises ValueError, naming the field and what would do, for a value that cannot be.

    >>> Config(steps=2).group_size
    8
    >>> Config(group_size=1)
    Traceback (most recent call last):
    ValueError: group_size=1 must be a whole number of at least 2
    """

    # How much
    steps: int = _number(100, "steps, each one rollout and its updates", changes=True)
    prompts_per_step: int = _number(8, "prompts")
    group_size: int = _number(8, "completions a prompt")
    max_completion_tokens: int | None = _number(None, "tokens; None: the task's")
    iterations: int = _number(1, "passes of updates over each rollout")
    minibatches: int = _number(1, "updates a pass, each on its share of the groups")
    seed: int = _number(0, "of the prompts' order and of every random number of a step")
    # How it samples
    temperature: float | Schedule = _number(
        1.0, "divides the logits, in sampling and in every score", changes=True
    )
    top_p: float = _number(1.0, "share of probability that is sampled from")
    top_k: int = _number(0, "most likely tokens that are sampled from; 0: all")
    min_p: float = _number(0.0, "least probability that is sampled, as a share of the likeliest token's")
    repetition_penalty: float = _number(1.0, "divides the logits of tokens that were there; 1: none")
    resample: int = _number(0, "times that groups without a signal are drawn anew, with other prompts")
    # What it optimises
    loss: str = _number("dapo", "a name of LOSSES")
    level: Literal["token", "sequence"] = _number("token", "what an importance ratio is taken of")
    epsilon: float = _number(0.2, "how far a ratio may fall below 1", changes=True)
    epsilon_high: float = _number(
        0.28, "how far a ratio may rise above 1; cispo: the largest ratio", changes=True
    )
    loss_options: dict[str, Any] = _number(
        None, "more arguments of the loss, as grpo_kit.objectives names them"
    )
    beta: float | Schedule = _number(0.0, "weight of the KL to the reference; 0: there is none", changes=True)
    entropy_bonus: float = _number(
        0.0, "weight of the mean entropy, in nats, that is added to the objective", changes=True
    )
    scale: Literal["group", "batch", "none"] = _number(
        "group", "whose standard deviation divides the advantages"
    )
    positive_weight: float = _number(1.0, "what advantages above 0 are multiplied by", changes=True)
    negative_weight: float = _number(1.0, "what advantages below 0 are multiplied by", changes=True)
    sampler_weight_cap: float | None = _number(
        None, "most that a token weighs for pi / the sampler's probability; None: each weighs 1", changes=True
    )
    reward_weights: list[float] | None = _number(None, "one a reward; None: the task's", changes=True)
    credit: Literal["episode", "return", "state"] = _number(
        "episode", "what a turn of an episode is credited with; see EpisodeSample"
    )
    discount: float = _number(1.0, "of later rewards, a turn; for credit return and state")
    mask_cut_off: bool = _number(False, "leave completions that ended by their length out of the loss")
    # How it updates
    learning_rate: float | Schedule = _number(1e-6, "of each update, after the warmup", changes=True)
    warmup: float = _number(0.1, "steps over which the rate rises; below 1: a share of all steps, at least 2")
    optimizer: str | None = _number(None, "a name of grpo_kit.optim; None: what the weights need")
    weight_decay: float = _number(0.0, "of matrices")
    max_grad_norm: float = _number(1.0, "the gradient is scaled down to this norm", changes=True)
    autocast: Literal["none", "bfloat16", "float16"] = _number("none", "dtype of products")
    gradient_checkpointing: bool = _number(
        False, "compute activations again in the backward pass of padded updates"
    )
    micro_batch: int = _number(8, "completions at a time in padded updates; halved where memory ends")
    # What it keeps
    save_steps: int = _number(0, "steps between checkpoints; 0: at a stop alone", changes=True)
    save_total_limit: int = _number(1, "checkpoints that stay, besides the best", changes=True)

    def __post_init__(self) -> None:
        self._running = False
        if self.loss_options is None:
            self.loss_options = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            return super().__setattr__(name, value)
        if name not in FIELDS:
            raise ValueError(f"{name}={value!r}: Config has no such field; it has {', '.join(FIELDS)}")
        value = _checked(name, value)
        if (
            getattr(self, "_running", False)
            and not FIELDS[name].metadata["changes"]
            and value != getattr(self, name)
        ):
            raise ValueError(
                f"{name}={value!r} {CANNOT_CHANGE}, and is {getattr(self, name)!r}; make a new trainer, with a new "
                "folder"
            )
        super().__setattr__(name, value)

    def freeze(self) -> None:
        """The run has begun: from here on, fields that cannot change refuse to."""
        self._running = True

    def values(self) -> dict[str, Any]:
        """Every field as JSON can hold it: a schedule as its text."""
        return {name: as_json(getattr(self, name)) for name in FIELDS}

    @property
    def warmup_steps(self) -> int:
        """Steps over which the learning rate rises."""
        return (
            int(self.warmup)
            if self.warmup >= 1
            else (max(2, math.ceil(self.warmup * self.steps)) if self.warmup else 0)
        )

    def at(self, step: int) -> StepNumbers:
        """The numbers of a step, counted from 0: a function of the step alone."""
        progress = min(step / max(self.steps - 1, 1), 1.0)
        rate = _at(self.learning_rate, progress) * min(1.0, (step + 1) / (self.warmup_steps + 1))
        temperature = check_temperature(_at(self.temperature, progress), f"temperature({progress:.3f})")
        return StepNumbers(step, progress, temperature, rate, _at(self.beta, progress))


FIELDS = {each.name: each for each in fields(Config)}
CANNOT_CHANGE = "cannot be changed while a run goes on"


@dataclass(frozen=True)
class StepNumbers:
    """What the schedules give at one step. Every stage of the step gets this object, and no stage changes it.

    step: finished steps before it. progress: in [0, 1]; the last step has 1. first: where this process's prompts begin
    among those of the step; 0 where there is one process.
    """

    step: int
    progress: float
    temperature: float
    learning_rate: float
    beta: float
    first: int = 0


def as_json(value: Any) -> Any:
    """A value of a Config as JSON holds it: a schedule as its text, any other function by its name alone.

    >>> from grpo_kit.schedules import linear
    >>> as_json(linear(1.2, 0.8)), as_json(max)
    ('linear(1.2, 0.8)', 'function max')
    """
    if not callable(value):
        return value
    try:
        schedule_from(repr(value))
    except ValueError:
        return f"function {getattr(value, '__qualname__', type(value).__name__)}"
    return repr(value)


def from_json(name: str, value: Any, given: Any) -> Any:
    """What as_json wrote of a field. given: what a function that is there by its name alone is taken from."""
    if name not in ("temperature", "learning_rate", "beta") or not isinstance(value, str):
        return value
    if not value.startswith("function "):
        return schedule_from(value)
    if not callable(given):
        raise ValueError(f"{name}={given!r}: the run was begun with {value}; give it that")
    return given


def _at(value: float | Schedule, progress: float) -> float:
    return float(value(progress)) if callable(value) else float(value)


_WHOLE = {
    "steps": 1, "prompts_per_step": 1, "group_size": 2, "iterations": 1, "minibatches": 1, "micro_batch": 1,
    "seed": 0, "top_k": 0, "resample": 0, "save_steps": 0, "save_total_limit": 1,
}  # fmt: skip
_AT_LEAST_0 = (
    "epsilon", "epsilon_high", "entropy_bonus", "positive_weight", "negative_weight", "warmup", "weight_decay",
)  # fmt: skip
_CHOICES = {
    "loss": LOSSES,
    "level": ("token", "sequence"),
    "scale": ("group", "batch", "none"),
    "credit": ("episode", "return", "state"),
    "autocast": ("none", "bfloat16", "float16"),
    "optimizer": (None, *OPTIMIZERS),
}


def _checked(name: str, value: Any) -> Any:
    """The value, or ValueError with the field's name and what would do."""
    if name in _WHOLE:
        return check_whole(name, value, _WHOLE[name])
    if name in _AT_LEAST_0:
        return check_number(name, value, 0)
    if name in _CHOICES:
        check_choice(name, value, _CHOICES[name])
    elif name == "max_completion_tokens" and value is not None:
        return check_whole(name, value, hint=", or None for the task's")
    elif name == "sampler_weight_cap" and value is not None:
        check_above_zero(name, value)
    elif name in ("temperature", "learning_rate", "beta"):
        for progress in (0.0, 0.5, 1.0):
            found = value(progress) if callable(value) else value
            label = f"{name}({progress})" if callable(value) else name
            if name == "temperature":
                check_temperature(found, label)
            else:
                check_number(label, found, 0)
    elif name in ("top_p", "max_grad_norm", "repetition_penalty", "discount"):
        check_above_zero(name, value)
        if name in ("top_p", "discount") and value > 1:
            raise ValueError(f"{name}={value!r} must lie in (0, 1]")
    elif name == "min_p" and not 0 <= check_number(name, value) < 1:
        raise ValueError(f"min_p={value!r} must lie in [0, 1)")
    elif name == "reward_weights" and value is not None:
        if not isinstance(value, (list, tuple)) or not value:
            raise ValueError(f"reward_weights={value!r} must be a list of numbers, one a reward, or None")
        return [check_number("reward_weights", weight) for weight in value]
    elif name in ("mask_cut_off", "gradient_checkpointing") and not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")
    return value

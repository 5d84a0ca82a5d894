"""Config: every number of a run, each with its unit and what it is for; Preset: and what the run is made from.

StepNumbers: the numbers of one step.

Longer than 300 lines because the fields of a run are read together.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from grpo_kit._support.argument_checks import check_known
from grpo_kit.loop import config_checks as checks
from grpo_kit.schedules import schedule_from, stepwise
from grpo_kit.tasks import _by_name as by_name

if TYPE_CHECKING:
    import pandas as pd

    from grpo_kit.tasks.task import Task

Schedule = Callable[[float], float]
"""f(progress in [0, 1]) -> value, such as those of grpo_kit.schedules."""


def _number(default: Any, unit: str, *, changes: bool = False) -> Any:
    """A field. unit: what it counts. changes: whether it may change while the run trains."""
    how = {"default_factory": default} if default is dict else {"default": default}
    return field(**how, metadata={"unit": unit, "changes": changes})


class _ByName:
    """Refuses what is no field before Config's own __init__, whose signature editors complete, would."""

    def __new__(cls, *unnamed: Any, **values: Any) -> Any:
        if unnamed:
            cure = "of a dict, Config(**values)"
            if isinstance(unnamed[0], str):
                cure = f"kit.preset({unnamed[0]!r}) fills one"
            what = f"Config({unnamed[0]!r:.100}): name each field, such as Config(steps=100)"
            raise ValueError(f"{what}; {cure}")
        values.pop("reasons", None)
        cls._check_names(values)
        return super().__new__(cls)

    @classmethod
    def _check_names(cls, values: Mapping[str, Any]) -> None:
        """Raises ValueError for a name that is no field, and for one of a Preset where this is none."""
        check_fields(values)
        for name, value in values.items():
            if name not in cls.__dataclass_fields__:
                cure = f"{value!r:.100}" if name == "preset" else f"'auto', {name}={value!r:.100}"
                raise ValueError(
                    f"{name}={value!r:.100}: the loop does not read it, so Config does not hold it; kit.preset({cure}) "
                    "does"
                )


@dataclass(kw_only=True)
class Config(_ByName):
    """Every number that the loop reads. Config() has each field's default; kit.preset gives a Preset.

    learning_rate, temperature and beta may each be a number or a schedule, a function of progress. A rate that begins
    or ends at 0 is there before the first step or after the last: no step is trained at rate 0.
    A loss brings its paper's level, epsilon, epsilon_high and scale (config_checks.LOSSES) where none are given. Those
    that are its own change with it: Config().epsilon is 0.2, and 0.0003 once loss is "gspo".
    A field that says changes=True may be assigned while the run trains: from the next step on the run obeys, and
    metrics.jsonl says so in that step's line. Assigning to any other field of a running config raises ValueError.
    reasons: field -> (the preset's value, why it has it). Printed, a config is a table: value, unit, reason.
    Raises ValueError, naming the field and what would do, for a name that is no field, a value that cannot be, and
    values that together move no weight.

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
    temperature: float | Schedule = _number(1.0, "divides the logits, in sampling and scoring", changes=True)
    top_p: float = _number(1.0, "share of probability that is sampled from")
    top_k: int = _number(0, "most likely tokens that are sampled from; 0: all")
    min_p: float = _number(0.0, "least probability that is sampled, as a share of the likeliest token's")
    repetition_penalty: float = _number(1.0, "divides the logits of tokens that were there; 1: none")
    rollout_bits: int = _number(32, "of products while it samples; 16: bfloat16, of the engine on a CPU")
    dynamic_sampling: int = _number(
        0, "times that groups without a signal are drawn anew, with other prompts"
    )
    # What it optimises
    loss: str = _number("dapo", "a name of config_checks.LOSSES; brings level, epsilons and scale")
    level: Literal["token", "sequence"] = _number(None, "what an importance ratio is taken of")
    epsilon: float = _number(None, "how far a ratio may fall below 1", changes=True)
    epsilon_high: float = _number(None, "how far a ratio may rise; cispo: the largest ratio", changes=True)
    loss_options: dict[str, Any] = _number(dict, "more arguments of the loss; see grpo_kit.objectives")
    beta: float | Schedule = _number(0.0, "weight of the KL to the reference; 0: there is none", changes=True)
    entropy_bonus: float = _number(0.0, "weight of the mean entropy, in nats, in the objective", changes=True)
    scale: Literal["group", "batch", "none"] = _number(None, "whose spread divides the advantages")
    positive_weight: float = _number(1.0, "what advantages above 0 are multiplied by", changes=True)
    negative_weight: float = _number(1.0, "what advantages below 0 are multiplied by", changes=True)
    importance_sampling_cap: float | None = _number(
        None,
        "most that a token weighs for pi / the sampler's probability; None: each weighs 1",
        changes=True,
    )
    reward_weights: list[float] | None = _number(None, "one a reward; None: the task's", changes=True)
    credit: Literal["episode", "return", "state"] = _number("episode", "a turn's credit; see EpisodeSample")
    discount: float = _number(1.0, "of later rewards, a turn; for credit return and state")
    mask_truncated_completions: bool = _number(
        False, "leave completions that ended by their length out of the loss"
    )
    # How it updates
    learning_rate: float | Schedule = _number(1e-6, "of each update, after the warmup", changes=True)
    warmup: float = _number(0.1, "steps over which the rate rises; below 1: a share of all steps, at least 2")
    optimizer: str | None = _number(None, "a name of grpo_kit.engine.optim; None: what the weights need")
    weight_decay: float = _number(0.0, "of matrices")
    max_grad_norm: float = _number(1.0, "the gradient is scaled down to this norm", changes=True)
    autocast: Literal["none", "bfloat16", "float16"] = _number("none", "dtype of products")
    gradient_checkpointing: bool = _number(False, "of padded updates: activations are computed again")
    micro_batch: int = _number(8, "completions at a time in padded updates; halved where memory ends")
    # What it keeps
    save_steps: int = _number(0, "steps between checkpoints; 0: one each 5 minutes", changes=True)
    save_total_limit: int = _number(1, "checkpoints that stay, besides the best", changes=True)

    reasons: dict[str, tuple[Any, str]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._running = self._taken = False
        self._follow_loss()
        checks.check_together(self)

    def _follow_loss(self) -> None:
        """What was the own number of the loss before becomes this loss's own; reasons says which those are."""
        numbers = checks.LOSSES[self.loss]
        for name, number in numbers.items():
            if name in self.reasons and getattr(self, name) == self.reasons[name][0]:
                super().__setattr__(name, number)
        self.reasons = self.reasons | {
            name: (number, f"{self.loss}'s own") for name, number in numbers.items()
        }

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name == "reasons":
            return super().__setattr__(name, value)
        self._check_names({name: value})
        value = checks.checked(name, value)
        if value is None and name in checks.LOSSES["dapo"]:
            value = checks.LOSSES[self.loss][name]
        if name == "loss_options":
            checks.check_loss_options(self.loss, value)
        elif name == "loss" and (options := getattr(self, "loss_options", None)) and value != self.loss:
            checks.check_loss_options(value, options, "; set loss_options={} first, these are another loss's")
        if (
            getattr(self, "_running", False)
            and not FIELDS[name].metadata["changes"]
            and value != getattr(self, name)
        ):
            raise ValueError(
                f"{name}={value!r} {CANNOT_CHANGE}, and is {getattr(self, name)!r}; make a new trainer, with a new "
                "folder"
            )
        if hasattr(self, "_running") and name in ("steps", *checks.SCHEDULED):
            changed = copy.copy(self)
            vars(changed)[name] = value
            checks.check_steps(changed)
        super().__setattr__(name, value)
        if name == "loss" and hasattr(self, "reasons"):
            self._follow_loss()

    def take(self) -> None:
        """A trainer goes by it: another task has a config of its own."""
        self._taken = True

    def freeze(self) -> None:
        """The run has begun: from here on, fields that cannot change refuse to."""
        self._running = True

    def values(self) -> dict[str, Any]:
        """Every field as JSON can hold it: a schedule as its text."""
        return {name: as_json(getattr(self, name)) for name in FIELDS if hasattr(self, name)}

    def table(self) -> pd.DataFrame:
        """One row a field that the preset sets or that is not at its default: value, unit, reason, as it is printed.

        A value that no preset gave is marked "set by you".
        """
        import pandas as pd

        rows, defaults, presets = [], type(self)(), self.reasons
        its_task = all(
            name not in presets or getattr(self, name) == presets[name][0]
            for name in ("task", "task_options")
        )
        for name in self.values():
            value, default = getattr(self, name), getattr(defaults, name)
            was, reason = presets.get(name, (default, "set by you"))
            if value == was == default and reason in ("set by you", f"{self.loss}'s own"):
                continue
            if value != was:
                goes_with_it = name == "task_options" and self.task != presets.get("task", (None,))[0]
                who = "for this task" if goes_with_it else "set by you"
                reason = f"{who} (was {_shown(name, was)})"
            elif name == "max_completion_tokens" and value is None and not its_task:
                reason = "see the task"  # the preset's reason is about the preset's task
            unit = FIELDS[name].metadata["unit"].partition(";")[0]
            rows.append((name, _shown(name, value), unit, reason))
        return pd.DataFrame(rows, columns=["name", "value", "unit", "reason"]).set_index("name")

    def why(self, name: str) -> str:
        """The reason of a field in the table: why the preset has its value, or that you have set it."""
        return self.table().loc[name, "reason"]

    def __str__(self) -> str:
        table = self.table().astype(str).reset_index()
        widths = {column: table[column].str.len().max() for column in ("name", "value", "unit")}
        return "\n".join(
            "  ".join([*(f"{getattr(row, column):<{width}}" for column, width in widths.items()), row.reason])
            for row in table.itertuples(index=False)
        )

    def _repr_html_(self) -> str:
        return self.table().astype(str).to_html().replace("<td>", '<td style="text-align:left">')

    def with_task(self, task: Any) -> Config:
        """This config, which now says the run's task, as far as it has fields for it: its length, of a Preset its name.

        A copy where another trainer goes by it with another task.
        """
        told = self._told_by(task)
        values, reasons = {name: value for name, (value, _) in told.items()}, self.reasons | told
        if self._taken and any(getattr(self, name) != value for name, value in values.items()):
            return replace(self, **values, reasons=reasons)
        for name, value in values.items():
            setattr(self, name, value)
        self.reasons = reasons
        return self

    def _told_by(self, task: Any) -> dict[str, tuple[Any, str]]:
        """The fields that a task fills in: {name: (value, why)}."""
        length = (self.max_completion_tokens, "the task's")
        if self.max_completion_tokens is None or self.reasons.get("max_completion_tokens") == length:
            return {"max_completion_tokens": (task.max_completion_tokens, "the task's")}
        return {}

    @property
    def completions_per_step(self) -> int:
        """prompts_per_step * group_size."""
        return self.prompts_per_step * self.group_size

    @property
    def warmup_steps(self) -> int:
        """Steps over which the learning rate rises."""
        if self.warmup >= 1:
            return int(self.warmup)
        return max(2, math.ceil(self.warmup * self.steps)) if self.warmup else 0

    def at(self, step: int) -> StepNumbers:
        """The numbers of a step, counted from 0: a function of the step alone."""
        progress = min(step / max(self.steps - 1, 1), 1.0)
        rate = self.learning_rate  # an end at 0 lies outside the steps; stepwise is asked for as it is
        moves = callable(rate) and not isinstance(rate, stepwise)
        starts_at_zero = moves and self._at("learning_rate", 0.0) == 0
        ends_at_zero = moves and self._at("learning_rate", 1.0) == 0
        of_rate = min((step + starts_at_zero) / max(self.steps - 1 + starts_at_zero + ends_at_zero, 1), 1.0)
        warm = min(1.0, (step + 1) / (self.warmup_steps + 1))
        rate, temperature = self._at("learning_rate", of_rate) * warm, self._at("temperature", progress)
        return StepNumbers(step, progress, temperature, rate, self._at("beta", progress))

    def _at(self, name: str, progress: float) -> float:
        """What a field with a schedule is at a progress. Raises ValueError for what cannot be there."""
        value = getattr(self, name)
        if not callable(value):
            return float(value)
        try:
            number = value(progress)
        except Exception as error:  # of a user's function
            raise ValueError(
                f"{name}={value!r:.100} must give a number for a progress in [0, 1], as kit.linear(1.0, 0.6) does; at "
                f"{progress:.3g} it raised {type(error).__name__}: {error}"
            ) from error
        return float(checks.checked(name, number, f"{name}({round(progress, 3)})"))


def _shown(name: str, value: object) -> object:
    if value is None:
        return "the task's" if name == "max_completion_tokens" else "None"
    return value


@dataclass(kw_only=True)
class Preset(Config):
    """A Config, and what the run is made from. Made by kit.preset, so that a notebook holds one object.

    A model and a task are made from it, load_policy(cfg.model, tuning=cfg.tuning, dtype=cfg.dtype) and cfg.make_task(),
    or are the user's own. A trainer that is given another task says so here (task=None) and takes its length.
    """

    preset: str | None = _number(None, "name; None: of none")
    model: str | None = _number(None, "name or path; None: the one that the trainer is given")
    tuning: Literal["full", "lora", "qlora"] | None = _number(None, "weights that train; None: as loaded")
    dtype: str | None = _number(None, "of the weights, frozen ones with LoRA; None: as the model was loaded")
    task: str | None = _number(None, "name; None: the task that the trainer is given")
    task_options: dict[str, Any] = _number(dict, "arguments of the task")
    held_out: int = _number(256, "prompts that are never trained on")
    eval_batch: int = _number(64, "prompts at a time in an evaluation")

    def __post_init__(self) -> None:
        if self.preset is not None and "preset" not in self.reasons:
            raise ValueError(
                f"preset={self.preset!r} is a name alone here: kit.preset({self.preset!r}) fills a Config"
            )
        super().__post_init__()

    @classmethod
    def of(cls, config: Config) -> Preset:
        """The config itself, or a plain one with the defaults of a preset's fields."""
        if isinstance(config, cls):
            return config
        return cls(**{name: getattr(config, name) for name in config.__dataclass_fields__})

    def make_task(self) -> Task:
        """The named task with `held_out` held-out rows, or fewer if it has no more, and this max_completion_tokens.

        Raises ValueError where task=None, and for arguments that the task does not take.
        """
        return self.cut(by_name.make(self.task, self.task_options, self.held_out))

    def cut(self, task: Task) -> Task:
        """A task with this many held-out rows, or fewer if it has no more, and with this length, if there is one."""
        length = self.max_completion_tokens or task.max_completion_tokens
        return replace(task, held_out=task.held_out[: self.held_out], max_completion_tokens=length)

    def _told_by(self, task: Any) -> dict[str, tuple[Any, str]]:
        given = "the one that the trainer was given"
        told = {} if task.name == self.task else {"task_options": ({}, given), "task": (None, given)}
        return told | super()._told_by(task)


SETUP = {
    each.name: each
    for each in fields(Preset)
    if each.metadata and each.name not in Config.__dataclass_fields__
}
"""Fields of a Preset that the loop does not read."""
FIELDS = SETUP | {each.name: each for each in fields(Config) if each.metadata}
CANNOT_CHANGE = "cannot be changed while a run goes on"


def check_fields(values: Mapping[str, Any], besides: Sequence[str] = ()) -> None:
    """Raises ValueError, with the nearest name, for one that is no field. besides: other names that are known there.

    >>> check_fields({"lerning_rate": 1e-5})
    Traceback (most recent call last):
    ValueError: lerning_rate=1e-05: Config has no such field; did you mean 'learning_rate'?
    """
    check_known("Config has no such field", values, [*FIELDS, *besides])


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
        return json.loads(json.dumps(value)) if isinstance(value, dict) else value
    try:
        schedule_from(repr(value))
    except ValueError:
        return f"function {getattr(value, '__qualname__', type(value).__name__)}"
    return repr(value)


def from_json(name: str, value: Any, given: Any) -> Any:
    """What as_json wrote of a field. given: what a function that is there by its name alone is taken from."""
    if name not in checks.SCHEDULED or not isinstance(value, str):
        return value
    if not value.startswith("function "):
        return schedule_from(value)
    if not callable(given):
        raise ValueError(f"{name}={given!r}: the run was begun with {value}; give it that")
    return given

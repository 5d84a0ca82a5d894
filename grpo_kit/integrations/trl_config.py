"""The loop's Config as fields of TRL's GRPOConfig, and a sentence for each field that TRL has no word for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_kit.loop.grpo_config import Config
from grpo_kit.schedules import constant, cosine, linear

CARRIED = {
    "steps": "max_steps, which counts updates",
    "prompts_per_step": "per_device_train_batch_size, gradient_accumulation_steps, steps_per_generation",
    "group_size": "num_generations",
    "max_completion_tokens": "max_completion_length",
    "iterations": "num_iterations",
    "minibatches": "steps_per_generation = minibatches * gradient_accumulation_steps",
    "seed": "seed",
    "temperature": "temperature; of a schedule where it starts",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "loss": "loss_type; gspo is grpo at importance_sampling_level='sequence'",
    "level": "importance_sampling_level",
    "epsilon": "epsilon",
    "epsilon_high": "epsilon_high",
    "loss_options": "the fields of sapo and vespo, and use_bias_correction_kl",
    "beta": "beta; of a schedule where it starts",
    "entropy_bonus": "entropy_coef",
    "scale": "scale_rewards",
    "reward_weights": "reward_weights",
    "mask_cut_off": "mask_truncated_completions",
    "learning_rate": "learning_rate, lr_scheduler_type, lr_scheduler_kwargs",
    "warmup": "warmup_steps",
    "optimizer": "optim; None is adamw_torch_fused",
    "weight_decay": "weight_decay",
    "max_grad_norm": "max_grad_norm",
    "autocast": "bf16, fp16",
    "gradient_checkpointing": "activation_checkpointing",
    "micro_batch": "per_device_train_batch_size is at most this",
    "save_steps": "save_strategy, save_steps",
    "save_total_limit": "save_total_limit",
}  # fmt: skip
NOT_CARRIED = {
    "credit": ("episode", "TRL trains single turns"),
    "discount": (1.0, "TRL trains single turns"),
    "resample": (0, "groups without a signal are not drawn anew"),
    "positive_weight": (1.0, "advantages above 0 keep their size"),
    "negative_weight": (1.0, "advantages below 0 keep their size"),
    "sampler_weight_cap": (
        None,
        "with use_vllm=True, vllm_importance_sampling_mode='token_truncate' weighs so",
    ),
}
# What the model and the task were made from: to_trl is given both.
MADE_BEFORE = ("preset", "model", "tuning", "dtype", "task", "task_options", "held_out", "eval_batch")
_OPTIM = {None: "adamw_torch_fused", "adamw": "adamw_torch_fused", "adamw-8bit": "adamw_8bit"}


def fields_of(
    config: Config, length: int, weights: list[float], processes: int, given: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Fields of GRPOConfig, and a sentence for each field of Config that TRL cannot be told.

    length: tokens of a completion. weights: one a reward. processes: among which TRL divides a batch.
    given: fields that the caller has chosen; they stand, and batches follow per_device_train_batch_size.
    Raises ValueError where a batch cannot be divided among the processes.
    """
    left = [
        f"{name}={getattr(config, name)!r}: {what}"
        for name, (default, what) in NOT_CARRIED.items()
        if getattr(config, name) != default
    ]
    a_step = config.iterations * config.minibatches
    warmup = config.warmup_steps * a_step
    made: dict[str, Any] = {
        "max_steps": config.steps * a_step,
        "num_generations": config.group_size,
        "max_completion_length": length,
        "num_iterations": config.iterations,
        "seed": config.seed,
        "temperature": _start(config, "temperature", left),
        "top_p": config.top_p,
        "top_k": config.top_k,
        "min_p": config.min_p or None,
        "repetition_penalty": config.repetition_penalty,
        "loss_type": "grpo" if config.loss == "gspo" else config.loss,
        "importance_sampling_level": "sequence" if config.loss == "gspo" else config.level,
        "epsilon": config.epsilon,
        "epsilon_high": config.epsilon_high,
        "beta": _start(config, "beta", left),
        "entropy_coef": config.entropy_bonus,
        "scale_rewards": config.scale,
        "reward_weights": weights,
        "mask_truncated_completions": config.mask_cut_off,
        "warmup_steps": warmup,
        "optim": _OPTIM.get(config.optimizer, "adamw_torch_fused"),
        "weight_decay": config.weight_decay,
        "max_grad_norm": config.max_grad_norm,
        "bf16": config.autocast == "bfloat16",
        "fp16": config.autocast == "float16",
        "activation_checkpointing": config.gradient_checkpointing,
        "save_strategy": "steps" if config.save_steps else "no",
        "save_total_limit": config.save_total_limit,
        "logging_steps": 1,
        "report_to": "none",
    }
    made |= {"save_steps": config.save_steps * a_step} if config.save_steps else {}
    made |= _batches(config, processes, given) | _options(config, left) | _rate(config, warmup, left)
    if config.optimizer not in _OPTIM:
        left.append(
            f"optimizer={config.optimizer!r}: TRL takes {made['optim']!r}; load the model with dtype='float32', or "
            "bfloat16 weights round small updates away"
        )
    return made, left


def _start(config: Config, name: str, left: list[str]) -> float:
    """The number, or where its schedule starts, with a sentence."""
    value = getattr(config, name)
    if not callable(value):
        return value
    first = value(0.0)
    if not isinstance(value, constant):
        left.append(f"{name}={value!r}: TRL takes one number, {first:g}, where the schedule starts")
    return first


def _batches(config: Config, processes: int, given: Mapping[str, Any]) -> dict[str, int]:
    """How TRL divides the completions of an update: at most micro_batch at a time in each process."""
    update, rest = divmod(config.prompts_per_step * config.group_size, config.minibatches * processes)
    if rest:
        raise ValueError(
            f"prompts_per_step={config.prompts_per_step} of group_size={config.group_size} cannot be divided among "
            f"{processes} processes and minibatches={config.minibatches}; make their product a multiple"
        )
    largest = max(n for n in range(1, min(config.micro_batch, update) + 1) if update % n == 0)
    at_once = given.get("per_device_train_batch_size", largest)
    if update % at_once:
        raise ValueError(
            f"per_device_train_batch_size={at_once} does not divide the {update} completions that a process has in an "
            f"update; use {largest}"
        )
    made = {"per_device_train_batch_size": at_once, "gradient_accumulation_steps": update // at_once}
    if "generation_batch_size" in given:
        return made
    return made | {"steps_per_generation": update // at_once * config.minibatches}


def _options(config: Config, left: list[str]) -> dict[str, Any]:
    """The loss's own numbers."""
    made = {}
    for name, value in config.loss_options.items():
        if name == "correct_kl":
            made["use_bias_correction_kl"] = value
        elif config.loss in ("sapo", "vespo"):
            made[f"{config.loss}_{name}"] = value
        else:
            left.append(f"loss_options[{name!r}]={value!r}: TRL's {config.loss} has no such number")
    return made


def _rate(config: Config, warmup: int, left: list[str]) -> dict[str, Any]:
    """The learning rate in TRL's words. Its first update with a warmup has rate 0, the loop's has 1 / (warmup + 1)."""
    rate = config.learning_rate
    if isinstance(rate, (linear, cosine)) and rate.start > rate.end:
        kind, lowest = (
            ("polynomial", {"lr_end": rate.end, "power": 1.0})
            if isinstance(rate, linear)
            else ("cosine_with_min_lr", {"min_lr": rate.end})
        )
        return {"learning_rate": rate.start, "lr_scheduler_type": kind, "lr_scheduler_kwargs": lowest}
    first = _start(config, "learning_rate", left)
    return {"learning_rate": first, "lr_scheduler_type": "constant_with_warmup" if warmup else "constant"}

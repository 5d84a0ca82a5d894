"""A GRPOConfig of TRL as the loop's Config, and back; _trl_fields.py has the table of what becomes of each field."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from transformers import get_scheduler
from trl import GRPOConfig

from grpo_kit.loop.config import Config
from grpo_kit.more.bridges._trl_fields import SAME, TRL, check_fields
from grpo_kit.schedules import constant, cosine, linear, stepwise

_ADAMW = {"adamw_torch", "adamw_torch_fused", "paged_adamw_32bit"}
_ADAMW_8BIT = {"adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"}
_OPTIONS = {
    "sapo": ("temperature_pos", "temperature_neg"),
    "vespo": ("k_pos", "lambda_pos", "k_neg", "lambda_neg"),
}
_NO_CLIPPING = 1e12
# A field of Config: its value where TRL does the same, and what TRL does with another.
NOT_CARRIED = {
    "rollout_bits": (32, "its generate and vLLM have bits of their own"),
    "dynamic_sampling": (0, "groups without a signal are not drawn anew"),
    "positive_weight": (1.0, "advantages above 0 keep their size"),
    "negative_weight": (1.0, "advantages below 0 keep their size"),
    "importance_sampling_cap": (
        None,
        "with use_vllm=True, vllm_importance_sampling_mode='token_truncate' weighs so",
    ),
}
_OPTIM = {None: "adamw_torch_fused", "adamw": "adamw_torch_fused", "adamw-8bit": "adamw_8bit"}


def config_of(args: GRPOConfig, rows: int) -> Config:
    """The loop's Config of a GRPOConfig. rows: of the data set.

    Raises ValueError, naming the field and what would do, for what the loop cannot do.
    """
    check_fields(args)
    prompts, minibatches = _batches(args)
    if rows < prompts:
        raise ValueError(
            f"train_dataset has {rows} train rows, and a step takes prompts_per_step={prompts}; give more"
        )
    a_step = minibatches * args.num_iterations  # updates
    per_epoch = rows // prompts  # steps
    updates = args.max_steps
    if updates <= 0:
        updates = math.ceil(args.num_train_epochs * per_epoch * a_step)
    steps = max(math.ceil(updates / a_step), 1)
    options = {
        name: getattr(args, f"{args.loss_type}_{name}")
        for name in _OPTIONS.get(args.loss_type, ())
    }
    if not args.use_bias_correction_kl:
        options["correct_kl"] = False
    autocast = "none"
    if args.fp16:
        autocast = "float16"
    if args.bf16:
        autocast = "bfloat16"
    return Config(
        **{ours: getattr(args, theirs) for theirs, ours in SAME.items()},
        steps=steps,
        prompts_per_step=prompts,
        max_completion_tokens=args.max_completion_length,
        minibatches=minibatches,
        temperature=args.temperature,
        top_k=args.top_k or 0,
        min_p=args.min_p or 0.0,
        loss=args.loss_type,
        level=args.importance_sampling_level,
        epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        loss_options=options,
        beta=args.beta,
        scale={True: "group", False: "none"}.get(args.scale_rewards, args.scale_rewards),
        learning_rate=rates(args, updates, a_step),
        warmup=0.0,
        optimizer=_optimizer(args),
        max_grad_norm=args.max_grad_norm or _NO_CLIPPING,
        autocast=autocast,
        gradient_checkpointing=bool(args.gradient_checkpointing),
        micro_batch=args.per_device_train_batch_size,
        save_steps=steps_between("save", args, updates, a_step, per_epoch),
        save_total_limit=args.save_total_limit
        if (args.save_total_limit or 0) > 0
        else max(steps, 1),
    )


def _batches(args: GRPOConfig) -> tuple[int, int]:
    """Prompts of a rollout, and updates of one pass over it."""
    accumulated, generated = args.gradient_accumulation_steps, args.steps_per_generation
    if generated % accumulated:
        raise ValueError(
            f"steps_per_generation={generated} with gradient_accumulation_steps={accumulated}: an update would take "
            "parts of several rollouts; make the first a multiple of the second, or leave it out"
        )
    minibatches = generated // accumulated
    prompts = args.per_device_train_batch_size * generated // args.num_generations
    if prompts % minibatches:
        raise ValueError(
            f"steps_per_generation={generated} makes {minibatches} updates of {prompts} prompts: the loop's updates "
            "take whole groups; let per_device_train_batch_size * gradient_accumulation_steps be a multiple of "
            f"num_generations={args.num_generations}"
        )
    if args.loss_type == "bnpo" and accumulated > 1:
        raise ValueError(
            f"loss_type='bnpo' with gradient_accumulation_steps={accumulated} divides by the tokens of each part; set "
            "loss_type='dapo', which divides by those of the update, or gradient_accumulation_steps=1"
        )
    return prompts, minibatches


def rates(args: GRPOConfig, updates: int, a_step: int) -> float | Callable[[float], float]:
    """The learning rate of each step as transformers' schedule gives it; of several updates a step, their mean.

    A number where it stays the same, linear(...) where it falls in a line, else stepwise(...).
    Raises ValueError for a schedule that goes by what an evaluation finds.
    """
    kind = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    if kind in ("reduce_lr_on_plateau", "greedy"):
        raise ValueError(
            f"lr_scheduler_type={kind!r} goes by what is measured; use 'linear', 'cosine' or 'constant'"
        )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
    warmup = args.get_warmup_steps(updates)
    schedule = get_scheduler(
        kind,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=updates,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )
    by_update = []
    for _ in range(updates):
        by_update.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return _as_schedule([fmean(by_update[i : i + a_step]) for i in range(0, updates, a_step)])


def _as_schedule(values: Sequence[float]) -> float | Callable[[float], float]:
    first, last, gaps = values[0], values[-1], len(values) - 1
    close = 1e-9 * max(values)
    if max(values) - min(values) <= close:
        return first
    straight = all(
        abs(first + (last - first) * i / gaps - value) <= close
        for i, value in enumerate(values)
    )
    # linear has no step of rate 0, as TRL's first update of a warmup is
    if straight and first and last:
        return linear(first, last)
    return stepwise(values, at=[(i + 0.5) / gaps for i in range(gaps)])


def _optimizer(args: GRPOConfig) -> str | None:
    name = getattr(args.optim, "value", args.optim)
    if name in _ADAMW:
        return None  # an AdamW that the weights need
    if name in _ADAMW_8BIT:
        return "adamw-8bit"
    raise ValueError(
        f"optim={name!r} is not known; use 'adamw_torch_fused', 'adamw_8bit', or {TRL}"
    )


def steps_between(
    kind: str, args: GRPOConfig, updates: int, a_step: int, per_epoch: int
) -> int:
    """Steps between two checkpoints (kind "save") or measurements (kind "eval"); 0 for none."""
    strategy, every = getattr(args, f"{kind}_strategy"), getattr(args, f"{kind}_steps")
    if strategy == "best":
        raise ValueError(
            "save_strategy='best' goes by evaluations; use 'steps', 'epoch' or 'no'"
        )
    if strategy == "epoch":
        return max(per_epoch, 1)
    if strategy == "no":
        return 0
    if every < 1:
        every = math.ceil(every * updates)
    return max(math.ceil(every / a_step), 1)


def fields_of(
    config: Config,
    length: int,
    weights: list[float],
    processes: int,
    overrides: Mapping[str, Any],
) -> tuple[dict[str, Any], list[str]]:
    """Fields of GRPOConfig, and a sentence for each field of Config that TRL cannot be told.

    length: tokens of a completion. weights: one a reward. processes: among which TRL divides a batch.
    overrides: fields that the caller has chosen; they stand, and batches follow per_device_train_batch_size.
    Raises ValueError where a batch cannot be divided among the processes.
    """
    notes = [
        f"{name}={getattr(config, name)!r}: {reason}"
        for name, (same_as_trl, reason) in NOT_CARRIED.items()
        if getattr(config, name) != same_as_trl
    ]
    a_step = config.iterations * config.minibatches
    warmup = config.warmup_steps * a_step
    optim = _OPTIM.get(config.optimizer, "adamw_torch_fused")
    if config.optimizer not in _OPTIM:
        notes.append(
            f"optimizer={config.optimizer!r}: TRL takes {optim!r}; load the model with dtype='float32', or "
            "bfloat16 weights round small updates away"
        )
    fields: dict[str, Any] = {theirs: getattr(config, ours) for theirs, ours in SAME.items()}
    fields |= {
        "max_steps": config.steps * a_step,
        "max_completion_length": length,
        "temperature": _start(config, "temperature", notes),
        "top_k": config.top_k,
        "min_p": config.min_p or None,
        "loss_type": config.loss,
        "importance_sampling_level": config.level,
        "epsilon_high": config.epsilon_high,
        "beta": _start(config, "beta", notes),
        "scale_rewards": config.scale,
        "reward_weights": weights,
        "warmup_steps": warmup,
        "optim": optim,
        "max_grad_norm": config.max_grad_norm,
        "bf16": config.autocast == "bfloat16",
        "fp16": config.autocast == "float16",
        "activation_checkpointing": config.gradient_checkpointing,
        "save_strategy": "no",
        "save_total_limit": config.save_total_limit,
        "logging_steps": 1,
        "report_to": "none",
    }
    if config.loss == "gspo":
        fields |= {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    if config.save_steps:
        fields |= {"save_strategy": "steps", "save_steps": config.save_steps * a_step}
    for name, value in config.loss_options.items():
        theirs = f"{config.loss}_{name}"
        if name == "correct_kl":
            theirs = "use_bias_correction_kl"
        fields[theirs] = value
    fields |= _batch_fields(config, processes, overrides) | _rate_fields(config, warmup, notes)
    return fields, notes


def _start(config: Config, name: str, notes: list[str]) -> float:
    """The number, or where its schedule starts, with a note."""
    value = getattr(config, name)
    if not callable(value):
        return value
    first = value(0.0)
    if not isinstance(value, constant):
        notes.append(
            f"{name}={value!r}: TRL takes one number, {first:g}, where the schedule starts"
        )
    return first


def _batch_fields(
    config: Config, processes: int, overrides: Mapping[str, Any]
) -> dict[str, int]:
    """How TRL divides the completions of an update: at most micro_batch at a time in each process."""
    completions = config.prompts_per_step * config.group_size
    update, remainder = divmod(completions, config.minibatches * processes)
    if remainder:
        raise ValueError(
            f"prompts_per_step={config.prompts_per_step} of group_size={config.group_size} cannot be divided among "
            f"{processes} processes and minibatches={config.minibatches}; make their product a multiple"
        )
    largest = max(n for n in range(1, min(config.micro_batch, update) + 1) if update % n == 0)
    at_once = overrides.get("per_device_train_batch_size", largest)
    if update % at_once:
        raise ValueError(
            f"per_device_train_batch_size={at_once} does not divide the {update} completions that a process has in an "
            f"update; use {largest}"
        )
    accumulated = update // at_once
    fields = {
        "per_device_train_batch_size": at_once,
        "gradient_accumulation_steps": accumulated,
    }
    if "generation_batch_size" not in overrides:
        fields["steps_per_generation"] = accumulated * config.minibatches
    return fields


def _rate_fields(config: Config, warmup: int, notes: list[str]) -> dict[str, Any]:
    """The learning rate in TRL's words. Its first update with a warmup has rate 0, the loop's has 1 / (warmup + 1)."""
    rate = config.learning_rate
    if isinstance(rate, (linear, cosine)) and rate.start > rate.end:
        kind, lowest = "cosine_with_min_lr", {"min_lr": rate.end}
        if isinstance(rate, linear):
            kind, lowest = "polynomial", {"lr_end": rate.end, "power": 1.0}
        return {
            "learning_rate": rate.start,
            "lr_scheduler_type": kind,
            "lr_scheduler_kwargs": lowest,
        }
    first = _start(config, "learning_rate", notes)
    if not first:
        raise ValueError(
            f"learning_rate={rate!r} starts at 0, and TRL would stay there; give a number, and warmup={config.steps}"
        )
    return {
        "learning_rate": first,
        "lr_scheduler_type": "constant_with_warmup" if warmup else "constant",
    }

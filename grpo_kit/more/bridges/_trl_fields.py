"""Every field of TRL's GRPOConfig: mapped to the loop's Config, ignored with a reason, or refused with what would do.

A test compares the three tables with the fields of the installed GRPOConfig, so a new field fails there first.
Words of TRL: an update is one optimizer step, and max_steps counts updates. The loop's step is one rollout with all of
its updates: num_iterations * steps_per_generation / gradient_accumulation_steps of them.
"""

from __future__ import annotations

import dataclasses
import math
from numbers import Real

from trl import GRPOConfig

from grpo_kit._support.argument_checks import (
    check_above_zero,
    check_choice,
    check_number,
    check_whole,
)
from grpo_kit.more.bridges.trackers import TRACKERS

SAME = {
    "num_generations": "group_size",
    "num_iterations": "iterations",
    "seed": "seed",
    "top_p": "top_p",
    "repetition_penalty": "repetition_penalty",
    "epsilon": "epsilon",
    "entropy_coef": "entropy_bonus",
    "mask_truncated_completions": "mask_truncated_completions",
    "weight_decay": "weight_decay",
}
"""Fields of GRPOConfig that hold the same as a field of Config, both ways."""

MAPPED = {
    **SAME,
    "seed": "seed, and the draw of new adapters",
    "output_dir": "the run's folder, unless folder= names another",
    "per_device_train_batch_size": "prompts_per_step, with steps_per_generation and num_generations; and micro_batch",
    "gradient_accumulation_steps": "minibatches = steps_per_generation / gradient_accumulation_steps",
    "steps_per_generation": "prompts_per_step and minibatches",
    "generation_batch_size": "GRPOConfig itself turns it into steps_per_generation",
    "max_steps": "steps, each with all updates of its rollout",
    "num_train_epochs": "steps, from the number of rows",
    "max_completion_length": "max_completion_tokens",
    "temperature": "temperature",
    "top_k": "top_k; None is 0",
    "min_p": "min_p; None is 0",
    "beta": "beta",
    "use_bias_correction_kl": "loss_options['correct_kl']",
    "loss_type": "loss",
    "importance_sampling_level": "level",
    "epsilon_high": "epsilon_high; None is epsilon",
    "sapo_temperature_neg": "loss_options['temperature_neg'] of sapo",
    "sapo_temperature_pos": "loss_options['temperature_pos'] of sapo",
    "vespo_k_pos": "loss_options['k_pos'] of vespo",
    "vespo_lambda_pos": "loss_options['lambda_pos'] of vespo",
    "vespo_k_neg": "loss_options['k_neg'] of vespo",
    "vespo_lambda_neg": "loss_options['lambda_neg'] of vespo",
    "scale_rewards": "scale",
    "reward_weights": "the task's reward_weights; None: 1 each",
    "learning_rate": "learning_rate, with its schedule and warmup",
    "lr_scheduler_type": "learning_rate: a number, linear(...), or stepwise(...) with each step's rate",
    "lr_scheduler_kwargs": "learning_rate",
    "warmup_steps": "learning_rate; Config.warmup is 0",
    "optim": "optimizer: an AdamW, of 8 bits or not",
    "adam_beta1": "set on trainer.optimizer",
    "adam_beta2": "set on trainer.optimizer",
    "adam_epsilon": "set on trainer.optimizer",
    "max_grad_norm": "max_grad_norm; 0, TRL's word for no clipping, is 1e12",
    "bf16": "autocast='bfloat16'",
    "fp16": "autocast='float16'",
    "activation_checkpointing": "gradient_checkpointing",
    "gradient_checkpointing": "gradient_checkpointing",
    "save_strategy": "save_steps; 'no' is 0, and 'steps' also saves after the last step",
    "save_steps": "save_steps",
    "save_total_limit": "save_total_limit; None: all stay",
    "use_cpu": "the device that the model is moved to",
    "model_init_kwargs": "given to from_pretrained where the model is a name",
    "trust_remote_code": "given to from_pretrained where the model is a name",
    "disable_dropout": "the model's dropout layers get p=0",
    "chat_template_kwargs": "given to the chat template",
    "remove_unused_columns": "True: rewards get no columns of the data set",
    "report_to": "trackers of these names as hooks: tensorboard, trackio, wandb",
    "project": "the project of trackio",
    "trackio_space_id": "the space_id of trackio",
    "eval_strategy": "eval_dataset is measured before the first step, every eval_steps, and after the last",
    "eval_steps": "steps between two measurements",
    "eval_on_start": "held-out rows are measured before the first step, and after the last",
}  # fmt: skip

_IGNORED_BECAUSE = {
    "TRL's GRPO does not read it either": (
        "label_smoothing_factor do_train do_eval do_predict label_names length_column_name train_sampling_strategy "
        "data_seed prediction_loss_only use_cache include_for_metrics batch_eval_metrics"
    ),
    "each held-out row is answered once, greedily, as many at a time as fit": (
        "per_device_eval_batch_size eval_do_concat_batches eval_use_gather_object eval_accumulation_steps "
        "num_generations_eval"
    ),
    "load_best_model_at_end, which is refused, reads it": "metric_for_best_model greater_is_better",
    "the loop writes every step and every completion to metrics.jsonl and completions.jsonl": (
        "logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter log_level "
        "log_level_replica include_num_input_tokens_seen disable_tqdm log_completions num_completions_to_print "
        "log_unique_prompts log_multimodal skip_memory_metrics debug"
    ),
    "a tracker's run has the name of the run's folder": "run_name",
    "push_to_hub, which is refused, reads it": (
        "hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision"
    ),
    "the loop has no data loader: a step's rows are a function of (seed, step)": (
        "dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
        "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order ignore_data_skip "
        "accelerator_config"
    ),
    "one process trains": (
        "average_tokens_across_devices ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers "
        "ddp_static_graph ddp_backend ddp_timeout local_rank save_on_each_node ds3_gather_for_generation fsdp_config"
    ),
    "it changes speed or memory and no number; the engine and the packed update have ways of their own": (
        "torch_compile torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config "
        "torch_empty_cache_steps auto_find_batch_size activation_checkpointing_kwargs gradient_checkpointing_kwargs "
        "pad_to_multiple_of cache_implementation use_transformers_continuous_batching "
        "transformers_continuous_batching_config use_transformers_paged"
    ),
    "TrainingArguments has switched it already": "tf32",
    "a checkpoint of the loop always holds the optimizer, and a stop saves one": (
        "save_only_model enable_jit_checkpoint restore_callback_states_from_checkpoint"
    ),
    "use_vllm, which is refused, reads it": (
        "vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url "
        "vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization "
        "vllm_max_model_length vllm_tensor_parallel_size vllm_importance_sampling_correction "
        "vllm_importance_sampling_mode vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min "
        "vllm_importance_sampling_cap"
    ),
    "sync_ref_model, which is refused, reads it": "ref_model_mixup_alpha ref_model_sync_steps",
    "use_adaptive_entropy, which is refused, reads it": (
        "entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target"
    ),
}  # fmt: skip
IGNORED = {}
for _reason, _names in _IGNORED_BECAUSE.items():
    IGNORED |= dict.fromkeys(_names.split(), _reason)
# ignored, but a line says so where they are set
PRINTED = ("run_name", "torch_compile", "use_liger_kernel")

TRL = "train this one by trl.GRPOTrainer"
_OUT = f"leave it out, or {TRL}"
REFUSED = {
    "use_vllm": "leave it out, the engine samples on the trained weights; or give kit.GRPOTrainer a "
    f"sample=VllmSample() of grpo_kit.more.bridges.vllm; for several cards {TRL}",
    "deepspeed": f"leave it out on one card; on several {TRL}",
    "fsdp": f"leave it out on one card; on several {TRL}",
    "parallelism_config": f"leave it out on one card; on several {TRL}",
    "generation_kwargs": _OUT,
    "delta": f"leave it out, epsilon_high bounds what a positive advantage gains; or {TRL}",
    "multi_objective_aggregation": f"set 'sum_then_normalize', or {TRL}",
    "sync_ref_model": f"leave it out, the reference is what training began with; or {TRL}",
    "top_entropy_quantile": f"set 1.0, or {TRL}",
    "use_adaptive_entropy": f"leave it out and set entropy_coef, or {TRL}",
    "off_policy_mask_threshold": _OUT,
    "router_aux_loss_coef": f"set 0.0, or {TRL}",
    "cast_lm_head_to_fp32": "leave it out, and load the model with dtype='float32'",
    "neftune_noise_alpha": _OUT,
    "optim_args": _OUT,
    "optim_target_modules": _OUT,
    "max_tool_calling_iterations": f"leave it out; for tools {TRL}",
    "shuffle_dataset": f"set True: seed decides the order of the rows; or {TRL}",
    "eval_delay": "leave it out; the first measurement is before the first step",
    "bf16_full_eval": "leave it out; held-out rows are answered in the weights' own dtype",
    "fp16_full_eval": "leave it out; held-out rows are answered in the weights' own dtype",
    "trackio_bucket_id": "leave it out; trackio_space_id names a Space",
    "trackio_static_space_id": "leave it out; trackio_space_id names a Space",
    "load_best_model_at_end": "leave it out, and load the checkpoint that you want by grpo_kit.load_policy",
    "push_to_hub": "leave it out, and call trainer.model.push_to_hub(...) after training",
    "log_completions_hub_repo": "leave it out, and upload completions.jsonl of the run's folder",
    "full_determinism": "leave it out, and call transformers.enable_full_determinism(seed) first",
    "resume_from_checkpoint": "leave it out, and call trainer.train(resume=True); for a checkpoint of TRL's load it as "
    "the model",
}  # fmt: skip

_SIZES = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_iterations",
    "max_completion_length",
)  # fmt: skip
_AT_LEAST_0 = ("adam_", "warmup_", "learning_rate")
_DEFAULTS = {}
for _field in dataclasses.fields(GRPOConfig):
    _DEFAULTS[_field.name] = _field.default
    if _field.default_factory is not dataclasses.MISSING:
        _DEFAULTS[_field.name] = _field.default_factory()


def is_set(args: GRPOConfig, name: str) -> bool:
    """Whether a field has another value than its default. Of a default that means nothing, so do None, 0 and empty."""
    value, default = getattr(args, name), _DEFAULTS[name]
    if not value and (not default or default in ("none", "no")):  # report_to="none" becomes []
        return False
    return value != default


def check_fields(args: GRPOConfig) -> None:
    """Raises ValueError for a number that cannot be, and with each field that is set and refused, and what would do."""
    for name in MAPPED:
        value = getattr(args, name)
        is_real = isinstance(value, Real) and not isinstance(value, bool)
        if is_real or isinstance(_DEFAULTS[name], float) and value is not None:
            check_number(name, value, 0 if name.startswith(_AT_LEAST_0) else -math.inf)
    for name in _SIZES:
        check_whole(name, getattr(args, name))
    check_whole("num_generations", args.num_generations, 2)
    if args.max_steps <= 0:
        check_above_zero("num_train_epochs", args.num_train_epochs)
    else:
        check_whole("max_steps", args.max_steps)
    for kind in ("save", "eval"):
        if getattr(args, f"{kind}_strategy") == "steps":
            check_above_zero(f"{kind}_steps", getattr(args, f"{kind}_steps"))
    for name in args.report_to:
        check_choice("report_to", name, TRACKERS)
    for name in ("adam_beta1", "adam_beta2"):
        if getattr(args, name) >= 1:
            raise ValueError(f"{name}={getattr(args, name)!r} must lie in [0, 1)")
    lines = [
        f"{name}={getattr(args, name)!r}: {remedy}"
        for name, remedy in REFUSED.items()
        if is_set(args, name)
    ]
    if args.world_size > 1:
        lines.append(f"{args.world_size} processes: start one; on several cards {TRL}")
    if lines:
        raise ValueError("args asks for what the loop cannot do:\n  " + "\n  ".join(lines))

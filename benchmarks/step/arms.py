"""The trainers that are compared. All train the same weights on the same work; what differs is said at each arm.

Unverified, for want of a card: `vllm`, and every arm on CUDA.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
import trl
from transformers import PrinterCallback, ProgressCallback
from trl import GRPOConfig

from benchmarks.step.forcing import forced_completions
from benchmarks.step.phases import Step, StepWatch
from benchmarks.step.workload import Workload
from grpo_kit import GRPOTrainer
from grpo_kit.models import base_model

KIT = {"warmup": 0, "live": None}
TINY_RATE = 1e-9  # the optimizer does all its work and the weights stay where they are


@dataclass(frozen=True)
class Setup:
    """What all arms share.

    model: the weights on the CPU, copied for each measurement; cuda: where to train; bf16: autocast;
    warmup: unmeasured steps before the measured one; tuned: (micro-batch, checkpointing) of TRL at its best.
    """

    model: Any
    tokenizer: Any
    workload: Workload
    cuda: bool
    bf16: bool
    warmup: int
    tuned: tuple[int, bool]

    @property
    def rows(self) -> int:
        return len(self.workload.completion_ids)


def cannot_run(arm: str) -> str | None:
    """Why the arm cannot run here, or None.

    Unsloth replaces TRL's and transformers' classes when it is imported and needs older versions of both, so it has
    no place in one process with the others.
    """
    if arm in ("vllm", "unsloth") and importlib.util.find_spec(arm) is None:
        return "not installed"
    return "not run: it cannot share a process with the other arms" if arm == "unsloth" else None


def measure(arm: str, setup: Setup, say: Callable[[str], None] = lambda text: None) -> Step:
    """One step of a fresh trainer of that arm on a fresh copy of the weights. say: told of each part as it ends.

    Raises torch.cuda.OutOfMemoryError when it does not fit.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        torch.manual_seed(setup.workload.seed)
        model = copy.deepcopy(setup.model).to("cuda" if setup.cuda else "cpu")
        if arm == "loop":
            from benchmarks.step.loop_arm import measure_loop

            return measure_loop(setup, model, folder, say)
        trainer = ARMS[arm](setup, model, folder)
        for callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
        split = arm not in ("trl-cb", "vllm")
        watch = StepWatch(trainer, warmup=setup.warmup, split_prefill=split, say=say)
        stack.callback(watch.count.close)
        stack.enter_context(watch.count.heads())
        stack.enter_context(forced_completions(arm, trainer, setup.workload, watch))
        trainer.train()
        step = watch.step
    del trainer, model, watch
    release(setup.cuda)
    return step


def release(cuda: bool) -> None:
    """Give back what an arm has left behind, after it failed too."""
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()


def _config(setup: Setup, folder: str, micro_batch: int, checkpointing: bool, **overrides: Any) -> GRPOConfig:
    """One optimizer step over all rows: gradient accumulation makes up for the micro-batch."""
    if setup.rows % micro_batch:
        raise ValueError(f"micro_batch={micro_batch} must divide the {setup.rows} completions of a step")
    work = setup.workload
    return GRPOConfig(
        output_dir=folder,
        max_steps=setup.warmup + 1,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=setup.rows // micro_batch,
        num_generations=work.group_size,
        max_completion_length=work.max_completion,
        activation_checkpointing=checkpointing,  # gradient_checkpointing under its new name
        shuffle_dataset=False,
        learning_rate=TINY_RATE,
        lr_scheduler_type="constant",
        bf16=setup.bf16,
        use_cpu=not setup.cuda,
        dataloader_pin_memory=setup.cuda,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=work.seed,
        **overrides,
    )


def _trainer(cls: type, setup: Setup, model: Any, args: GRPOConfig, **options: Any) -> Any:
    return cls(
        model=model,
        reward_funcs=setup.workload,
        args=args,
        train_dataset=setup.workload.dataset(),
        processing_class=setup.tokenizer,
        **options,
    )


def trl_hf(setup: Setup, model: Any, folder: str) -> Any:
    """TRL's defaults: micro-batches of 8, gradient checkpointing on, transformers' generate."""
    return _trainer(trl.GRPOTrainer, setup, model, _config(setup, folder, min(8, setup.rows), True))


def trl_hf_tuned(setup: Setup, model: Any, folder: str) -> Any:
    """TRL's best settings: the micro-batch and checkpointing measured as fastest, one outer autocast in rollouts."""
    trainer = _trainer(trl.GRPOTrainer, setup, model, _config(setup, folder, *setup.tuned))
    inner = trainer._generate_single_turn

    @wraps(inner)
    def under_one_autocast(*args: Any, **kwargs: Any) -> Any:
        with trainer.accelerator.autocast():  # keeps the cast weights from one token to the next
            return inner(*args, **kwargs)

    trainer._generate_single_turn = under_one_autocast
    return trainer


def trl_cb(setup: Setup, model: Any, folder: str) -> Any:
    """TRL with transformers' continuous batching, otherwise as tuned."""
    args = _config(setup, folder, *setup.tuned, use_transformers_continuous_batching=True)
    return _trainer(trl.GRPOTrainer, setup, model, args)


def vllm(setup: Setup, model: Any, folder: str) -> Any:
    """TRL with vLLM in the same process and its weights put to sleep for the update, otherwise as tuned.

    Without importance-sampling correction, since the tokens of the update are not the ones vLLM sampled.
    """
    path = str(Path(folder, "model"))  # vLLM reads the weights from a folder
    base = base_model(model)
    copy.deepcopy(base if base is model else model.merge_and_unload()).save_pretrained(path)
    setup.tokenizer.save_pretrained(path)
    base.config._name_or_path = base.name_or_path = path
    colocated = dict(use_vllm=True, vllm_mode="colocate", vllm_enable_sleep_mode=True)
    args = _config(setup, folder, *setup.tuned, vllm_importance_sampling_correction=False, **colocated)
    return _trainer(trl.GRPOTrainer, setup, model, args)


def kit(setup: Setup, model: Any, folder: str, *, skip: bool) -> Any:
    """The kit's trainer. skip: leave out groups whose advantages are all zero."""
    args = _config(setup, folder, setup.rows, False)  # the kit splits the rows by the memory there is
    return _trainer(GRPOTrainer, setup, model, args, **KIT, rollout="kit", skip_zero_advantage=skip)


def kit_rollout(setup: Setup, model: Any, folder: str) -> Any:
    """The kit's rollouts and TRL's update as tuned: what the engine alone brings."""
    args = _config(setup, folder, *setup.tuned)
    return _trainer(GRPOTrainer, setup, model, args, **KIT, rollout="kit", pack=False)


def kit_update(setup: Setup, model: Any, folder: str) -> Any:
    """TRL's rollouts and the kit's update: what packing alone brings."""
    args = _config(setup, folder, setup.rows, False)
    return _trainer(GRPOTrainer, setup, model, args, **KIT, rollout="hf", skip_zero_advantage=False)


ARMS = {
    "trl-hf": trl_hf,
    "trl-hf-tuned": trl_hf_tuned,
    "trl-cb": trl_cb,
    "kit": partial(kit, skip=False),
    "kit-skip": partial(kit, skip=True),
    "kit-before": partial(kit, skip=False),  # with the kit of another checkout
    "kit-rollout": kit_rollout,
    "kit-update": kit_update,
    "vllm": vllm,
    "loop": None,  # benchmarks/step/loop_arm.py
}

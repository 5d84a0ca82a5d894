"""The arms that are TRL's trainer, and how a step of it is measured. The one file of this benchmark that imports trl.

On CUDA none of them has been run yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import trl
import trl.trainer.utils as trl_utils
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from trl import GRPOConfig

from benchmarks.step.forcing import forced_tokens
from benchmarks.step.phases import Step, Watch
from benchmarks.step.setup import TINY_RATE, Setup


def measure_trl(trainer: Any, setup: Setup, say: Callable[[str], None]) -> Step:
    """The step of a fresh trainer that follows setup.warmup steps."""
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    watch = TRLWatch(trainer, setup.warmup, say=say)
    model = trainer.accelerator.unwrap_model(trainer.model)
    try:
        with heads(watch), forced_tokens(model, setup.workload, watch):
            trainer.train()
    finally:
        watch.count.close()
    return watch.step


class TRLWatch(Watch, TrainerCallback):
    """Measures the step that follows `warmup` steps of a TRL trainer."""

    def __init__(self, trainer: Any, warmup: int, **options: Any) -> None:
        cuda = trainer.accelerator.device.type == "cuda"
        super().__init__(trainer.model, cuda=cuda, **options)
        self._warmup, self._losses = warmup, []
        self._wrap(trainer)
        trainer.add_callback(self)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The rollout is next."""
        self._losses = []
        if state.global_step == self._warmup:
            self.measure()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The gradient is there."""
        self.ended("forward-backward")
        self.clock.enter("optimizer")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The weights have moved."""
        self.clock.leave()

    def _wrap(self, trainer: Any) -> None:
        def after(name: str, phase: str | None, then: Callable[..., None]) -> None:
            inner = getattr(trainer, name)
            within = self.timed(inner, phase) if phase else inner

            @wraps(inner)
            def outer(*args: Any, **kwargs: Any) -> Any:
                out = within(*args, **kwargs)
                then(args, kwargs, out)
                return out

            setattr(trainer, name, outer)

        def nothing(*_: Any) -> None:
            pass

        after("_prepare_inputs", "other", nothing)
        after("_calculate_rewards", "reward", self._keep_work)
        after(
            "training_step",
            "forward-backward",
            lambda args, kwargs, loss: self._losses.append(loss),
        )
        after("_clip_grad_norm", "optimizer", nothing)
        after("_maybe_log_save_evaluate", "other", lambda *_: self._end(trainer))
        scored = trainer._get_per_token_logps_and_entropies
        without = self.timed(scored, "log-probs")

        def scoring(*args: Any, **kwargs: Any) -> Any:
            return (scored if torch.is_grad_enabled() else without)(*args, **kwargs)

        trainer._get_per_token_logps_and_entropies = scoring
        trainer._generate_single_turn = self.sampling(trainer._generate_single_turn)

    def _keep_work(self, args: tuple, kwargs: dict[str, Any], rewards: torch.Tensor) -> None:
        ids = kwargs["completion_ids_list"] if "completion_ids_list" in kwargs else args[3]
        self.step.completion_ids = [list(row) for row in ids]
        self.step.rewards = rewards.sum(1).tolist()

    def _end(self, trainer: Any) -> None:
        if trainer.state.global_step == self._warmup + 1:
            norms = [
                row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row
            ]
            self.finish(loss=float(sum(self._losses)), grad_norm=norms[-1])


@contextmanager
def heads(watch: Watch) -> Iterator[None]:
    """Count what goes into trl's fused head inside."""
    function = trl_utils._ChunkedLogProbFunction
    inner = function.apply

    def apply(hidden: torch.Tensor, *args: Any) -> Any:
        watch.count.head(len(hidden))
        return inner(hidden, *args)

    function.apply = staticmethod(apply)
    try:
        yield
    finally:
        del function.apply  # the inherited one is there again


def _config(setup: Setup, folder: str, micro_batch: int, checkpointing: bool) -> GRPOConfig:
    """One optimizer step over all rows: gradient accumulation makes up for the micro-batch."""
    if setup.rows % micro_batch:
        raise ValueError(
            f"micro_batch={micro_batch} must divide the {setup.rows} completions of a step"
        )
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
    )


def _trainer(setup: Setup, model: Any, args: GRPOConfig) -> Any:
    return trl.GRPOTrainer(
        model=model,
        reward_funcs=setup.workload,
        args=args,
        train_dataset=setup.workload.dataset(),
        processing_class=setup.tokenizer,
    )


def trl_hf(setup: Setup, model: Any, folder: str) -> Any:
    """TRL's defaults: micro-batches of 8, gradient checkpointing on, transformers' generate."""
    return _trainer(setup, model, _config(setup, folder, min(8, setup.rows), True))


def trl_hf_tuned(setup: Setup, model: Any, folder: str) -> Any:
    """TRL's best settings: the micro-batch and checkpointing measured as fastest, one outer autocast in rollouts."""
    trainer = _trainer(setup, model, _config(setup, folder, *setup.tuned))
    inner = trainer._generate_single_turn

    @wraps(inner)
    def under_one_autocast(*args: Any, **kwargs: Any) -> Any:
        # keeps the cast weights from one token to the next
        with trainer.accelerator.autocast():
            return inner(*args, **kwargs)

    trainer._generate_single_turn = under_one_autocast
    return trainer

"""GRPOTrainer: trl's, with the kit's guarantees.

It takes what trl.GRPOTrainer takes. What it adds: a temperature schedule that reaches sampler and scorer alike,
stop and go, exact resuming, weights that keep their dtype, a reference that is the model you passed, rewards that
are checked, prompts computed once per group, and a run folder with live charts. Every private method of trl and
transformers it leans on is listed in tests/training/test_private_api.py.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_utils import TrainOutput, get_last_checkpoint
from trl import GRPOConfig
from trl import GRPOTrainer as TRLGRPOTrainer

from grpo_kit.models import base_model, has_dropout
from grpo_kit.optim.choose import choose_optimizer, make_optimizer
from grpo_kit.rollout import RolloutEngine
from grpo_kit.training.checks import (
    CheckedReward,
    align,
    buffer_steps,
    check_prompt_lengths,
    check_temperature,
    check_training_data,
    choose_rollout,
)
from grpo_kit.training.interrupts import InterruptGuard
from grpo_kit.training.recorder import Recorder
from grpo_kit.training.restore import get_random_state, restore_dtypes, set_random_state, weights_come_back
from grpo_kit.training.trl_internals import (
    follow_epochs,
    fused_head,
    is_plain_function,
    reference_is_a_copy_of,
)
from grpo_kit.training.update import PackedUpdate
from grpo_kit.training.update_memory import free_bytes
from grpo_kit.watch.flags import Flag
from grpo_kit.watch.monitor import OnFlag

Schedule = Callable[[float], float]
_ROOM_FOR_GRAPHS = 16 * 2**30  # bytes free after a rollout above which its cache and graphs are kept
_LOSS_STATE = ("entropy_coef", "_last_world_entropy", "_entropy_window_stats")  # what trl's loss changes


class GRPOTrainer(TRLGRPOTrainer):
    """trl.GRPOTrainer made safe, fast and visible.

    args.output_dir is the run folder: config.json, metrics.csv (one row a step), completions.parquet, checkpoints.

    temperature: a schedule f(progress) -> temperature > 0; it changes only where a rollout buffer begins.
    None keeps args.temperature.
    eval_temperature: the sampler's in evaluation; None means args.temperature.
    warmup: fraction of the steps (in [0, 1)) used when args.warmup_steps is 0; 0 turns it off.
    rollout: who makes completions: "kit" (the default: this process, these weights), "hf" (trl's plain path), "vllm"
    (colocated) or "continuous" (transformers' continuous batching). None follows args.use_vllm and the like.
    optimizer: a name of optim.choose.OPTIMIZERS. None follows args.optim, but for bfloat16 weights, on which it
    would round its updates away: they get "adamw-8bit-split".
    pack: compute each prompt once per group, in chunks sized by free memory (same loss and gradient).
    skip_zero_advantage: leave out completions whose advantage is 0, wherever they add exactly nothing.
    live: chart in a notebook, one line a step elsewhere.
    on_flag: what a red flag does (see watch/monitor.py): "warn" shows it once, "stop" also ends training after the
    step and saves, a callable is called with the Flag. All are appended to flags.jsonl in the run folder.
    Raises ValueError before any training for data, rewards or settings that cannot work.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        temperature: Schedule | None = None,
        eval_temperature: float | None = None,
        warmup: float = 0.1,
        rollout: str | None = None,
        optimizer: str | None = None,
        pack: bool = True,
        skip_zero_advantage: bool = True,
        live: bool = True,
        on_flag: OnFlag = "warn",
        **trl_options: Any,
    ) -> None:
        if not 0 <= warmup < 1:
            raise ValueError(f"warmup={warmup} must be a fraction of the steps in [0, 1)")
        args = copy.copy(args) if args is not None else GRPOConfig("runs/grpo")
        rewards = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        rewards = [r for r in rewards if r is not None]
        prompts_per_buffer = args.generation_batch_size // args.num_generations
        check_training_data(train_dataset, [r for r in rewards if is_plain_function(r)], prompts_per_buffer)
        align(args, warmup)
        self.rollout = choose_rollout(rollout, args)
        dtypes = (
            {n: p.dtype for n, p in model.named_parameters()} if isinstance(model, torch.nn.Module) else {}
        )

        with reference_is_a_copy_of(model):
            super().__init__(
                model=model,
                reward_funcs=[CheckedReward(r) if is_plain_function(r) else r for r in rewards],
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                **trl_options,
            )
        restore_dtypes(self.model, dtypes)
        if optimizer is not None and self.optimizer is not None:
            raise ValueError(f"optimizer={optimizer!r} and optimizers= are both given; say one of the two")
        self._optimizer_asked = optimizer is not None
        self._optimizer_name = choose_optimizer(optimizer, self.model) if self.optimizer is None else None
        if isinstance(train_dataset, Dataset):
            context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
            if context:
                tokenize = lambda texts: self._tokenizer(texts)["input_ids"]  # noqa: E731
                check_prompt_lengths(train_dataset, tokenize, context, self.max_completion_length)

        self._schedule = temperature
        self._train_temperature = self.temperature
        self._eval_temperature = eval_temperature if eval_temperature is not None else self.temperature
        self._heads = [fused_head(base_model(self.model))] + (
            [fused_head(self.ref_model)] if self.ref_model is not None else []
        )
        for progress in (0.0, 0.5, 1.0):
            check_temperature(temperature(progress) if temperature else self.temperature, "temperature")
        check_temperature(self._eval_temperature, "eval_temperature")
        self.pack = pack
        self.update = PackedUpdate(self, self._loss_of_scores, skip_zero_advantage=skip_zero_advantage)
        self._engine: RolloutEngine | None = None
        self._sampled_entropies: list[list[float]] | None = None
        self._window: list[dict[str, Any]] = []  # micro-batches of the current optimizer step
        self._ready_scores: tuple[torch.Tensor, torch.Tensor] | None = None

        self.interrupted = False
        self._stopped_at: str | None = None
        self._random_state: tuple[int, Any] | None = None
        self._guard = InterruptGuard()
        self._recorder = Recorder(self, live=live, on_flag=on_flag)
        self.add_callback(_Bookkeeping(self))
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)
        _remove_notebook_table(self)

    def own_options(self) -> dict[str, Any]:
        """What a subclass was given besides GRPOTrainer's options, as JSON values; config.json keeps it."""
        return {}

    # ---- stop and go ------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> TrainOutput:
        """Train; the stop button (SIGINT) ends the step cleanly, saves, and returns; call train() again to go on.

        resume_from_checkpoint: a checkpoint folder, or True for the last one in args.output_dir.
        After an interrupt `trainer.interrupted` is True, after a red flag (on_flag="stop") `trainer.stopped_by` is
        the Flag; train() then continues where it stopped, with fresh rollouts, and that flag stops it no more.
        Raises RunFolderError if the folder already holds a run and resuming was not asked for.
        """
        if resume_from_checkpoint is None:
            resume_from_checkpoint = self._stopped_at
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(
                    f"resume_from_checkpoint=True, but {self.args.output_dir!r} holds no checkpoint"
                )
        again = bool(resume_from_checkpoint) or self.interrupted
        self.interrupted = False
        self._started = self._updating = False
        start = get_random_state()
        with self._guard, warnings.catch_warnings():
            # trl asks transformers for a renamed property at every rollout.
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)
            self._recorder.open(resume=again)
            try:
                output = super().train(resume_from_checkpoint=resume_from_checkpoint or None, **kwargs)
                self._stopped_at = None
                if self.stopped_by is not None:
                    self._save_where_it_stopped(f"red flag: {self.stopped_by.name}")
                return output
            except KeyboardInterrupt:
                self.interrupted = True
                self._save_where_it_stopped("interrupted")
                if self.state.global_step == 0:
                    set_random_state(start)
                return TrainOutput(self.state.global_step, float("nan"), {"interrupted": 1.0})
            except Exception as error:
                # Between the optimizer's first and last write the weights are neither old nor new: not worth saving.
                if not self._updating:
                    self._save_where_it_stopped(type(error).__name__)
                raise
            finally:
                self._recorder.close()

    def _save_where_it_stopped(self, why: str) -> None:
        step = self.state.global_step
        self._guard.begin_finish_first()
        self.model.zero_grad(set_to_none=True)
        self.model.train()
        if not self._started or step == 0:
            self._recorder.say(f"Stopped before the first step was done ({why}); nothing to save.")
            return
        if self._random_state is not None and self._random_state[0] == step:
            set_random_state(self._random_state[1])  # as if the unfinished step had never begun
        folder = Path(self.args.output_dir) / f"checkpoint-{step}"
        if not (folder / "trainer_state.json").is_file():
            self._save_checkpoint(self.model, trial=None)
        self._stopped_at = str(folder)
        self._recorder.say(
            f"Stopped after step {step} ({why}), saved to {folder}; train() continues from here."
        )

    def _begin(self, state: Any) -> None:
        """A run begins or resumes: nothing of an earlier one may leak in."""
        self._started = True
        self._step = state.global_step * self.args.gradient_accumulation_steps
        self._buffered_inputs = None
        self._window.clear()
        self._current_train_step_time = 0.0
        self._metrics["train"].clear()
        self._pending_metrics.clear()
        self._pending_extra_logs.clear()
        self._random_state = None
        self._began_at = state.global_step
        self._recorder.begin()
        if state.global_step >= state.max_steps:
            self._recorder.say(f"All {state.max_steps} steps are done already; raise max_steps to train on.")

    def _begin_epoch(self, state: Any) -> None:
        """Opening the data draws a random number, and a step that an epoch begins with is redone with it."""
        if state.global_step != self._began_at:
            self._random_state = (state.global_step, get_random_state())

    def _run_epoch(self, **kwargs: Any) -> None:
        """Where a finished run is resumed nothing is left to do; transformers would train one step more."""
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(**kwargs)
        else:
            self.control.should_training_stop = True

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self._guard.end_finish_first()

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As trl's, at the evaluation temperature; an interrupt stops it at once."""
        with self._guard.at_once():
            return super().evaluate(*args, **kwargs)

    # ---- temperature ------------------------------------------------------------------------------------------

    def _temperature_at(self, step: int) -> float:
        """A function of the step alone, constant inside a rollout buffer."""
        if self._schedule is None:
            return self._train_temperature
        size = buffer_steps(self.args)
        last = (max(self.state.max_steps, 1) - 1) // size * size
        progress = step // size * size / last if last else 0.0
        return check_temperature(self._schedule(min(progress, 1.0)), f"temperature({progress:.3f})")

    def _set_temperature(self, value: float) -> None:
        """Sampler and scorer together: anything else biases the gradient."""
        self.temperature = value
        for head in self._heads:
            head.cell_contents = value
        if self.use_vllm:
            self.vllm_generation.temperature = value
        else:
            self.generation_config.temperature = value
            self.generation_kwargs["temperature"] = value

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """As trl's, sampled and scored at the evaluation temperature."""
        before = self.temperature
        self._set_temperature(self._eval_temperature)
        try:
            return super().prediction_step(*args, **kwargs)
        finally:
            self._set_temperature(before)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return follow_epochs(super()._get_train_sampler(*args, **kwargs))

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """The one of grpo_kit.optim that was asked for, or that the weights need; else as transformers'."""
        if self.optimizer is None and self._optimizer_name is not None:
            if not self._optimizer_asked:
                self._recorder.say(
                    f"bfloat16 weights: optimizer {self._optimizer_name!r}, which keeps the bits that args.optim would "
                    "round away"
                )
            self.optimizer = make_optimizer(
                self._optimizer_name,
                self.model,
                learning_rate=self.args.learning_rate,
                weight_decay=self.args.weight_decay,
                betas=(self.args.adam_beta1, self.args.adam_beta2),
                eps=self.args.adam_epsilon,
            )
        return super().create_optimizer(*args, **kwargs)

    # ---- rollouts and scores ----------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        step = self.state.global_step
        if self._random_state is None or self._random_state[0] != step:  # a step may fill several buffers
            self._random_state = (step, get_random_state())
        self._set_temperature(self._temperature_at(step))
        self._logs[
            "extra"
        ].clear()  # else a column that a reward logs only at times would show an earlier batch's
        with self._first_pass_gives_old_scores():
            output = super()._generate_and_score_completions(inputs)
        self._add_sampled_entropies(output)
        self._metrics["train"]["temperature"].append(self.temperature)
        self._recorder.completions(inputs)
        return output

    @contextmanager
    def _first_pass_gives_old_scores(self) -> Iterator[None]:
        """No pass of its own for them when one optimizer step sees the whole buffer before the weights move."""
        iterations = self.num_iterations
        covered = self.args.gradient_accumulation_steps % self.args.steps_per_generation == 0
        if self.pack and covered and self.update.supports({}) and not has_dropout(self.model):
            self.num_iterations = 1
        try:
            yield
        finally:
            self.num_iterations = iterations

    def _generate_single_turn(
        self, prompt_ids: list, images: Any, multimodal_fields: dict, *args: Any, **kwargs: Any
    ):
        """Sample in evaluation mode (no LoRA dropout); put mode and checkpointing back whatever happens."""
        model = base_model(self.model)
        training, checkpointing = self.model.training, model.is_activation_checkpointing
        self.model.eval()
        self._sampled_entropies = None
        try:
            own = self.rollout in ("kit", "hf")
            # One outer context keeps the cast weights between tokens.
            with self.accelerator.autocast() if own else nullcontext():
                if self._uses_engine(images, multimodal_fields):
                    return self._generate_with_engine(prompt_ids)
                with (
                    weights_come_back(self.model)
                    if self.use_transformers_continuous_batching
                    else nullcontext()
                ):
                    return super()._generate_single_turn(
                        prompt_ids, images, multimodal_fields, *args, **kwargs
                    )
        finally:
            self.model.train(training)
            if checkpointing and not model.is_activation_checkpointing:
                model.gradient_checkpointing_enable(
                    gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs
                )

    def _uses_engine(self, images: Any, multimodal_fields: dict) -> bool:
        if self.rollout != "kit" or images is not None or multimodal_fields:
            return False
        why_not = (
            "several processes"
            if self.accelerator.num_processes > 1
            else RolloutEngine.unsupported(self.model, self.generation_config)
        )
        if why_not:
            self.rollout = "hf"
            self._recorder.say(
                f"The kit's rollout engine cannot do this run ({why_not}); rollouts are trl's own."
            )
        return not why_not

    def _generate_with_engine(self, prompt_ids: list[list[int]]):
        if self._engine is None:
            self._engine = RolloutEngine(self.accelerator.unwrap_model(self.model_wrapped))
        try:
            rollouts = self._engine.generate(prompt_ids, self.generation_config, tokenizer=self._tokenizer)
        finally:
            if free_bytes(self.accelerator.device) < _ROOM_FOR_GRAPHS:
                self._engine.release()  # the update needs the memory more than the next rollout its graphs
        self._sampled_entropies = rollouts.entropies
        return rollouts.completion_ids, rollouts.policy_logprobs

    def _add_sampled_entropies(self, output: dict[str, Any]) -> None:
        """The entropies at sampling time beside the log-probabilities, for the metrics of skipped completions."""
        width = output["completion_ids"].size(1)
        rows = self._sampled_entropies
        if rows is not None and len(rows) == len(output["completion_ids"]) and max(map(len, rows)) <= width:
            padded = [row + [0.0] * (width - len(row)) for row in rows]
            output["sampling_per_token_entropies"] = torch.tensor(padded, device=self.accelerator.device)

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ):
        if self._ready_scores is not None:
            return *self._ready_scores, None
        scoring = not torch.is_grad_enabled()  # old and reference log-probabilities: no dropout either
        training = model.training
        if scoring:
            model.eval()
        try:
            if not self.pack or not self.update.supports({k: v for k, v in kwargs.items() if v is not None}):
                return super()._get_per_token_logps_and_entropies(
                    model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
                )
            logprobs, entropies = self.update.scores(model, input_ids, attention_mask, logits_to_keep)
            return logprobs, entropies if kwargs.get("compute_entropy") else None, None
        finally:
            model.train(training)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """As trl's. Packed, the micro-batches of an optimizer step are collected and computed at its last one."""
        if not model.training or not self.pack or not self.update.supports(inputs):
            return super().compute_loss(model, inputs, *args, **kwargs)
        self._window.append(inputs)
        loss = torch.zeros((), device=self.accelerator.device)
        if self.accelerator.sync_gradients:
            window, self._window = self._window, []
            loss = self.update.step(model, window)
        return loss.requires_grad_()  # the gradients are in place already; backward finds nothing below

    def _loss_of_scores(
        self,
        model: Any,
        micro: dict[str, Any],
        logprobs: torch.Tensor,
        entropies: torch.Tensor,
        *,
        log: bool = False,
        last: bool = True,
    ) -> torch.Tensor:
        """trl's loss of a micro-batch whose scores are known; its metrics and controllers move only if log."""
        state = {name: getattr(self, name) for name in _LOSS_STATE}
        lengths = {name: len(values) for name, values in self._metrics["train"].items()}
        gradient_state = self.accelerator.gradient_state
        sync = gradient_state.sync_gradients
        gradient_state._set_sync_gradients(last)
        self._ready_scores = logprobs, entropies
        try:
            return self._compute_loss(model, micro)
        finally:
            self._ready_scores = None
            gradient_state._set_sync_gradients(sync)
            if not log:
                vars(self).update(state)
                for name, values in self._metrics["train"].items():
                    del values[lengths.get(name, 0) :]

    # ---- records ----------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As trl's; every training step also becomes a row of metrics.csv and a point in the live chart."""
        super().log(logs, start_time)
        if "loss" in logs and self.model.training:
            self._recorder.step(logs)
        elif "eval_loss" in logs:
            self._recorder.evaluation(logs)
        if self.stopped_by is not None:
            self.control.should_training_stop = True

    @property
    def stopped_by(self) -> Flag | None:
        """The red flag that ended the last train(), where on_flag="stop"; interrupts are another matter."""
        return self._recorder.stopped_by


class _Bookkeeping(TrainerCallback):
    """Tells the trainer where in the loop it is."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._begin(state)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._begin_epoch(state)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._guard.begin_finish_first()
        self.trainer._updating = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._updating = False


def _remove_notebook_table(trainer: GRPOTrainer) -> None:
    try:
        from transformers.utils.notebook import NotebookProgressCallback
    except ImportError:  # no IPython: transformers did not add it
        return
    trainer.remove_callback(NotebookProgressCallback)

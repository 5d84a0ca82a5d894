"""GRPOTrainer: trl's, with the kit's guarantees.

It takes what trl.GRPOTrainer takes. What it adds: a temperature schedule that reaches sampler and scorer alike,
stop and go, exact resuming, weights that keep their dtype, a reference that is the model you passed, rewards that
are checked, prompts computed once per group, and a run folder with live charts. Every private method of trl and
transformers it leans on is listed in tests/test_private_api.py.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import trl.trainer.grpo_trainer as trl_grpo
import trl.trainer.utils as trl_utils
from datasets import Dataset
from peft import PeftModel
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_utils import TrainOutput, get_last_checkpoint
from trl import GRPOConfig
from trl import GRPOTrainer as TRLGRPOTrainer
from trl.trainer.grpo_trainer import is_async_callable

from grpo_kit.interrupts import InterruptGuard
from grpo_kit.packing import SUPPORTED_MODEL_TYPES, pack_groups
from grpo_kit.recorder import Recorder
from grpo_kit.restore import get_random_state, restore_dtypes, set_random_state, weights_come_back
from grpo_kit.rollout import generate_shared_prefill
from grpo_kit.trainer_checks import CheckedReward, check_prompt_lengths, check_training_data

Schedule = Callable[[float], float]


class GRPOTrainer(TRLGRPOTrainer):
    """trl.GRPOTrainer made safe, fast and visible.

    args.output_dir is the run folder: config.json, metrics.csv (one row a step), completions.parquet, checkpoints.

    temperature: a schedule f(progress) -> temperature > 0; it changes only where a rollout buffer begins.
    None keeps args.temperature.
    eval_temperature: the sampler's in evaluation; None means args.temperature.
    warmup: fraction of the steps (in [0, 1)) used when args.warmup_steps is 0; 0 turns it off.
    pack: score each prompt once per group (same gradient). None means on a CPU, where it was measured.
    live: chart in a notebook, one line a step elsewhere.
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
        pack: bool | None = None,
        live: bool = True,
        **trl_options: Any,
    ) -> None:
        if not 0 <= warmup < 1:
            raise ValueError(f"warmup={warmup} must be a fraction of the steps in [0, 1)")
        args = copy.copy(args) if args is not None else GRPOConfig("runs/grpo")
        rewards = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        rewards = [r for r in rewards if r is not None]
        prompts_per_buffer = args.generation_batch_size // args.num_generations
        check_training_data(train_dataset, [r for r in rewards if _is_function(r)], prompts_per_buffer)
        _align(args, warmup)
        dtypes = (
            {n: p.dtype for n, p in model.named_parameters()} if isinstance(model, torch.nn.Module) else {}
        )

        with _reference_is_a_copy_of(model):
            super().__init__(
                model=model,
                reward_funcs=[CheckedReward(r) if _is_function(r) else r for r in rewards],
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                **trl_options,
            )
        restore_dtypes(self.model, dtypes)
        if isinstance(train_dataset, Dataset):
            context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
            if context:
                tokenize = lambda texts: self._tokenizer(texts)["input_ids"]  # noqa: E731
                check_prompt_lengths(train_dataset, tokenize, context, self.max_completion_length)

        self._schedule = temperature
        self._train_temperature = self.temperature
        self._eval_temperature = eval_temperature if eval_temperature is not None else self.temperature
        self._heads = [_fused_head(self._base_model())] + (
            [_fused_head(self.ref_model)] if self.ref_model is not None else []
        )
        for progress in (0.0, 0.5, 1.0):
            _check_temperature(temperature(progress) if temperature else self.temperature, "temperature")
        _check_temperature(self._eval_temperature, "eval_temperature")
        self.pack = (self.accelerator.device.type == "cpu") if pack is None else pack

        self.interrupted = False
        self._stopped_at: str | None = None
        self._random_state: tuple[int, Any] | None = None
        self._guard = InterruptGuard()
        self._recorder = Recorder(self, live=live)
        self.add_callback(_Bookkeeping(self))
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)
        _remove_notebook_table(self)

    # ---- stop and go ------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> TrainOutput:
        """Train; the stop button (SIGINT) ends the step cleanly, saves, and returns; call train() again to go on.

        resume_from_checkpoint: a checkpoint folder, or True for the last one in args.output_dir.
        After an interrupt `trainer.interrupted` is True, and train() continues where it stopped, with fresh rollouts.
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
        self._current_train_step_time = 0.0
        self._metrics["train"].clear()
        self._pending_metrics.clear()
        self._pending_extra_logs.clear()
        self._random_state = None
        self._recorder.begin()

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
        size = _buffer_steps(self.args)
        last = (max(self.state.max_steps, 1) - 1) // size * size
        progress = step // size * size / last if last else 0.0
        return _check_temperature(self._schedule(min(progress, 1.0)), f"temperature({progress:.3f})")

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

    # ---- rollouts and scores ----------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        step = self.state.global_step
        self._random_state = (step, get_random_state())
        self._set_temperature(self._temperature_at(step))
        self._logs[
            "extra"
        ].clear()  # else a column that a reward logs only at times would show an earlier batch's
        output = super()._generate_and_score_completions(inputs)
        self._metrics["train"]["temperature"].append(self.temperature)
        self._recorder.completions(inputs)
        return output

    def _generate_single_turn(
        self, prompt_ids: list, images: Any, multimodal_fields: dict, *args: Any, **kwargs: Any
    ):
        """Sample in evaluation mode (no LoRA dropout); put mode and checkpointing back whatever happens."""
        model = self._base_model()
        training, checkpointing = self.model.training, model.is_activation_checkpointing
        self.model.eval()
        try:
            if self._plain_text_rollout(images, multimodal_fields):
                policy = self.accelerator.unwrap_model(self.model_wrapped)
                with self.accelerator.autocast():  # one outer context keeps the cast weights between tokens
                    return generate_shared_prefill(policy, prompt_ids, self.generation_config), None
            with (
                weights_come_back(self.model) if self.use_transformers_continuous_batching else nullcontext()
            ):
                return super()._generate_single_turn(prompt_ids, images, multimodal_fields, *args, **kwargs)
        finally:
            self.model.train(training)
            if checkpointing and not model.is_activation_checkpointing:
                model.gradient_checkpointing_enable(
                    gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs
                )

    def _plain_text_rollout(self, images: Any, multimodal_fields: dict) -> bool:
        other_engine = self.use_vllm or self.use_transformers_continuous_batching
        text_only = images is None and not multimodal_fields
        known = (
            self.model.config.model_type in SUPPORTED_MODEL_TYPES and self.args.cache_implementation is None
        )
        return text_only and known and not other_engine and self.accelerator.num_processes == 1

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ):
        scoring = not torch.is_grad_enabled()  # old and reference log-probabilities: no dropout either
        training = model.training
        if scoring:
            model.eval()
        try:
            if not self._can_pack(args, kwargs):
                return super()._get_per_token_logps_and_entropies(
                    model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
                )
            size = (args[0] if args else kwargs.get("batch_size")) or len(input_ids)
            parts = [
                self._packed_scores(
                    model, input_ids[i : i + size], attention_mask[i : i + size], logits_to_keep
                )
                for i in range(0, len(input_ids), size)
            ]
            logps, entropies = (torch.cat(p) for p in zip(*parts, strict=True))
            return logps, entropies if kwargs.get("compute_entropy") else None, None
        finally:
            model.train(training)

    def _can_pack(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        config = self._base_model().config
        multimodal = any(
            v is not None
            for k, v in kwargs.items()
            if k not in ("batch_size", "compute_entropy", "compute_aux_loss")
        )
        return (
            self.pack
            and len(args) <= 1
            and not multimodal
            and not kwargs.get("compute_aux_loss")
            and config.model_type in SUPPORTED_MODEL_TYPES
            and config._attn_implementation in ("sdpa", "eager")
        )

    def _packed_scores(self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, width: int):
        packed = pack_groups(input_ids, attention_mask, width)
        with self.accelerator.autocast(), _score_only_labelled_positions():
            out = model(
                input_ids=packed.input_ids,
                attention_mask=packed.attention_mask,
                position_ids=packed.position_ids,
                shift_labels=packed.labels,
                fused_lm_head=True,
            )
        entropy = (
            out.entropy if out.entropy is not None else torch.zeros_like(out.log_probs)
        )  # the reference has none
        return packed.unpack(out.log_probs, width), packed.unpack(entropy, width)

    # ---- records ----------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As trl's; every training step also becomes a row of metrics.csv and a point in the live chart."""
        super().log(logs, start_time)
        if "loss" in logs and self.model.training:
            self._recorder.step(logs)

    def _base_model(self) -> Any:
        return self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model


class _Bookkeeping(TrainerCallback):
    """Tells the trainer where in the loop it is."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._begin(state)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._guard.begin_finish_first()
        self.trainer._updating = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._updating = False


def _is_function(reward: Any) -> bool:
    return not isinstance(reward, (str, torch.nn.Module)) and not is_async_callable(reward)


def _buffer_steps(args: GRPOConfig) -> int:
    """Optimizer steps that share one rollout buffer."""
    return max(1, args.steps_per_generation * args.num_iterations // args.gradient_accumulation_steps)


def _align(args: GRPOConfig, warmup: float) -> None:
    """One row a step, warmup, and checkpoints where a rollout buffer ends (elsewhere resuming is not exact)."""
    args.logging_steps = 1
    if args.warmup_steps == 0:
        args.warmup_steps = warmup
    size = _buffer_steps(args)
    if args.save_strategy == "steps" and args.save_steps >= 1 and args.save_steps % size:
        args.save_steps = int(-(-args.save_steps // size) * size)
        print(
            f"save_steps is now {args.save_steps}, a multiple of the {size} steps that share a rollout buffer"
        )


@contextmanager
def _reference_is_a_copy_of(model: Any) -> Iterator[None]:
    """trl reloads the reference from the config's path, which is wrong for a model changed in memory."""
    if not isinstance(model, torch.nn.Module) or isinstance(model, PeftModel):
        yield
        return
    original = trl_grpo.create_model_from_path

    def copy_instead(*args: Any, **kwargs: Any) -> Any:
        reference = copy.deepcopy(model)
        return reference.requires_grad_(False).eval()

    trl_grpo.create_model_from_path = copy_instead
    try:
        yield
    finally:
        trl_grpo.create_model_from_path = original


def _fused_head(model: Any) -> Any:
    """The closure cell in which trl's fused LM head keeps its temperature."""
    forward = getattr(model, "_original_forward", None) or model.forward  # accelerate may have wrapped it
    function = forward.__func__
    return function.__closure__[function.__code__.co_freevars.index("temperature")]


def _check_temperature(value: float, name: str) -> float:
    if not value > 0:
        raise ValueError(f"{name}={value} must be above 0; greedy decoding has no gradient to learn from")
    return float(value)


@contextmanager
def _score_only_labelled_positions() -> Iterator[None]:
    """On a CPU trl's head scores every position; only the labelled ones are needed."""
    original = trl_utils._use_triton
    trl_utils._use_triton = lambda device: True
    try:
        yield
    finally:
        trl_utils._use_triton = original


def _remove_notebook_table(trainer: GRPOTrainer) -> None:
    try:
        from transformers.utils.notebook import NotebookProgressCallback
    except ImportError:  # no IPython: transformers did not add it
        return
    trainer.remove_callback(NotebookProgressCallback)

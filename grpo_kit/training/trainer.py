"""GRPOTrainer: trl's, with the kit's guarantees.

It takes a task (from_task.py), or what trl.GRPOTrainer takes. A step, in order, one file a stage: temperature.py sets
the temperature where a rollout buffer begins; make_completions.py makes the completions; grpo_kit.rewards.scoring
asks the rewards; old_logprobs.py and update.py compute log-probabilities, loss and gradient, each prompt once;
recorder.py writes the row, the completions and the chart. session.py is around them: stop, save and go on.

Of several processes each makes and trains its own rows (ranks.py), and what ends one ends all (together.py).
Left out: sharded weights take trl's own path; images too. Every private method of trl and transformers that it leans on
is listed in tests/training/test_private_api.py.
Longer than 300 lines because it has every override of trl's trainer in one place, most of them one call long.
"""

from __future__ import annotations

import copy
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from accelerate.utils import broadcast_object_list
from peft import PeftModel
from transformers import PrinterCallback, ProgressCallback
from transformers.trainer_utils import TrainOutput
from trl import GRPOConfig
from trl import GRPOTrainer as TRLGRPOTrainer

from grpo_kit.display import progress_told
from grpo_kit.models import tokenizer_of
from grpo_kit.models.adapters import load_trained_adapter
from grpo_kit.optim.choose import choose_optimizer
from grpo_kit.record.files import run_file
from grpo_kit.rewards.scoring import totals
from grpo_kit.trackers.names import check_installed
from grpo_kit.training.accelerate_state import AccelerateState
from grpo_kit.training.batch import Batch, StepSettings
from grpo_kit.training.changes import Changes
from grpo_kit.training.checkpoints import SAVING, CheckpointNotSaved
from grpo_kit.training.checks import (
    align,
    check_base,
    check_engine,
    check_run_folder,
    check_sharded,
    choose_rollout,
    default_args,
    evaluation_of,
    in_trls_way,
    one_card,
)
from grpo_kit.training.data import Given
from grpo_kit.training.first_contact import FirstContact
from grpo_kit.training.from_task import from_task
from grpo_kit.training.lineage import trained_before
from grpo_kit.training.logged import Logged
from grpo_kit.training.make_completions import Sampling
from grpo_kit.training.messages import completion_texts, prompt_ids, with_prefills, without_prefills
from grpo_kit.training.old_logprobs import Logprobs
from grpo_kit.training.optimizer import own_optimizer, start_above_zero
from grpo_kit.training.precision import check_trained_for_fp16, settle_precision
from grpo_kit.training.ranks import Ranks, who_shards
from grpo_kit.training.recorder import Recorder
from grpo_kit.training.requests import Requests
from grpo_kit.training.restore import dtypes_of, restore_dtypes
from grpo_kit.training.session import Session
from grpo_kit.training.temperature import Schedule, Temperature
from grpo_kit.training.told import own_trackers
from grpo_kit.training.trl_internals import (
    follow_epochs,
    reference_is_a_copy_of,
    remove_notebook_table,
    without_total,
)

if TYPE_CHECKING:
    from grpo_kit.episodes.episode_task import EpisodeTask
    from grpo_kit.tasks.task import Task
    from grpo_kit.watch.flags import Flag
    from grpo_kit.watch.monitor import OnFlag


class GRPOTrainer(TRLGRPOTrainer):
    """trl.GRPOTrainer made safe, fast and visible.

    args.output_dir is the run folder: run.json, metrics.csv (one row a step), completions.parquet, checkpoints.

    task: a tasks.Task, which brings rewards, their weights, rows, prefill and max_completion_tokens; args have a length
    of their own where they were given one. train_dataset beside it: the rows to train on, such as a part of
    task.dataset(tokenizer). In place of a task: rewards as trl takes them, here or as reward_funcs, and train_dataset.
    train_dataset, eval_dataset: as trl takes them, or a list of dicts. A prompt of messages that ends in the
    assistant's is continued.
    reward_funcs: rewards as trl takes them; functions must give None or a finite number, of any scale (outside [0, 1]
    it is said once). A completion without a total (rewards.scoring.totals) moves no advantage.
    temperature: a schedule f(progress) -> temperature > 0; it changes only where a rollout buffer begins.
    None keeps args.temperature.
    eval_temperature: the sampler's in evaluation; None means args.temperature.
    warmup: fraction of the steps (in [0, 1)) used when args.warmup_steps is 0; 0 turns it off. A warmup of w steps
    begins at 1 / (w + 1) of its height, where transformers' begins at 0, a step that trains nothing.
    rollout: who makes completions: "kit" (the default: this process, these weights), "hf" (trl's plain path), "vllm"
    (docs/vllm.md) or "continuous" (transformers' continuous batching). None follows args.use_vllm and the like.
    optimizer: a name of optim.choose.OPTIMIZERS. None follows args.optim, but for an AdamW on bfloat16 weights, which
    would round its updates away: they get "adamw-8bit-split".
    pack: compute each prompt once per group, in chunks sized by free memory (same loss and gradient).
    skip_zero_advantage: leave out completions whose advantage is 0, wherever they add exactly nothing.
    live: True draws a chart in a notebook and prints one line a step elsewhere, False prints everywhere, None is quiet.
    on_flag: what a red flag does (see watch/monitor.py): "warn" shows it once, "stop" also ends training after the
    step and saves, a callable is called with the Flag. All are appended to flags.jsonl in the run folder.
    held_out: an evaluation.HeldOut: greedy accuracy on a small fixed set before the first step, every so many steps and
    after the last, in the chart and as eval/accuracy in metrics.csv.
    keep: "last" leaves the model as the last step made it; "best", with held_out, gives it the weights of the best
    evaluation in the end, and keeps that checkpoint.
    Raises ValueError before any training for data, rewards or settings that cannot work or that contradict the task;
    RewardError, after saving,
    for a reward that raises or breaks its contract.
    """

    def __init__(
        self,
        model: Any,
        task: Task | Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        reward_funcs: Any = None,
        temperature: Schedule | None = None,
        eval_temperature: float | None = None,
        warmup: float = 0.1,
        rollout: str | None = None,
        optimizer: str | None = None,
        pack: bool = True,
        skip_zero_advantage: bool = True,
        live: bool | None = True,
        on_flag: OnFlag = "warn",
        held_out: Any = None,
        keep: str = "last",
        **trl_options: Any,
    ) -> None:
        check_base(TRLGRPOTrainer)
        args = copy.copy(args) if args is not None else default_args()
        check_installed(args.report_to)
        check_engine(rollout, use_vllm=args.use_vllm, torch_compile=args.torch_compile, pack=pack)
        self.ranks = Ranks(args)
        args.output_dir = self.ranks.from_main(
            lambda: args.output_dir
        )  # each may have found another name free
        self.ranks.from_main(lambda: check_run_folder(args.output_dir, quiet=live is None))
        settle_precision(args, quiet=live is None)
        evaluates = evaluation_of(args, held_out, keep)
        self.starts_from = trained_before(model, args.output_dir)
        if self.starts_from and live is not None:
            print(
                f"This model was trained before: {self.starts_from}. The run goes on from those weights; for the base "
                "load it again.",
                flush=True,
            )
        tokenizer = tokenizer_of(model) if processing_class is None else processing_class
        given = {"reward_funcs": reward_funcs, "train_dataset": train_dataset, "rewards_of": self._rewards_of}
        made = from_task(task, args, tokenizer, **given)
        self.task, train_dataset = made.task, made.train_dataset
        self._given = Given(made.reward_funcs, trl_options)
        least = args.generation_batch_size // args.num_generations
        train_dataset = self._given.take(train_dataset, "train_dataset", least=least)
        eval_dataset = self._given.take(eval_dataset, "eval_dataset")
        one_card(args)
        align(args, warmup)
        self.rollout = choose_rollout(rollout, args)
        dtypes = dtypes_of(model)
        self.reports_to = args.report_to
        # Else transformers tells them TRL's names, and trl its tables and timings.
        trackers, args.report_to = own_trackers(args.report_to)
        with reference_is_a_copy_of(model), _vllm_of(args):
            super().__init__(
                model=model,
                reward_funcs=self._given.asked,
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=tokenizer,
                **trl_options,
            )
        self.accelerate_state = AccelerateState(self.accelerator)
        self.text_tokenizer = self._tokenizer
        vars(self.args).update(evaluates)
        self.ranks.sharded = who_shards(self)
        if self.ranks.sharded:
            self.rollout, pack = check_sharded(self, held_out=held_out, optimizer=optimizer), False
        restore_dtypes(self.model, dtypes)
        check_trained_for_fp16(self.args, self.model)
        self._given.check_prompts(self, train_dataset, "train_dataset")
        self._given.check_prompts(self, eval_dataset, "eval_dataset")
        self._optimizer_asked = optimizer is not None
        optim = getattr(args.optim, "value", args.optim)
        self.optimizer_name = choose_optimizer(optimizer, self.model, given=self.optimizer, optim=optim)
        if self.ranks.sharded:  # transformers' own is what shards come apart for
            self.optimizer_name = None
        self.temperatures = Temperature(self, temperature, eval_temperature)
        self.recorder = Recorder(self, live=live, on_flag=on_flag, trackers=trackers)
        if self.ranks.sharded:
            self.recorder.say(in_trls_way(self.ranks))
        elif self.ranks.count > 1 and self.args.fsdp:
            self.recorder.say(
                "fsdp is ignored here, as accelerate does on a CPU: every process has all weights."
            )
        self._logged = Logged(self, self.recorder.say)
        self.sampling = Sampling(self, self.recorder.say)
        self.first_contact = FirstContact(self, self.recorder.say)
        self.batch: Batch | None = None  # of the latest rollout, filled in while it is made
        self.logprobs = Logprobs(self, pack=pack, skip_zero_advantage=skip_zero_advantage)
        self.update = self.logprobs.update
        self.held_out, self.planned_epochs = held_out, 0
        self.has_reference = self.beta != 0
        self.changes = Changes(self, self.recorder.changed, self.recorder.say)
        self.requests = Requests(self)
        self.session = Session(self, self.recorder)
        self.add_callback(self.session)
        self.callback_handler.callbacks.insert(0, self.recorder)  # before the trackers'
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        remove_notebook_table(self)

    @property
    def is_training_now(self) -> bool:
        """Is train() between its first step and its last?"""
        return self.session.training

    def _rewards_of(self, task: Task | EpisodeTask) -> list:
        from grpo_kit.episodes.episode_task import EpisodeTask

        if isinstance(task, EpisodeTask):
            raise ValueError(
                f"task {task.name!r} is an EpisodeTask; {type(self).__name__} takes a Task, EpisodeTrainer it"
            )
        return task.rewards

    def own_options(self) -> dict[str, Any]:
        """What a subclass was given besides GRPOTrainer's options, as JSON values; run.json keeps it."""
        return {}

    # ---- around the steps: stop and go --------------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *, on_stop: str = "raise", **kwargs: Any
    ) -> TrainOutput:
        """Train; the stop button (SIGINT) ends the step, saves and raises Stopped; call train() again to go on.

        resume_from_checkpoint: a checkpoint folder, or True for the last whole one in args.output_dir: one that a kill
        cut short is passed over.
        on_stop: "raise" raises Stopped, a KeyboardInterrupt, so that nothing after train() takes the model for done;
        "return" returns.
        After an interrupt `trainer.interrupted` is True, after a red flag (on_flag="stop") `trainer.stopped_by` is
        the Flag; train() then continues where it stopped, and that flag stops it no more. A run that is done goes on
        from where it ended after change(max_steps=...).
        A checkpoint that the disk does not take is said, and training goes on; where it stops the trainer keeps it in
        memory, and the next train() saves it first. An evaluation that was cut short is made up first, too.
        Raises RunFolderError if the folder already holds a run and resuming was not asked for; ValueError where there
        is no whole checkpoint; CheckpointNotSaved (an OSError) while the disk is too full to go on.
        """
        self.accelerate_state.put_back()
        return self.session.train(super().train, resume_from_checkpoint, on_stop, **kwargs)

    def change(self, **values: Any) -> None:
        """Other numbers, from the next rollout buffer on: before, between and during train(), from any thread.

        learning_rate (the height of its schedule), temperature (a number, or a schedule of the whole run's progress),
        max_steps (schedules follow; the warmup stays as long as it was), beta (where the trainer was made with one
        above 0), epsilon, epsilon_high, max_grad_norm, reward_weights (a list), save_steps, eval_steps.
        Each is written to changes.jsonl with the first step trained with it, marked in the chart, and made again when
        the run is resumed. Assigning to trainer.args between two train() does the same. Another process asks by
        grpo_kit.control(folder).
        Raises ValueError, and changes nothing, for a name that no run can change and a value that this one cannot take.

        >>> trainer.change(learning_rate=5e-6, max_steps=64)  # doctest: +SKIP
        """
        self.changes.ask(values)

    @property
    def interrupted(self) -> bool:
        """Did the stop button end the last train()?"""
        return self.session.interrupted

    @property
    def stopped_by(self) -> Flag | None:
        """The red flag that ended the last train(), where on_flag="stop"; interrupts are another matter."""
        return self.recorder.stopped_by

    def _save_where_it_stopped(self, why: str) -> None:
        self.session.save_where_it_stopped(why)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        write = super()._save_checkpoint
        self.session.save(lambda: write(model, trial), self._write_own, trial)

    def _write_own(self, folder: Path) -> None:
        """What a subclass keeps in a checkpoint."""

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return str(Path(folder) / SAVING) if self.session.checkpoints.writing else folder

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self.session.checkpoints.writing:
            self.session.checkpoints.push_later(checkpoint_folder)
        else:
            super()._push_from_checkpoint(checkpoint_folder)

    def _run_epoch(self, **kwargs: Any) -> None:
        """Where a finished run is resumed nothing is left to do; transformers would train one step more."""
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(**kwargs)
        else:
            self.control.should_training_stop = True

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._maybe_log_save_evaluate(*args, **kwargs)
        except CheckpointNotSaved as error:
            self.control.should_save = False
            self.session.saving_failed(error)
        self.session.after_step()

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As trl's, at the evaluation temperature; in training an interrupt cuts it short, and train() makes it up.

        Raises ValueError for an eval_dataset that cannot work, as the trainer does for its own.
        """
        self.accelerate_state.put_back()
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            eval_dataset = self._given.take(eval_dataset, "eval_dataset")
            self._given.check_prompts(self, eval_dataset, "eval_dataset")
        evaluate = super().evaluate

        def both() -> dict[str, float]:
            found = self._measure_held_out() if eval_dataset is None and self.held_out is not None else {}
            if not found or self.eval_dataset is not None:
                found = evaluate(eval_dataset, *args, **kwargs) | found
            return found

        return self.session.evaluate(both)

    def _measure_held_out(self) -> dict[str, float]:
        model = self.accelerator.unwrap_model(self.model)
        divided = {"divide": self.ranks.divide} if self.ranks.together else {}
        with progress_told(self.recorder.progress):
            measured = self.held_out.measure(model, self._tokenizer, **divided)
        self.recorder.progress("")
        found = {f"eval_{name}": value for name, value in measured.items()}
        training = self.model.training
        self.model.eval()  # trl logs by the mode
        self.log(found)
        self.model.train(training)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
        return found

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        best = super()._determine_best_metric(metrics, trial)
        if best and self.args.load_best_model_at_end:
            self.control.should_save = True
        return best

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """As transformers'."""
        self.accelerate_state.put_back()
        super().save_model(*args, **kwargs)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """README.md in the run folder: base, data, reward, curve, before and after. Takes what trl's takes."""
        from grpo_kit.watch.run_card import model_card

        if self.is_world_process_zero() and run_file(self.args.output_dir) is not None:
            model_card(self.args.output_dir)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """As trl's, sampled and scored at the evaluation temperature."""
        with self.temperatures.of_evaluation():
            return super().prediction_step(*args, **kwargs)

    # ---- a step: prompts, temperature, completions, rewards -----------------------------------------------------

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return follow_epochs(super()._get_train_sampler(*args, **kwargs))

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        inputs = with_prefills(inputs)
        trl_does, training = super()._generate_and_score_completions, self.model.training
        if training:
            self.temperatures.set(self.temperatures.at(self.state.global_step))
            # Else a column that a reward logs only at times would show an earlier batch's.
            self._logs["extra"].clear()
        batch = self.batch = Batch(self._step_settings(), inputs)
        if not training:
            return self._fill(batch, trl_does)
        with self.logprobs.old_ones_by_the_first_pass():
            output = self._fill(batch, trl_does)
        batch.take(output)
        settings = batch.settings
        groups = batch.groups_of(len(batch.parts))
        batch.rewards = totals(batch.parts.T.tolist(), settings.reward_weights, groups)
        batch.extra = {name: list(values) for name, values in self._logs["extra"].items()}
        self.sampling.check_in_step(batch)
        if (entropies := batch.padded_entropies()) is not None:  # for the metrics of skipped completions
            output["sampling_per_token_entropies"] = entropies
        self._metrics["train"]["temperature"].append(settings.temperature)
        self.recorder.completions(batch)
        return output

    def _step_settings(self) -> StepSettings:
        return StepSettings(
            step=self.state.global_step,
            training=self.model.training,
            temperature=self.temperature,
            group_size=self.num_generations if self.model.training else self.num_generations_eval,
            reward_names=tuple(self.reward_func_names),
            reward_weights=tuple(self.reward_weights.tolist()),
        )

    def _fill(self, batch: Batch, trl_does: Any) -> dict[str, Any]:
        """trl's tensors of a batch's rows. Of episodes the batch's rows become turns."""
        return trl_does(batch.rows)

    def _tokenize_prompts(self, prompts: list) -> tuple[list[list[int]], Any, dict]:
        return prompt_ids(self, super()._tokenize_prompts, prompts)

    def _generate_single_turn(
        self, prompt_ids: list, images: Any, multimodal_fields: dict, *args: Any, **kwargs: Any
    ):
        made, self.batch.entropies = self.sampling.turn(
            super()._generate_single_turn, prompt_ids, images, multimodal_fields, *args, **kwargs
        )
        return made

    def _log_completion_extra(self, column: str, values: list) -> None:
        super()._log_completion_extra(column, self._logged.extra(column, values))

    def _log_metric(self, name: str, value: float) -> None:
        super()._log_metric(name, self._logged.metric(name, value))

    def _calculate_rewards(self, inputs: list, prompts: list, completions: list, ids: list) -> torch.Tensor:
        batch = self.batch
        completions = without_prefills(self._tokenizer, prompts, completions)
        batch.completions = completion_texts(self._tokenizer, completions, ids)
        batch.parts = super()._calculate_rewards(inputs, prompts, completions, ids)
        self._logged.check(batch, self._pending_extra_logs)
        return without_total(batch.parts, batch.settings.group_size)

    # ---- a step: log-probabilities, loss, optimizer ---------------------------------------------------------------

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any):
        return self.logprobs.of(super()._get_per_token_logps_and_entropies, *args, **kwargs)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """As trl's. Packed, the micro-batches of an optimizer step are collected and computed at its last one."""
        if model.training and self.logprobs.collects(inputs):
            return self.logprobs.collect(model, inputs)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As trl's; of several processes each has its own rows' gradients until the last micro-batch."""
        loss = super().training_step(*args, **kwargs)
        if self.ranks.together and self.accelerator.sync_gradients:
            self.session.average_gradients()
        return loss

    def get_high_entropy_mask(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As trl's, of the tokens of all processes; asked for once in a step, however often that starts over."""
        known = self.logprobs.high_entropy
        return super().get_high_entropy_mask(*args, **kwargs) if known is None else known

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> tuple:
        """As transformers', but nothing is put around a model of which every process has all weights."""
        if (checkpoint := args[2]) and isinstance(self.model, PeftModel):
            load_trained_adapter(self.model, Path(checkpoint))
        if not self.ranks.together:
            return super()._prepare_for_training(*args, **kwargs)
        self.ranks.same_weights(self.model)
        bare = partial(self.accelerator.prepare_model, evaluation_mode=True)
        with patch.object(self.accelerator, "prepare_model", bare):
            return super()._prepare_for_training(*args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """The one of grpo_kit.optim that was asked for, or that the weights need; else as transformers'."""
        lacks_one = self.optimizer is None
        # A stop in this very moment leaves one process with an optimizer and another without: they ask together.
        if self.ranks.any(lacks_one) and not self.first_contact.keeps_optimizer_off() and lacks_one:
            how = {"asked": self._optimizer_asked, "say": self.recorder.say}
            self.optimizer = own_optimizer(self, self.optimizer_name, **how)
        return super().create_optimizer(*args, **kwargs)

    def create_scheduler(self, num_training_steps: int, *args: Any, **kwargs: Any) -> Any:
        """As transformers', but the first step of a warmup has a rate above 0."""
        if self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, *args, **kwargs)
        begun = self.changes.begun_steps
        asked, warmup = (
            self.args.warmup_steps,
            self.args.get_warmup_steps(begun if begun > 0 else num_training_steps),
        )
        self.args.warmup_steps = warmup  # of a run that was made longer it stays as it was
        try:
            scheduler = super().create_scheduler(num_training_steps, *args, **kwargs)
        finally:
            self.args.warmup_steps = asked
        self.lr_scheduler = start_above_zero(scheduler, warmup)
        return self.lr_scheduler

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> tuple:
        """As transformers', but epochs do not end a run: its steps do, and they can be changed while it goes on."""
        epochs, *rest = super().set_initial_training_values(*args, **kwargs)
        self.planned_epochs = epochs
        return sys.maxsize, *rest

    # ---- a step: records ------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As trl's; every training step also becomes a row of metrics.csv and a point in the live chart."""
        super().log(logs, start_time)  # a training step's row: Recorder.on_log
        if any(name.startswith("eval_") for name in logs):
            self.recorder.evaluation(logs)
        # The main process alone knows; all must stop.
        self.recorder.stopped_by = broadcast_object_list([self.stopped_by])[0]
        if self.stopped_by is not None:
            self.control.should_training_stop = True


def _vllm_of(args: GRPOConfig) -> AbstractContextManager[None]:
    """trl's trainer made inside samples by the kit's VllmSampler, where args.use_vllm."""
    if not args.use_vllm:
        return nullcontext()
    from grpo_kit.training.vllm_sampler import sampled_by_vllm

    return sampled_by_vllm(args)

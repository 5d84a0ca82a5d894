"""Stop and go: what train() does around the steps, so that nothing is lost and nothing stale is trained on."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import TrainOutput

from grpo_kit.training import checkpoints
from grpo_kit.training.checkpoints import CheckpointNotSaved, Checkpoints
from grpo_kit.training.interrupts import InterruptGuard
from grpo_kit.training.logprobs import LOSS_STATE
from grpo_kit.training.quiet import quiet
from grpo_kit.training.recorder import Recorder
from grpo_kit.training.restore import get_random_state, random_state_of_its_own, set_random_state

_FILE = "stop_and_go.pt"


class Session(TrainerCallback):
    """One trainer's runs, from train() to where they stop, and from there on.

    interrupted: did the stop button end the last train()? random_state: (step, state) with which a step began: an
    unfinished step is done again with it.
    A checkpoint holds stop_and_go.pt where the next step goes on inside a rollout buffer (the buffer and its
    temperature), or where the step's evaluation was not made to its end (it is made up before the next step).
    """

    def __init__(self, trainer: Any, recorder: Recorder) -> None:
        self.trainer, self.recorder = trainer, recorder
        self.guard = InterruptGuard()
        self.checkpoints = Checkpoints(trainer)
        self.interrupted = False
        self.random_state: tuple[int, Any] | None = None
        self._before: dict[str, Any] = {}  # what else the trainer had as that step began
        self._tokens_before = 0  # and its state
        self._stopped_at: str | None = None  # the checkpoint that the next train() goes on from
        self._unsaved: Any = None  # random state of a step that the disk did not take: it is in memory alone
        self._on_disk: tuple[int, str] | None = None  # step and folder of what was saved or loaded last
        self._save_failed = False  # the last one that was due
        self._started = self._updating = False
        self._began_at = 0
        self._evaluated_at = -1

    def train(
        self, trl_train: Callable[..., TrainOutput], checkpoint: str | bool | None, **kwargs: Any
    ) -> TrainOutput:
        """See GRPOTrainer.train."""
        with self.guard, quiet(self.trainer.model):
            checkpoint = self._where_to_go_on(checkpoint)
            self.recorder.open(resume=bool(checkpoint) or self.interrupted)
            self.interrupted = self._started = self._updating = False
            start, self._on_disk, done = get_random_state(), (-1, checkpoint), False
            try:
                with self.guard.at_once():
                    output = trl_train(resume_from_checkpoint=checkpoint or None, **kwargs)
                self._stopped_at, done = None, True
                if self.recorder.stopped_by is not None:
                    self.trainer._save_where_it_stopped(f"red flag: {self.recorder.stopped_by.name}")
                return output
            except KeyboardInterrupt:
                self.interrupted = True
                self.trainer._save_where_it_stopped("interrupted")
                step = self.trainer.state.global_step
                if not self._started or step == 0:
                    set_random_state(start)
                return TrainOutput(step, float("nan"), {"interrupted": 1.0})
            except Exception as error:
                # Between the optimizer's first and last write the weights are neither old nor new: not worth saving.
                if not self._updating:
                    self.trainer._save_where_it_stopped(type(error).__name__)
                raise
            finally:
                self.guard.begin_finish_first()
                self._started = False
                left = not self.recorder.close() or self._save_failed
                if done and left and not self.trainer.args.load_best_model_at_end:
                    self._unsaved = get_random_state()

    def _where_to_go_on(self, checkpoint: str | bool | None) -> str | None:
        """The checkpoint to load; what is in memory alone is saved first.

        Raises CheckpointNotSaved while the disk is still full; the memory keeps it.
        """
        if self._unsaved is not None:
            set_random_state(self._unsaved)
            self.trainer._save_checkpoint(self.trainer.model, trial=None)
            self._unsaved, self._stopped_at = None, self._on_disk[1]
        if checkpoint:
            self._stopped_at = checkpoints.choose(checkpoint, self.trainer.args.output_dir, self.recorder.say)
        return self._stopped_at

    # ---- saving -------------------------------------------------------------------------------------------------

    def save(self, write: Callable[[], None], own: Callable[[Path], None], trial: Any) -> None:
        """A checkpoint of the last whole step. Raises CheckpointNotSaved; then the memory alone has it."""
        self._save_failed = True
        folder = self.checkpoints.save(write, lambda folder: (self._write(folder), own(folder)), trial)
        self._save_failed, self._on_disk = False, (self.trainer.state.global_step, str(folder))

    def save_where_it_stopped(self, why: str) -> None:
        """A checkpoint of the last whole step, from which the next train() goes on."""
        trainer, step = self.trainer, self.trainer.state.global_step
        self.guard.begin_finish_first()
        trainer.model.zero_grad(set_to_none=True)
        trainer.model.train()
        if not self._started or step == 0:
            self.recorder.say(f"Stopped before the first step was done ({why}); nothing to save.")
            return
        if self.random_state is not None and self.random_state[0] == step:  # as if the step had never begun
            set_random_state(self.random_state[1])
            vars(trainer).update(self._before)
            trainer.state.num_input_tokens_seen = self._tokens_before
        if self._on_disk[0] != step:
            try:
                trainer._save_checkpoint(trainer.model, trial=None)
            except CheckpointNotSaved as error:
                self._unsaved = get_random_state()
                self.recorder.say(
                    f"Stopped after step {step} ({why}), not saved: {error}. It is in memory: free some space, and "
                    "train() saves it and continues from here."
                )
                return
        self._stopped_at = self._on_disk[1]
        self.recorder.say(
            f"Stopped after step {step} ({why}), saved to {self._stopped_at}; train() continues from here."
        )

    def saving_failed(self, error: CheckpointNotSaved) -> None:
        """Training goes on where a disk does not take a checkpoint; the next one may find more room."""
        warnings.warn(
            f"{error}. Training goes on; it is tried again at the next save, or by train() after the last step. "
            "Free some space.",
            RuntimeWarning,
            stacklevel=3,
        )

    def _write(self, folder: Path) -> None:
        """What the next step needs beside transformers' files."""
        trainer, args = self.trainer, self.trainer.args
        inside = trainer.state.global_step * args.gradient_accumulation_steps % _length(trainer)
        # Of several processes each has a buffer of its own: they begin a new one.
        buffer = trainer._buffered_inputs if inside and trainer.accelerator.num_processes == 1 else None
        if not args.should_save or buffer is None and not self._owes_evaluation():
            return
        state = {
            "buffer": buffer,
            "shape": _shape(trainer),
            "temperature": trainer.temperature,
            "owes_evaluation": self._owes_evaluation(),
        }
        torch.save(state, folder / _FILE)

    def _owes_evaluation(self) -> bool:
        """An evaluation is due at this step and has not been made, or not to its end."""
        trainer, state, args = self.trainer, self.trainer.state, self.trainer.args
        if self._evaluated_at == state.global_step or state.epoch is None:
            return False
        ends = float(state.epoch).is_integer() or state.global_step >= state.max_steps
        by_epoch = args.eval_strategy == "epoch" and ends and args.eval_delay <= state.epoch
        return bool(trainer.control.should_evaluate or by_epoch)

    # ---- evaluation ---------------------------------------------------------------------------------------------

    def evaluate(self, trl_evaluate: Callable[..., dict[str, float]]) -> dict[str, float]:
        """In training an interrupt stops it at once, and its random numbers are its own: it moves no later step."""
        if not self._started:
            return trl_evaluate()
        step = self.trainer.state.global_step
        self.trainer._metrics["eval"].clear()  # of one that was stopped
        with (
            self.guard.at_once(),
            random_state_of_its_own(f"evaluation {self.trainer.args.seed} {step}"),
        ):
            metrics = trl_evaluate()
        self._evaluated_at = step
        return metrics

    def _make_up_evaluation(self, folder: str) -> None:
        """The one that a checkpoint owes; then the checkpoint is what it would have been."""
        trainer, control = self.trainer, self.trainer.control
        trainer._load_rng_state(folder)
        self.recorder.take_up_row()
        control.should_evaluate = control.should_save = True  # save_strategy="best" saves it only if it is
        trainer._maybe_log_save_evaluate(
            trainer._tr_loss, None, trainer.model, None, trainer.state.epoch, None, time.time()
        )

    # ---- callbacks ----------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A run begins or resumes: nothing of an earlier one may leak in."""
        trainer = self.trainer
        self._started = True
        trainer._step = state.global_step * args.gradient_accumulation_steps
        trainer._buffered_inputs = None
        trainer._current_train_step_time = 0.0
        trainer._metrics["train"].clear()
        trainer._pending_metrics.clear()
        trainer._pending_extra_logs.clear()
        trainer._logprobs.begin()
        control.should_log = control.should_evaluate = control.should_save = False
        self.random_state, self._evaluated_at = None, -1
        self._save_failed = False
        self._began_at = state.global_step
        self.recorder.begin()
        folder = self._on_disk[1]
        if folder:
            self._on_disk = state.global_step, folder
            self._take_up(folder)
        if state.global_step >= state.max_steps:
            self.recorder.say(f"All {state.max_steps} steps are done already; raise max_steps to train on.")

    def _take_up(self, folder: str) -> None:
        trainer = self.trainer
        kept = _load(folder, trainer.accelerator.device)
        if kept.get("buffer") is not None and kept["shape"] == _shape(trainer):
            trainer._buffered_inputs = kept["buffer"]
            trainer._temperature.set(kept["temperature"])
        if kept.get("owes_evaluation") and trainer.eval_dataset is not None:
            self._make_up_evaluation(folder)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Opening the data draws a random number, and a step that an epoch begins with is redone with it."""
        if state.global_step != self._began_at:
            self._remember(state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An unfinished step is done again from here."""
        self.guard.raise_if_pending()
        if self.random_state is None or self.random_state[0] != state.global_step:
            self._remember(state.global_step)

    def _remember(self, step: int) -> None:
        trainer = self.trainer
        self.random_state = step, get_random_state()
        self._before = {name: copy.copy(getattr(trainer, name)) for name in ("_buffered_inputs", *LOSS_STATE)}
        self._tokens_before = trainer.state.num_input_tokens_seen

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """From here on weights and files change: an interrupt waits for the end of the step."""
        self.guard.raise_if_pending()
        self.guard.begin_finish_first()
        self._updating = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The weights are whole again."""
        self._updating = False


def _length(trainer: Any) -> int:
    """Micro-batches that are trained on one rollout buffer."""
    return trainer.args.steps_per_generation * trainer.num_iterations


def _shape(trainer: Any) -> list[int]:
    """A buffer fits a trainer that has the same."""
    args = trainer.args
    return [
        args.per_device_train_batch_size,
        args.gradient_accumulation_steps,
        args.steps_per_generation,
        trainer.num_iterations,
        trainer.num_generations,
    ]


def _load(folder: str, device: Any = "cpu") -> dict[str, Any]:
    """stop_and_go.pt of a checkpoint; {} where it has none."""
    file = Path(folder) / _FILE
    return torch.load(file, map_location=device, weights_only=True) if file.is_file() else {}

"""Stop and go: what train() does around the steps, so that nothing is lost and nothing stale is trained on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import TrainOutput, get_last_checkpoint

from grpo_kit.training.interrupts import InterruptGuard
from grpo_kit.training.recorder import Recorder
from grpo_kit.training.restore import get_random_state, set_random_state


class Session(TrainerCallback):
    """One trainer's runs, from train() to where they stop, and from there on.

    interrupted: did the stop button end the last train()? random_state: (step, state) with which a step's first rollout
    began: an unfinished step is done again with it.
    """

    def __init__(self, trainer: Any, recorder: Recorder) -> None:
        self.trainer, self.recorder = trainer, recorder
        self.guard = InterruptGuard()
        self.interrupted = False
        self.random_state: tuple[int, Any] | None = None
        self._stopped_at: str | None = None
        self._started = self._updating = False
        self._began_at = 0

    def train(
        self, trl_train: Callable[..., TrainOutput], checkpoint: str | bool | None, **kwargs: Any
    ) -> TrainOutput:
        """See GRPOTrainer.train."""
        if checkpoint is None:
            checkpoint = self._stopped_at
        if checkpoint is True:
            folder = self.trainer.args.output_dir
            checkpoint = get_last_checkpoint(folder)
            if checkpoint is None:
                raise ValueError(f"resume_from_checkpoint=True, but {folder!r} holds no checkpoint")
        again = bool(checkpoint) or self.interrupted
        self.interrupted = self._started = self._updating = False
        start = get_random_state()
        with self.guard, warnings.catch_warnings():
            # trl asks transformers for a renamed property at every rollout.
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)
            self.recorder.open(resume=again)
            try:
                output = trl_train(resume_from_checkpoint=checkpoint or None, **kwargs)
                self._stopped_at = None
                if self.recorder.stopped_by is not None:
                    self.trainer._save_where_it_stopped(f"red flag: {self.recorder.stopped_by.name}")
                return output
            except KeyboardInterrupt:
                self.interrupted = True
                self.trainer._save_where_it_stopped("interrupted")
                step = self.trainer.state.global_step
                if step == 0:
                    set_random_state(start)
                return TrainOutput(step, float("nan"), {"interrupted": 1.0})
            except Exception as error:
                # Between the optimizer's first and last write the weights are neither old nor new: not worth saving.
                if not self._updating:
                    self.trainer._save_where_it_stopped(type(error).__name__)
                raise
            finally:
                self.recorder.close()

    def save_where_it_stopped(self, why: str) -> None:
        """A checkpoint of the last whole step, from which the next train() goes on."""
        trainer, step = self.trainer, self.trainer.state.global_step
        self.guard.begin_finish_first()
        trainer.model.zero_grad(set_to_none=True)
        trainer.model.train()
        if not self._started or step == 0:
            self.recorder.say(f"Stopped before the first step was done ({why}); nothing to save.")
            return
        if self.random_state is not None and self.random_state[0] == step:
            set_random_state(self.random_state[1])  # as if the unfinished step had never begun
        folder = Path(trainer.args.output_dir) / f"checkpoint-{step}"
        if not (folder / "trainer_state.json").is_file():
            trainer._save_checkpoint(trainer.model, trial=None)
        self._stopped_at = str(folder)
        self.recorder.say(
            f"Stopped after step {step} ({why}), saved to {folder}; train() continues from here."
        )

    def remember_random_state(self, step: int) -> None:
        """Call before a step draws its first random number; a step that fills several buffers calls it for each."""
        if self.random_state is None or self.random_state[0] != step:
            self.random_state = (step, get_random_state())

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
        self.random_state = None
        self._began_at = state.global_step
        self.recorder.begin()
        if state.global_step >= state.max_steps:
            self.recorder.say(f"All {state.max_steps} steps are done already; raise max_steps to train on.")

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Opening the data draws a random number, and a step that an epoch begins with is redone with it."""
        if state.global_step != self._began_at:
            self.random_state = (state.global_step, get_random_state())

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """From here on weights and files change: an interrupt waits for the end of the step."""
        self.guard.begin_finish_first()
        self._updating = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The weights are whole again."""
        self._updating = False

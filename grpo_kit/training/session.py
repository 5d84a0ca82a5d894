"""Stop and go: what train() does around the steps, so that nothing is lost and nothing stale is trained on.

Longer than 300 lines because the state machine is read as a whole: going on, saving, evaluating, and the callbacks
between which each of them may happen.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import TrainOutput

from grpo_kit.argument_checks import check_choice
from grpo_kit.engine.freed_memory import kept_for_the_next_step
from grpo_kit.loop.digests import what_is_wrong
from grpo_kit.loop.interrupts import InterruptGuard, Stopped
from grpo_kit.training import checkpoints
from grpo_kit.training.checkpoints import CheckpointNotSaved, Checkpoints
from grpo_kit.training.lineage import mark_trained
from grpo_kit.training.quiet import quiet
from grpo_kit.training.recorder import Recorder
from grpo_kit.training.restore import get_random_state, random_state_of_its_own, set_random_state
from grpo_kit.training.together import Together
from grpo_kit.training.trl_internals import LOSS_STATE
from grpo_kit.training.unfinished import begins_buffer, keep_unfinished, take_up_unfinished


class Session(TrainerCallback):
    """One trainer's runs, from train() to where they stop, and from there on.

    interrupted: did the stop button end the last train()? random_state: (step, state) with which a step began: an
    unfinished step is done again with it.
    """

    def __init__(self, trainer: Any, recorder: Recorder) -> None:
        self.trainer, self.recorder = trainer, recorder
        self.guard = InterruptGuard()
        self.ranks = trainer.ranks
        self.together = Together(self.ranks, self.guard, lambda: (trainer.state.global_step, self._updating))
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
        # The step that the last train() ended with, and its random state.
        self._finished: tuple[int, Any] | None = None
        self._of_a_stop = False  # the checkpoint being written
        self._last_words = ""

    @property
    def training(self) -> bool:
        """Is train() between its first and its last step?"""
        return self._started

    def train(
        self,
        trl_train: Callable[..., TrainOutput],
        checkpoint: str | bool | None,
        on_stop: str,
        **kwargs: Any,
    ) -> TrainOutput:
        """See GRPOTrainer.train."""
        check_choice("on_stop", on_stop, ("raise", "return"))
        with self.together.run():
            return self._train(trl_train, checkpoint, on_stop, **kwargs)

    def _train(
        self,
        trl_train: Callable[..., TrainOutput],
        checkpoint: str | bool | None,
        on_stop: str,
        **kwargs: Any,
    ) -> TrainOutput:
        trainer = self.trainer
        # Sharded, every step is one conversation: who turns back in the middle leaves the others waiting.
        self.guard.patient = self.ranks.count > 1 and not self.ranks.together
        self._check_all_stand_at_one_place()
        folder = Path(trainer.args.output_dir)
        trainer.changes.take_over_assigned(running=False)
        trainer.changes.open(folder)
        trainer.requests.hear_what_waits(folder)
        if not checkpoint and not self.ranks.any(not self._nothing_left()):
            return self._show_what_is_done()
        with self.guard, quiet(trainer.model), kept_for_the_next_step(trainer.accelerator.device):
            checkpoint = self._where_to_go_on(checkpoint)
            config = self.recorder.open(resume=bool(checkpoint) or self.interrupted)
            self.interrupted = self._started = self._updating = False
            start, self._on_disk, done = get_random_state(), (-1, checkpoint), False
            failed = False
            try:
                step = checkpoints.steps_in(checkpoint) if checkpoint else 0
                trainer.requests.open()
                trainer.changes.prepare(folder, step, config if checkpoint else None)
                with self.together.ending(), self.guard.at_once():
                    output = trl_train(resume_from_checkpoint=checkpoint or None, **kwargs)
                self._stopped_at, done = None, True
                if self.recorder.stopped_by is not None:
                    trainer._save_where_it_stopped(f"red flag: {self.recorder.stopped_by.name}")
                    self.recorder.say(self._last_words)
                else:
                    self._finish()
                return output
            except KeyboardInterrupt:
                self.interrupted = True
                trainer._save_where_it_stopped("interrupted")
                step = trainer.state.global_step
                self._begin_anew(start)
                if on_stop == "return":
                    self.recorder.say(self._last_words)
                    return TrainOutput(step, float("nan"), {"interrupted": 1.0})
                raise Stopped(self._last_words, step) from None
            except Exception as error:
                failed = True
                # Between the optimizer's first and last write the weights are neither old nor new: not worth saving.
                self._updating |= self.together.half_done
                if self.guard.patient:
                    self.recorder.say(
                        f"Not saved ({type(error).__name__}): with sharded weights all processes save together, or "
                        "none does; train(resume_from_checkpoint=True) goes on from the last checkpoint."
                    )
                elif not self._updating:
                    self._begin_anew(start)
                    trainer._save_where_it_stopped(type(error).__name__)
                    self.recorder.say(self._last_words)
                raise
            finally:
                self.guard.begin_finish_first()
                self._started = False
                trainer.requests.close()
                if trainer.state.global_step:
                    mark_trained(trainer.model, trainer.args.output_dir, trainer.state.global_step)
                left = not self.recorder.close(failed=failed) or self._save_failed
                left = left if self.together.gone else self.ranks.any(left)
                if done and left and not self.trainer.args.load_best_model_at_end:
                    self._unsaved = get_random_state()

    def _check_all_stand_at_one_place(self) -> None:
        """Raises ValueError where the processes would go on from different steps: an error can end them so."""
        if self.ranks.count == 1:
            return
        step = self._finished[0] if self._finished else self.trainer.state.global_step
        places = self.ranks.gather((step, self._stopped_at, self._unsaved is not None))
        if len(set(places)) > 1:
            raise ValueError(
                f"the processes stand at different steps ({', '.join(str(step) for step, *_ in places)}): start them "
                "again, with train(resume_from_checkpoint=True)"
            )

    def _begin_anew(self, random_state: Any) -> None:
        """Before the first step is done there is nothing to go on from: the next train() begins as this one did."""
        if not self._started or self.trainer.state.global_step == 0:
            set_random_state(random_state)

    def _finish(self) -> None:
        """All steps are done: the memory has what a later train() with more steps goes on from."""
        trainer = self.trainer
        self._finished = trainer.state.global_step, get_random_state()
        best = trainer.state.best_model_checkpoint
        if trainer.args.should_save:
            checkpoints.remove_those_of_stops(trainer.args.output_dir, best)
        from grpo_kit.training.kept import record_kept

        record_kept(trainer, self.recorder.say)

    def _nothing_left(self) -> bool:
        """The run is done, and no more steps are asked for."""
        waits = self._unsaved is not None or self.recorder.folder is not None
        if self._finished is None or self._stopped_at is not None or waits:
            return False
        return (self.trainer.changes.waiting("max_steps") or 0) <= self._finished[0]

    def _show_what_is_done(self) -> TrainOutput:
        step = self._finished[0]
        self.recorder.show_again()
        self.trainer.requests.close()
        self.recorder.say(
            f"All {step} steps are done. To go on from here: trainer.change(max_steps={step + max(1, step // 2)}), "
            "then train() again. To start anew: load the model again, and a trainer with another folder."
        )
        return TrainOutput(step, float("nan"), {})

    def _where_to_go_on(self, checkpoint: str | bool | None) -> str | None:
        """The checkpoint to load; what is in memory alone is saved first.

        Raises CheckpointNotSaved while the disk is still full; the memory keeps it.
        """
        if self._unsaved is not None:
            set_random_state(self._unsaved)
            self.trainer._save_checkpoint(self.trainer.model, trial=None)
            self._unsaved, self._stopped_at = None, self._on_disk[1]
        elif self._finished is not None and self._stopped_at is None and not checkpoint:
            step, random_state = self._finished
            if self._on_disk[0] != step or what_is_wrong(self._on_disk[1]):
                set_random_state(random_state)
                self._save_to_go_on()
            self._stopped_at = self._on_disk[1]
        self._finished = None
        if checkpoint:
            folder = self.trainer.args.output_dir
            self._stopped_at = self.ranks.from_main(
                lambda: checkpoints.choose(checkpoint, folder, self.recorder.say)
            )
            if (before := checkpoints.saved_by(self._stopped_at)) not in (0, self.ranks.count):
                self.recorder.say(
                    f"{self._stopped_at} was saved by {before} process{'es' * (before > 1)}, and now there are "
                    f"{self.ranks.count}: it goes on from its weights and step, with other random numbers, so not to "
                    f"the weights of a run with {before}."
                )
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
            self._last_words = f"Stopped before the first step was done ({why}); nothing to save."
            return
        if self.random_state is not None and self.random_state[0] == step:  # as if the step had never begun
            set_random_state(self.random_state[1])
            vars(trainer).update(self._before)
            trainer.state.num_input_tokens_seen = self._tokens_before
        if self.ranks.any(self._on_disk[0] != step):
            try:
                self._save_to_go_on()
            except CheckpointNotSaved as error:
                self._unsaved = get_random_state()
                self._last_words = (
                    f"Stopped after step {step} ({why}), not saved: {error}. It is in memory: free some space, and "
                    "train() saves it and continues from here."
                )
                return
        self._stopped_at = self._on_disk[1]
        self._last_words = (
            f"Stopped after step {step} of {trainer.state.max_steps} ({why}), saved to {self._stopped_at}; train() "
            "continues from here."
        )

    def _save_to_go_on(self) -> None:
        """A checkpoint that goes when the run is done."""
        self._of_a_stop = True
        try:
            self.trainer._save_checkpoint(self.trainer.model, trial=None)
        finally:
            self._of_a_stop = False

    def save_between_steps(self) -> None:
        """A checkpoint that a person asked for, while the run is paused."""
        self.guard.begin_finish_first()
        try:
            if self._on_disk[0] != self.trainer.state.global_step:
                self.trainer._save_checkpoint(self.trainer.model, trial=None)
        except CheckpointNotSaved as error:
            self.saving_failed(error)
        finally:
            self.trainer.control.should_save = False
        self.guard.end_finish_first()

    def after_step(self) -> None:
        """Logged, evaluated and saved: from here on the stop button works at once again."""
        trainer, state = self.trainer, self.trainer.state
        if state.global_step >= state.max_steps and trainer.changes.at_the_end():
            trainer.control.should_training_stop = False
        if trainer.args.load_best_model_at_end and state.global_step >= state.max_steps:
            self.save_between_steps()  # the last step too, to go on from: the memory gets the best one's weights
        self.guard.end_finish_first()
        self.heed_interrupt()
        trainer.requests.wait_while_paused()

    def heed_interrupt(self) -> None:
        """Between two steps: one that waits is raised; where weights are sharded, in all processes at once."""
        self.guard.raise_if_pending()
        if self.guard.patient and self.ranks.any(self.guard.pending):
            raise KeyboardInterrupt

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
        if self._of_a_stop and self.trainer.args.should_save:
            (folder / checkpoints.OF_A_STOP).touch()
        keep_unfinished(self.trainer, folder, owes_evaluation=self.ranks.any(self._owes_evaluation()))

    # ---- evaluation ---------------------------------------------------------------------------------------------

    def evaluate(self, trl_evaluate: Callable[..., dict[str, float]]) -> dict[str, float]:
        """In training an interrupt stops it at once, and its random numbers are its own: it moves no later step."""
        if not self._started:
            return trl_evaluate()
        step = self.trainer.state.global_step
        self.trainer._metrics["eval"].clear()  # of one that was stopped
        with (
            self.guard.at_once(),
            random_state_of_its_own(f"evaluation {self.trainer.args.seed} {step}{self._apart()}"),
        ):
            metrics = trl_evaluate()
        self._evaluated_at = step
        return metrics

    def _apart(self) -> str:
        """Each process draws numbers of its own."""
        return f" {self.ranks.index}" if self.ranks.index else ""

    def _owes_evaluation(self) -> bool:
        """An evaluation is due at this step and has not been made, or not to its end."""
        trainer, state, args = self.trainer, self.trainer.state, self.trainer.args
        if self._evaluated_at == state.global_step or state.epoch is None:
            return False
        ends = float(state.epoch).is_integer() or state.global_step >= state.max_steps
        by_epoch = args.eval_strategy == "epoch" and ends and args.eval_delay <= state.epoch
        return bool(trainer.control.should_evaluate or by_epoch)

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
        trainer.logprobs.begin()
        trainer.sampling.begin()
        trainer.first_contact.begin()
        control.should_log = control.should_evaluate = control.should_save = False
        self.random_state, self._evaluated_at = None, -1
        self._save_failed = False
        from grpo_kit.training.disk import lacks_room

        if args.should_save and (words := lacks_room(trainer)):
            self.recorder.say(words)
        self._began_at = state.global_step
        trainer.changes.begin()
        state.num_train_epochs = trainer.planned_epochs
        self.recorder.begin()
        folder = self._on_disk[1]
        if folder:
            self._on_disk = state.global_step, folder
            evaluates = trainer.eval_dataset is not None or trainer.held_out is not None
            if take_up_unfinished(trainer, folder) and evaluates:
                self._make_up_evaluation(folder)
        if state.global_step >= state.max_steps:
            self.recorder.say(
                f"All {state.max_steps} steps are done already; trainer.change(max_steps=...) trains on."
            )
        elif state.global_step == 0 and trainer.held_out is not None and not args.eval_on_start:
            trainer.evaluate()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Opening the data draws a random number, and a step that an epoch begins with is redone with it."""
        if state.global_step != self._began_at:
            self._remember(state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An unfinished step is done again from here; where a rollout buffer begins changes take effect."""
        self.guard.raise_if_pending()
        if begins_buffer(self.trainer):
            self.trainer.changes.at_buffer()
        if self.random_state is None or self.random_state[0] != state.global_step:
            self._remember(state.global_step)

    def _remember(self, step: int) -> None:
        trainer = self.trainer
        self.random_state = step, get_random_state()
        self._before = {name: copy.copy(getattr(trainer, name)) for name in ("_buffered_inputs", *LOSS_STATE)}
        self._tokens_before = trainer.state.num_input_tokens_seen

    def average_gradients(self) -> None:
        """Of all processes. Who comes here makes the step: from here on an interrupt waits for its end, in all."""
        self.guard.begin_finish_first()
        self.ranks.average_gradients(self.trainer.model)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """From here on weights and files change: an interrupt waits for the end of the step."""
        if not self.ranks.together:  # else they have agreed to make it
            self.guard.raise_if_pending()
        self.guard.begin_finish_first()
        self.trainer.first_contact.before_optimizer_step()
        self._updating = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The weights are whole again; what was asked for meanwhile is heard."""
        self._updating = False
        self.trainer.requests.take_up()

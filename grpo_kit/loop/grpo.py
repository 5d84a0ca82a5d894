"""Loop: GRPO from the first step to the last. Sample, score, compare within groups, update; write it down; again.

    for each step:
        rows    = the prompts of (seed, step)
        batch   = sample(model, rows, temperature)      generate, or the engine
        score(batch); give_advantages(batch)            rewards, then how much better than the group
        for each pass over the batch:
            gradient of the loss; clip; optimizer step  PaddedUpdate, or the packed one
        write the step's metrics and completions; hooks

A step is a function of (weights, optimizer state, seed, step), and of the state of a sampler that keeps one. Whatever
ends a step before its first update drops it, and train() does it again, so a run that was stopped ends with the weights
of one that was not. Between the first update of a step and its last written line the stop button waits; that takes
seconds.

Left out of GRPO, and why: the reference model where beta is 0, most of today's recipes (it costs a model's memory and
moves little in a short run); a value model (the group's mean is the baseline); sampling from the next batch while this
one trains (one card does one thing at a time).
Longer than 300 lines because a step, a stop and a change are read together.
"""

from __future__ import annotations

import math
import shutil
import time
import uuid
import warnings
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from grpo_kit._support.argument_checks import check_known
from grpo_kit.engine.optim.choose import choose_optimizer, make_optimizer
from grpo_kit.loop import checkpoint
from grpo_kit.loop.batch import Batch, generate
from grpo_kit.loop.config import Config, StepNumbers
from grpo_kit.loop.config_checks import checked
from grpo_kit.loop.padded_update import PaddedUpdate
from grpo_kit.loop.policy_loss import PolicyLoss, weights_of
from grpo_kit.loop.processes import (
    InterruptGuard,
    Processes,
    Stopped,
    modes_of_training,
    random_state_comes_back,
    rows_of_step,
    seed_everything,
)
from grpo_kit.loop.protocols import Hook, Sampler, Task, Update, optional
from grpo_kit.loop.run_checks import (
    check_given,
    check_run,
    check_values,
    lacks_room,
    mark_trained,
    trained_before,
)
from grpo_kit.loop.run_settings import Changes, began_with, made_with, settings_of
from grpo_kit.loop.score import (
    completions_table,
    first_groups,
    first_rollout,
    give_advantages,
    measures,
    score,
    with_signal,
)
from grpo_kit.models._adapters import save_adapter
from grpo_kit.models._model_facts import has_dropout
from grpo_kit.record._digests import checkpoints, last_whole, write_digests
from grpo_kit.record._jsonl_run import RunLog
from grpo_kit.record._lines import RUN, RUN_ID, reading, run_id
from grpo_kit.record._run_folder import alone, path_of, run_path
from grpo_kit.record.files import next_run_folder


class Loop:
    """Trains a model on a task by GRPO. A notebook holds it: train(), stop, look, change a number, train() again.

    model: any causal model of transformers, or one with LoRA adapters (load_policy); what requires a gradient is
    trained. task: its rows, prompts and rewards. tokenizer: renders the prompts. folder: of the run; it must be new, or
    hold a run to go on with by train(resume=True).
    sample, update: the two seams (protocols.py). None: plain ones. hooks: see Hook.
    Raises ValueError, naming the argument, for what cannot be.

    >>> trainer = Loop(model, task, Config(steps=32), tokenizer=tokenizer, folder="runs/demo")  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Any,
        task: Task,
        config: Config | None = None,
        *,
        tokenizer: Any,
        folder: str | Path,
        sample: Sampler | None = None,
        update: Update | None = None,
        hooks: Sequence[Hook] = (),
    ) -> None:
        check_given(model, task, config, tokenizer, sample, update, hooks)
        self.model, self.task, self.tokenizer = model, task, tokenizer
        self.config = config = (config or Config()).with_task(task)
        self.folder, self.hooks = run_path(folder), list(hooks)
        check_run(model, tokenizer, task, config)
        self.sample, self.update = sample or generate, update or PaddedUpdate(config)
        if config.rollout_bits != getattr(self.sample, "bits", Sampler.bits):
            raise ValueError(
                "rollout_bits=16 is for the engine on a CPU; this run's sample is another"
            )
        self.device = next(model.parameters()).device
        self.processes = Processes(config.prompts_per_step, self.device)
        self.processes.check(config, has_dropout(model))
        self.processes.from_main(RunLog.check, self.folder)
        self.starts_from = trained_before(model, self.folder)
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer_name = choose_optimizer(config.optimizer, model)
        steps = (0, config.steps // 2, config.steps - 1)
        rate = max(config.at(step).learning_rate for step in steps)
        self.optimizer = make_optimizer(
            self.optimizer_name, model, learning_rate=rate, weight_decay=config.weight_decay
        )
        needs_scale = config.autocast == "float16"
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=needs_scale)
        self.reference = None
        if config.beta != 0:  # of the KL: the weights that the run begins with
            self.reference = {name: p.detach().clone() for name, p in self.trained.items()}
        self.began_with = began_with(model, self.reference)
        self.step = 0  # steps that are done
        self.tokens = 0  # that went through the model in them
        self.seconds = 0.0  # that they took
        self.guard = InterruptGuard()
        self.guard.patient = self.processes.count > 1  # all stop together, between two steps
        self.log: RunLog | None = None
        self.completions: dict[str, list[Any]] = {}  # of the last step, as columns
        self.notes: dict[str, Any] = {}  # whatever you want run.json to hold besides
        # Names of those that stay, such as the best; a hook says which.
        self.kept_checkpoints: set[str] = set()
        self._changes, self._is_open, self._has_trained = Changes(config), False, False
        self._run_id: str | None = None  # drawn when the run is opened
        # The sampler's state after the last step that is done.
        self._sample_state = optional(self.sample, "state", None)
        # (parameter, tensor) of all that is trained, as the step began.
        self._step_tensors: list[Any] = []
        self._save_failed = False  # the last checkpoint that was due
        self._hooks_to_end: list[Hook] = []
        # True between a step's first update and its last line: the weights are those of no step.
        self._half_done = False
        config.claim()

    # ---- the loop -------------------------------------------------------------------------------------------------

    def train(self, *, resume: bool = False, **unknown: Any) -> None:
        """Train until config.steps steps are done. After a stop it goes on where it stopped.

        Of a run whose last rows, checkpoint or evaluation are missing (a full disk, a stop at the end) it does those.

        resume: True goes on with the run that the folder holds, from its last whole checkpoint. What is given otherwise
        than then is obeyed, said and written down, or refused by name before anything is loaded.
        The stop button (Ctrl-C) drops the step that is being made, saves a checkpoint and raises Stopped.
        Raises RunFolderError where the folder holds another run, or another process trains into it.
        """
        check_known("train() has no such argument", unknown, ["resume"])
        if not isinstance(resume, bool):
            raise ValueError(
                f"resume={str(resume)!r:.200}: give True, which goes on from the last whole checkpoint of this "
                f"trainer's folder, {str(self.folder)!r}; to begin from another run's weights, load_policy(its folder)"
            )
        with (
            self.guard,
            random_state_comes_back(),
            modes_of_training(self.device.type),
            ExitStack() as locks,
        ):
            self._hooks_to_end = []
            self._begin(resume, locks)
            error: BaseException | None = None
            try:
                # A hook may ask for more steps.
                self.processes.from_main(self._call_hooks, "begin")
                if self.step >= self.config.steps and self.processes.is_main:
                    print(
                        f"All {self.step} steps are done; trainer.change(steps=...) and train() go on from here."
                    )
                with self.guard.at_once():
                    while self.step < self.config.steps:
                        self.one_step()
                    if self._save_failed:
                        self._save_or_warn()
            except KeyboardInterrupt as stop:
                error = stop
                kind, reason = Stopped, "interrupted"
                if isinstance(stop, Stopped):
                    kind, reason = type(stop), str(stop)
                raise kind(self._save_where_it_stopped(reason), self.step) from None
            except (Exception, SystemExit) as failure:
                error = failure
                if not self._half_done and self.processes.count == 1:
                    print(self._save_where_it_stopped(type(failure).__name__), flush=True)
                raise
            finally:
                self.guard.begin_finish_first()
                self.model.eval()
                if self.step:
                    mark_trained(self.model, self.folder, self.step)
                all_end_here = isinstance(error, KeyboardInterrupt | None)
                if all_end_here or self.processes.count == 1:
                    self.processes.from_main(self._call_hooks, "end", error)
                    self.processes.take_mains(self.trained.values())
                if self.log is not None:
                    self.log.flush()

    def one_step(self) -> None:
        """One step: a function of (weights, optimizer state, the sampler's state, seed, step)."""
        start = time.monotonic()
        self.processes.from_main(self._call_hooks, "before_step")
        repeated = self.processes.from_main(lambda: self.log.changes_at(self.step + 1))
        changes, values = self._changes.of_step(self, repeated)
        numbers = replace(
            self.config.at(self.step), first=self.processes.first(self.config.prompts_per_step)
        )
        self._step_tensors = [(p, p.data) for p in self.trained.values()]
        seed_everything(self.config.seed, self.step, "sample")
        batch, reported = self.roll_out(numbers)
        seed_everything(self.config.seed, self.step, "update", self.processes.rank)
        metrics = self.learn(batch, numbers)  # from its first update on the stop button waits
        self.step += 1
        self._step_tensors = []
        self._sample_state = optional(self.sample, "state", None)
        row, batch = self._write(
            batch, numbers, metrics | reported | changes, time.monotonic() - start
        )
        self._half_done, self._changes.known = False, values
        self.processes.from_main(self._call_hooks, "after_step", row, batch)
        is_kept = self.processes.from_main(
            lambda: f"checkpoint-{self.step}" in self.kept_checkpoints
        )
        is_due = self.config.save_steps and self.step % self.config.save_steps == 0
        # These weights must not be lost: training ends where the disk does not take them.
        if is_kept:
            self.save()
        elif is_due or self._save_failed:
            self._save_or_warn()
        if self.guard.patient and any(self.processes.gather(self.guard.pending)):
            raise KeyboardInterrupt
        self.guard.end_finish_first()

    def roll_out(self, numbers: StepNumbers) -> tuple[Batch, dict[str, float]]:
        """Sample, score and compare within groups; with dynamic_sampling again, until every group has a signal."""
        config, rollouts, reported, signals = self.config, [], {}, 0
        # No dropout while sampling and scoring, and no gradient of a pass beside the loop.
        self.model.eval().zero_grad()
        for attempt in range(1 + config.dynamic_sampling):
            rows = self.processes.share(
                rows_of_step(self.task.train, config, numbers.step, attempt)
            )
            batch = self.sample(self.model, self.tokenizer, self.task, rows, config, numbers)
            first_group = attempt * config.prompts_per_step + numbers.first
            batch.groups = [first_group + group for group in batch.groups]
            reported = score(batch, self.task, self.reward_weights, self.tokenizer)
            rollouts.append(batch)
            signals += len({batch.groups[place] for place in with_signal(batch)})
            if signals >= len(rows):
                break
        if config.dynamic_sampling:
            reported |= first_rollout(rollouts, numbers, self.processes, self.sample, self.task)
            batch = first_groups(rollouts, len(rows))
        everyone = sum(self.processes.gather(batch.rewards), [])
        give_advantages(batch, config, everyone)
        return batch, reported

    def learn(self, batch: Batch, numbers: StepNumbers) -> dict[str, float]:
        """The updates of a step. Returns their metrics: of several updates the means."""
        config, temperature = self.config, numbers.temperature
        if numbers.beta:
            with weights_of(self.trained, self.reference):
                batch.ref_logprobs = self.update.logprobs(self.model, batch, temperature)
        needs_old = config.minibatches > 1 or (
            config.iterations > 1 and has_dropout(self.model)
        )
        if batch.old_logprobs is None and needs_old:
            batch.old_logprobs = self.update.logprobs(self.model, batch, temperature)
        self.model.train()
        metrics: dict[str, list[float]] = defaultdict(list)
        for _ in range(config.iterations):
            first = batch.old_logprobs is None
            for part in batch.split(config.minibatches):
                loss = PolicyLoss(part, config, numbers, device=self.device)
                sizes = self.processes.sums({"rows": loss.rows, "tokens": loss.tokens})
                loss.rows, loss.tokens = sizes["rows"], sizes["tokens"]
                value = self.update.gradients(
                    self.model, part, loss, temperature, self._backward
                )
                norm = self._optimizer_step(numbers)
                sums = self.processes.sums({"loss": value} | loss.measured(first))
                numbers_of_update = {"loss": sums["loss"], "grad_norm": norm} | loss.means(sums)
                numbers_of_update["update/left_out"] = float(not math.isfinite(norm))
                for name, number in numbers_of_update.items():
                    metrics[name].append(number)
                if first and config.iterations > 1:
                    batch.old_logprobs = loss.logprobs
        return {name: fmean(values) for name, values in metrics.items()}

    def _backward(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss).backward()

    def _optimizer_step(self, numbers: StepNumbers) -> float:
        """Clip the gradient and move the weights. Returns the gradient's norm before it was clipped."""
        for p in self.trained.values():
            if p.grad is None:
                p.grad = torch.zeros_like(p)  # not a missing one: the moments still decay
        self.processes.add_gradients(self.trained.values())
        # Where no loss was scaled there would be no scale.
        self.scaler.scale(torch.zeros((), device=self.device))
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.trained.values(), self.config.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = numbers.learning_rate
        self.guard.begin_finish_first()
        # Half of an optimizer step is neither the old weights nor the new.
        self._half_done = True
        if norm.isfinite():
            self.scaler.step(self.optimizer)
        elif self.processes.is_main:
            print(
                f"Step {numbers.step + 1}: the gradient's norm is {norm.item()}. This update is left out and the "
                "weights stay; a smaller learning rate, or float32 in place of 16 bits, helps most often.",
                flush=True,
            )
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return norm.item()

    def _write(
        self, batch: Batch, numbers: StepNumbers, metrics: dict[str, Any], seconds: float
    ) -> tuple[dict[str, Any], Batch]:
        """The step's row and completions, of all processes; the main one writes them. Returns the row and the batch."""
        if self.processes.count > 1:
            batch = Batch.join(
                self.processes.gather(replace(batch, old_logprobs=None, ref_logprobs=None))
            )
        self.seconds += seconds
        self.tokens += metrics.pop("num_tokens", batch.tokens)
        row = measures(batch, numbers, self.sample, self.task)
        row |= metrics | {
            "num_tokens": self.tokens,
            "step_seconds": seconds,
            "seconds": self.seconds,
        }
        self.completions = completions_table(batch, self.tokenizer, self.task, numbers)
        if self.log is not None:
            self.log.write(self.step, row, self.completions)
        return row, batch

    def _call_hooks(self, name: str, *arguments: Any) -> None:
        """Calls the hooks. An error is raised once the others had their turn, in begin at once."""
        hooks = self._hooks_to_end if name == "end" else self.hooks
        errors: list[BaseException] = []
        for hook in list(hooks):
            try:
                getattr(hook, name)(self, *arguments)
                if name == "begin":
                    self._hooks_to_end.append(hook)
            except (KeyboardInterrupt, Exception) as error:
                if name == "begin" and isinstance(error, Exception):
                    raise
                errors.append(error)
        if errors:  # the first error; a stop where there is none
            raise min(errors, key=lambda error: isinstance(error, KeyboardInterrupt))

    # ---- changes, stops, records --------------------------------------------------------------------------------

    def change(self, **values: Any) -> None:
        """Other numbers from the next step on: change(learning_rate=5e-6) is trainer.config.learning_rate = 5e-6.

        Raises ValueError, and changes nothing, for a field that cannot change and a value that cannot be.
        """
        check_values(self, {name: checked(name, value) for name, value in values.items()})
        for name, value in values.items():
            setattr(self.config, name, value)

    def _save_or_warn(self) -> None:
        """Training goes on where a disk does not take a checkpoint; the next step tries again."""
        self._save_failed = False
        try:
            self.save()
        except checkpoint.CheckpointNotSaved as error:
            self._save_failed = True
            warnings.warn(
                f"{error}. Training goes on; the next step tries again, or trainer.save().",
                RuntimeWarning,
                stacklevel=4,
            )

    def save(self) -> Path:
        """A checkpoint of the steps done so far, in the run's folder. Raises CheckpointNotSaved where it cannot."""
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "config": self.config.values(),
            "begun": self._changes.begun,
            "made_with": made_with(self),
            "scaler": self.scaler.state_dict(),
            RUN_ID: self._run_id,
        }
        return self.processes.from_main(
            lambda: checkpoint.save(
                self.folder,
                state,
                model=self.model,
                tokenizer=self.tokenizer,
                optimizer=self.optimizer,
                sample_state=self._sample_state,
                limit=self.config.save_total_limit,
                stay=self.kept_checkpoints,
            )
        )

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint of this run: weights, moments, step, and the config of then.

        Raises RunFolderError, and changes nothing, for one that is damaged or was made otherwise: a table says how.
        """
        folder = path_of(folder)
        with reading(folder, "Move it away; train(resume=True) takes the one before."):
            state = checkpoint.read_state(folder)
            self._changes.take_up(self, state, str(folder))
            sample_state = checkpoint.load(folder, model=self.model, optimizer=self.optimizer)
            self.scaler.load_state_dict(state["scaler"])
        self._sample_state, self._run_id = sample_state, state.get(RUN_ID)
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        mark_trained(self.model, self.folder, self.step)

    def save_model(self, folder: str | Path) -> Path:
        """The model, or its adapters, and the tokenizer, as load_policy opens them; whole or not at all.

        Adapters on a base that its name does not give (made in memory, resized, trained before) are saved with it.
        Returns the folder; of the run's own, which holds the record, that is the next free `model` in it.
        Raises ValueError for one that holds anything: nothing is overwritten.
        """
        path = path_of(folder)
        if run_path(folder) == self.folder:
            path = next_run_folder(self.folder, "model")
            print(
                f"The model is saved in {path}: {folder} has the record of the run.", flush=True
            )
        if path.exists() and any(path.iterdir()):
            free = next_run_folder(path.parent, path.name)
            raise ValueError(f"folder={str(folder)!r} is not empty; {str(free)!r} is free")
        part = path.with_name(f".{path.name}")
        shutil.rmtree(part, ignore_errors=True)  # of a save that was killed
        if hasattr(self.model, "peft_config"):
            save_adapter(self.model, self.tokenizer, part, path)
        else:
            self.model.save_pretrained(part)
        self.tokenizer.save_pretrained(part)
        write_digests(part, self._run_id)
        shutil.rmtree(path, ignore_errors=True)  # an empty one
        return part.rename(path)

    @property
    def reward_weights(self) -> list[float]:
        """The weights of this step: the config's, else the task's."""
        return list(self.config.reward_weights or self.task.reward_weights)

    def open(self, *, resume: bool = False) -> None:
        """Write run.json: from here on the folder is this run's. train() does so where it was not done before.

        Raises RunFolderError as train() does.
        """
        if self._is_open:
            return
        settings = settings_of(
            self.model,
            self.task,
            self.config,
            self.reward_weights,
            self.optimizer_name,
            self.sample,
        )
        if (self.folder / RUN).is_file():
            self._run_id = run_id(self.folder) or self._run_id
        elif not resume:
            self._run_id = uuid.uuid4().hex
        settings |= {"starts_from": self.starts_from, "notes": self.notes, RUN_ID: self._run_id}
        log = self.processes.from_main(
            lambda: RunLog.open(self.folder, settings, resume=resume)
        )
        self.log, self._is_open = log if self.processes.is_main else None, True

    def _begin(self, resume: bool, locks: ExitStack) -> None:
        """Lock the folder; load a checkpoint where the run goes on from one; compare, and warn of a small disk."""
        is_main = self.processes.is_main
        if is_main and self.folder.is_dir():
            locks.enter_context(alone(self.folder))
        resumes = resume and not self._has_trained and bool(checkpoints(self.folder))
        loads = self._half_done or resumes
        if loads:
            self.load(self.processes.from_main(last_whole, self.folder))
        self.open(resume=resume)
        self._changes.begin(self, first=not (self._has_trained or loads))
        if loads:  # what the main process cannot read is an error of all, here and below
            lines = self.processes.from_main(lambda: self.log.lost(self.step))
            if is_main and lines:
                print(*lines, sep="\n", flush=True)
        if is_main and not self._has_trained:
            locks.enter_context(alone(self.folder))
            warning = lacks_room(
                self.folder, self.model, self.optimizer_name, self.config, self.step
            )
            if warning is not None:
                warnings.warn(warning, RuntimeWarning, stacklevel=4)
        self._has_trained, self._half_done = True, False
        if self._sample_state is not None:
            with reading(self.folder / f"checkpoint-{self.step}"):
                # Nothing stays of a step that was dropped.
                self.sample.load_state(self._sample_state)
        self.config.freeze()
        self.processes.from_main(lambda: self.log.go_on_from(self.step))

    def _save_where_it_stopped(self, reason: str) -> str:
        """Save what is done; the line that says how to go on."""
        self.guard.begin_finish_first()
        # The stop may have come while other weights were in their place.
        for p, tensor in self._step_tensors:
            p.data = tensor
        self._step_tensors = []
        self.optimizer.zero_grad(set_to_none=True)
        if self._half_done:
            return f"Stopped inside the update of step {self.step + 1} ({reason}); train() goes on from a checkpoint."
        if not self.step:
            return f"Stopped before the first step was done ({reason}); nothing to save."
        try:
            saved = f"saved to {self.save()}"
        except checkpoint.CheckpointNotSaved as error:
            saved = f"not saved: {error}. It is in memory"
        stopped = f"Stopped after step {self.step} of {self.config.steps} ({reason})"
        return f"{stopped}, {saved}; train() continues from here."

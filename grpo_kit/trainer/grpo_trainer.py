"""GRPOTrainer as most runs want it: the loop, the fast ways through a step, and the standard hooks.

The small ones stand here: checkpoints by time, and in the end a line on what the folder lacks; a line, once, about a
reward outside [0, 1], a step without a gradient (the red flags wait for several), a config that was made again.
"""

from __future__ import annotations

import inspect
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_kit._support.argument_checks import check_choice, check_known, nearest
from grpo_kit._support.kernel import in_notebook
from grpo_kit.engine.fast import fast
from grpo_kit.evaluation.held_out import HeldOut
from grpo_kit.loop.checkpoint import CheckpointNotSaved
from grpo_kit.loop.config import FIELDS, SETUP, Config
from grpo_kit.loop.config_changes import differences
from grpo_kit.loop.grpo import Loop
from grpo_kit.loop.hooks import Hook
from grpo_kit.loop.protocols import Task, optional
from grpo_kit.loop.run_checks import check_given
from grpo_kit.loop.step_batch import Batch
from grpo_kit.models._model_facts import few_weights
from grpo_kit.models._token_rows import close_rows
from grpo_kit.record._digests import newest_whole
from grpo_kit.record.files import next_run_folder
from grpo_kit.rewards._parts import with_parts
from grpo_kit.rewards.scoring import off_scale
from grpo_kit.tasks._same_task import reward_digest, task_digest
from grpo_kit.trainer.control_folder import ControlFolder
from grpo_kit.trainer.held_out_hook import HeldOutHook
from grpo_kit.trainer.watch_run import WatchRun
from grpo_kit.trainer.watchdog import Watchdog
from grpo_kit.watch.monitor import OnFlag


class Autosave(Hook):
    """With save_steps=0: saves after each 5 minutes of training, and spends at most 2 % of the time on it.

    The newest one is kept (save_total_limit). A shorter run has none. The steps are the same with and without it.
    quiet: prints no line where a run ends.
    """

    EVERY, SHARE = 300.0, 0.02  # seconds of training; of the time

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet

    def begin(self, trainer: Any) -> None:
        """From here on time counts."""
        self._due = trainer.seconds + self.EVERY

    def after_step(self, trainer: Any, row: dict[str, Any], batch: Batch) -> None:
        """Save if it is due. Training goes on where a disk does not take it."""
        if trainer.config.save_steps or trainer.seconds < self._due:
            return
        began = time.monotonic()
        try:
            trainer.save()
        except CheckpointNotSaved as error:
            warnings.warn(f"{error}. Training goes on, and tries again.", RuntimeWarning, stacklevel=2)
        self._due = trainer.seconds + max(self.EVERY, (time.monotonic() - began) / self.SHARE)

    def end(self, trainer: Any, error: BaseException | None) -> None:
        """All steps are done: where the run is, and which of it is in memory alone."""
        if error is not None or self._quiet or not trainer.step:
            return
        folder, newest = trainer.folder, newest_whole(trainer.folder, digests=False)
        if folder.is_relative_to(Path.cwd()):
            folder = folder.relative_to(Path.cwd())
        saved = 0 if newest is None else int(newest.name[11:])
        lost = f"steps {saved + 1} to {trainer.step}" if saved + 1 < trainer.step else f"step {trainer.step}"
        what, cure = "", f" trainer.save_model({str(folder / 'model')!r}) saves the model."
        if (trainer.folder / "model").is_dir():
            what, cure = f", its model in {folder / 'model'}", ""
        elif newest is None:
            what = ". Not saved in it: any weights"
        elif saved < trainer.step:
            what = f". Not saved in it: the weights of {lost}; the newest is {newest.name}"
        else:
            what = f", the weights of its last step in {newest.name}"
        print(f"The run is in {folder}{what}.{cure}", flush=True)


class OffScale(Hook):
    """Prints the line once a reward; none about a reward that states its range. Any finite score is taken."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._seen: dict[str, tuple[float, float]] = {}  # lowest and highest score of each reward

    def after_step(self, trainer: Any, row: dict[str, Any], batch: Batch) -> None:
        """Look at the step's scores."""
        for (name, scores), reward in zip(batch.parts.items(), trainer.task.rewards, strict=False):
            there = [score for score in scores if score is not None]
            if not there or name in self._said:
                continue
            low, high = self._seen.get(name, (there[0], there[0]))
            self._seen[name] = min(low, *there), max(high, *there)
            if said := off_scale(name, reward, scores, self._seen[name]):
                self._said.add(name)
                print(f"{said}; choose reward_weights by its scale.", flush=True)


class StillStep(Hook):
    """Prints the line at the first step without a gradient, and no more.

    Such a step is made as TRL makes it: the optimizer's moments move the weights on. The line says how far, the root
    mean square of up to 64 weights of each tensor.
    """

    def __init__(self) -> None:
        self._said, self._weights, self._moved = False, None, None

    def before_step(self, trainer: Any) -> None:
        """Keep some of the weights that the step begins with."""
        if not self._said:
            self._weights = few_weights(trainer.trained.values())

    def after_step(self, trainer: Any, row: dict[str, Any], batch: Batch) -> None:
        """Look at the step's gradient, rewards and weights."""
        if self._said:
            return
        moved = (few_weights(trainer.trained.values()) - self._weights).square().mean().sqrt().item()
        before, self._moved = self._moved, moved
        if row.get("grad_norm"):
            return
        self._said, totals = True, {reward for reward in batch.rewards if reward is not None}
        groups = len(set(batch.groups))
        why = "no completion has tokens that count, or weights and epsilon leave no gradient"
        if row.get("frac_reward_zero_std") == 1:
            why = f"in none of its {groups} groups do the rewards differ"
            why += f", all are {totals.pop():g}" if len(totals) == 1 else ""
        how_far = "No weight moved."
        if moved:
            beside = f", {moved / before:.2f} times as far as step {trainer.step - 1}" if before else ""
            how_far = f"The optimizer's moments still moved each weight by {moved:.1e} on average{beside}."
        print(
            f"Step {trainer.step} has no gradient: {why}. {how_far} If it stays so nothing is learned; "
            "kit.readiness(...) counts how many groups would have a signal.",
            flush=True,
        )


class ReboundConfig(Hook):
    """As training begins, compares the trainer's config, task and rewards with what the notebook's variables hold."""

    def __init__(self, config: Config, task: Any) -> None:
        rewards = with_parts(task.rewards)
        kinds = [(config, None), (task, task_digest), *((one, reward_digest) for one in rewards)]
        held = {id(value): (value, kind) for value, kind in kinds}
        self._held = {name: held[id(value)] for name, value in _variables().items() if id(value) in held}

    def begin(self, trainer: Any) -> None:
        """Say which differ: those of the trainer are obeyed."""
        variables = _variables()
        for name, (was, digest) in self._held.items():
            now = variables.get(name)
            if now is was or now is trainer.config or type(now) is not type(was):
                continue
            told = _differ(trainer.config, now) if digest is None else ""
            if told or digest and digest(now) != digest(was):
                again = "cell that makes" if digest is None else "cells that make task and"
                print(
                    f"{name!r} was made again after this trainer, which goes by the earlier one{told}. To train by the "
                    f"new {name!r}, run the {again} the trainer again.",
                    flush=True,
                )


def _differ(config: Config, other: Config) -> str:
    """The fields in which another config differs, in words."""
    ours, theirs = config.values(), other.values()
    for mine in ("task", "task_options", "max_completion_tokens"):  # filled in by the trainer's task
        if theirs.get(mine) in (None, {}):
            theirs[mine] = ours.get(mine)
    found = differences(ours, theirs).items()
    return ": " * bool(found) + ", ".join(f"{field}={was!r}, not {value!r}" for field, (was, value) in found)


def _variables() -> dict[str, Any]:
    """Of the notebook, outputs apart; none elsewhere."""
    every = sys.modules["IPython"].get_ipython().user_ns if in_notebook() else {}
    return {name: value for name, value in every.items() if not name.startswith("_")}


class GRPOTrainer(Loop):
    """The loop with engine, packed update, chart, red flags and controls; see grpo_kit.loop.Loop.

    task: a tasks.Task, or one that brings the seams it needs.
    folder: of the run; None: the next free one of runs/<task>, runs/<task>-2, ...
    held_out: measures a few held-out rows while it trains. keep: "best" ends with the best evaluation's weights.
    live, on_flag: see WatchRun. sample, update: None takes the fast ways, or the plain ones where a line says why.
    A sample with a method around(fast) is taken as what that returns, given the fast one: OlderWeights of examples/.
    hooks: more of them, called after the standard ones, but before those that obey requests and save.
    Raises ValueError, naming the argument, for what cannot be.
    """

    def __init__(
        self,
        model: Any,
        task: Task | None = None,
        config: Config | None = None,
        *,
        tokenizer: Any = None,
        folder: str | Path | None = None,
        held_out: HeldOut | None = None,
        keep: str = "last",
        live: bool | None = True,
        on_flag: OnFlag = "warn",
        sample: Any = None,
        update: Any = None,
        hooks: Sequence[Hook] = (),
        **unknown: Any,
    ) -> None:
        *known, _ = inspect.signature(GRPOTrainer).parameters
        for name in unknown:
            if name in FIELDS:
                call = "kit.preset('auto', " if name in SETUP else "kit.Config("
                raise ValueError(
                    f"{name} is a field of the config: config={call}{name}={unknown[name]!r:.100})"
                )
        check_known("GRPOTrainer has no such argument", unknown, known)
        check_given(model, task, config, tokenizer, sample, update, hooks)
        config = Config() if config is None else config
        folder = next_run_folder("runs", task.name) if folder is None else folder
        check_choice("keep", keep, ("last", "best"))
        if held_out is not None and not isinstance(held_out, HeldOut):
            raise ValueError(
                f"held_out={held_out!r:.100} must be a kit.HeldOut(task, rows=64, every=8), or None"
            )
        if keep == "best" and held_out is None:
            raise ValueError(
                "keep='best' needs held_out, a grpo_kit.HeldOut(task), to judge by: give it, or keep='last'"
            )
        close_rows(model, tokenizer)
        seams = getattr(task, "seams", fast)(model, config)
        if seams.why_not and live is not None and not (sample and update):
            print(f"A slower, plain way is taken, since {seams.why_not}.", flush=True)
        sample = optional(sample, "around", sample, seams.sample) or seams.sample
        measuring = [] if held_out is None else [HeldOutHook(held_out, keep)]
        watching = WatchRun(live, on_flag)
        scales = [] if live is None else [OffScale(), StillStep(), ReboundConfig(config, task)]
        watchdog = [] if live is None or any(isinstance(each, Watchdog) for each in hooks) else [Watchdog()]
        super().__init__(
            model, task, config, tokenizer=tokenizer, folder=folder,
            sample=sample, update=update or seams.update,
            hooks=[
                *seams.hooks, *watchdog, *measuring, *scales, watching, *hooks,
                ControlFolder(watching.say), Autosave(quiet=live is None),  # last: a checkpoint's row is whole
            ],
        )  # fmt: skip
        if self.starts_from and live is not None and self.processes.is_main:
            print(
                f"This model was trained before: {self.starts_from}. The run goes on from those weights; for the base "
                "load it again.",
                flush=True,
            )

    def __getattr__(self, name: str) -> Any:
        """What a trainer of another library has under this name is called otherwise here."""
        raise AttributeError(
            f"GRPOTrainer has no {name!r}{nearest(name, dir(type(self)))}", name=name, obj=self
        )

"""WatchRun: the live chart of a run, or a line a step, and its red flags; and the small hooks of the standard trainer.

Those are: checkpoints by time, and in the end a line on what the folder lacks; a line, once, about a reward outside
[0, 1], a step without a gradient (the red flags wait for several), a config that was made again.
"""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pandas as pd

from grpo_kit._support.kernel import in_notebook
from grpo_kit.loop.checkpoint import CheckpointNotSaved
from grpo_kit.loop.config import Config
from grpo_kit.loop.interrupts import Stopped
from grpo_kit.loop.protocols import Hook
from grpo_kit.loop.run_settings import differences
from grpo_kit.loop.step_batch import Batch
from grpo_kit.models._model_facts import few_weights
from grpo_kit.record._digests import newest_whole
from grpo_kit.record.files import RunFolderError, read_metrics, run_settings
from grpo_kit.rewards._parts import with_parts
from grpo_kit.rewards.scoring import off_scale
from grpo_kit.tasks._same_task import reward_digest, task_digest
from grpo_kit.watch._flags import Flag
from grpo_kit.watch._live import LiveChart
from grpo_kit.watch._run_state import change_text
from grpo_kit.watch.monitor import Monitor, OnFlag
from grpo_kit.watch.run_card import model_card


class StoppedByFlag(Stopped):
    """A red flag ended the run, where on_flag="stop"."""


class WatchRun(Hook):
    """Shows each step and raises red flags.

    live: True draws in a notebook and prints a line elsewhere, False prints lines, None shows flags alone.
    on_flag: "warn" shows a flag, "stop" also ends the run after the step (StoppedByFlag), f(flag) is called.
    Measures of a step's completions (diversity/..., script/..., scale/...) are added to its row.
    """

    def __init__(self, live: bool | None = True, on_flag: OnFlag = "warn") -> None:
        self._chart = None if live is None else LiveChart(pictures=live)
        self._monitor = Monitor(on_flag)

    def begin(self, trainer: Any) -> None:
        """Take up the steps that are there; show the chart."""
        rows = read_metrics(trainer.folder).to_dict("records")
        self._monitor.begin(trainer.folder, run_settings(trainer.folder) or {}, rows)
        if self._chart is not None:
            self._chart.start(trainer.config.steps, trainer.folder)

    def after_step(self, trainer: Any, row: dict[str, Any], batch: Batch) -> None:
        """Measure, show, and raise flags."""
        table = pd.DataFrame(trainer.completions)  # of all processes, which batch is not
        table.insert(0, "step", trainer.step)
        measured = self._monitor.measure(table)
        trainer.log.write(trainer.step, measured)
        row |= {"step": trainer.step} | measured
        if self._chart is not None:
            if changes := row.get("changes"):
                before = {name: pair[0] for name, pair in changes.items()}
                after = {name: pair[1] for name, pair in changes.items()}
                self._chart.change(trainer.step, change_text(after, before))
            self._chart.update([row], table, trainer.config.steps)
        flags = self._monitor.step(row)
        for flag in flags:
            self._show(flag)
        if flags and self._monitor.on_flag == "stop":
            raise StoppedByFlag(f"red flag: {flags[0].name}", trainer.step)

    def end(self, trainer: Any, error: BaseException | None) -> None:
        """The last picture, and the model card: README.md in the run's folder."""
        self._monitor.flush()
        if self._chart is not None:
            self._chart.finish()
        if not trainer.step:
            return
        try:
            model_card(trainer.folder)
        except (OSError, RunFolderError) as failure:  # a full disk, whose rows wait in memory; a damaged file
            warnings.warn(f"The model card was not written ({failure})", RuntimeWarning, stacklevel=2)

    def say(self, text: str) -> None:
        """A sentence under the chart, where its buttons are; elsewhere a printed line."""
        if self._chart is not None:
            self._chart.say(text)
        else:
            print(text, flush=True)

    def _show(self, flag: Flag) -> None:
        if self._chart is not None:
            self._chart.flag(flag)
        elif not callable(self._monitor.on_flag):
            print(f"Red flag: {flag}", flush=True)


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
        start = time.monotonic()
        try:
            trainer.save()
        except CheckpointNotSaved as error:
            warnings.warn(f"{error}. Training goes on, and tries again.", RuntimeWarning, stacklevel=2)
        self._due = trainer.seconds + max(self.EVERY, (time.monotonic() - start) / self.SHARE)

    def end(self, trainer: Any, error: BaseException | None) -> None:
        """All steps are done: where the run is, and which of it is in memory alone."""
        if error is not None or self._quiet or not trainer.step:
            return
        folder = trainer.folder
        if folder.is_relative_to(Path.cwd()):
            folder = folder.relative_to(Path.cwd())
        if (trainer.folder / "model").is_dir():
            print(f"The run is in {folder}, its model in {folder / 'model'}.", flush=True)
            return
        newest = newest_whole(trainer.folder, digests=False)
        saved = 0 if newest is None else int(newest.name.removeprefix("checkpoint-"))
        if newest is None:
            content = ". Not saved in it: any weights"
        elif saved >= trainer.step:
            content = f", the weights of its last step in {newest.name}"
        else:
            steps = (
                f"steps {saved + 1} to {trainer.step}" if saved + 1 < trainer.step else f"step {trainer.step}"
            )
            content = f". Not saved in it: the weights of {steps}; the newest is {newest.name}"
        cure = f"trainer.save_model({str(folder / 'model')!r}) saves the model."
        print(f"The run is in {folder}{content}. {cure}", flush=True)


class OffScale(Hook):
    """Prints the line once a reward; none about a reward that states its range. Any finite score is taken."""

    def __init__(self) -> None:
        self._named: set[str] = set()
        self._ranges: dict[str, tuple[float, float]] = {}  # lowest and highest score of each reward

    def after_step(self, trainer: Any, row: dict[str, Any], batch: Batch) -> None:
        """Look at the step's scores."""
        for (name, scores), reward in zip(batch.parts.items(), trainer.task.rewards, strict=False):
            numbers = [score for score in scores if score is not None]
            if not numbers or name in self._named:
                continue
            numbers += self._ranges.get(name, ())
            self._ranges[name] = min(numbers), max(numbers)
            if line := off_scale(name, reward, scores, self._ranges[name]):
                self._named.add(name)
                print(f"{line}; choose reward_weights by its scale.", flush=True)


class StillStep(Hook):
    """Prints the line at the first step without a gradient, and no more.

    Such a step is made as TRL makes it: the optimizer's moments move the weights on. The line says how far, the root
    mean square of up to 64 weights of each tensor.
    """

    def __init__(self) -> None:
        self._printed, self._weights, self._distance = False, None, None

    def before_step(self, trainer: Any) -> None:
        """Keep some of the weights that the step begins with."""
        if not self._printed:
            self._weights = few_weights(trainer.trained.values())

    def after_step(self, trainer: Any, row: dict[str, Any], batch: Batch) -> None:
        """Look at the step's gradient, rewards and weights."""
        if self._printed:
            return
        distance = (few_weights(trainer.trained.values()) - self._weights).square().mean().sqrt().item()
        earlier_distance, self._distance = self._distance, distance
        if row.get("grad_norm"):
            return
        self._printed = True
        reason = "no completion has tokens that count, or weights and epsilon leave no gradient"
        if row.get("frac_reward_zero_std") == 1:
            reason = f"in none of its {len(set(batch.groups))} groups do the rewards differ"
            rewards = {reward for reward in batch.rewards if reward is not None}
            if len(rewards) == 1:
                reason += f", all are {rewards.pop():g}"
        movement = "No weight moved."
        if distance:
            movement = f"The optimizer's moments still moved each weight by {distance:.1e} on average"
            if earlier_distance:
                movement += f", {distance / earlier_distance:.2f} times as far as step {trainer.step - 1}"
            movement += "."
        print(
            f"Step {trainer.step} has no gradient: {reason}. {movement} If it stays so nothing is learned; "
            "kit.readiness(...) counts how many groups would have a signal.",
            flush=True,
        )


class ReboundConfig(Hook):
    """As training begins, compares the trainer's config, task and rewards with what the notebook's variables hold."""

    def __init__(self, config: Config, task: Any) -> None:
        digests = {id(reward): reward_digest for reward in with_parts(task.rewards)}
        digests |= {id(task): task_digest, id(config): None}
        variables = [(name, value) for name, value in _variables().items() if id(value) in digests]
        self._variables = {name: (value, digests[id(value)]) for name, value in variables}

    def begin(self, trainer: Any) -> None:
        """Say which differ: those of the trainer are obeyed."""
        variables = _variables()
        for name, (earlier, digest) in self._variables.items():
            value = variables.get(name)
            if value is earlier or value is trainer.config or type(value) is not type(earlier):
                continue
            cells, fields = "cells that make task and", ""
            if digest is None:  # the config
                cells, fields = "cell that makes", _differing_fields(trainer.config, value)
            if fields or digest and digest(value) != digest(earlier):
                print(
                    f"{name!r} was made again after this trainer, which goes by the earlier one{fields}. To train by "
                    f"the new {name!r}, run the {cells} the trainer again.",
                    flush=True,
                )


def _differing_fields(config: Config, other: Config) -> str:
    """The fields in which another config differs, in words; "" for none."""
    ours, theirs = config.values(), other.values()
    for name in ("task", "task_options", "max_completion_tokens"):  # filled in by the trainer's task
        if theirs.get(name) in (None, {}):
            theirs[name] = ours.get(name)
    fields = differences(ours, theirs)
    texts = [f"{name}={value!r}, not {other_value!r}" for name, (value, other_value) in fields.items()]
    return f": {', '.join(texts)}" if texts else ""


def _variables() -> dict[str, Any]:
    """Of the notebook, outputs apart; none elsewhere."""
    if not in_notebook():
        return {}
    namespace = sys.modules["IPython"].get_ipython().user_ns
    return {name: value for name, value in namespace.items() if not name.startswith("_")}

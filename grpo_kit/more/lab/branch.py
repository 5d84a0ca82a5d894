"""An exact what-if: a run goes on from one of its checkpoints twice, as it was and changed.

A step is a function of weights, optimizer state, seed and step. So both sides have the same prompts and the same random
numbers, and differ by the change alone: where the policies still agree they write the same completions.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from grpo_kit._support.display import BASE, TUNED, new_figure
from grpo_kit.evaluation.accuracy import evaluate
from grpo_kit.evaluation.comparison import Comparison, compare
from grpo_kit.evaluation.intervals import Estimate, bootstrap_mean
from grpo_kit.loop.checkpoint import SAMPLE_STATE
from grpo_kit.record._digests import checkpoints, what_is_wrong
from grpo_kit.record._lines import COMPLETIONS_LINES, METRICS_LINES, RUN, as_line, lines_of, read_json
from grpo_kit.record.files import (
    RunFolderError,
    next_run_folder,
    read_completions,
    read_metrics,
    run_settings,
    steps_done,
    write_whole,
)
from grpo_kit.record.run_path import path_of, run_path
from grpo_kit.trainer.grpo_trainer import GRPOTrainer
from grpo_kit.trainer.job import Job, model_in

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from grpo_kit.tasks import Task

BRANCH = "branch.json"  # in a branch's folder: the run and step that it left, and its changes


@dataclass(frozen=True, repr=False)
class Branch:
    """A run as it was, and changed from a step on. Made by branch().

    step: the checkpoint that both go on from. folders: of both. comparison: as it was beside changed, on the same
    held-out rows (kit.compare). rewards: changed minus as it was, over the groups of the steps after `step`: the
    difference of the mean rewards of groups on the same prompt, with a paired bootstrap's interval.
    """

    step: int
    changes: dict[str, Any]
    folders: tuple[Path, Path]
    comparison: Comparison
    rewards: Estimate

    def __repr__(self) -> str:
        changed = ", ".join(f"{name}={value!r}" for name, value in self.changes.items())
        return (
            f"From step {self.step} on {changed}: held out, as it was -> changed: {self.comparison.sentence} Training "
            f"rewards, paired by prompt: {self.rewards.value:+.3f} [{self.rewards.low:.3f}, {self.rewards.high:.3f}], "
            f"{self.rewards.n} groups. The changed run: {self.folders[1]}"
        )

    def plot(self) -> Figure:
        """The reward of both runs by step: two lines from one point."""
        figure = new_figure(8, 3)
        axes = figure.subplots()
        for folder, colour, label in zip(self.folders, (BASE, TUNED), ("as it was", "changed"), strict=True):
            table = read_metrics(folder)
            first = 0 if label == "as it was" else self.step
            table = table[table["step"] >= first]
            axes.plot(table["step"], table["reward"], color=colour, label=label, linewidth=1.8)
        axes.axvline(self.step, color="#555555", linewidth=0.8, linestyle=":")
        axes.set(xlabel="step", ylabel="reward")
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        return figure


def branch(
    folder: str | os.PathLike,
    step: int,
    *,
    task: Task | None = None,
    live: bool | None = None,
    **changes: Any,
) -> Branch:
    """What if this run had gone on otherwise from this step? The run is not touched; each branch has its own folder.

    folder: of a run with checkpoints (save_steps); the newest whole one up to `step` is taken. task: the run's own,
    where its run.json does not say where that is. changes: fields of Config that a run may change, such as
    learning_rate or beta. live: as in GRPOTrainer.
    A run that is whole is its own "as it was"; one that was stopped goes on in a branch too.
    The intervals are over held-out rows and groups. Another seed's branch may differ by more, held out most of all.
    Raises RunFolderError where there is no such checkpoint, ValueError for a field that cannot change, for no change,
    and for a run whose sampler keeps rollouts of earlier steps.

    >>> kit.branch("runs/05_train_full", 16, learning_rate=2e-6)  # doctest: +SKIP
    """
    source = run_path(folder)
    if not changes:
        raise ValueError("changes is empty: say what is to be otherwise, such as learning_rate=2e-6")
    job, asked = Job.of_run(source, task, {}), Job.of_run(source, task, changes)
    there = {int(path.name[11:]): path for path in checkpoints(source) if what_is_wrong(path) is None}
    if not (before := [number for number in there if number <= step]):
        raise RunFolderError(
            f"{source} has no whole checkpoint up to step {step}; it has {sorted(there) or 'none'}"
        )
    number = max(before)
    if (there[number] / SAMPLE_STATE).exists():
        raise ValueError(
            f"the sampler of {source} keeps something from step to step, such as older weights, and a branch has no "
            "copy of that sampler; begin a new run"
        )
    whole = steps_done(source) >= job.config.steps and (
        max(there) == job.config.steps or (source / "model").is_dir()
    )
    as_it_was = source if whole else _go_on(source, there[number], number, job, {}, live)
    changed = _go_on(source, there[number], number, asked, changes, live)
    found = []
    for place in (as_it_was, changed):
        model, tokenizer = job.policy(model_in(place)[0])
        found.append(evaluate(model, tokenizer, job.task, batch_size=job.config.eval_batch))
    return Branch(number, changes, (as_it_was, changed), compare(*found), _paired(as_it_was, changed, number))


def _go_on(
    source: Path, begin: Path, step: int, job: Job, changes: dict[str, Any], live: bool | None
) -> Path:
    """A new run folder with what the run had at the checkpoint, trained from there to its last step."""
    folder = next_run_folder(source.parent, f"{source.name}-from-{step}")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source / RUN, folder / RUN)
    for name in (METRICS_LINES, COMPLETIONS_LINES):
        lines = [as_line(line) for line in lines_of(source / name) if line["step"] <= step]
        write_whole(folder / name, b"".join(lines))
    shutil.copytree(begin, folder / begin.name)
    said = {
        "of": os.path.relpath(source, folder),
        "step": step,
        "changes": {n: f"{v:.6g}" if isinstance(v, float) else repr(v) for n, v in changes.items()},
    }
    write_whole(folder / BRANCH, (json.dumps(said, indent=1) + "\n").encode())
    model, tokenizer = job.policy()
    trainer = GRPOTrainer(model, job.task, job.config, tokenizer=tokenizer, folder=folder, live=live)
    trainer.train(resume=True)
    trainer.save_model(folder / "model")
    return folder


def _paired(one: Path, other: Path, step: int) -> Estimate:
    """Of the groups after a step: the mean reward by `other` less that by `one`, where both asked the same prompt."""
    means = []
    for folder in (one, other):
        table = read_completions(folder)
        table = table[(table["step"] > step) & table["reward"].notna()]
        means.append(table.groupby(["step", "group", "prompt"])["reward"].mean())
    both = pd.concat(means, axis=1, join="inner", keys=["one", "other"])
    change = (both["other"] - both["one"]).tolist()
    reach = max(1.0, *map(abs, change)) if change else 1.0
    return bootstrap_mean(change, lowest=-reach, highest=reach)


def branches(folder: str | os.PathLike) -> str:
    """The tree of a run and its branches, as text: each with its steps, its last reward, and what was changed.

    Raises RunFolderError for a folder that holds no run.
    """
    root = path_of(folder)
    if run_settings(root) is None:
        raise RunFolderError(f"folder={str(folder)!r} holds no run; give a run's folder")
    below: dict[Path, list[tuple[int, str, Path]]] = {}
    for path in root.parent.glob(f"*/{BRANCH}"):
        said = read_json(path, names={"changes": dict, "step": int, "of": str})
        changed = ", ".join(f"{name}={value}" for name, value in said["changes"].items()) or "as it was"
        parent = (path.parent / said["of"]).resolve()
        below.setdefault(parent, []).append((said["step"], changed, path.parent))

    def lines(run: Path, lead: str) -> list[str]:
        made = []
        own = sorted(below.get(run.resolve(), []))
        for place, (step, changed, path) in enumerate(own):
            last = place == len(own) - 1
            made.append(f"{lead}{'└' if last else '├'}─ from step {step}: {changed}   {_state(path)}")
            made += lines(path, lead + ("   " if last else "│  "))
        return made

    return "\n".join([_state(root), *lines(root, "")])


def _state(folder: Path) -> str:
    table = read_metrics(folder)
    rewards = table["reward"].dropna()
    last = f", reward {rewards.iloc[-5:].mean():.3f} in the last 5" if len(rewards) else ""
    return f"{folder} ({steps_done(folder)} steps{last})"

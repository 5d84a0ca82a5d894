"""An exact what-if: a run goes on from one of its checkpoints twice, as it was and changed.

A step is a function of weights, optimizer state, seed and step. So both sides have the same prompts and the same random
numbers, and differ by the change alone: where the policies still agree they write the same completions.
"""

from __future__ import annotations

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
from grpo_kit.more.lab._job import Job, model_in
from grpo_kit.more.lab._run import write_json
from grpo_kit.record._digests import checkpoints, what_is_wrong
from grpo_kit.record._lines import (
    COMPLETIONS_LINES,
    METRICS_LINES,
    RUN,
    as_line,
    lines_of,
    read_json,
)
from grpo_kit.record._run_folder import path_of, run_path
from grpo_kit.record.files import (
    RunFolderError,
    next_run_folder,
    read_completions,
    read_metrics,
    run_settings,
    steps_done,
    write_whole,
)
from grpo_kit.trainer.grpo_trainer import GRPOTrainer

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
        changes = ", ".join(f"{name}={value!r}" for name, value in self.changes.items())
        rewards = self.rewards.words(rate=False, change=True)
        return (
            f"From step {self.step} on {changes}: held out, as it was -> changed: {self.comparison.sentence} Training "
            f"rewards, paired by prompt: {rewards}, {self.rewards.n} groups. The changed run: {self.folders[1]}"
        )

    def plot(self) -> Figure:
        """The reward of both runs by step: two lines from one point."""
        figure = new_figure(8, 3)
        axes = figure.subplots()
        base_metrics, changed_metrics = (read_metrics(folder) for folder in self.folders)
        changed_metrics = changed_metrics[changed_metrics["step"] >= self.step]
        for metrics, colour, label in (
            (base_metrics, BASE, "as it was"),
            (changed_metrics, TUNED, "changed"),
        ):
            axes.plot(
                metrics["step"], metrics["reward"], color=colour, label=label, linewidth=1.8
            )
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
        raise ValueError(
            "changes is empty: say what is to be otherwise, such as learning_rate=2e-6"
        )
    job = Job.of_run(source, task, {})
    changed_job = Job.of_run(source, task, changes)
    whole_checkpoints = {
        int(path.name[11:]): path for path in checkpoints(source) if what_is_wrong(path) is None
    }
    start = max((number for number in whole_checkpoints if number <= step), default=None)
    if start is None:
        raise RunFolderError(
            f"{source} has no whole checkpoint up to step {step}; it has {sorted(whole_checkpoints) or 'none'}"
        )
    if (whole_checkpoints[start] / SAMPLE_STATE).exists():
        raise ValueError(
            f"the sampler of {source} keeps something from step to step, such as older weights, and a branch has no "
            "copy of that sampler; begin a new run"
        )
    last_step, base_run = job.config.steps, source
    has_result = max(whole_checkpoints) == last_step or (source / "model").is_dir()
    if steps_done(source) < last_step or not has_result:
        base_run = _go_on(source, start, job, {}, live)
    changed_run = _go_on(source, start, changed_job, changes, live)
    evaluations = []
    for run in (base_run, changed_run):
        model, tokenizer = job.policy(model_in(run)[0])
        evaluations.append(
            evaluate(model, tokenizer, job.task, batch_size=job.config.eval_batch)
        )
    return Branch(
        start,
        changes,
        (base_run, changed_run),
        compare(*evaluations),
        _paired(base_run, changed_run, start),
    )


def _go_on(
    source: Path,
    step: int,
    job: Job,
    changes: dict[str, Any],
    live: bool | None,
) -> Path:
    """A new run folder with the run's lines up to its checkpoint of this step, trained from there to its last step."""
    folder = next_run_folder(source.parent, f"{source.name}-from-{step}")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source / RUN, folder / RUN)
    for name in (METRICS_LINES, COMPLETIONS_LINES):
        lines = [as_line(line) for line in lines_of(source / name) if line["step"] <= step]
        write_whole(folder / name, b"".join(lines))
    checkpoint = f"checkpoint-{step}"
    shutil.copytree(source / checkpoint, folder / checkpoint)
    record = {
        "of": os.path.relpath(source, folder),
        "step": step,
        "changes": {name: _written(value) for name, value in changes.items()},
    }
    write_json(folder / BRANCH, record)
    model, tokenizer = job.policy()
    trainer = GRPOTrainer(
        model,
        job.task,
        job.config,
        tokenizer=tokenizer,
        folder=folder,
        live=live,
    )
    trainer.train(resume=True)
    trainer.save_model(folder / "model")
    return folder


def _written(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


def _paired(base_run: Path, changed_run: Path, step: int) -> Estimate:
    """Of the groups after a step: the mean reward of the changed run less that of the run as it was, by prompt."""
    before, after = _mean_rewards(base_run, step), _mean_rewards(changed_run, step)
    # NaN: one of the runs did not have this prompt
    differences = (after - before).dropna().tolist()
    reach = max([1.0, *map(abs, differences)])
    return bootstrap_mean(differences, lowest=-reach, highest=reach)


def _mean_rewards(folder: Path, step: int) -> pd.Series:
    """By step, group and prompt after a step."""
    table = read_completions(folder)
    table = table[(table["step"] > step) & table["reward"].notna()]
    return table.groupby(["step", "group", "prompt"])["reward"].mean()


def branches(folder: str | os.PathLike) -> str:
    """The tree of a run and its branches, as text: each with its steps, its last reward, and what was changed.

    Raises RunFolderError for a folder that holds no run.
    """
    root = path_of(folder)
    if run_settings(root) is None:
        raise RunFolderError(f"folder={str(folder)!r} holds no run; give a run's folder")
    children: dict[Path, list[tuple[int, str, Path]]] = {}
    for path in root.parent.glob(f"*/{BRANCH}"):
        record = read_json(path, names={"changes": dict, "step": int, "of": str})
        changes = ", ".join(f"{name}={value}" for name, value in record["changes"].items())
        parent = (path.parent / record["of"]).resolve()
        children.setdefault(parent, []).append(
            (record["step"], changes or "as it was", path.parent)
        )
    return "\n".join([_state(root), *_tree(root, children, "")])


def _tree(
    run: Path, children: dict[Path, list[tuple[int, str, Path]]], indent: str
) -> list[str]:
    """A line for each branch of a run, with its own branches below it."""
    lines = []
    branches_of_run = sorted(children.get(run.resolve(), []))
    for number, (step, changes, path) in enumerate(branches_of_run, 1):
        corner, continuation = "├", "│  "
        if number == len(branches_of_run):
            corner, continuation = "└", "   "
        lines.append(f"{indent}{corner}─ from step {step}: {changes}   {_state(path)}")
        lines += _tree(path, children, indent + continuation)
    return lines


def _state(folder: Path) -> str:
    rewards = read_metrics(folder)["reward"].dropna()
    text = f"{folder} ({steps_done(folder)} steps"
    if len(rewards):
        text += f", reward {rewards.iloc[-5:].mean():.3f} in the last 5"
    return text + ")"

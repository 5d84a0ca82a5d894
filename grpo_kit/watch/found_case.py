"""A completion of a run as a case for check_rewards, so that a hack found by training never pays again unnoticed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_kit.record.files import read_completions
from grpo_kit.rewards.cheat_cases import Case
from grpo_kit.watch.completions import numbered, text_of
from grpo_kit.watch.conversations import has_episodes

if TYPE_CHECKING:
    from grpo_kit.tasks import Task

_OF_THE_RECORD = {
    "step", "group", "number", "pick", "prompt", "prefill", "completion", "response", "advantage", "temperature",
    "reward", "tokens", "logprobs",
}  # fmt: skip


_NO_CASE = (
    "An episode is no case for check_rewards: its environment rewarded it, and no reward function can judge it again. "
    "What it was paid for wrongly is mended in the environment's step()."
)


def case_from(
    folder: str | Path,
    *,
    step: int,
    group: int,
    number: int,
    task: Task | None = None,
    honest: bool = False,
) -> Case:
    """One completion of a run folder as a Case, for check_rewards(rewards, task, found=[case]).

    step, group, number: as shown by `browse`; number counts the group's completions from 0.
    task: the row's columns come from this task, on which the run trained. Without it they come from the folder:
    the answer, and columns logged by rewards; a reward that needs others then raises an error.
    honest: the completion is a good one that a reward must pay, rather than a cheat that it must not pay.
    Raises RunFolderError (a ValueError) if there is no such folder; ValueError naming the argument if the run has no
    such completion, or the task no such question, or if the run has episodes, which no reward function judges.

    >>> hack = case_from("runs/full", step=12, group=0, number=3)  # doctest: +SKIP
    >>> check_rewards(task.rewards, task, found=[hack])  # doctest: +SKIP
    """
    table = numbered(read_completions(folder))
    if has_episodes(table):
        raise ValueError(_NO_CASE)
    chosen = table
    for name, value in (("step", step), ("group", group), ("number", number)):
        narrower = chosen[chosen[name] == value]
        if narrower.empty:
            there = sorted(int(v) for v in chosen[name].dropna().unique())
            some = ", ".join(map(str, there[:12])) + ", ..." * (len(there) > 12)
            raise ValueError(f"{name}={value!r} is not in {str(folder)!r}; there is {some or 'nothing yet'}")
        chosen = narrower
    row = chosen.iloc[0].to_dict()
    if task is None:
        kept = [name for name in row if name not in _OF_THE_RECORD and not name.startswith("reward/")]
        columns = {name: _plain(row[name]) for name in kept}
        columns = {name: value for name, value in columns.items() if value is not None}
    else:
        columns = dict(_row_of(task, text_of(row, "prompt")))
    return Case(
        f"found at step {step}, group {group}, number {number}",
        text_of(row, "completion"),
        honest=honest,
        prefill=text_of(row, "prefill"),
        columns=columns,
    )


def _row_of(task: Task, prompt: str) -> dict:
    """The task's row whose question the prompt contains; among several the longest, then the last in the prompt."""
    rows = [row for row in [*task.train, *task.held_out] if row["question"] in prompt]
    if not rows:
        raise ValueError(
            f"task={task.name!r} has no question that stands in the prompt {prompt[-200:]!r}; give the task that the "
            "run was on, or none"
        )
    return max(
        rows, key=lambda row: (prompt.rfind(row["question"]) + len(row["question"]), len(row["question"]))
    )


def _plain(value: Any) -> Any:
    """Numbers and lists of numpy as Python's; NaN as None."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return None if isinstance(value, float) and value != value else value

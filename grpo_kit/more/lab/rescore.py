"""What another reward would have taught: the completions of a run that is there, scored again. No model is asked."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from grpo_kit.evaluation._shown import ShownTable, estimates_table, percent, shown
from grpo_kit.evaluation.intervals import bootstrap_mean
from grpo_kit.loop.config import Config
from grpo_kit.loop.processes import rows_of_step
from grpo_kit.loop.score import advantages
from grpo_kit.record._run_folder import path_of
from grpo_kit.record.files import RunFolderError, read_completions, run_settings
from grpo_kit.rewards._parts import check_columns, columns_of, reward_names
from grpo_kit.rewards.response import Reward
from grpo_kit.rewards.scoring import score_all, totals

if TYPE_CHECKING:
    from grpo_kit.tasks import Task

_MEASURES = {  # column of `groups`: what its mean is
    "signal before": "groups with a signal, as trained",
    "signal": "groups with a signal, by this reward",
    "order": "groups in which two completions are ordered otherwise",
    "reversed": "groups in which two completions change places",
    "sign": "completions whose advantage has another sign, or none",
}


@dataclass(frozen=True, repr=False)
class Rescored:
    """A run's completions under another reward. Made by rescore().

    completions: one row each: step, group, prompt, prefill, completion, answer, before (its reward in the run), after
    (by this reward; NaN where it cannot judge), and the advantages advantage_before and advantage_after.
    groups: one row a group: step, group, and what _MEASURES says: "signal before", "signal", "order", "reversed" as 0
    or 1, "sign" as a share of its completions.
    direction: the cosine of the two vectors of advantages of the first step in which both have a signal: 1, the first
    update would go the same way; 0, they have nothing to do with each other; None where no step has both.
    """

    run: str
    reward: str
    completions: pd.DataFrame
    groups: pd.DataFrame
    direction: float | None

    def table(self) -> ShownTable:
        """One row a measure: its share of groups, or of completions, with a 95 % interval (bootstrap over groups)."""
        estimates = {
            words: bootstrap_mean(self.groups[column].tolist())
            for column, words in _MEASURES.items()
        }
        table = estimates_table(self.reward, estimates, [], 0)
        cells = {
            name: {"value, 95 % interval": e.words(), "n": str(e.n)}
            for name, e in estimates.items()
        }
        return shown(table, self.sentence, cells)

    @property
    def sentence(self) -> str:
        """What another reward would have changed, in one line."""
        share = self.groups[list(_MEASURES)].mean()
        end = "."
        if self.direction is not None:
            end = f"; the first update's direction: {self.direction:+.2f}."
        return (
            f"{self.reward} on the {len(self.completions)} completions of {self.run}: {percent(share['signal'])} of "
            f"groups have a signal ({percent(share['signal before'])} as trained), {percent(share['order'])} another "
            f"order, {percent(share['sign'])} of advantages another sign{end}"
        )

    def changed(self, n: int = 10) -> pd.DataFrame:
        """The n completions, each text once, whose pay changes most; of equals those that would be paid more first."""
        table = self.completions
        change = table["after"] - table["before"]
        table = table.assign(change=change, size=change.abs())
        table = table[table["size"] > 0].drop_duplicates(["prompt", "completion"])
        table = table.sort_values(["size", "change"], ascending=False, kind="stable")
        return table.head(n)[["step", "completion", "answer", "before", "after"]].reset_index(
            drop=True
        )

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_() + self.changed().to_html(na_rep="cannot judge")


def rescore(
    folder: str | os.PathLike,
    reward: Reward | Sequence[Reward] | Task,
    *,
    reward_weights: Sequence[float] | None = None,
    task: Task | None = None,
) -> Rescored:
    """Score every completion of a run again, by another reward, and compare what each would have taught.

    folder: of a run with completions. reward: one, several (weighed by reward_weights; default: equally), or a task
    with its rewards. task: the run's own, where the reward reads columns of a row besides "question" and "answer".
    The completions are those that the run's policy wrote: a policy trained by this reward would soon write others. So
    the first steps tell most.
    Raises RunFolderError for a folder without completions, ValueError for a task whose rows are not the run's, for
    weights that do not fit and a column that is missing, and RewardError as in training.

    >>> kit.rescore("runs/05_train_full", kit.rewards.MathAnswer()).changed()  # doctest: +SKIP
    """
    rewards = getattr(reward, "rewards", reward)
    if not isinstance(rewards, Sequence):
        rewards = [rewards]
    weights = (
        reward_weights
        or getattr(reward, "reward_weights", None)
        or [1 / len(rewards)] * len(rewards)
    )
    if len(weights) != len(rewards):
        raise ValueError(
            f"reward_weights={weights!r} has {len(weights)} numbers for {len(rewards)} rewards"
        )
    run = path_of(folder)
    table = read_completions(folder)
    if table.empty or "completion" not in table:
        raise RunFolderError(
            f"folder={str(folder)!r} holds no completions to score again; give a run's folder"
        )
    if "turn" in table:
        raise RunFolderError(
            f"folder={str(folder)!r} holds episodes: their environment pays, not a reward"
        )
    config = _config(run)
    if task is None and hasattr(reward, "train"):
        task = reward
    columns = {"answer": table["answer"].tolist()}
    if task is not None:
        columns = columns_of(_rows(task, config, table))
    columns |= {"prompts": table["prompt"].tolist(), "prefill": table["prefill"].tolist()}
    check_columns(rewards, {*columns}, "rescore (give task=, the run's own)")
    scores = score_all(rewards, table["completion"].tolist(), reward_names(rewards), **columns)
    group_ids = [
        f"{step} {group}" for step, group in zip(table["step"], table["group"], strict=True)
    ]
    after = totals(list(scores.values()), weights, group_ids)
    table = table[["step", "group", "prompt", "prefill", "completion", "answer"]].assign(
        before=table["reward"].astype(float),
        after=pd.Series(after, dtype=float, index=table.index),
    )
    for column in ("before", "after"):
        table[f"advantage_{column}"] = _advantages(table, column, config.scale)
    by_group = table.groupby(["step", "group"], sort=False)
    groups = pd.DataFrame([_compared(group) for _, group in by_group])
    name = getattr(reward, "name", None) or " + ".join(reward_names(rewards))
    return Rescored(run.name, name, table, groups, _direction(table))


def _config(run: Path) -> Config:
    values = (run_settings(run) or {}).get("config", {})
    fields = {"seed", "prompts_per_step", "scale"} & values.keys()
    return Config(**{name: values[name] for name in fields})


def _rows(
    task: Any,
    config: Config,
    table: pd.DataFrame,
) -> list[dict[str, Any]]:
    """The row of each completion: what (seed, step, group) say, where its answer is the one on record."""
    rows = []
    rows_of = cache(lambda step, attempt: rows_of_step(task.train, config, step - 1, attempt))
    for step, group, answer in zip(table["step"], table["group"], table["answer"], strict=True):
        attempt, place = divmod(int(group), config.prompts_per_step)
        row = {}
        if len(task.train) >= config.prompts_per_step:
            row = rows_of(int(step), attempt)[place]
        if answer is not None and str(row.get("answer")) != str(answer):
            raise ValueError(
                f"task {task.name!r} has not the rows that the run was trained on: step {step} asked for {answer!r}, "
                f"and this task for {row.get('answer')!r}; give the run's own task"
            )
        rows.append(row)
    return rows


def _advantages(
    table: pd.DataFrame,
    column: str,
    scale: str,
) -> pd.Series:
    """Of the rewards in a column, step by step."""
    by_step = []
    for _, rows in table.groupby("step"):
        rewards = [None if math.isnan(reward) else reward for reward in rows[column]]
        by_step.append(
            pd.Series(advantages(rewards, rows["group"].tolist(), scale=scale), rows.index)
        )
    return pd.concat(by_step)


def _compared(group: pd.DataFrame) -> dict[str, Any]:
    """One group under both rewards."""
    judged_by_both = group[["before", "after"]].dropna().to_numpy()
    first, second = (np.sign(rewards[:, None] - rewards) for rewards in judged_by_both.T)
    signs = np.sign(group["advantage_before"]) != np.sign(group["advantage_after"])
    return {
        "step": int(group["step"].iloc[0]),
        "group": int(group["group"].iloc[0]),
        "signal before": float(group["before"].nunique() > 1),
        "signal": float(group["after"].nunique() > 1),
        "order": float((first != second).any()),
        "reversed": float((first * second < 0).any()),
        "sign": float(signs.mean()),
    }


def _direction(table: pd.DataFrame) -> float | None:
    for _, rows in table.groupby("step", sort=False):
        before, after = (
            rows["advantage_before"].to_numpy(float),
            rows["advantage_after"].to_numpy(float),
        )
        size = np.linalg.norm(before) * np.linalg.norm(after)
        if size > 0:
            return float(before @ after / size)
    return None

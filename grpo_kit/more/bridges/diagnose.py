"""The red flags on a run of anybody: logs of TRL, notebooks with stored outputs, tables, TensorBoard's events.

A log is brought under the record's names (_log_rows.py) and asked by the same flags as a run of the kit. What a flag
reads and the log lacks is said.
"""

import html
import math
import os
from dataclasses import dataclass
from typing import Any

import pandas as pd

from grpo_kit.more.bridges._log_rows import LogError, runs_of
from grpo_kit.record._run_folder import path_of
from grpo_kit.record.files import has_metrics, read_metrics, run_settings
from grpo_kit.watch._red_flag import Flag
from grpo_kit.watch.monitor import red_flags

_NEEDS = {  # flag: the columns that it reads, any of a tuple
    "KL spike": ["kl"],
    "gradient spike": ["grad_norm"],
    "cancelling parts": ["frac_cancelled_groups"],
    "hacking": ["reward", "a held-out measure or a part of weight 0"],
    "length explosion": ["completion_length"],
    "cut off": ["completion_cut_off"],
    "language switch": ["the completions"],
    "sampler gap": ["rollout/logprob_gap"],
    "stale rollouts": ["clip_ratio"],
    "part never paid": ["reward/..."],
    "entropy collapse": ["entropy", "reward"],
    "mode collapse": ["the completions"],
    "sparse reward": ["frac_reward_zero_std", "reward"],
    "one answer": ["the answers to held-out questions"],
    "not finite": ["loss"],
    "no update": ["grad_norm"],
    "KL drift": ["kl"],
    "loss spike": ["loss"],
    "entropy explosion": ["entropy"],
    "held-out fall": ["held-out accuracy or reward"],
}
_COLUMNS = {  # how the columns begin that these words of _NEEDS stand for
    "reward/...": ("reward/",),
    "the completions": ("diversity/",),
    "the answers to held-out questions": ("eval/one_answer",),
    "held-out accuracy or reward": ("eval/accuracy", "eval/reward"),
    "a held-out measure or a part of weight 0": ("eval/",),
}
_FIFTH = 5  # the first and the last fifth of the steps are compared


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """What a log says of its run. Made by diagnose().

    source: where it was read. metrics: one row a step, by the record's names. flags: the red flags, first step first.
    untold: flag -> the columns that it needs and the log lacks. runs: the names of the log's runs if it has several;
    all else is of the last.
    """

    source: str
    metrics: pd.DataFrame
    flags: list[Flag]
    untold: dict[str, list[str]]
    runs: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """Steps, the reward of the first and last fifth of them, and the share of steps without any signal."""
        source = self.source
        if self.runs:
            source += f" has {len(self.runs)} runs ({', '.join(self.runs)}). This is the last, {self.runs[-1]}"
        facts = [f"{source}: {len(self.metrics)} logged steps"]
        rewards = self._recorded("reward")
        if len(rewards) >= 2 * _FIFTH:
            facts.append(_reward_change(rewards))
        spreads = self._recorded("reward_std")
        if len(spreads):
            facts.append(
                f"{(spreads.abs() < 1e-9).mean():.0%} of steps without any spread of rewards"
            )
        return f"{'; '.join(facts)}."

    def _recorded(self, name: str) -> pd.Series:
        """The values of a measure; empty if it was not logged."""
        return self.metrics.get(name, pd.Series(dtype=float)).dropna()

    def __repr__(self) -> str:
        lines = [self.sentence, *(f"- {flag}" for flag in self.flags)]
        if not self.flags:
            lines.append("No red flag of those that this log can show.")
        if self.untold:
            lines.append("Cannot be told from this log:")
            lines += [
                f"  {name} (needs {' and '.join(columns)})"
                for name, columns in self.untold.items()
            ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        items = []
        for flag in self.flags:
            remedy = html.escape(f"{flag.why} First try: {flag.first}")
            items.append(f"<li><b>{html.escape(flag.brief)}</b><br>{remedy}</li>")
        untold = html.escape(", ".join(self.untold) or "nothing")
        return (
            f"<p>{html.escape(self.sentence)}</p><ul>{''.join(items)}</ul>"
            f"<p>Cannot be told from this log: {untold}.</p>"
        )


def _reward_change(rewards: pd.Series) -> str:
    """The mean reward of the first and the last fifth, and whether they differ by more than noise."""
    count = len(rewards) // _FIFTH
    first = rewards.head(count)
    last = rewards.tail(count)
    before = first.mean()
    after = last.mean()
    errors = [part.std(ddof=1) / math.sqrt(count) for part in (first, last)]
    change = "up" if after > before else "DOWN"
    if abs(after - before) <= 2 * math.hypot(*errors):
        change = "within the noise of a step"
    return f"reward {before:.3g} in the first fifth, {after:.3g} in the last: {change}"


def diagnose(log: str | os.PathLike) -> Diagnosis:
    """The red flags of a run that anybody trained, from its log: what was seen, since which step, what to try.

    log: a run folder of the kit; a trainer_state.json of transformers, or a folder with one (a checkpoint, an output
    folder); a notebook with stored outputs; a text with TRL's printed lines; a CSV, JSON or JSON Lines table, such as
    W&B's and trackio's exports; a folder with TensorBoard's events.
    Of a log with several runs the last is diagnosed, and the sentence names them all.
    A flag lasts for some rows of the log: where every tenth step was logged it needs ten times the steps.
    Raises LogError for a log without steps.

    >>> kit.diagnose("outputs/checkpoint-500/trainer_state.json")  # doctest: +SKIP
    """
    path = path_of(log, "log")
    if not path.exists():
        raise LogError(f"log={str(log)!r} does not exist; give a file or a folder")
    settings: dict[str, Any] = {}
    runs: tuple[str, ...] = ()
    if path.is_dir() and has_metrics(path):
        metrics = read_metrics(path)
        settings = run_settings(path) or {}
    else:
        tables = runs_of(path)
        metrics = [pd.DataFrame(), *tables.values()][-1]
        if len(tables) > 1:
            runs = tuple(tables)
    if metrics.empty:
        raise LogError(
            f"log={str(log)!r} holds no steps of a run with a reward; known are run folders, trainer_state.json, "
            "notebooks, printed TRL lines, CSV, JSON, JSON Lines and TensorBoard's events"
        )
    flags = red_flags(metrics, settings)
    if not settings:
        # In such logs every part counts; their highest scores are not known, so other flags go by the sum.
        parts = [
            str(name).removeprefix("reward/")
            for name in metrics
            if str(name).startswith("reward/")
        ]
        weighted = red_flags(
            metrics, {"reward_parts": parts, "reward_weights": [1.0] * len(parts)}
        )
        flags += [flag for flag in weighted if flag.name == "part never paid"]
        flags.sort(key=lambda flag: flag.step)
    raised = {flag.name for flag in flags}
    untold = {}
    for name, needs in _NEEDS.items():
        missing_columns = [columns for columns in needs if not _has(metrics, columns)]
        if missing_columns and name not in raised:
            untold[name] = missing_columns
    return Diagnosis(path.name, metrics, flags, untold, runs)


def _has(metrics: pd.DataFrame, columns: str) -> bool:
    """Has the log this column, or one of those that the words stand for?"""
    starts = _COLUMNS.get(columns)
    if starts is None:
        return columns in metrics
    return any(str(name).startswith(starts) for name in metrics)

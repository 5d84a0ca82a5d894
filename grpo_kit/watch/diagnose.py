"""The red flags on a run of anybody: logs of TRL, notebooks with stored outputs, tables, TensorBoard's events.

A log is brought under the record's names (_log_rows.py) and asked by the same flags as a run of the kit. What a flag
reads and the log lacks is said.
"""

from __future__ import annotations

import html
import math
import os
from dataclasses import dataclass
from typing import Any

import pandas as pd

from grpo_kit.record.files import has_metrics, read_metrics, run_settings
from grpo_kit.record.run_path import path_of
from grpo_kit.watch._flags import Flag
from grpo_kit.watch._log_rows import LogError, runs_of, table_of
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
        rewards = self.metrics["reward"].dropna() if "reward" in self.metrics else pd.Series(dtype=float)
        whose = self.source
        if self.runs:
            whose += f" has {len(self.runs)} runs ({', '.join(self.runs)}). This is the last, {self.runs[-1]}"
        said = f"{whose}: {len(self.metrics)} logged steps"
        if len(rewards) >= 2 * _FIFTH:
            some = len(rewards) // _FIFTH
            first, last = rewards.iloc[:some].mean(), rewards.iloc[-some:].mean()
            parts = (rewards.iloc[:some], rewards.iloc[-some:])
            noise = 2 * math.hypot(*(part.std(ddof=1) / math.sqrt(some) for part in parts))
            change = (
                "within the noise of a step"
                if abs(last - first) <= noise
                else "up"
                if last > first
                else "DOWN"
            )
            said += f"; reward {first:.3g} in the first fifth, {last:.3g} in the last: {change}"
        if "reward_std" in self.metrics and len(spread := self.metrics["reward_std"].dropna()):
            said += f"; {(spread.abs() < 1e-9).mean():.0%} of steps without any spread of rewards"
        return f"{said}."

    def __repr__(self) -> str:
        lines = [self.sentence, *(f"- {flag}" for flag in self.flags)]
        if not self.flags:
            lines.append("No red flag of those that this log can show.")
        if self.untold:
            lines.append("Cannot be told from this log:")
            lines += [f"  {name} (needs {' and '.join(columns)})" for name, columns in self.untold.items()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        flags = "".join(
            f"<li><b>{html.escape(f.brief)}</b><br>{html.escape(f.why)} First try: {html.escape(f.first)}</li>"
            for f in self.flags
        )
        lacks = html.escape(", ".join(self.untold) or "nothing")
        return f"<p>{html.escape(self.sentence)}</p><ul>{flags}</ul><p>Cannot be told from this log: {lacks}.</p>"


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
        metrics, settings = read_metrics(path), run_settings(path) or {}
    else:
        tables = runs_of(path)
        runs = tuple(tables) if len(tables) > 1 else ()
        metrics = [table_of([]), *tables.values()][-1]
    if metrics.empty:
        raise LogError(
            f"log={str(log)!r} holds no steps of a run with a reward; known are run folders, trainer_state.json, "
            "notebooks, printed TRL lines, CSV, JSON, JSON Lines and TensorBoard's events"
        )
    flags = red_flags(metrics, settings)
    if (
        not settings
    ):  # in such logs every part counts; their highest scores are not known, so other flags go by the sum
        parts = [str(name).removeprefix("reward/") for name in metrics if str(name).startswith("reward/")]
        weighed = red_flags(metrics, {"reward_parts": parts, "reward_weights": [1.0] * len(parts)})
        flags += [flag for flag in weighed if flag.name == "part never paid"]
        flags.sort(key=lambda flag: flag.step)
    untold = {}
    for name, needs in _NEEDS.items():
        lacks = [one for one in needs if not _has(metrics, one)]
        if lacks and name not in {flag.name for flag in flags}:
            untold[name] = lacks
    return Diagnosis(path.name, metrics, flags, untold, runs)


def _has(metrics: pd.DataFrame, needed: str) -> bool:
    stands_for = {
        "reward/...": "reward/",
        "the completions": "diversity/",
        "the answers to held-out questions": "eval/one_answer",
        "held-out accuracy or reward": ("eval/accuracy", "eval/reward"),
        "a held-out measure or a part of weight 0": "eval/",
    }
    start = stands_for.get(needed)
    return needed in metrics if start is None else any(str(name).startswith(start) for name in metrics)

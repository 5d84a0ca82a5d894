"""What a run has shown so far: its rows, red flags and changes, read from its folder or added step by step; in words.

Held-out evaluations too: the last one, compared with a constant answer, and a better earlier one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from grpo_kit._support.display import duration
from grpo_kit.record._run_folder import is_locked, path_of
from grpo_kit.record.files import read_changes, read_metrics, run_settings
from grpo_kit.watch._red_flag import ACCURACY, REWARD, Flag
from grpo_kit.watch.monitor import read_flags

CONSTANT = "eval/constant"  # accuracy of the best constant strategy on the same rows
HOW_TO_KEEP = "keep='best' (--keep best) ends a run with the weights of its best evaluation."
# of the accuracy, or of the reward's range: smaller falls occur in every run
_WORTH_SAYING = 0.05
# measure -> its name in a line, and its format
_IN_WORDS = {
    "completion_length": ("length", ".0f"),
    "completion_cut_off": ("cut off", ".0%"),
    "entropy": ("entropy", ".2f"),
}
Row = Mapping[str, Any]  # of metrics
Change = tuple[int, str]  # the first step trained with it, and the changed values


@dataclass
class RunState:
    """Rows of metrics by step, red flags and changes of a run so far. stopped: a sentence if it was killed, else "".

    >>> RunState({1: {"step": 1, "reward": 0.5, "seconds": 65.0}}).step_line(1, 2)
    'step 1/2  reward 0.50  1 min 5 s left'
    """

    rows: dict[int, Row] = field(default_factory=dict)
    flags: list[Flag] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    stopped: str = ""

    @classmethod
    def read(cls, folder: str | Path) -> RunState:
        """A run folder's, also while the run writes it; refused changes are left out.

        Raises the RunFolderError of read_metrics.
        """
        changes = [
            (int(line["step"]), change_text(line["change"], line["was"]))
            for line in read_changes(folder)
            if "change" in line
        ]
        state = cls({}, read_flags(folder), changes)
        state.add(read_metrics(folder).to_dict("records"))
        path = path_of(folder)
        if is_locked(path) is False:
            way = "a new folder, then trainer.train(): no step was saved"
            if any(path.glob("checkpoint-*")):
                way = f"folder={str(folder)!r}, then trainer.train(resume=True)"
            state.stopped = (
                f"{killed_words(state.step, steps_asked_for(path))}; to go on: run the cells up to the trainer, "
                f"with {way}."
            )
        return state

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows; a later row of a step takes the place of an earlier one."""
        self.rows |= {int(row["step"]): row for row in rows}

    @property
    def step(self) -> int:
        """The last step; 0 before the first."""
        return max(self.rows, default=0)

    @property
    def seconds(self) -> float:
        """Seconds of training so far: the last row's, which leaves pauses out."""
        return self.rows.get(self.step, {}).get("seconds") or 0.0

    def seconds_left(self, total: int) -> float:
        """By the last steps' seconds; one that took ten times as long as usual is no estimate for the rest."""
        steps = sorted(step for step in self.rows if step > 0)
        if not steps:
            return 0.0
        ends = [0.0, *(self.rows[step].get("seconds") or 0.0 for step in steps)]
        durations = np.diff(ends[-21:])
        usual = durations[durations <= 10 * np.median(durations)]
        return usual.mean() * max(0, total - self.step)

    def measures(self) -> list[str]:
        """The last step's measures, a few words each; and the latest held-out accuracy or reward.

        >>> RunState({1: {"step": 1, "reward": 0.5, "completion_length": 11.2}}).measures()
        ['reward 0.50', 'length 11']
        """
        words = _measures(self.rows.get(self.step, {}))
        words[1:1] = held_out_lines(self.rows.values())[-1:]
        return words

    def step_line(self, step: int, total: int) -> str:
        """A step in one line, as a run prints it and as whoever follows the run reads it."""
        so_far = RunState({number: row for number, row in self.rows.items() if number <= step})
        time = f"{duration(so_far.seconds)} in all"
        if step < total:
            time = f"{duration(so_far.seconds_left(total))} left"
        return "  ".join([f"step {step}/{total}", *_measures(self.rows.get(step, {})), time])


def steps_asked_for(folder: str | Path) -> int:
    """How many steps a run is to have, with later changes of that; 0 if it does not say."""
    steps = (run_settings(folder) or {}).get("config", {}).get("steps", 0)
    for line in read_changes(folder):
        steps = line.get("change", {}).get("steps", steps)
    return steps


def killed_words(step: int, total: int) -> str:
    """The beginning of a sentence about a run whose process ended without a word."""
    return (
        f"This run stopped when its kernel was restarted or its process killed, at step {step} of {total} "
        "(unless another machine trains it)"
    )


def _measures(row: Row) -> list[str]:
    """The measures of a row, a few words each."""
    formats = {"reward": ("reward", ".2f")}
    formats |= {
        name: (name.removeprefix("reward/"), ".2f")
        for name in row
        if name.startswith("reward/")
    }
    words = []
    for name, (label, spec) in (formats | _IN_WORDS).items():
        value = value_of(row, name)
        if value is None:
            continue
        text = f"{label} {value:{spec}}"
        spread = value_of(row, "reward_std")
        if name == "reward" and spread is not None:
            text += f" ± {spread:.2f}"
        words.append(text)
    return words


def value_of(row: Row, name: str) -> float | None:
    """A measure of a row of metrics; None if it was not measured."""
    value = row.get(name)
    return None if value is None or value != value else float(value)


def flag_line(flag: Flag) -> str:
    """A red flag in one line."""
    return f"Red flag: {flag}"


def change_line(change: Change) -> str:
    """A change in one line.

    >>> change_line((6, "beta 0 → 0.04"))
    'From step 6: beta 0 → 0.04'
    """
    step, text = change
    return f"From step {step}: {text}"


def change_text(change: Mapping[str, Any], was: Mapping[str, Any]) -> str:
    """One change in words.

    >>> change_text({"learning_rate": 1e-5, "beta": 0.1}, {"learning_rate": 2e-05})
    'learning_rate 2e-05 → 1e-05, beta → 0.1'
    """
    words = []
    for name, value in change.items():
        before = f" {was[name]}" if name in was else ""
        words.append(f"{name}{before} → {value}")
    return ", ".join(words)


def held_out_lines(rows: Iterable[Row]) -> list[str]:
    """A line for each held-out evaluation in these rows."""
    return [*filter(None, map(held_out_words, rows))]


def held_out_words(row: Row) -> str | None:
    """The held-out measure of a row of metrics, the constant answer first if it is no better; None without a measure.

    >>> held_out_words({"step": 48, "eval/accuracy": 0.467, "eval/accuracy_low": 0.35, "eval/constant": 0.45})
    'no better than a constant answer (45%): held-out accuracy 47% (step 48)'
    >>> held_out_words({"step": 8, "eval/reward": 0.27}), held_out_words({"step": 9})
    ('held-out reward 0.27 (step 8)', None)
    """
    step = int(row["step"])
    accuracy = value_of(row, ACCURACY)
    reward = value_of(row, REWARD)
    if accuracy is not None:
        words = f"held-out accuracy {accuracy:.0%} (step {step})"
        if no_better(row):
            return f"no better than a constant answer ({row[CONSTANT]:.0%}): {words}"
        return words
    if reward is not None:
        return f"held-out reward {reward:.2f} (step {step})"
    return None


def no_better(row: Row) -> bool:
    """Does the accuracy's interval reach down to the best constant strategy's accuracy? False before the first step."""
    low = value_of(row, f"{ACCURACY}_low")
    constant = value_of(row, CONSTANT)
    if low is None or not constant:
        return False
    return row["step"] > 0 and low <= constant


def leading(metrics: pd.DataFrame) -> str | None:
    """The column that ranks held-out evaluations: the reward if it was measured for that; None without evaluations."""
    recorded = [
        name for name in (REWARD, ACCURACY) if name in metrics and metrics[name].notna().any()
    ]
    if not recorded:
        return None
    if REWARD in recorded and f"{REWARD}_low" in metrics:
        return REWARD
    return recorded[-1]


def better_before(metrics: pd.DataFrame) -> str | None:
    """One sentence on a held-out evaluation that was better than the last; None if none was by 5 points or more.

    >>> table = pd.DataFrame({"step": [0, 16, 48], "eval/accuracy": [0.17, 0.63, 0.47]})
    >>> better_before(table)
    'Held-out accuracy was 63 % after step 16 and is 47 % after the last, 48.'
    """
    name = leading(metrics)
    if name is None:
        return None
    rows = metrics[metrics[name].notna()]
    values = rows[name].astype(float)
    best = rows.loc[values.idxmax()]
    last = rows.iloc[-1]
    unit = max(1.0, values.abs().max())
    before = f"{best[name]:.2f}"
    after = f"{last[name]:.2f}"
    if name == ACCURACY:
        unit = 1.0
        before = f"{100 * best[name]:.0f} %"
        after = f"{100 * last[name]:.0f} %"
    if not best[name] - last[name] >= _WORTH_SAYING * unit:
        return None
    best_step = f"after step {int(best['step'])}"
    if best["step"] == 0:
        best_step = "before the first step"
    low = value_of(best, f"{name}_low")
    chance = "; the fall may be chance" if low is not None and last[name] >= low else ""
    return (
        f"Held-out {name.removeprefix('eval/')} was {before} {best_step} and is {after} after the last, "
        f"{int(last['step'])}{chance}."
    )

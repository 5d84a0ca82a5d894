"""What a run has shown so far: its rows, red flags and changes, read from its folder or told step by step; in words."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_kit._support.display import duration
from grpo_kit.record.control import read_changes
from grpo_kit.record.files import read_metrics
from grpo_kit.watch._flags import Flag
from grpo_kit.watch._held_out_words import held_out_words, value_of
from grpo_kit.watch.monitor import read_flags

# measure -> its name in a line, and its format
_SHOWN = {
    "completion_length": ("length", ".0f"), "completion_cut_off": ("cut off", ".0%"), "entropy": ("entropy", ".2f"),
}  # fmt: skip
Change = tuple[int, str]  # the first step trained with it, and the changed values


@dataclass
class RunState:
    """Rows of metrics by step, red flags and changes of a run so far.

    >>> RunState({1: {"step": 1, "reward": 0.5, "seconds": 65.0}}).step_line(1, 2)
    'step 1/2  reward 0.50  1 min 5 s left'
    """

    rows: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    flags: list[Flag] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)

    @classmethod
    def read(cls, folder: str | Path) -> RunState:
        """A run folder's, also while the run writes it. Raises the RunFolderError of read_metrics."""
        state = cls({}, read_flags(folder), _changes_of(folder))
        state.add(read_metrics(folder).to_dict("records"))
        return state

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows; a later row of a step takes the place of an earlier one."""
        self.rows |= {int(row["step"]): row for row in rows}

    @property
    def step(self) -> int:
        """The last step; 0 before the first."""
        return max(self.rows, default=0)

    @property
    def trained(self) -> float:
        """Seconds of training so far: the last row's, which leaves pauses out."""
        return self.rows[self.step].get("seconds") or 0.0 if self.rows else 0.0

    def seconds_left(self, total: int) -> float:
        """By the last steps' seconds; one that took ten times as long as usual is no estimate for the rest."""
        ends = [row.get("seconds") or 0.0 for _, row in sorted(self.rows.items()) if row["step"] > 0]
        ends = [0.0, *ends][-21:]
        lasted = [after - before for before, after in zip(ends, ends[1:], strict=False)]
        if not lasted:
            return 0.0
        usual = statistics.median(lasted)
        return statistics.mean(s for s in lasted if s <= 10 * usual) * max(0, total - self.step)

    def measures(self) -> list[str]:
        """The last step's measures, a few words each; and the latest held-out accuracy or reward.

        >>> RunState({1: {"step": 1, "reward": 0.5, "completion_length": 11.2}}).measures()
        ['reward 0.50', 'length 11']
        """
        words = _measured(self.rows.get(self.step, {}))
        words[1:1] = held_out_lines(self.rows.values())[-1:]
        return words

    def step_line(self, step: int, total: int) -> str:
        """A step in one line, as a run prints it and as whoever follows the run reads it."""
        so_far = RunState({n: row for n, row in self.rows.items() if n <= step})
        left = (
            f"{duration(so_far.seconds_left(total))} left"
            if step < total
            else f"{duration(so_far.trained)} in all"
        )
        return "  ".join([f"step {step}/{total}", *_measured(self.rows.get(step, {})), left])


def _measured(row: Mapping[str, Any]) -> list[str]:
    """The measures of a row, a few words each."""
    parts = {name: (name.removeprefix("reward/"), ".2f") for name in row if name.startswith("reward/")}
    shown = {"reward": ("reward", ".2f")} | parts | _SHOWN
    values = {name: value_of(row, name) for name in (*shown, "reward_std")}
    words = {n: f"{label} {values[n]:{how}}" for n, (label, how) in shown.items() if values[n] is not None}
    if "reward" in words and values["reward_std"] is not None:
        words["reward"] += f" ± {values['reward_std']:.2f}"
    return list(words.values())


def held_out_lines(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line for each held-out evaluation in these rows."""
    return [line for row in rows if (line := held_out_words(row)) is not None]


def flag_line(flag: Flag) -> str:
    """A red flag in one line."""
    return f"Red flag: {flag}"


def change_line(change: Change) -> str:
    """A change in one line.

    >>> change_line((6, "beta 0 → 0.04"))
    'From step 6: beta 0 → 0.04'
    """
    return f"From step {change[0]}: {change[1]}"


def _changes_of(folder: str | Path) -> list[Change]:
    """The changes made while a run trained, in words; refused changes are left out.

    >>> _changes_of("runs/no-such-run")
    []
    """
    made = [line for line in read_changes(folder) if "change" in line]
    return [(int(line["step"]), change_text(line["change"], line.get("was") or {})) for line in made]


def change_text(change: Mapping[str, Any], was: Mapping[str, Any]) -> str:
    """One change in words.

    >>> change_text({"learning_rate": 1e-5, "beta": 0.1}, {"learning_rate": 2e-05})
    'learning_rate 2e-05 → 1e-05, beta → 0.1'
    """
    words = [
        f"{name} {was[name]} → {new}" if name in was else f"{name} → {new}" for name, new in change.items()
    ]
    return ", ".join(words)

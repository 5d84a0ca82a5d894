"""Red flags: failures in a run, with first step, evidence, reason and first remedy.

`red_flags` is a pure function of the metrics so far; `Monitor` calls it after each step of a running trainer.
"""

import json
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from grpo_kit.record._lines import LineFile, write_lines
from grpo_kit.record._run_folder import path_of
from grpo_kit.rewards.cancel import cancelled_groups
from grpo_kit.rewards.form import SCRIPTS, script_of, script_share
from grpo_kit.watch._diversity import group_diversity
from grpo_kit.watch._flags import OF_PARTS, OF_ROLLOUTS, OF_STEPS
from grpo_kit.watch._red_flag import Flag, Setup, Steps, scale_columns

OnFlag = Literal["warn", "stop"] | Callable[[Flag], Any]

_GROUPS, _LETTERS = 4, 1000  # of a step, and of each completion: limits of the measuring cost
# of 1: rewards that differ by less are equal; float32 sums of equal parts differ by 1e-7
_SAME = 1e-6


def red_flags(metrics: pd.DataFrame, config: Mapping[str, Any] | None = None) -> list[Flag]:
    """The failures in a run so far, each flag once, in the order of their first steps.

    metrics: one row a step, from read_metrics; measures of completions (diversity/..., script/..., scale/...) are
    those that the trainer recorded, see completion_measures.
    config: the run's run.json; without it no part is assumed to have weight 0.
    A reward's scale is its stated range, else [0, 1] extended to the scores so far.
    A flag that lacks a column or steps (spikes need 5, states 3 to 5) is not raised.
    Raises ValueError if metrics has no column step.

    >>> held_out = {"step": [8], "eval/one_answer": [1.0], "eval/one_gold": [0.1]}
    >>> [flag.name for flag in red_flags(pd.DataFrame(held_out))]
    ['one answer']
    """
    if "step" not in metrics:
        raise ValueError(
            f"metrics has the columns {list(metrics)}, but no step; give read_metrics(folder)"
        )
    setup = Setup.of(config)
    table = metrics.sort_values("step").reset_index(drop=True)
    if "groups/equal_rewards" not in table and "frac_reward_zero_std" in table:
        table = table.assign(**{"groups/equal_rewards": table["frac_reward_zero_std"]})
    held_out = table.filter(regex="^eval/")
    if setup.age:  # measured while a rollout was reused: reported with the next one
        held_out = held_out.ffill(limit=setup.age)
    rows_of = [
        (OF_ROLLOUTS, _rows_with_any(table.assign(**held_out), ["reward"])),
        (OF_PARTS, _rows_with_any(table, ["reward", "completion_length"])),
        (OF_STEPS, table),
    ]
    flags = []
    for finders, rows in rows_of:
        steps = Steps(rows, setup)
        flags += [flag for find in finders if (flag := find(steps)) is not None]
    return sorted(flags, key=lambda flag: flag.step)


def _rows_with_any(table: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """The rows in which one of these measures is there; all of them if none was recorded."""
    recorded = [name for name in names if name in table]
    if not recorded:
        return table
    return table[table[recorded].notna().any(axis=1)].reset_index(drop=True)


def completion_measures(
    completions: pd.DataFrame, *, weights: Mapping[str, float] | None = None
) -> pd.DataFrame:
    """Per step, the measures of completions for the flags, from at most 4 groups a step and 1,000 characters of each.

    completions: from read_completions. weights: of the reward parts by name; parts of weight 0 do not count
    as cancelling.
    Returns step; diversity/... (see group_diversity); script/<name>, for each script the mean share of a
    completion's letters in it (completions of tags and digits only count as the commonest);
    groups/equal_rewards, the share of groups whose rewards do not differ; scale/<reward>/low and /high, the ends of a
    reward's or a part's scores if some lie outside [0, 1]; frac_cancelled_groups (see cancelled_groups), if there
    are several parts.

    >>> table = pd.DataFrame({"step": 1, "group": 0, "completion": ["yes", "да"], "reward": [1.0, 0.0]})
    >>> completion_measures(table)[["script/latin", "script/cyrillic", "groups/equal_rewards"]].iloc[0].tolist()
    [0.5, 0.5, 0.0]
    """
    is_read = completions.groupby("step")["group"].rank("dense") <= _GROUPS
    texts = completions["completion"].fillna("").str[:_LETTERS]
    first_groups = completions.assign(completion=texts)[is_read]
    scripts = [
        {"step": step} | _scripts(step_texts)
        for step, step_texts in first_groups.groupby("step")["completion"]
    ]
    table = pd.DataFrame(scripts).merge(group_diversity(first_groups), on="step", how="left")
    if "reward" not in completions:
        return table
    table = table.merge(_equal_rewards(completions), on="step", how="left")
    table = table.merge(_scales(completions), on="step", how="left")
    unused = [f"reward/{name}" for name, weight in (weights or {}).items() if weight == 0]
    with_weight = completions.drop(columns=unused, errors="ignore")
    if sum(str(name).startswith("reward/") for name in with_weight) > 1:
        cancelled = cancelled_groups(with_weight).rename(
            columns={"share": "frac_cancelled_groups"}
        )
        table = table.merge(cancelled[["step", "frac_cancelled_groups"]], on="step", how="left")
    return table


def _equal_rewards(completions: pd.DataFrame) -> pd.Series:
    """Per step, the share of groups whose rewards do not differ."""
    rewards = completions.astype({"reward": float}).groupby(["step", "group"])["reward"]
    low = rewards.min()
    high = rewards.max()
    largest = np.maximum(low.abs(), high.abs())
    is_equal = (high - low) <= _SAME * np.maximum(1, largest)
    return is_equal.groupby("step").mean().rename("groups/equal_rewards")


def _scales(completions: pd.DataFrame) -> pd.DataFrame:
    """Per step, the ends of the rewards' and the parts' scores where some lie outside [0, 1]."""
    scores = completions.filter(regex="^reward(/|$)").astype(float)
    by_step = scores.groupby(completions["step"])
    low = by_step.min()
    high = by_step.max()
    is_outside = (low < -_SAME) | (high > 1 + _SAME)
    ends = {}
    for name in scores.columns[is_outside.any()]:
        low_column, high_column = scale_columns(name)
        ends[low_column] = low[name].where(is_outside[name])
        ends[high_column] = high[name].where(is_outside[name])
    return pd.DataFrame(ends, index=low.index).reset_index()


def _scripts(texts: Sequence[str]) -> dict[str, float]:
    """script/<name> -> the mean share of a completion's letters in that script."""
    texts = [text for text in texts if text.strip()]
    letters = Counter(map(script_of, "".join(texts)))
    scripts = [script for script, _ in letters.most_common() if script in SCRIPTS]
    if not scripts:
        return {}
    shares = pd.DataFrame({s: [script_share(text, (s,)) for text in texts] for s in scripts})
    if len(scripts) > 1:
        # A completion without letters scores 1.0 for every script: it counts as the commonest one.
        no_letters = shares.min(axis=1) == 1.0
        shares.loc[no_letters, scripts[1:]] = 0.0
    return {f"script/{script}": round(float(np.mean(shares[script])), 4) for script in scripts}


def read_flags(folder: str | Path) -> list[Flag]:
    """The red flags of a run folder, in the order in which they were raised; also while the run writes.

    A line that is no flag, such as one cut short by a kill or a full disk, gives a RuntimeWarning and is left out.

    >>> read_flags("runs/no-such-run")
    []
    """
    path = path_of(folder) / "flags.jsonl"
    data = path.read_bytes() if path.is_file() else b""
    flags = []
    for number, line in enumerate(data.splitlines(keepends=True), 1):
        try:
            if not line.endswith(b"\n"):
                raise ValueError("cut short")
            flags.append(Flag(**json.loads(line)))
        except (ValueError, TypeError, RecursionError):
            warnings.warn(
                f"{path}, line {number} is no whole flag ({line[:40]!r}) and is left out",
                RuntimeWarning,
                stacklevel=2,
            )
    return flags


class Monitor:
    """Watches one run: measures each step's completions, raises each flag once, appends it to flags.jsonl.

    on_flag: "warn" shows the flag, "stop" also ends training after the step, a callable is called with the flag.
    Errors in here never stop training: each gives one RuntimeWarning. A flag that cannot be written, on a full
    disk, is raised all the same; it is kept, and written at a later step or in flush().
    Raises ValueError for another on_flag.
    """

    def __init__(self, on_flag: OnFlag) -> None:
        if on_flag not in ("warn", "stop") and not callable(on_flag):
            raise ValueError(
                f"on_flag={on_flag!r} must be 'warn', 'stop' or a callable f(flag)"
            )
        self.on_flag = on_flag
        self._file: LineFile | None = None
        self._disk_works = True
        self.begin(Path(), {}, [])

    def begin(
        self, folder: Path, config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
    ) -> None:
        """Begin a run in `folder`, or continue from `rows`; flags raised before are not raised again."""
        if self._file is None or self._file.path.parent != folder:
            self._file = LineFile(folder / "flags.jsonl")
        self.flush()
        self._config = config
        self._rows = list(rows)
        flags = self._guard(read_flags, folder) or []
        self._raised = {flag.name for flag in flags}
        self._raised |= {json.loads(line)["name"] for line in self._file.waiting}

    def measure(self, completions: pd.DataFrame | None) -> dict[str, float]:
        """The measures of a step's completions, for its row."""
        if completions is None or not len(completions):
            return {}
        weights = Setup.of(self._config).weights
        table = self._guard(completion_measures, completions, weights=weights)
        if table is None:
            return {}
        return table.iloc[-1].drop("step").dropna().to_dict()

    def step(self, row: Mapping[str, Any]) -> list[Flag]:
        """Add a finished step's row; returns the flags raised by it, already written unless the disk is full."""
        if self._rows and self._rows[-1]["step"] == row["step"]:
            self._rows.pop()
        unjudged = {f"reward/{part}": np.nan for part in self._config.get("reward_parts") or ()}
        self._rows.append(unjudged | row)
        flags = self._guard(red_flags, pd.DataFrame(self._rows), config=self._config) or []
        new = [flag for flag in flags if flag.name not in self._raised]
        for flag in new:
            self._raised.add(flag.name)
            self._file.waiting.append((json.dumps(asdict(flag)) + "\n").encode())
            if callable(self.on_flag):
                self._guard(self.on_flag, flag)
        self.flush()
        return new

    def flush(self) -> bool:
        """Write the waiting flags; True if none waits any more. Warns once each time the disk fails."""
        advice = (
            "Red flags are kept in memory and tried again at the next step. Free some space."
        )
        self._disk_works = write_lines(
            [self._file], self._file.path, advice, warns=self._disk_works
        )
        return self._disk_works

    def _guard(self, work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """The result of the work; None, and a warning, where it failed: watching must never stop training."""
        try:
            return work(*arguments, **options)
        except Exception as error:
            warnings.warn(
                f"The red flags stumbled ({type(error).__name__}: {error}); training goes on.",
                RuntimeWarning,
                stacklevel=3,
            )
            return None

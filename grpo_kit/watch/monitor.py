"""Red flags: failures in a run, with first step, evidence, reason and first remedy.

`red_flags` is a pure function of the metrics so far; `Monitor` calls it after each step of a running trainer.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from grpo_kit.record._lines import LineFile, RunFolderError, reading
from grpo_kit.record.run_path import path_of
from grpo_kit.rewards.cancel import cancelled_groups
from grpo_kit.rewards.form import SCRIPTS, Language, script_of
from grpo_kit.watch._curves import scale_columns
from grpo_kit.watch._flags import OF_PARTS, OF_ROLLOUTS, OF_STEPS, Flag, Setup
from grpo_kit.watch.diversity import group_diversity

OnFlag = Literal["warn", "stop"] | Callable[[Flag], Any]

_GROUPS, _LETTERS = 4, 1000  # of a step, and of each completion: limits of the measuring cost
_SAME = 1e-6  # of 1: rewards that differ by less are equal; float32 sums of equal parts differ by 1e-7
COLUMNS = (
    "step", "loss", "learning_rate", "kl", "grad_norm", "entropy", "completion_length", "completion_cut_off",
    "clip_ratio", "reward", "reward/", "frac_reward_zero_std", "frac_cancelled_groups",
    "completions/max_terminated_length", "rollout/logprob_gap", "rollout/age", "diversity/", "script/", "groups/",
    "scale/", "eval/",
)  # fmt: skip
"""What the flags read of a run's metrics; a name that ends in / stands for all that begin with it."""
PREFIXES = tuple(name for name in COLUMNS if name.endswith("/"))


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
        raise ValueError(f"metrics has the columns {list(metrics)}, but no step; give read_metrics(folder)")
    setup = Setup.of(config)
    table = metrics.sort_values("step").reset_index(drop=True)
    if "groups/equal_rewards" not in table and "frac_reward_zero_std" in table:
        table = table.assign(**{"groups/equal_rewards": table["frac_reward_zero_std"]})
    held_out = table.filter(regex="^eval/")
    if setup.age and len(held_out.columns):  # measured while a rollout was reused: reported with the next one
        held_out = held_out.ffill(limit=setup.age)
    sampled = table.assign(**held_out)
    sampled = sampled[sampled["reward"].notna()].reset_index(drop=True) if "reward" in table else sampled
    there = [name for name in ("reward", "completion_length") if name in table]
    asked = table[table[there].notna().any(axis=1)].reset_index(drop=True) if there else table
    rows = [(OF_ROLLOUTS, sampled), (OF_PARTS, asked), (OF_STEPS, table)]
    found = [find(some, setup) for finders, some in rows for find in finders]
    return sorted((flag for flag in found if flag is not None), key=lambda flag: flag.step)


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
    first = completions[completions.groupby("step")["group"].rank("dense") <= _GROUPS]
    first = first.assign(completion=first["completion"].fillna("").str[:_LETTERS])
    table = group_diversity(first)
    scripts = [{"step": step} | _scripts(texts) for step, texts in first.groupby("step")["completion"]]
    table = pd.DataFrame(scripts).merge(table, on="step", how="left")
    if "reward" not in completions:
        return table
    by_group = completions.astype({"reward": float}).groupby(["step", "group"])["reward"]
    least, most = by_group.min(), by_group.max()
    same = _SAME * np.maximum(1, np.maximum(least.abs(), most.abs()))
    equal = ((most - least) <= same).groupby("step").mean().rename("groups/equal_rewards")
    table = table.merge(equal, on="step", how="left").merge(_scales(completions), on="step", how="left")
    watched = [f"reward/{name}" for name, weight in (weights or {}).items() if weight == 0]
    judged = completions.drop(columns=[name for name in watched if name in completions])
    if sum(str(name).startswith("reward/") for name in judged) > 1:
        shares = cancelled_groups(judged).set_index("step")["share"].rename("frac_cancelled_groups")
        table = table.merge(shares, on="step", how="left")
    return table


def _scales(completions: pd.DataFrame) -> pd.DataFrame:
    names = [name for name in completions if name == "reward" or str(name).startswith("reward/")]
    by_step = completions.astype(dict.fromkeys(names, float)).groupby("step")[names]
    least, most, ends = by_step.min(), by_step.max(), {}
    for name in names:
        low, high = least[name], most[name]
        outside = (low < -_SAME) | (high > 1 + _SAME)
        if outside.any():
            ends |= dict(zip(scale_columns(name), (low.where(outside), high.where(outside)), strict=True))
    return pd.DataFrame(ends, index=least.index).reset_index()


def _scripts(texts: Sequence[str]) -> dict[str, float]:
    texts = [text for text in texts if text.strip()]
    letters: dict[str, int] = {}
    for letter in "".join(texts):
        script = script_of(letter)
        letters[script] = letters.get(script, 0) + 1
    found = sorted((s for s in letters if s in SCRIPTS), key=lambda s: -letters[s])
    if not found:
        return {}
    scores = {script: Language(script)(texts) for script in found}
    commonest = found[0]
    # A completion without letters scores 1.0 for every script.
    bare = [len(found) > 1 and min(s[i] for s in scores.values()) == 1.0 for i in range(len(texts))]
    means = {
        s: np.mean([0.0 if bare[i] and s != commonest else v for i, v in enumerate(scores[s])]) for s in found
    }
    return {f"script/{script}": round(float(mean), 4) for script, mean in means.items()}


def read_flags(folder: str | Path) -> list[Flag]:
    """The red flags of a run folder, in the order in which they were raised; also while the run writes.

    A line that is no flag, such as one cut short by a kill or a full disk, gives a RuntimeWarning and is left out.

    >>> read_flags("runs/no-such-run")
    []
    """
    path = path_of(folder) / "flags.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    flags = []
    for number, line in enumerate(lines, 1):
        try:
            with reading(path):
                if not line.endswith(b"\n"):
                    raise ValueError("cut short")
                flags.append(Flag(**json.loads(line)))
        except RunFolderError:
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
            raise ValueError(f"on_flag={on_flag!r} must be 'warn', 'stop' or a callable f(flag)")
        self.on_flag = on_flag
        self._file: LineFile | None = None
        self._disk_failing = False
        self.begin(Path(), {}, [])

    def begin(self, folder: Path, config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        """Begin a run in `folder`, or continue from `rows`; flags raised before are not raised again."""
        same = self._file is not None and self._file.path.parent == folder
        self._file = self._file if same else LineFile(folder / "flags.jsonl")
        self.flush()
        self._config = config
        self._rows = [_slim(row) for row in rows]
        waiting = [json.loads(line)["name"] for line in self._file.waiting]
        self._raised = {*waiting, *(flag.name for flag in self._guard(read_flags, folder) or [])}
        self._weights = Setup.of(config).weights

    def measure(self, completions: pd.DataFrame | None) -> dict[str, float]:
        """The measures of a step's completions, for its row."""
        if completions is None or not len(completions):
            return {}
        table = self._guard(completion_measures, completions, weights=self._weights)
        return {} if table is None else {k: v for k, v in table.iloc[-1].items() if k != "step" and v == v}

    def step(self, row: Mapping[str, Any]) -> list[Flag]:
        """Add a finished step's row; returns the flags raised by it, already written unless the disk is full."""
        unjudged = {f"reward/{part}": np.nan for part in self._config.get("reward_parts") or ()}
        self._rows = [
            *self._rows[: -1 if self._rows and self._rows[-1]["step"] == row["step"] else None],
            unjudged | _slim(row),
        ]
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
        try:
            self._file.write()
        except OSError as error:
            if not self._disk_failing:
                warnings.warn(
                    f"{self._file.path} cannot be written ({error}). Red flags are kept in memory and tried again at "
                    "the next step. Free some space.",
                    RuntimeWarning,
                    stacklevel=3,
                )
            self._disk_failing = True
            return False
        self._disk_failing = False
        return True

    def _guard(self, work: Callable[..., Any], *given: Any, **options: Any) -> Any:
        try:
            return work(*given, **options)
        except Exception as error:  # watching must never stop training
            warnings.warn(
                f"The red flags stumbled ({type(error).__name__}: {error}); training goes on.",
                RuntimeWarning,
                stacklevel=3,
            )
            return None


def _slim(row: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if k in COLUMNS or k.startswith(PREFIXES)}

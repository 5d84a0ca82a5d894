"""A laboratory: the same training under several settings (arms) and seeds, everything else equal.

Every run has its own run folder, folder/<arm>/seed-<n>, with result.json once it is finished. A finished run is never
repeated, so a killed laboratory continues where it was. Several processes may work on one folder. Functions and
classes among the settings are identified by name: after changing one's code, rename the arm. Longer than 300 lines
because the runs and the table that reads them check the same settings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from filelock import FileLock, Timeout

from grpo_kit._support.argument_checks import is_whole
from grpo_kit._support.display import progress_line
from grpo_kit.evaluation.intervals import Estimate
from grpo_kit.more.lab._arm import Arm, arm_of, fingerprint, outcomes, unlike
from grpo_kit.more.lab._run import (
    RESULT,
    RunProgress,
    before_training,
    print_flag,
    run,
    set_aside,
)
from grpo_kit.more.lab.figures import draw_lab
from grpo_kit.more.lab.statistics import difference_over_seeds, holm, over_seeds, paired_scalars
from grpo_kit.record._lines import read_json
from grpo_kit.record._run_folder import path_of, run_path
from grpo_kit.record.files import RunFolderError, read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from grpo_kit.loop.config import Config

_BY_NAME = "functions and classes are known by name: name the arm otherwise when you change the code of one"


@dataclass(frozen=True)
class Lab:
    """The result of compare_arms().

    arms: those with a finished run. against: the first arm of the call, with which the others are compared; it is
    not among the arms as long as none of its runs is finished.
    runs: one row a run (tidy): arm, seed, accuracy, before (the untrained model, without prepare=), formatted,
    reward_mean (mean of the reward over all rollouts: how fast the arm learned), reward_last, entropy_last, length_last
    and kl_last (over the last quarter), reward_roughness (mean distance of a rollout's reward from the mean of its two
    neighbours: 0 for a curve that rises evenly), reward/<name>_mean and _last of each reward, also those of weight 0,
    grad_norm_max, grad_norm_early (mean of the first 5 steps), pass@<eval_samples>_<temperature>, cost, and everything
    else in a run's result.json.
    right: (arm, seed) -> 0/1 for each held-out row. curves: one row per step and run.
    """

    arms: list[str]
    runs: pd.DataFrame
    right: dict[tuple[str, int], list[int]]
    curves: pd.DataFrame
    against: str

    def seeds(self, *arms: str) -> list[int]:
        """The seeds that every one of these arms (default: all) has."""
        sets = [
            set(self.runs.loc[self.runs["arm"] == arm, "seed"]) for arm in arms or self.arms
        ]
        return sorted(map(int, set.intersection(*sets)))

    def accuracy(self, arm: str) -> Estimate:
        """Final held-out accuracy over seeds, with an interval for seeds and rows."""
        self._check(arm)
        return over_seeds([self.right[arm, seed] for seed in self.seeds(arm)])

    def difference(
        self,
        arm: str,
        against: str | None = None,
        *,
        outcome: str = "accuracy",
        null: float = 0.0,
    ) -> dict[str, Any]:
        """arm minus against (default: the first arm), paired by seed: mean, low, high (95 %), p, seeds.

        null: the difference that p is tested against: minus a margin to test "no worse by more than that".
        outcome: "accuracy" is paired by held-out row too, if both have equally many; else a column of runs. Only seeds
        with a value in both count. This p is not corrected for the number of outcomes; summary()'s is.
        Raises ValueError for an unknown arm or column, and if the two share no seed.
        """
        against = self.against if against is None else against
        self._check(arm, against)
        seeds = self.seeds(arm, against)
        if not seeds:
            raise ValueError(
                f"{arm!r} and {against!r} have no seed in common; run both with the same seeds"
            )
        if outcome == "accuracy":
            first, second = (
                [self.right[name, seed] for seed in seeds] for name in (against, arm)
            )
            if len({len(rows) for rows in [*first, *second]}) == 1:
                mean, p = difference_over_seeds(first, second, null=null)
                return {
                    "mean": mean.value,
                    "low": mean.low,
                    "high": mean.high,
                    "p": p,
                    "seeds": len(seeds),
                }
        numbers = self.runs.select_dtypes("number")
        if outcome not in numbers:
            raise ValueError(
                f"outcome={outcome!r} is no column of numbers in runs; use one of {', '.join(numbers)}"
            )
        by_seed = self.runs.pivot(index="seed", columns="arm", values=outcome)
        by_seed = by_seed.loc[seeds, [against, arm]].dropna()
        if not len(by_seed):
            raise ValueError(
                f"outcome={outcome!r} was not measured in {arm!r} and {against!r} with the same seed"
            )
        mean, low, high, p = paired_scalars(
            by_seed[against].tolist(), by_seed[arm].tolist(), null=null
        )
        return {"mean": mean, "low": low, "high": high, "p": p, "seeds": len(by_seed)}

    def unlike(self, arm: str, against: str | None = None) -> list[str]:
        """Differences between the arm's runs and those of against (default: the first arm), besides the settings.

        Other train rows, steps, token limits, held-out rows; more or fewer completions and tokens by over 10 %.

        >>> lab.unlike("twice the group")  # doctest: +SKIP
        ['2.0 x the completions', '2.0 x the tokens']
        """
        against = self.against if against is None else against
        self._check(arm, against)
        return unlike(self.runs, arm, against)

    def summary(self) -> pd.DataFrame:
        """One row an arm: accuracy and its difference to the first arm with 95 % intervals, p (Holm), speed and cost.

        unlike: further differences of the arm from the first, see unlike().
        completions and tokens: of all rollouts, used or not, counted once however often they are trained on; tokens
        counts a prompt with each of its completions. seconds: of training with prepare=, on a machine that may have
        done other work.
        """
        rows = []
        for arm in self.arms:
            runs, accuracy = self.runs[self.runs["arm"] == arm], self.accuracy(arm)
            difference, differences = {}, []
            if arm != self.against and self.against in self.arms:
                differences = self.unlike(arm)
                if self.seeds(arm, self.against):
                    difference = self.difference(arm)
            rows.append(
                {
                    "arm": arm,
                    "seeds": len(runs),
                    "n": accuracy.n,
                    "before": runs["before"].mean(),
                    "accuracy": accuracy.value,
                    "low": accuracy.low,
                    "high": accuracy.high,
                    "reward_mean": runs["reward_mean"].mean(),
                    "difference": difference.get("mean"),
                    "d_low": difference.get("low"),
                    "d_high": difference.get("high"),
                    "p": difference.get("p"),
                    **runs[["steps", "completions", "tokens", "seconds"]].mean(),
                    "unlike": "; ".join(differences),
                }
            )
        table = pd.DataFrame(rows).set_index("arm")
        table.insert(table.columns.get_loc("p") + 1, "p_holm", holm(table["p"]))
        return table

    def figure(self) -> Figure:
        """Reward curves with bands, final accuracy, differences to the first arm, and cost."""
        return draw_lab(self.summary(), self.runs, self.curves, against=self.against)

    def _check(self, *arms: str) -> None:
        for name in arms:
            if name not in self.arms:
                raise ValueError(
                    f"arm {name!r} has no finished run; use one of {', '.join(self.arms)}"
                )

    def _repr_html_(self) -> str:
        return self.summary().to_html(float_format="{:.3g}".format, na_rep="")


def compare_arms(
    arms: Mapping[str, Mapping[str, Any]],
    seeds: Sequence[int],
    config: Config | str = "auto",
    *,
    folder: str | Path,
    quiet: bool = False,
    **shared: Any,
) -> Lab:
    """Train every arm with every seed and compare their held-out accuracy.

    arms: {name: changes of the config, and its own task, sample, prepare, ... (see lab.arm.arm_of)}; the others are
    compared with the first. config: of all arms, or the name of a preset. shared: further changes of them all, such as
    task=task. folder: of the runs. Finished runs there are not repeated, and all their seeds for these arms are in the
    result. A function or class is identified by its name alone: after changing its code, rename the arm.
    Seeds go first to last, each through all arms, so that an unfinished table is fair. Runs of another process are left
    to it, and are not in the result. One line shows the present run and step, and the time for all; each red flag one.
    At the end it prints which arms had other train rows, steps, token limits or compute than the first (Lab.unlike).
    The stop button saves and raises Stopped; the next call continues there.
    Raises ValueError for unknown names and for no seeds; RunFolderError if the folder holds an arm of that name with
    other settings, or if another process has all remaining runs and none is finished.

    >>> arms = {"as it is": {}, "cold": {"temperature": 0.5}}
    >>> compare_arms(arms, [0, 1, 2], kit.preset("cpu", steps=12), folder="runs/cold")  # doctest: +SKIP
    """
    folder = run_path(folder)
    # All checks come before the first run.
    seeds = _checked_seeds(arms, seeds)
    settings = _checked_arms(folder, arms, config, shared)
    (folder / ".locks").mkdir(parents=True, exist_ok=True)
    runs = {(seed, arm): folder / arm / f"seed-{seed}" for seed in seeds for arm in arms}
    waiting = [run for run, path in runs.items() if not (path / RESULT).exists()]
    finished = len(runs) - len(waiting)
    printed_flags: set[tuple[str, str]] = set()
    with progress_line(f"laboratory {folder.name}") as line:
        if finished and not quiet:
            line.print(
                f"{finished} of {len(runs)} runs were done before, under the same settings; {_BY_NAME}"
            )
        for number, ((seed, arm), path) in enumerate(runs.items(), 1):
            label = f"{number}/{len(runs)} {arm}, seed {seed}"
            lock_path = folder / ".locks" / f"{arm}--{seed}.lock"
            try:
                lock = FileLock(lock_path).acquire(blocking=False)
            except Timeout:
                line.print(f"{label}: another process is at it")
                continue
            with lock:  # releases it in every case
                if (path / RESULT).exists():
                    _check_settings(path, settings[arm])
                    continue
                if unfinished := set_aside(path, settings[arm]):
                    line.print(f"{label}: an unfinished run is now {unfinished.name}")
                run_label = f"run {number} of {len(runs)} ({arm}, seed {seed})"
                result = run(
                    settings[arm],
                    seed,
                    path,
                    before=before_training(settings[arm], folder),
                    progress=RunProgress(
                        line, run_label, waiting.index((seed, arm)), len(waiting)
                    ),
                    on_flag=partial(print_flag, line, label, printed_flags),
                )
                if not quiet:
                    line.print(f"{label}: {Estimate(**result['accuracy'])}")
    lab = load(folder, list(arms))
    if not quiet and lab.against in lab.arms:
        for arm in lab.arms:
            if differences := lab.unlike(arm):
                print(
                    f"{arm} differs from {lab.against} in more than its settings: {'; '.join(differences)}"
                )
    return lab


def _checked_seeds(arms: Mapping[str, Any], seeds: Sequence[int]) -> list[int]:
    for seed in seeds:
        if not is_whole(seed, 0):
            raise ValueError(f"seeds holds {seed!r}; use whole numbers of at least 0")
    seeds = [int(seed) for seed in seeds]
    if not arms or not seeds or len(set(seeds)) != len(seeds):
        raise ValueError(
            f"arms={list(arms)}, seeds={seeds}: give at least one of each, no seed twice"
        )
    return seeds


def _checked_arms(
    folder: Path,
    arms: Mapping[str, Mapping[str, Any]],
    config: Config | str,
    shared: Mapping[str, Any],
) -> dict[str, Arm]:
    """Each arm's settings, by its name. Raises ValueError, and RunFolderError for finished runs of other settings."""
    settings = {}
    for arm, changes in arms.items():
        if not re.fullmatch(r"\w[\w .,+=-]*", arm):
            raise ValueError(
                f"arm {arm!r} becomes a folder's name; use letters, digits, blanks and .,+=-_, a letter or digit first"
            )
        settings[arm] = arm_of(config, {**shared, **changes})
        for path in _finished(folder, arm):
            _check_settings(path, settings[arm])
    return settings


def load(folder: str | Path, arms: Sequence[str] | None = None) -> Lab:
    """Reads the runs of a laboratory back from its folders: these arms, the first to compare with; or all, by name.

    Runs without result.json are left out. Raises RunFolderError if none is finished.
    """
    folder = path_of(folder)
    if arms is None:
        arms = sorted({path.parent.parent.name for path in folder.glob(f"*/seed-*/{RESULT}")})
    rows, right, curves = [], {}, []
    for arm in arms:
        for path in _finished(folder, arm):
            result, metrics = read_json(path / RESULT), read_metrics(path)
            right[arm, result["seed"]] = [int(digit) for digit in result["right"]]
            curves.append(metrics.assign(arm=arm, seed=result["seed"]))
            rows.append({"arm": arm, "n": result["accuracy"]["n"], **outcomes(result, metrics)})
    if not rows:
        raise RunFolderError(
            f"folder={str(folder)!r} holds no finished run of these arms; run compare_arms() first, or wait for the "
            "process that is at it"
        )
    runs = pd.DataFrame(rows)
    return Lab(
        list(runs["arm"].unique()),
        runs,
        right,
        pd.concat(curves, ignore_index=True),
        against=arms[0],
    )


def _finished(folder: Path, arm: str) -> list[Path]:
    """The folders of an arm's finished runs by seed; a person's copies have other names."""
    folders = [path.parent for path in folder.glob(f"{arm}/seed-*/{RESULT}")]
    folders = [path for path in folders if path.name[5:].isdecimal()]
    return sorted(folders, key=lambda path: int(path.name[5:]))


def _check_settings(path: Path, arm: Arm) -> None:
    """Raises RunFolderError if the finished run in `path` was made with other settings."""
    stored, present = read_json(path / RESULT)["settings"], fingerprint(arm)
    if stored != present:
        names = sorted(
            name for name in {*stored, *present} if stored.get(name) != present.get(name)
        )
        raise RunFolderError(
            f"{path} holds a finished run with other settings ({', '.join(names)}); give the arm another name, "
            f"or the laboratory another folder; {_BY_NAME}"
        )

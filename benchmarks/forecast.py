"""Where will a run end? Intervals after 8 steps, tried on recorded runs that they have not seen.

    python -m benchmarks.forecast          # reads recorded runs; trains nothing, ten seconds
    python -m benchmarks.forecast --table  # what is saved

The question: can 80 % intervals for the held-out accuracy at the end be had after 8 steps, that hold 76 to 84 % of the
runs of settings and of tasks that they have not seen, and are narrower than what is known without these steps? The
runs: advice_plan, agents_*.json and the arm "never hinted" of hinted_*.json that have 15 steps or more.

What an interval may know:
  before       nothing but the accuracy before: [before, 1]
  ends         the ends of the other runs: their quantiles
  start        also the accuracy before and the number of steps
  eight        also the share of completions that are right, in steps 1 to 4 and in steps 5 to 8
  signals      also steps 5 to 8's entropy, gradient norm, groups without a signal and length (the largest number only)
How: line, least squares and the 10 % and 90 % quantiles of its errors on units that it was not fitted on;
neighbours, these quantiles of the ends of the 60 nearest runs. A unit (a seed, an arm, a task) is never on both sides.
Units count alike, and so do the arms of a task. The share held has Student's 95 % interval over units; over arms where
seeds are unseen. Writes benchmarks/results/forecast.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import ndtri, stdtrit

from benchmarks.result import RESULTS, command_line, origin, write_result

PATH = RESULTS / "forecast.json"
STATED, STEPS, LEAST_STEPS, NEAREST = 0.8, 8, 15, 60
TAILS = (0.5 - STATED / 2, 0.5 + STATED / 2)
SIGNALS = ("grad_norm", "entropy", "frac_reward_zero_std", "completion_length")
START = ("before", "steps")
EIGHT = (*START, "right_1_to_4", "right_5_to_8")
KNOWN: dict[str, tuple[str, ...]] = {
    "ends": (),
    "start": START,
    "eight": EIGHT,
    "signals": (*EIGHT, *SIGNALS),
}
# the same episodes as "grid", only slower: no settings of its own
COPIES = ("grid, slow",)
Bounds = tuple[np.ndarray, np.ndarray]


def recorded() -> pd.DataFrame:
    """One row a run: task, arm, seed, n, end (held-out accuracy), and what is known after 8 steps."""
    rows = []
    for path in sorted((RESULTS / "advice_plan").glob("*/*.json")):
        saved = json.loads(path.read_text(encoding="utf-8"))
        outcomes, curve = saved["outcomes"], saved["curve"]
        task, judge = "largest", "reward/exact_answer"
        if judge not in curve:
            task, judge = "code", "reward/code_tests"
        row = {"task": task, "arm": saved["arm"], "seed": saved["seed"], "n": outcomes["n"]}
        row |= {"before": outcomes["before"], "end": outcomes["accuracy"]}
        row |= _early(curve[judge])
        row |= {name: _mean(curve[name][4:STEPS]) for name in SIGNALS}
        rows.append(row)
    rows += _episodes("agents", "sampled", lambda arm: arm not in COPIES)
    rows += _episodes("hinted", "without", lambda arm: arm == "never hinted")
    runs = pd.DataFrame(rows)
    # gradient norms of two rates differ by factors
    runs["grad_norm"] = np.log(runs["grad_norm"] + 1e-3)
    return runs[runs["steps"] >= LEAST_STEPS].reset_index(drop=True)


def _episodes(name: str, how: str, wanted: Callable[[str], bool]) -> list[dict[str, Any]]:
    """Runs of episodes: an evaluation has the successes of 4 episodes a held-out row."""
    saved = json.loads((RESULTS / f"{name}_smollm2-135m-instruct.json").read_text("utf-8"))
    rows = []
    for run in saved["runs"]:
        if not wanted(run["arm"]):
            continue
        task = "grid" if name == "hinted" else run["arm"].split(",")[0]
        row = {
            "task": task,
            "arm": run["arm"],
            "seed": run["seed"],
            "n": len(run["after"][how]),
        }
        row |= {"before": _mean(run["before"][how]) / 4, "end": _mean(run["after"][how]) / 4}
        rows.append(row | _early(run["success"]))
    return rows


def _early(right: Sequence[float | None]) -> dict[str, float]:
    parts = {"right_1_to_4": _mean(right[:4]), "right_5_to_8": _mean(right[4:STEPS])}
    return {"steps": len(right)} | parts


def _mean(values: Sequence[float | None]) -> float:
    """Of the steps that sampled: an iteration on older completions has no number of its own."""
    numbers = [value for value in values if value is not None]
    return float(np.mean(numbers)) if numbers else float("nan")


def weights(runs: pd.DataFrame, unit: str) -> np.ndarray:
    """Float (runs,): arms count alike within a unit, and units alike; seeds are no units, so there arms do."""
    within = 1 / runs.groupby("arm")["arm"].transform("size")
    if unit == "task":
        within = within / runs.groupby("task")["arm"].transform("nunique")
    return within.to_numpy()


def quantile(values: np.ndarray, weight: np.ndarray, share: float) -> float:
    """The smallest value that has this share of the weight at or below it."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weight[order])
    place = np.searchsorted(reached, share * reached[-1] * (1 - 1e-12))
    return float(values[order][min(int(place), len(values) - 1)])


def line(runs: pd.DataFrame, known: Sequence[str], unit: str) -> Bounds:
    """Least squares on the other units, widened by its errors on units that it was not fitted on either."""
    inputs = np.column_stack([np.ones(len(runs)), *(runs[name] for name in known)])
    end, weight = runs["end"].to_numpy(), weights(runs, unit)
    units = pd.factorize(runs[unit])[0]
    low, high = np.zeros(len(runs)), np.zeros(len(runs))
    for left_out in np.unique(units):
        others = units != left_out
        errors = np.zeros(len(runs))
        for second in np.unique(units[others]):
            there = units == second
            errors[there] = (end - inputs @ _fit(inputs, end, weight * (others & ~there)))[
                there
            ]
        middle = inputs[~others] @ _fit(inputs, end, weight * others)
        below, above = (quantile(errors[others], weight[others], share) for share in TAILS)
        low[~others], high[~others] = middle + below, middle + above
    return np.clip(low, 0, 1), np.clip(high, 0, 1)


def _fit(inputs: np.ndarray, end: np.ndarray, weight: np.ndarray) -> np.ndarray:
    root = np.sqrt(weight)
    return np.linalg.lstsq(inputs * root[:, None], end * root, rcond=None)[0]


def neighbours(runs: pd.DataFrame, known: Sequence[str], unit: str) -> Bounds:
    """Quantiles of the ends of the nearest runs of other units and seeds; each input in its standard deviations."""
    inputs = runs[list(known)].to_numpy(float)
    inputs = (inputs - inputs.mean(axis=0)) / inputs.std(axis=0)
    end, weight = runs["end"].to_numpy(), weights(runs, unit)
    units, seeds = pd.factorize(runs[unit])[0], runs["seed"].to_numpy()
    bounds = np.zeros((len(runs), 2))
    for row in range(len(runs)):
        # another arm's run of the same seed begins with nearly the same completions
        others = np.flatnonzero((units != units[row]) & (seeds != seeds[row]))
        distance = ((inputs[others] - inputs[row]) ** 2).sum(axis=1)
        nearest = others[np.argsort(distance, kind="stable")[:NEAREST]]
        bounds[row] = [quantile(end[nearest], weight[nearest], share) for share in TAILS]
    return bounds[:, 0], bounds[:, 1]


def by_unit(runs: pd.DataFrame, values: np.ndarray, unit: str) -> pd.Series:
    """The mean of each unit, its arms alike. Seeds share arms: there the arms stay the units."""
    table = runs.assign(value=values, unit=runs["arm" if unit == "seed" else unit])
    return table.groupby(["unit", "arm"])["value"].mean().groupby("unit").mean()


def student(values: pd.Series) -> tuple[float, float, float]:
    """Mean and its 95 % interval over units."""
    half = stdtrit(len(values) - 1, 0.975) * values.std(ddof=1) / len(values) ** 0.5
    return float(values.mean()), float(values.mean() - half), float(values.mean() + half)


def judged(runs: pd.DataFrame, bounds: Bounds, unit: str) -> dict[str, Any]:
    """Share of ends held, with its interval, by unit; mean width; how many units would tell it to 4 points."""
    low, high = bounds
    inside = (runs["end"] >= low) & (runs["end"] <= high)
    held = by_unit(runs, inside.to_numpy(float), unit)
    width = by_unit(runs, high - low, unit)
    mean, least, most = student(held)
    return {
        "held": mean, "held_low": max(0.0, least), "held_high": min(1.0, most), "width": float(width.mean()),
        "units": len(held), "units_for_4_points": int(np.ceil((ndtri(0.975) * held.std(ddof=1) / 0.04) ** 2)),
        "held_by_unit": held.to_dict(), "width_by_unit": width.to_dict(),
    }  # fmt: skip


def asked(runs: pd.DataFrame, unit: str, ways: Sequence[str]) -> dict[str, Any]:
    """Each way's intervals on units that it has not seen, beside [before, 1]."""
    before = runs["before"].to_numpy()
    found = {"before": judged(runs, (before, np.ones(len(runs))), unit)}
    for way in ways:
        known, _, how = way.partition(", ")
        make = neighbours if how == "neighbours" else line
        found[way] = judged(runs, make(runs, KNOWN[known], unit), unit)
    widths = {way: pd.Series(one["width_by_unit"]) for way, one in found.items()}
    for way in ways[1:]:
        found[way]["narrower_than_ends"] = student(widths["ends"] - widths[way])
    return {"runs": len(runs), "ways": found}


def measured() -> dict[str, Any]:
    """All splits; how wide sampling of the held-out questions alone makes an interval."""
    runs = recorded()
    largest = runs[runs["task"] == "largest"].reset_index(drop=True)
    line_ways = ["ends", "start", "eight"]
    near = ["eight, neighbours"]
    result: dict[str, Any] = origin("python -m benchmarks.forecast", "numpy", "pandas", "scipy")
    counts = runs.groupby("task").agg(runs=("arm", "size"), arms=("arm", "nunique"))
    result |= {"runs": len(runs), "by_task": counts.to_dict("index")}
    chance = np.sqrt(largest["end"] * (1 - largest["end"]) / largest["n"])
    of_rows = by_unit(largest, 2 * ndtri(TAILS[1]) * chance.to_numpy(), "arm")
    result["width_by_sampling_alone"] = float(of_rows.mean())
    signals = ["signals", "signals, neighbours"]
    result["splits"] = {
        "largest, unseen seeds": asked(largest, "seed", line_ways),
        "largest, unseen arms": asked(largest, "arm", line_ways + near + signals),
        "all tasks, unseen arms": asked(runs, "arm", line_ways + near),
        "unseen tasks": asked(runs, "task", line_ways + near),
    }
    return result


def table(result: dict[str, Any]) -> str:
    """Share held and width of every way, in per cent and points."""
    lines = ["| unseen | what is known | held | width |", "|---" * 4 + "|"]
    for split, found in result["splits"].items():
        for way, one in found["ways"].items():
            low, mean, high = (100 * one[key] for key in ("held_low", "held", "held_high"))
            held = f"{mean:.0f} % [{low:.0f}, {high:.0f}]"
            lines.append(f"| {split} | {way} | {held} | {100 * one['width']:.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and save, or show."""
    parser = command_line(__doc__)
    parser.add_argument("--table", action="store_true", help="show what is saved")
    if parser.parse_args().table:
        result = json.loads(PATH.read_text(encoding="utf-8"))
    else:
        result = measured()
        write_result(PATH, result)
    print(table(result))
    tasks = result["splits"]["unseen tasks"]["ways"]
    for way, one in tasks.items():
        print(way, one["held_by_unit"], one["width_by_unit"], one["units_for_4_points"])


if __name__ == "__main__":
    main()

"""A run of the laboratory as a row of numbers, and what two arms' rows differ in besides their settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

_EARLY = 5  # steps
_TOLERANCE = 0.1  # share by which tokens and completions may differ without being reported
_UNKNOWN = "not on record"
# Columns that must be equal, and their words.
_COUNTS = {"steps": "steps", "max_completion_tokens": "tokens at most", "n": "held-out rows"}


def outcomes(result: Mapping[str, Any], metrics: pd.DataFrame) -> dict[str, Any]:
    """Numbers and names, no lists; see Lab.runs."""
    row = {name: value for name, value in result.items() if not isinstance(value, (dict, list))}
    row.pop("right", None)
    row["accuracy"] = result["accuracy"]["value"]
    row["before"] = result["before"]["value"]
    for temperature, rate in result["sampled"].items():
        row[f"sampled_{temperature}"] = rate
    for temperature, counts in result.get("sampled_right", {}).items():
        solved = sum(count > 0 for count in counts)
        row[f"pass@{result['eval_samples']}_{temperature}"] = solved / len(counts)
    _, row["best_constant"] = result["constant"] or (None, None)
    row["seconds"] = result["prepare_seconds"] + result["train_seconds"]
    return row | _of_curve(metrics)


def _of_curve(metrics: pd.DataFrame) -> dict[str, float]:
    reward = _column(metrics, "reward")  # in old runs empty where a rollout was used again
    bend = reward - (reward.shift() + reward.shift(-1)) / 2
    norm, length = _column(metrics, "grad_norm"), _column(metrics, "completion_length")
    row = {
        "reward_mean": float(reward.mean()),
        "reward_last": last_quarter(reward),
        "reward_roughness": float(bend.abs().mean()),
        "grad_norm_max": float(norm.max()),
        "grad_norm_early": float(norm.head(_EARLY).mean()),
        "entropy_last": last_quarter(metrics["entropy"].astype(float)),
        "equal_groups": float(metrics["frac_reward_zero_std"].astype(float).mean()),
        "length_mean": float(length.mean()),
        "length_last": last_quarter(length),
        "kl_last": last_quarter(_column(metrics, "kl")),
    }
    for name in metrics:
        if name.startswith("reward/"):
            scores = _column(metrics, name)
            row[f"{name}_mean"] = float(scores.mean())
            row[f"{name}_last"] = last_quarter(scores)
    return row


def _column(metrics: pd.DataFrame, name: str) -> pd.Series:
    """The column's values without gaps; a run without a reference model has no kl."""
    return metrics.get(name, pd.Series()).astype(float).dropna()


def last_quarter(values: pd.Series) -> float:
    """The mean of the last quarter: a run's final level."""
    return float(values.tail(max(1, len(values) // 4)).mean())


def unlike(
    runs: pd.DataFrame,
    arm: str,
    against: str,
) -> list[str]:
    """Ends of sentences, the arm's value first: ["20 steps for 10", "2.0 x the tokens"]; [] without differences.

    runs: as Lab.runs; the seeds in both arms count, or all if they share none. Old runs did not record train rows and
    token limits: these are "not on record".
    """
    first, second = _means(runs, arm, against), _means(runs, against, arm)
    differences = []
    if _UNKNOWN in (first["train_rows"], second["train_rows"]):
        differences.append(f"train rows {_UNKNOWN}")
    elif first["train_rows"] != second["train_rows"]:
        differences.append("other train rows")
    for name, words in _COUNTS.items():
        if first[name] != second[name]:
            differences.append(f"{_number(first[name])} {words} for {_number(second[name])}")
    for name in ("completions", "tokens"):
        if not second[name]:
            continue
        ratio = first[name] / second[name]
        if abs(ratio - 1) > _TOLERANCE:
            digits = 1 if ratio >= 1 else 2
            differences.append(f"{ratio:.{digits}f} x the {name}")
    return differences


def _means(
    runs: pd.DataFrame,
    arm: str,
    against: str,
) -> dict[str, Any]:
    """Of an arm's runs, the train rows' digests as a text, and the means of the other columns.

    The seeds that the other arm has too count, or all if it has none of them.
    """
    rows = runs[runs["arm"] == arm]
    shared = rows[rows["seed"].isin(runs.loc[runs["arm"] == against, "seed"])]
    if len(shared):
        rows = shared
    rows = rows.reindex(columns=["train_rows", *_COUNTS, "completions", "tokens"])
    means: dict[str, Any] = {"train_rows": _UNKNOWN}
    if rows["train_rows"].notna().all():
        means["train_rows"] = ", ".join(sorted(set(rows["train_rows"])))
    for name in _COUNTS:
        means[name] = rows[name].mean() if rows[name].notna().all() else None
    return means | rows[["completions", "tokens"]].mean().to_dict()


def _number(mean: float | None) -> str:
    return _UNKNOWN if mean is None else f"{mean:g}"

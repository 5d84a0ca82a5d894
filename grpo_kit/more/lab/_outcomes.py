"""A run of the laboratory as a row of numbers, and what two arms' rows differ in besides their settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

_EARLY = 5  # steps
_MORE = 0.1  # share by which tokens and completions may differ without being reported
_UNKNOWN = "not on record"


def outcomes(result: Mapping[str, Any], metrics: pd.DataFrame) -> dict[str, Any]:
    """Numbers and names, no lists; see Lab.runs."""
    row = {
        key: value for key, value in result.items() if not isinstance(value, (dict, list)) and key != "right"
    }
    row |= {"accuracy": result["accuracy"]["value"], "before": result["before"]["value"]}
    row |= {f"sampled_{t}": value for t, value in result["sampled"].items()}
    for t, counts in result.get("sampled_right", {}).items():
        row[f"pass@{result['eval_samples']}_{t}"] = sum(count > 0 for count in counts) / len(counts)
    row["best_constant"] = result["constant"][1] if result["constant"] else None
    row["seconds"] = result["prepare_seconds"] + result["train_seconds"]
    return row | _of_curve(metrics)


def _of_curve(metrics: pd.DataFrame) -> dict[str, float]:
    reward = metrics["reward"].astype(float).dropna()  # in old runs empty where a rollout was used again
    bent = reward - (reward.shift() + reward.shift(-1)) / 2
    norm, length, kl = (_column(metrics, name) for name in ("grad_norm", "completion_length", "kl"))
    parts = {name: metrics[name].astype(float).dropna() for name in metrics if name.startswith("reward/")}
    return {
        "reward_mean": float(reward.mean()),
        "reward_last": last_quarter(reward),
        "reward_roughness": float(bent.abs().mean()),
        "grad_norm_max": float(norm.max()),
        "grad_norm_early": float(norm.head(_EARLY).mean()),
        "entropy_last": last_quarter(metrics["entropy"].astype(float)),
        "equal_groups": float(metrics["frac_reward_zero_std"].astype(float).mean()),
        "length_mean": float(length.mean()),
        "length_last": last_quarter(length),
        "kl_last": last_quarter(kl),
        **{f"{name}_mean": float(values.mean()) for name, values in parts.items()},
        **{f"{name}_last": last_quarter(values) for name, values in parts.items()},
    }


def _column(metrics: pd.DataFrame, name: str) -> pd.Series:
    """The column's values without gaps; a run without a reference model has no kl."""
    return metrics[name].astype(float).dropna() if name in metrics else pd.Series(dtype=float)


def last_quarter(values: pd.Series) -> float:
    """The mean of the last quarter: a run's final level."""
    return float(values.tail(max(1, len(values) // 4)).mean())


def unlike(runs: pd.DataFrame, arm: str, against: str) -> list[str]:
    """Ends of sentences, the arm's value first: ["20 steps for 10", "2.0 x the tokens"]; [] without differences.

    runs: as Lab.runs; the seeds in both arms count, or all if they share none. Old runs did not record train rows and
    token limits: these are "not on record".
    """
    own, other = _mean(runs, arm, against), _mean(runs, against, arm)
    differences = []
    if _UNKNOWN in (own["train_rows"], other["train_rows"]):
        differences.append(f"train rows {_UNKNOWN}")
    elif own["train_rows"] != other["train_rows"]:
        differences.append("other train rows")
    for name, words in (
        ("steps", "steps"),
        ("max_completion_tokens", "tokens at most"),
        ("n", "held-out rows"),
    ):
        if own[name] != other[name]:
            differences.append(f"{_number(own[name])} {words} for {_number(other[name])}")
    for name in ("completions", "tokens"):
        ratio = own[name] / other[name] if other[name] else 1.0
        if abs(ratio - 1) > _MORE:
            digits = 1 if ratio >= 1 else 2
            differences.append(f"{ratio:.{digits}f} x the {name}")
    return differences


def _mean(runs: pd.DataFrame, arm: str, other: str) -> dict[str, object]:
    own = runs[runs["arm"] == arm]
    both = own[own["seed"].isin(runs.loc[runs["arm"] == other, "seed"])]
    own = both if len(both) else own
    found: dict[str, object] = {name: own[name].mean() for name in ("steps", "completions", "tokens", "n")}
    limits = own["max_completion_tokens"] if "max_completion_tokens" in own else pd.Series(dtype=float)
    found["max_completion_tokens"] = limits.mean() if limits.notna().all() and len(limits) else None
    digests = set(own["train_rows"]) if "train_rows" in own else {None}
    known = all(isinstance(digest, str) for digest in digests)
    found["train_rows"] = ", ".join(sorted(digests)) if known else _UNKNOWN
    return found


def _number(value: object) -> str:
    return _UNKNOWN if value is None else f"{value:g}"

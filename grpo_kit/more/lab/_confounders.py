"""Differences between two arms besides their settings, which may explain a result: rows, steps, lengths, compute."""

from __future__ import annotations

import pandas as pd

_MORE = 0.1  # share by which tokens and completions may differ without being reported
_UNKNOWN = "not on record"


def unlike(runs: pd.DataFrame, arm: str, against: str) -> list[str]:
    """Ends of sentences, the arm's value first: ["20 steps for 10", "2.0 x the tokens"]; [] without differences.

    runs: as Lab.runs; the seeds in both arms count, or all if they share none. Old runs did not record train rows and
    token limits: these are "not on record".
    """
    own, other = (_mean(runs, arm, against), _mean(runs, against, arm))
    said = []
    if _UNKNOWN in (own["train_rows"], other["train_rows"]):
        said.append(f"train rows {_UNKNOWN}")
    elif own["train_rows"] != other["train_rows"]:
        said.append("other train rows")
    for name, words in (
        ("steps", "steps"),
        ("max_completion_tokens", "tokens at most"),
        ("n", "held-out rows"),
    ):
        if own[name] != other[name]:
            said.append(f"{_number(own[name])} {words} for {_number(other[name])}")
    for name in ("completions", "tokens"):
        ratio = own[name] / other[name] if other[name] else 1.0
        if abs(ratio - 1) > _MORE:
            said.append(f"{ratio:.1f} x the {name}" if ratio >= 1 else f"{ratio:.2f} x the {name}")
    return said


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

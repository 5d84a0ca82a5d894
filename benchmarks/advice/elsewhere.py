"""Claims that runs of another benchmark decide: agents over several turns, thoughts, hints, PPO."""

from __future__ import annotations

import json
from functools import cache
from statistics import fmean
from typing import Any

from benchmarks.advice.claims import Claim
from benchmarks.result import RESULTS
from grpo_kit.lab.statistics import difference_over_seeds, paired_scalars

# What Claim.runs names: a file of results, and where in it the runs stand.
FILES = {
    "agents": ("agents_smollm2-135m-instruct.json", "runs"),
    "hinted": ("hinted_smollm2-135m-instruct.json", "runs"),
    "ppo": ("ppo_smollm2-135m-instruct.json", "runs"),
    "thinking": ("thinking_smollm2-135m-instruct.json", "runs"),
    "tokens": ("thinking_smollm2-135m-instruct.json", "drift"),
}
SAMPLES = 4  # episodes of a held-out row
_SERVED = ("sampled", "without")  # what a run calls the evaluation as it is served


def arms_of(benchmark: str) -> dict[str, dict[int, dict[str, Any]]]:
    """Each arm's runs by seed; {} where nothing is saved."""
    file, key = FILES[benchmark]
    if not (RESULTS / file).exists():
        return {}
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for run in _saved(file).get(key, ()):
        found.setdefault(run["arm"], {})[run["seed"]] = run
    return found


@cache
def _saved(file: str) -> dict[str, Any]:
    return json.loads((RESULTS / file).read_text(encoding="utf-8"))


def difference(claim: Claim) -> dict[str, Any] | None:
    """seeds, mean, low, high and p of arm less against, over the seeds that both have; None where there is none.

    Outcomes: "success" and "accuracy", of held-out rows, whose interval counts seeds and rows; "success_mean", over the
    steps of training; "step_seconds_mean"; "differ", a share. Those are one number a seed.
    """
    arms = arms_of(claim.runs)
    one, other = arms.get(claim.against, {}), arms.get(claim.arm, {})
    seeds = sorted(set(one) & set(other))
    if not seeds:
        return None
    pairs = [[_value(runs[seed], claim.outcome) for seed in seeds] for runs in (one, other)]
    if claim.outcome in ("success", "accuracy"):
        e, p = difference_over_seeds(*pairs, null=claim.null)
        return {"seeds": len(seeds), "mean": e.value, "low": e.low, "high": e.high, "p": p}
    mean, low, high, p = paired_scalars(*pairs, null=claim.null)
    return {"seeds": len(seeds), "mean": mean, "low": low, "high": high, "p": p}


def hours(claim: Claim) -> float:
    """Of the runs of both arms: training alone, as far as it is on record; 0.0 where it is not."""
    arms = arms_of(claim.runs)
    made = [run for arm in (claim.arm, claim.against) for run in arms.get(arm, {}).values()]
    return sum(run.get("seconds", sum(run.get("step_seconds", ()))) for run in made) / 3600


def origin(claim: Claim) -> dict[str, str]:
    """The weights and the hardware of the claim's runs."""
    saved = _saved(FILES[claim.runs][0])
    return {"model": saved["weights"], "hardware": saved["hardware"]}


def _value(run: dict[str, Any], outcome: str) -> Any:
    if outcome == "accuracy":
        return run["right"]
    if outcome == "success":
        after = run["after"]
        counts = after if isinstance(after, list) else next(after[name] for name in _SERVED if name in after)
        return [n / SAMPLES for n in counts]
    if outcome == "success_mean":
        return fmean(run["success"])
    return fmean(run["step_seconds"]) if outcome == "step_seconds_mean" else run[outcome]

"""Claims that other results decide: agents over several turns, thoughts, hints, PPO and DPO, untrained models."""

from __future__ import annotations

import json
from functools import cache
from statistics import fmean
from typing import Any

from benchmarks.advice.claims import Claim
from benchmarks.result import RESULTS
from grpo_kit.evaluation.intervals import wilson_interval
from grpo_kit.more.lab.statistics import difference_over_seeds, paired_scalars

# What Claim.runs names: a file of results, and where in it the runs stand.
FILES = {
    "agents": ("agents_smollm2-135m-instruct.json", "runs"),
    "dpo": ("dpo_smollm2-135m-instruct.json", "runs"),
    "hinted": ("hinted_smollm2-135m-instruct.json", "runs"),
    "ppo": ("ppo_smollm2-135m-instruct.json", "runs"),
    "thinking": ("thinking_smollm2-135m-instruct.json", "runs"),
    "tokens": ("thinking_smollm2-135m-instruct.json", "drift"),
}
# Claim.runs of claims about untrained models: their arms are models, the second may be NOTHING.
READINESS = "readiness"
NOTHING = "nothing"
# Outcome -> the task it is read in. formatted: by question, paired. reflecting: samples that hold a word of reflection.
_READ_IN = {"formatted": "largest, zero-shot", "reflecting": "countdown, thinking"}
SAMPLES = 4  # episodes of a held-out row
_ORIGIN = {"model": "weights", "hardware": "hardware"}
_SERVED = ("sampled", "without")  # what a run calls the evaluation as it is served


def files(claim: Claim) -> list[str]:
    """The names of the files in benchmarks/results that decide the claim."""
    if claim.runs != READINESS:
        return [FILES[claim.runs][0]]
    return [
        f"readiness_{model}.json" for model in (claim.arm, claim.against) if model != NOTHING
    ]


def counted(claim: Claim) -> str:
    """What the row's number of seeds counts."""
    if claim.runs != READINESS:
        return "seeds"
    return "questions" if claim.outcome == "formatted" else "samples"


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
    steps of training; "step_seconds_mean"; "differ", a share. Those are one number a seed. Untrained models: _READ_IN.
    """
    if claim.runs == READINESS:
        return _of_untrained(claim)
    arms = arms_of(claim.runs)
    one, other = arms.get(claim.against, {}), arms.get(claim.arm, {})
    seeds = sorted(set(one) & set(other))
    if not seeds:
        return None
    pairs = [[_value(runs[seed], claim.outcome) for seed in seeds] for runs in (one, other)]
    if claim.outcome in ("success", "accuracy"):
        e, p = difference_over_seeds(*pairs, null=claim.null)
        return _numbers(len(seeds), e.value, e.low, e.high, p)
    return _numbers(len(seeds), *paired_scalars(*pairs, null=claim.null))


def _of_untrained(claim: Claim) -> dict[str, Any] | None:
    found = []
    for name in files(claim):
        tasks = _saved(name)["tasks"] if (RESULTS / name).exists() else {}
        if _READ_IN[claim.outcome] not in tasks:
            return None
        found.append(tasks[_READ_IN[claim.outcome]]["readiness"])
    if claim.outcome == "reflecting":
        n = len(found[0]["questions"]) * found[0]["samples"]
        holds = found[0]["words"]["any"]
        return _numbers(n, holds / n, *wilson_interval(holds, n), None)
    arm, against = (
        {
            q: n / model["samples"]
            for q, n in zip(model["questions"], model[claim.outcome], strict=True)
        }
        for model in found
    )
    both = [question for question in arm if question in against]
    pairs = [[side[question] for question in both] for side in (against, arm)]
    mean, low, high, p = paired_scalars(*pairs, null=claim.null)
    return _numbers(len(both), mean, max(low, -1.0), min(high, 1.0), p)  # of shares


def _numbers(
    seeds: int, mean: float, low: float, high: float, p: float | None
) -> dict[str, Any]:
    return {"seeds": seeds, "mean": mean, "low": low, "high": high, "p": p}


def hours(claim: Claim) -> float:
    """Of the runs of both arms: training alone, as far as it is on record; 0.0 where it is not."""
    if claim.runs == READINESS:
        return 0.0
    arms = arms_of(claim.runs)
    made = [run for arm in (claim.arm, claim.against) for run in arms.get(arm, {}).values()]
    return sum(run.get("seconds", sum(run.get("step_seconds", ()))) for run in made) / 3600


def origin(claim: Claim) -> dict[str, str]:
    """The weights and the hardware of the claim's runs."""
    saved = [_saved(name) for name in files(claim)]
    return {key: "; ".join(sorted({s[of] for s in saved})) for key, of in _ORIGIN.items()}


def _value(run: dict[str, Any], outcome: str) -> Any:
    if outcome == "accuracy":
        return run["right"]
    if outcome == "success":
        after = run["after"]
        counts = (
            after
            if isinstance(after, list)
            else next(after[name] for name in _SERVED if name in after)
        )
        return [n / SAMPLES for n in counts]
    if outcome == "success_mean":
        return fmean(run["success"])
    return fmean(run["step_seconds"]) if outcome == "step_seconds_mean" else run[outcome]

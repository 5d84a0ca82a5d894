"""Arms whose best setting is chosen before they are compared, on seeds that the comparison does not use."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from benchmarks.advice.plan import runs
from benchmarks.advice.plan.entry import Asked

SEEDS = (100, 101)


def missing(entry: Asked) -> list[tuple[str, int]]:
    """(arm, seed) of the choice that are still to be run."""
    return [
        (arm, s)
        for arms in entry.tuned
        for arm in arms
        for s in SEEDS
        if s not in runs.done(arm)
    ]


def settled(entry: Asked) -> Asked | None:
    """The entry with the winners in place of their names; as it is where nothing is tuned; None before the choice."""
    if not entry.tuned:
        return entry
    if missing(entry):
        return None
    return replace(entry, arm=best(entry, 0), against=best(entry, 1))


def best(entry: Asked, side: int) -> str:
    """The arm whose outcome has the highest mean over the tuning seeds; the first of equals."""
    table = runs.load(list(entry.tuned[side]), entry.tuned[side][0]).runs
    means = {
        arm: fmean(table.loc[(table["arm"] == arm) & table["seed"].isin(SEEDS), entry.outcome])
        for arm in entry.tuned[side]
    }
    return max(means, key=means.get)

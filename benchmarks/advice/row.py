"""One row of the table: what the runs say of one hypothesis, whichever campaign made them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import quote

import pandas as pd

from benchmarks.advice import elsewhere
from benchmarks.advice.claims import CLAIMS, Claim
from benchmarks.advice.plan import campaign, runs, tuned
from benchmarks.advice.plan.entry import Answered, Asked, Elsewhere, verdict
from benchmarks.advice.plan.shown import hours_of
from benchmarks.result import RESULTS, WEIGHTS
from grpo_kit.more import lab

NOT_YET, SO_FAR, UNMET, WITHDRAWN = "not run yet", "so far", "conditions not met", "withdrawn"
CLAIM_OF = {claim.text: claim for claim in CLAIMS}
_PLANS, _FIRSTS = "benchmarks/results/advice_plan/", "benchmarks/results/advice/"
Row = dict[str, Any]


def of_asked(entry: Asked) -> Row:
    """Of a claim of the plan, by the runs that are there.

    A verdict and a p once its first seeds are run and its condition holds; the effect as soon as there is one.
    """
    row = _row(entry.name, entry.hypothesis, entry, "asked") | {"redone": entry.redone}
    row |= {
        "planned": entry.first,
        "hours": hours_of(campaign.largest(entry, entry.first)),
        "estimated": True,
    }
    ready = tuned.settled(entry)
    if ready is None:
        return row | {
            "why": f"{len(tuned.missing(entry))} runs to choose the best rates by are missing"
        }
    row |= {
        "arm": ready.arm,
        "against": ready.against,
        "data": [_runs_of(a) for a in (ready.arm, ready.against)],
    }
    found = campaign.lab_of(ready)
    seeds = found.seeds(ready.arm, ready.against) if found else []
    if not seeds:
        return row
    return (
        row
        | _read(ready, found, seeds)
        | {"hours": _hours_of_asked(entry, found), "estimated": False}
    )


def of_claim(claim: Claim, found: lab.Lab) -> Row:
    """Of a claim of the first campaign, found: its runs; or of another benchmark, which the claim names."""
    row = _row(claim.text, claim.text, claim, "first") | {"data": _data_of(claim)}
    row["counted"] = elsewhere.counted(claim)
    d = _difference(claim, found)
    if d is None:
        return row
    row |= (
        _numbers(d)
        | _origin(claim, found)
        | {"estimated": False, "unlike": _unlike(claim, found)}
    )
    row["hours"] = (
        elsewhere.hours(claim)
        if claim.runs
        else runs.hours(_both(found, claim.arm, claim.against))
    )
    if claim.withdrawn:
        return row | {"verdict": WITHDRAWN, "why": claim.withdrawn, "run": True}
    return row | _judged(claim.says, claim.margin, d)


def of_answered(entry: Answered, found: lab.Lab) -> Row:
    """Of a claim that committed data decide: the numbers of the row that it names."""
    row = of_claim(CLAIM_OF[entry.claim], found)
    return row | {
        "name": entry.name,
        "claim": entry.hypothesis,
        "by": entry.by,
        "kind": "answered",
    }


def of_elsewhere(entry: Elsewhere, found: lab.Lab) -> Row:
    """Of a claim that another command asks: by its runs that are there, judged once all its seeds are."""
    row = _row(entry.name, entry.hypothesis, entry, "elsewhere")
    row |= {
        "planned": entry.seeds,
        "hours": entry.hours,
        "estimated": True,
        "why": f"asked by `{entry.command}`",
    }
    row["data"] = [(entry.data, entry.data)]
    own = of_claim(_claim_of(entry), found)
    if not own["seeds"]:
        return row
    own |= {key: row[key] for key in ("name", "claim", "by", "kind", "planned", "why")}
    if own["seeds"] >= entry.seeds:
        return own | {"why": ""}
    return own | {"verdict": SO_FAR, "run": False, "p": None}


def _claim_of(entry: Elsewhere) -> Claim:
    """What decides the entry: the first table's claim, by the entry's own measure, or the runs that it names."""
    if entry.claim:
        return replace(CLAIM_OF[entry.claim], says=entry.says, margin=entry.margin)
    same = ("by", "arm", "against", "outcome", "says", "margin", "runs")
    return Claim(entry.hypothesis, **{key: getattr(entry, key) for key in same})


def say(row: Row) -> str:
    """The row as one line, for --claim."""
    if not row["seeds"]:
        return f"{row['name']}: {row['verdict']}" + (f": {row['why']}" if row["why"] else "")
    also = f"; also unlike: {row['unlike']}" if row["unlike"] else ""
    why = f" ({row['why']})" if row["why"] else ""
    return (
        f"{row['name']}: {row['arm']} less {row['against']}, {row['outcome']}: {row['effect']:+.3f} "
        f"[{row['low']:.3f}, {row['high']:.3f}], {row['seeds']} seeds, margin {row['margin']:g}: "
        f"{row['verdict']}{why}{also}"
    )


def _row(name: str, claim: str, entry: Any, kind: str) -> Row:
    """A row that is not run yet."""
    same = ("by", "arm", "against", "outcome", "says", "margin")
    row = {key: getattr(entry, key, "") for key in same} | {
        "name": name,
        "claim": claim,
        "kind": kind,
    }
    row |= {
        "counted": "seeds",
        "seeds": 0,
        "planned": 0,
        "effect": None,
        "low": None,
        "high": None,
        "p": None,
    }
    row |= {
        "verdict": NOT_YET,
        "why": "",
        "run": False,
        "unlike": "",
        "redone": "",
        "hours": 0.0,
    }
    return row | {"estimated": True, "data": [], "model": "", "hardware": ""}


def _read(entry: Asked, found: lab.Lab, seeds: Sequence[int]) -> Row:
    row = {"seeds": len(seeds), "unlike": "; ".join(found.unlike(entry.arm, entry.against))}
    row |= _origin(entry, found)
    try:
        d = found.difference(entry.arm, entry.against, outcome=entry.outcome, null=entry.null)
    except ValueError as none:  # no seed has the outcome in both arms
        return row | {"seeds": 0, "verdict": "cannot tell", "why": str(none)}
    row |= _numbers(d)
    if not set(range(entry.first)) <= set(seeds):
        return row | {
            "verdict": SO_FAR,
            "why": f"so far, {len(seeds)} of {entry.first} seeds",
            "p": None,
        }
    unmet = _unmet(entry)
    if unmet:
        return row | {"verdict": UNMET, "why": unmet, "p": None}
    more = (
        f"so far, {len(seeds)} of at most {entry.most} seeds" if campaign.wanted(entry) else ""
    )
    judged = _judged(entry.says, entry.margin, d)
    return row | judged | {"why": "; ".join(filter(None, (judged["why"], more)))}


def _unmet(entry: Asked) -> str:
    """Why the row has no verdict; "" where it has one."""
    condition = entry.counts_if
    if condition is None:
        return ""
    curves: dict[str, dict[int, pd.DataFrame]] = {}
    there = runs.load(condition.arms, condition.arm, below=entry.most)
    for (arm, seed), curve in there.curves.groupby(["arm", "seed"]) if there else ():
        curves.setdefault(arm, {})[seed] = curve
    value = condition.measured(curves)
    if value is None:
        return f"whether {condition} is not known: {condition.arms[-1]} is not run yet"
    return (
        ""
        if condition.holds(value)
        else f"counts only if {condition}; it is {100 * value:.1f} %"
    )


def _judged(says: str, margin: float, d: Row) -> Row:
    if d["seeds"] < 2:
        return {"verdict": "cannot tell", "why": "one seed", "run": True}
    return {"verdict": verdict(says, margin, d["low"], d["high"]), "why": "", "run": True}


def _numbers(d: Row) -> Row:
    return {"effect": d["mean"]} | {key: d[key] for key in ("seeds", "low", "high", "p")}


def _difference(claim: Claim, found: lab.Lab) -> Row | None:
    """Of the claim's arms; None where no seed has both, or none has the outcome."""
    if claim.runs:
        return elsewhere.difference(claim)
    if not {claim.arm, claim.against} <= set(found.arms):
        return None
    try:
        return found.difference(
            claim.arm, claim.against, outcome=claim.outcome, null=claim.null
        )
    except ValueError:
        return None


def _unlike(claim: Claim, found: lab.Lab) -> str:
    return "" if claim.runs else "; ".join(found.unlike(claim.arm, claim.against))


def _both(found: lab.Lab, *arms: str) -> pd.DataFrame:
    return found.runs[found.runs["arm"].isin(arms)]


def _origin(entry: Claim | Asked, found: lab.Lab) -> Row:
    if getattr(entry, "runs", ""):
        return elsewhere.origin(entry)
    table = (
        _both(found, entry.arm, entry.against).reindex(columns=["model", "hardware"]).dropna()
    )
    names = {key: sorted(set(table[key])) for key in table}
    return {
        "model": "; ".join(WEIGHTS.get(m, m) for m in names["model"]),
        "hardware": "; ".join(names["hardware"]),
    }


def _hours_of_asked(entry: Asked, found: lab.Lab) -> float:
    """Of both arms' runs, and of those by which its rates were chosen."""
    swept = [runs.load(list(side), side[0]).runs for side in entry.tuned]
    of_choice = [table[table["seed"].isin(tuned.SEEDS)] for table in swept]
    return sum(map(runs.hours, [found.runs, *of_choice]))


def _data_of(claim: Claim) -> list[tuple[str, str]]:
    if claim.runs:
        return [(f"benchmarks/results/{name}",) * 2 for name in elsewhere.files(claim)]
    return [(arm, f"{_FIRSTS}{quote(arm)}") for arm in (claim.arm, claim.against)]


def _runs_of(arm: str) -> tuple[str, str]:
    """Its name, and the folder of its runs, "" where there is none yet."""
    return arm, f"{_PLANS}{quote(arm)}" if runs.done(arm) else ""


def labs_of(rows: pd.DataFrame) -> list[tuple[str, lab.Lab]]:
    """(the first outcome, runs) behind rows of the table: one laboratory for each arm that others are compared with.

    Arms of other comparisons are not in it: what they differ in is another question. Withdrawn rows and those of other
    benchmarks have none.
    """
    found = []
    loads = {_PLANS: partial(runs.load, below=tuned.SEEDS[0]), _FIRSTS: _first_lab}
    compared = rows[rows["verdict"] != WITHDRAWN]
    for folder, load in loads.items():
        own = compared[
            [r.seeds > 0 and r.data[0][1].startswith(folder) for r in compared.itertuples()]
        ]
        for against, pairs in own.groupby("against", sort=False):
            arms = list(dict.fromkeys([against, *pairs["arm"]]))
            found.append((pairs["outcome"].iloc[0], load(arms, against)))
    return found


def _first_lab(arms: list[str], against: str) -> lab.Lab:
    return lab.load(RESULTS / "advice", arms)

"""Seconds of one step by phase on three workloads, measured by benchmarks.step, on record and beside another checkout.

Seconds of two days or two machines do not compare. So the limit holds only where one call of benchmarks.step measured
both arms in turn; beside the record a ratio is reported and nothing fails.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from benchmarks.oracle.cases import FOLDER
from benchmarks.oracle.compare import Difference
from benchmarks.result import ROOT, as_text, six_digits

PATH = FOLDER / "seconds.json"
WORKLOADS = ("main-job", "realistic", "long")
WORK = ROOT / "runs" / "oracle-seconds"  # measurements of a call that was stopped; the next call goes on
LIMIT = 1.05  # the new arm's seconds, of the old arm's
COUNTS = 0.05  # the least share of the old step that a phase has to be of, to be compared by itself


def measured(workload: str, *, before: str | None = None, rounds: int = 1) -> dict[str, Any]:
    """The result of benchmarks.step on the workload: this checkout's kit, after that of `before` if it is given."""
    from benchmarks.step.__main__ import main as measure

    WORK.mkdir(parents=True, exist_ok=True)
    how = ["--arms", "kit", "--busy", "--workload", workload, "--rounds", str(rounds)]
    path: Path = measure([*how, "--out", str(WORK), *(["--before", before] if before else [])])
    return json.loads(path.read_text())


def short(result: dict[str, Any], arm: str = "kit") -> dict[str, Any]:
    """What is recorded of an arm: median seconds of the step and of each phase, and how busy the machine was."""
    row = result["arms"][arm]
    return {
        "seconds": row["seconds"]["median"],
        "phases": {phase: spread["median"] for phase, spread in row["phases"].items()},
        "rounds": result["n"],
        "rounds on a busy machine": row["measured on a busy machine"],
        "load average before": result["load average before"],
        "hardware": result["hardware"],
        "threads": result["threads"],
        "date": result["date"],
        "versions": result["versions"],
        "code": row["code"],
        "command": result["command"].replace(f"{ROOT}/", ""),
    }


def compare_seconds(result: dict[str, Any], *, new: str = "kit", old: str = "kit-before") -> list[Difference]:
    """The ratio new / old of the step and of each phase that is 5 % or more of the old step.

    result: of benchmarks.step, one workload. Where it has both arms, a ratio above LIMIT fails; where it has no `old`,
    the recorded seconds take its place and no ratio fails. Raises ValueError for a `new` that it lacks.
    """
    arms, workload = result["arms"], result["work"]["kind"]
    if new not in arms:
        raise ValueError(f"new={new!r}: the result has the arms {', '.join(arms)}")
    together = old in arms
    base = short(result, old) if together else recorded()[workload]
    mine, limit = short(result, new), LIMIT if together else math.inf
    case = workload if together else f"{workload}, beside the record of {base['date']}"
    made = [Difference(case, "ratio of the step", mine["seconds"] / base["seconds"], limit)]
    for phase, seconds in base["phases"].items():
        if seconds >= COUNTS * base["seconds"]:
            made.append(Difference(case, f"ratio of {phase}", mine["phases"][phase] / seconds, limit))
    return made


def recorded() -> dict[str, dict[str, Any]]:
    """What is on record, by workload."""
    return json.loads(PATH.read_text())["workloads"] if PATH.exists() else {}


def record_seconds(workloads: tuple[str, ...] = WORKLOADS, rounds: int = 1) -> None:
    """Measure and write seconds.json, one workload after another; those that are not named stay as they are."""
    for workload in workloads:
        made = recorded() | {workload: short(measured(workload, rounds=rounds))}
        PATH.write_text(as_text(six_digits({"size": "cpu", "limit": LIMIT, "workloads": made})))


def check_seconds(
    workloads: tuple[str, ...] = WORKLOADS, rounds: int = 1, before: str | None = None
) -> list[Difference]:
    """This checkout beside `before`, measured in turn; without one beside the record, which reports alone."""
    made = []
    for workload in workloads:
        if not before and workload not in recorded():
            print(f"{workload}: not on record; use --record --part seconds --workload {workload}")
            continue
        found = compare_seconds(measured(workload, before=before, rounds=rounds))
        print("\n".join(f"{d.case}: {d.what} {d.error:.3f}" for d in found), flush=True)
        made += found
    return made

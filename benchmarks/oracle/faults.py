"""128 faults, each drawn from a seed and its number: today's trainer on record, and the check of another one.

benchmarks.faults strikes a run, lets it go on, and compares it with the untouched one. Another trainer gives its own
three functions (`Implementation`). A fault's moment is a share of how long the untouched run takes on the day, so an
outcome may differ from the record's; what counts is that no run ends wrong.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.faults.campaign import Implementation, campaign, drawn
from benchmarks.oracle.cases import FOLDER
from benchmarks.oracle.compare import Difference
from benchmarks.result import as_text, six_digits

PATH = FOLDER / "faults.json"
SEED, COUNT = 0, 128
FINE = ("equal", "words, then equal", "equal; the fault came after the end", "nothing saved yet, in words")


def record_faults(
    implementation: Implementation, facts: dict[str, Any], work: Path, count: int = COUNT
) -> None:
    """Run the faults that `work` lacks, and write faults.json: what was drawn, the step that was hit, how it ended."""
    made = []
    for fault in campaign(work, count, SEED, implementation):
        hit = fault["hit"][0] if fault["hit"] else None
        made.append(drawn(SEED, fault["number"]) | {"hit": hit, "outcome": fault["outcome"]})
    outcomes = dict(Counter(fault["outcome"] for fault in made))
    table = {"columns": [*made[0]], "faults": [[*fault.values()] for fault in made]}
    PATH.write_text(as_text(six_digits(facts | {"seed": SEED, "n": count, "outcomes": outcomes} | table)))


def recorded_faults() -> list[dict[str, Any]]:
    """The record, one dictionary a fault."""
    saved = json.loads(PATH.read_text())
    return [dict(zip(saved["columns"], row, strict=True)) for row in saved["faults"]]


def compare_faults(implementation: Implementation, work: Path, count: int = COUNT) -> list[Difference]:
    """Two numbers a recorded fault: is it drawn as it was, and does the implementation's run end well? 0 where so.

    work: a folder for runs. What it holds of an earlier call is not run again: give each implementation its own.
    """
    made = []
    for record, done in zip(recorded_faults(), campaign(work, count, SEED, implementation), strict=False):
        fault = six_digits(drawn(SEED, done["number"]))
        name = f"fault {done['number']}, {fault['arm']}, {fault['kind']}"
        alike = all(record[key] == value for key, value in fault.items())
        made.append(Difference(name, "drawing", float(not alike), 0.0))
        made.append(Difference(name, f"outcome {done['outcome']!r}", float(done["outcome"] not in FINE), 0.0))
    return made

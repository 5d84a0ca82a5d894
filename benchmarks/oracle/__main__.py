"""The oracle: record today's trainer, or compare it with the record.

    python -m benchmarks.oracle --compare               # losses, steps, accuracy; exit code 1 if anything differs
    python -m benchmarks.oracle --compare --part faults # half an hour; goes on where it was stopped
    python -m benchmarks.oracle --compare --part seconds --before ../an_older_checkout
    python -m benchmarks.oracle --record --part losses

Another implementation is compared by its own callable: see benchmarks/oracle/README.md. The record is in
benchmarks/results/oracle. Losses, steps and faults: tiny-random, float32, one thread of a CPU.
"""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

import numpy as np
import torch

from benchmarks.oracle.accuracy import check_accuracy, record_accuracy
from benchmarks.oracle.cases import BATCH, FOLDER, all_cases, make_batch
from benchmarks.oracle.compare import Difference, table, worst
from benchmarks.oracle.losses import case_differences, compare_losses, record_case, recorded, save_losses
from benchmarks.oracle.seconds import WORKLOADS, check_seconds, record_seconds
from benchmarks.result import ROOT, command_line, origin, six_digits

PACKAGES = ("torch", "transformers", "trl", "peft", "numpy")


def _facts(part: str) -> dict[str, Any]:
    facts = origin(f"python -m benchmarks.oracle --record --part {part}", *PACKAGES)
    return facts | {"weights": "tiny-random", "dtype": "float32", "threads": torch.get_num_threads()}


def record_losses() -> None:
    """Draw the batch, then record every case of both implementations and how far they are apart."""
    from benchmarks.oracle.today import IMPLEMENTATIONS

    FOLDER.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(BATCH, **make_batch())
    cases = list(all_cases())
    records = {
        name: {case.name: record_case(compute, case) for case in cases}
        for name, compute in IMPLEMENTATIONS.items()
    }
    beside = {
        name: [
            d
            for case in cases
            for d in case_differences(case.name, by_case[case.name], records["trl"][case.name])
        ]
        for name, by_case in records.items()
        if name != "trl"
    }
    refused = {
        name: sorted({f"{case.loss}, {case.level}" for case in cases if "refused" in by_case[case.name]})
        for name, by_case in records.items()
    }
    apart = {
        name: six_digits(worst([d for d in differences if d.what != "refusal"]))
        for name, differences in beside.items()
    }
    kept = {name: records[name] for name in ("trl", "kit")}
    save_losses(
        kept,
        _facts("losses") | {"n": len(cases), "largest relative error beside trl": apart, "refused": refused},
    )
    recorded.cache_clear()
    for name, differences in beside.items():
        print(f"losses: {len(cases)} cases; {name} beside TRL: {table(differences, 0)}")
    for name, losses in refused.items():
        print(f"refused by {name}: {'; '.join(losses) or 'none'}")


def check_losses() -> list[Difference]:
    """Today's implementations against their records, and the kit's against TRL's."""
    from benchmarks.oracle.today import kit_loss, trl_loss

    return compare_losses(kit_loss) + compare_losses(trl_loss)


def record_steps() -> None:
    """The steps of every run as today's trainer makes them."""
    from benchmarks.oracle.step_runs import RUNS
    from benchmarks.oracle.steps import save_steps
    from benchmarks.oracle.today_steps import todays_steps

    save_steps({run.name: todays_steps(run) for run in RUNS.values()}, _facts("steps") | {"n": len(RUNS)})


def check_steps() -> list[Difference]:
    """Today's trainer against its record, completions included."""
    from benchmarks.oracle.steps import compare_steps
    from benchmarks.oracle.today_steps import todays_steps

    return compare_steps(todays_steps, sampled=True)


def record_faults() -> None:
    """The campaign on today's trainer; goes on where it was stopped."""
    from benchmarks.faults.child import TODAY
    from benchmarks.oracle import faults

    faults.record_faults(TODAY, _facts("faults"), ROOT / "runs" / "oracle-faults")


def check_faults() -> list[Difference]:
    """The campaign on today's trainer once more."""
    from benchmarks.faults.child import TODAY
    from benchmarks.oracle.faults import compare_faults

    return compare_faults(TODAY, ROOT / "runs" / "oracle-faults-compared")


PARTS = {
    "losses": (record_losses, check_losses),
    "steps": (record_steps, check_steps),
    "accuracy": (record_accuracy, check_accuracy),
    "faults": (record_faults, check_faults),
    "seconds": (record_seconds, check_seconds),
}
QUICK = ("losses", "steps", "accuracy")  # the parts that are taken where none is named


def main() -> int:
    """Record or compare the parts that are named."""
    parser = command_line(__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--record", action="store_true", help="write the record anew")
    what.add_argument("--compare", action="store_true", help="compare today's trainer with the record")
    parser.add_argument("--part", choices=sorted(PARTS), action="append", help="this part alone")
    parser.add_argument("--before", help="seconds: another checkout, measured in turn with this one")
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="seconds: this workload alone")
    parser.add_argument("--rounds", type=int, default=1, help="seconds: measurements of each workload")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    failed = False
    for part in options.part or QUICK:
        record, check = PARTS[part]
        how: dict[str, Any] = {}
        if part == "seconds":  # on all threads
            how = {"workloads": options.workload or WORKLOADS, "rounds": options.rounds}
            how |= {"before": options.before} if options.compare else {}
        else:
            torch.set_num_threads(1)
        if options.record:
            record(**how)
        else:
            differences = check(**how)
            failed |= not all(difference.passes for difference in differences)
            print(f"{part}: {table(differences)}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

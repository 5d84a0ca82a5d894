"""The oracle: record today's trainer, or compare it with the record.

    python -m benchmarks.oracle --compare               # today's trainer against the record; exit code 1 if it differs
    python -m benchmarks.oracle --compare --part steps
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

from benchmarks.oracle.cases import BATCH, FOLDER, all_cases, make_batch
from benchmarks.oracle.compare import Difference, table, worst
from benchmarks.oracle.losses import case_differences, compare_losses, record_case, recorded, save_losses
from benchmarks.result import command_line, origin, six_digits

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


PARTS = {
    "losses": (record_losses, check_losses),
    "steps": (record_steps, check_steps),
}


def main() -> int:
    """Record or compare the parts that are named."""
    parser = command_line(__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--record", action="store_true", help="write the record anew")
    what.add_argument("--compare", action="store_true", help="compare today's trainer with the record")
    parser.add_argument("--part", choices=sorted(PARTS), action="append", help="this part alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    failed = False
    for part in options.part or PARTS:
        record, check = PARTS[part]
        if options.record:
            record()
        else:
            differences = check()
            failed |= not all(difference.passes for difference in differences)
            print(f"{part}: {table(differences)}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

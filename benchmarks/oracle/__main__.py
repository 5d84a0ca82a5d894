"""The oracle: compare the loop with what is on record of TRL's losses and of the trainer before it, or record anew.

    python -m benchmarks.oracle --compare                # losses, steps, accuracy; exit code 1 if anything differs
    python -m benchmarks.oracle --record --part losses   # TRL's, of the version that is installed

Another implementation is compared by its own callable: see benchmarks/oracle/README.md. The record is in
benchmarks/results/oracle. Losses and steps: tiny-random, float32, one thread of a CPU.
"""

from __future__ import annotations

import logging
import sys
import warnings
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.oracle.accuracy import check_accuracy, record_accuracy
from benchmarks.oracle.cases import BATCH, FOLDER, all_cases, make_batch
from benchmarks.oracle.compare import Difference, table
from benchmarks.oracle.loop import Packed, loop_loss, loop_steps
from benchmarks.oracle.losses import compare_losses, record_case, recorded, save_losses
from benchmarks.oracle.steps import compare_steps
from benchmarks.oracle.textbook import textbook_loss
from benchmarks.result import command_line, origin

PACKAGES = ("torch", "transformers", "trl", "peft", "numpy")


def _facts(part: str) -> dict[str, Any]:
    facts = origin(f"python -m benchmarks.oracle --record --part {part}", *PACKAGES)
    return facts | {
        "weights": "tiny-random",
        "dtype": "float32",
        "threads": torch.get_num_threads(),
    }


def record_losses() -> None:
    """Draw the batch, then record every case as TRL computes it, and how far the others are from it."""
    from benchmarks.oracle.trl_loss import trl_loss

    FOLDER.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(BATCH, **make_batch())
    cases = list(all_cases())
    record = {case.name: record_case(trl_loss, case) for case in cases}
    save_losses({"trl": record}, _facts("losses") | {"n": len(cases)})
    recorded.cache_clear()
    refused = sorted(
        {f"{case.loss}, {case.level}" for case in cases if "refused" in record[case.name]}
    )
    print(f"losses: {len(cases)} cases; refused by TRL: {'; '.join(refused) or 'none'}")


def check_losses() -> list[Difference]:
    """The loop's loss by both updates, and the textbook's, against TRL's record."""
    packed = partial(loop_loss, make_update=Packed)
    return [
        d for compute in (loop_loss, packed, textbook_loss) for d in compare_losses(compute)
    ]


def check_steps() -> list[Difference]:
    """The loop's steps by both updates against the record of the trainer before it."""
    return compare_steps(loop_steps) + compare_steps(partial(loop_steps, make_update=Packed))


PARTS = {
    "losses": (record_losses, check_losses),
    "steps": (None, check_steps),  # the trainer that was recorded is gone
    "accuracy": (record_accuracy, check_accuracy),
}


def main() -> int:
    """Record or compare the parts that are named."""
    parser = command_line(__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--record", action="store_true", help="write the record anew")
    what.add_argument("--compare", action="store_true", help="compare the loop with the record")
    parser.add_argument(
        "--part", choices=sorted(PARTS), action="append", help="this part alone"
    )
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if options.record and (
        fixed := [part for part in options.part or PARTS if PARTS[part][0] is None]
    ):
        parser.error(
            f"--record --part {fixed[0]}: the trainer that it was recorded of is gone; name other parts"
        )
    torch.set_num_threads(1)
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

"""Is a run that was killed, stopped or left without disk the run that nobody touched? Drawn faults, one a run.

    python -m benchmarks.faults                    # 120 faults, about half an hour on 2 cores; goes on where it was
    python -m benchmarks.faults --faults 20 --seed 1 --work runs/faults-1

Each fault is drawn from the seed and its number: what is trained (an arm), what happens, and when. A kill is SIGKILL; a
press is SIGINT, one or two; both at any moment, in an evaluation, or while a checkpoint is saved. A full disk is a
tmpfs that is filled to the last bytes at any moment (root alone can mount one), or a limit on the size of files
(RLIMIT_FSIZE: no privileges; the kernel refuses larger files with EFBIG instead of ENOSPC, smaller ones still fit).
Then the run goes on: after a kill in a new process with resume_from_checkpoint=True; after a press by train() in the
same process or a new one; on a disk by train() once there is space. It must end in the untouched run's weights, rows of
metrics.csv (but times) and completions, bit for bit, the files read by pandas as they stand; or say in words that
nothing could be saved yet.
The model is tiny and random, on a CPU, float32, 6 steps: what is tested is stop and go, not learning.
Lines go to <work>/faults.jsonl as they come; the count to benchmarks/results/faults.json.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from benchmarks.faults.campaign import campaign
from benchmarks.faults.child import TODAY
from benchmarks.faults.runs import ARMS, STEPS
from benchmarks.result import RESULTS, command_line, origin, save


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--faults", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("runs/faults"))
    options = parser.parse_args()
    faults = campaign(options.work, options.faults, options.seed, TODAY)
    counts = Counter((f["kind"], f["moment"], f["outcome"]) for f in faults)
    result = origin(
        "python -m benchmarks.faults " + " ".join(sys.argv[1:]), "torch", "transformers", "trl", "peft"
    )
    result |= {
        "weights": "tiny-random", "seed": options.seed, "n": len(faults), "arms": list(ARMS), "steps": STEPS,
        "outcomes": dict(Counter(f["outcome"] for f in faults)),
        "counts": [{"kind": k, "moment": m, "outcome": o, "n": n} for (k, m, o), n in sorted(counts.items())],
        "by_arm": {arm: dict(Counter(f["outcome"] for f in faults if f["arm"] == arm)) for arm in ARMS},
        "not_equal": [f for f in faults if "equal" not in f["outcome"]],
    }  # fmt: skip
    print(save(RESULTS, "faults", result))


if __name__ == "__main__":
    main()

"""Is a run that was killed, stopped, damaged or left without disk the run that nobody touched? Drawn faults, one a run.

    python -m benchmarks.faults                    # 256 faults, an hour on one core; goes on where it was stopped
    python -m benchmarks.faults --faults 20 --seed 1 --work runs/faults-1

Each fault is drawn from the seed and its number: what is trained (an arm), what happens, and when. A kill is SIGKILL; a
press is SIGINT, one or two; of two processes it meets one or both, and where one dies both end, as under torchrun. A
full disk is a tmpfs that is filled to the last bytes (root alone can mount one), or a limit on the size of files
(RLIMIT_FSIZE: no privileges; the kernel refuses larger files with EFBIG instead of ENOSPC, smaller ones still fit).
A folder that becomes read-only refuses every write (to another user than root), and is given back.
Damage: the process is killed, then a file of a checkpoint is cut, emptied, changed in a byte or removed; a torn line:
half a line stands at the end of metrics.jsonl or completions.jsonl; damage at rest: one to three of all files of the
run, those beside the checkpoints as often as those inside. Where words ask for it, the line is deleted or the file is
moved away, and the run goes on. The moment is any, or in a sampling, an update, the
writing of a row, a save or an evaluation: of the first step, of the last, or between.
Then the run goes on: after a kill in a new process by train(resume=True); after a press by train() in the same process
or a new one; on a disk by train() once there is space. It must end in the untouched run's weights, rows of
metrics.jsonl (but times), completions, last checkpoint and kept weights, bit for bit; or say in words that nothing
could be saved yet.
The model is tiny and random, on a CPU, float32, 6 steps: what is tested is stop and go, not learning.
Lines go to <work>/faults.jsonl as they come; the count to benchmarks/results/faults.json.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from benchmarks.faults.campaign import FINE, campaign
from benchmarks.faults.runs import ARMS, STEPS
from benchmarks.result import RESULTS, command_line, origin, save


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--faults", type=int, default=256)
    parser.add_argument(
        "--only", type=int, nargs="+", help="these numbers alone; no result is saved"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("runs/faults"))
    options = parser.parse_args()
    numbers = options.only or list(range(options.faults))
    faults = campaign(options.work, numbers, options.seed)
    wrong = [fault for fault in faults if fault["outcome"] not in FINE]
    print(f"{len(faults)} faults, {len(wrong)} wrong")
    if options.only:
        return
    counts = Counter((f["kind"], f["moment"], f["outcome"]) for f in faults)
    result = origin(
        "python -m benchmarks.faults " + " ".join(sys.argv[1:]), "torch", "transformers", "peft"
    )
    result |= {
        "weights": "tiny-random", "seed": options.seed, "n": len(faults), "arms": list(ARMS), "steps": STEPS,
        "outcomes": dict(Counter(f["outcome"] for f in faults)),
        "counts": [{"kind": k, "moment": m, "outcome": o, "n": n} for (k, m, o), n in sorted(counts.items())],
        "by_arm": {arm: dict(Counter(f["outcome"] for f in faults if f["arm"] == arm)) for arm in ARMS},
        "wrong": wrong,
    }  # fmt: skip
    print(save(RESULTS, "faults", result))


if __name__ == "__main__":
    main()

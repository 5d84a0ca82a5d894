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

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.faults.child import resumed, touched, untouched
from benchmarks.faults.runs import ARMS, STEPS
from benchmarks.result import RESULTS, command_line, origin, save

KINDS = {"kill": 4, "press": 3, "two presses": 2, "full tmpfs": 2, "file size limit": 2}  # of 13 faults
MOMENTS = ("any", "any", "evaluation", "saving")
ROOM = (
    0,
    4_000,
    60_000,
    3_000_000,
    8_000_000,
)  # bytes a full disk still takes; a checkpoint is 23 MB, adapters 5
TIMEOUT = 180.0  # seconds


def drawn(seed: int, number: int) -> dict[str, Any]:
    """Fault `number` of the campaign."""
    draw = random.Random(f"fault {seed} {number}")
    kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
    moment = "any" if kind in ("full tmpfs", "file size limit") else draw.choice(MOMENTS)
    return {
        "number": number,
        "arm": list(ARMS)[number % len(ARMS)],
        "kind": kind,
        "moment": moment,
        "at": draw.random(),  # fraction of the run, or of the evaluation or save
        "which": draw.randrange(3),  # evaluation or save
        "second": draw.uniform(0, 0.4),  # seconds to a second press
        "room": draw.choice(ROOM),
        "new_process": draw.random() < 0.5,
        "stays": draw.randrange(2),  # calls of train() on a disk still full
    }


def in_child(work: Callable[[], dict[str, Any]], folder: Path) -> dict[str, Any]:
    """What work() returns in a forked process; {"killed": True}, {"error": ...} or {"hung": True} where it does not."""
    answer = folder.parent / "answer.json"
    answer.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1), os.dup2(null, 2)
            warnings.simplefilter("ignore")
            found = work()
        except BaseException:
            found = {"error": traceback.format_exc()[-2500:]}
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2)
        (folder.parent / "filler").unlink(missing_ok=True)
        answer.write_text(json.dumps(found))
        os._exit(0)
    until = time.monotonic() + TIMEOUT
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return {"hung": True}
        time.sleep(0.02)
    return json.loads(answer.read_text()) if answer.exists() else {"killed": True}


def one(fault: dict[str, Any], reference: dict[str, Any], work: Path) -> dict[str, Any]:
    """The fault, going on after it, and how it ended."""
    place = work / f"fault-{fault['number']}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    mounted = fault["kind"] == "full tmpfs" and mount(place)
    if fault["kind"] == "full tmpfs" and not mounted:
        fault = fault | {"kind": "file size limit", "asked": "full tmpfs, which cannot be mounted here"}
    try:
        folder = place / "run"
        first = last = in_child(lambda: touched(fault, folder, reference["lasts"]), folder)
        if "killed" in first or "goes_on" in first:
            last = in_child(lambda: resumed(fault, folder), folder)
        outcome = ended(first, last, reference)
    finally:
        if mounted:
            subprocess.run(["umount", str(place)], check=True)
        if "outcome" not in locals() or "equal" in outcome or outcome.startswith("nothing"):
            shutil.rmtree(place, ignore_errors=True)
    words = last.get("nothing_yet") or last.get("error") or "; ".join(first.get("said", []))
    return fault | {
        "outcome": outcome,
        "hit": first.get("hit", []),
        "words": words.replace(str(place), "..."),
    }


def ended(first: dict[str, Any], last: dict[str, Any], reference: dict[str, Any]) -> str:
    """One of: equal; words, then equal; nothing saved yet, in words; came after the end; different ...; a raw error."""
    if "nothing_yet" in last:
        return "nothing saved yet, in words"
    if "weights" not in last:
        return "hung" if "hung" in last else "a raw error"
    unlike = [name for name in ("weights", "rows", "completions") if last[name] != reference[name]]
    if unlike:
        return "different " + ", ".join(unlike)
    if "killed" not in first and not first.get("hit"):
        return "equal; the fault came after the end"
    return "words, then equal" if first.get("said") else "equal"


def mount(place: Path) -> bool:
    """A tmpfs of 120 MB there; False where this user may not."""
    command = ["mount", "-t", "tmpfs", "-o", "size=120m", "tmpfs", str(place)]
    return shutil.which("mount") is not None and subprocess.run(command, capture_output=True).returncode == 0


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--faults", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("runs/faults"))
    options = parser.parse_args()
    torch.set_num_threads(1)  # forked processes and thread pools do not mix
    options.work.mkdir(parents=True, exist_ok=True)
    lines = options.work / "faults.jsonl"
    done = {f["number"]: f for f in map(json.loads, lines.read_text().splitlines())} if lines.exists() else {}
    references = {
        arm: in_child(lambda arm=arm, place=place: untouched(arm, place / "run"), place / "run")
        for number, arm in enumerate(ARMS)
        if (place := _fresh(options.work / f"untouched-{number}"))
    }
    for number in range(options.faults):
        if number not in done:
            fault = drawn(options.seed, number)
            done[number] = one(fault, references[fault["arm"]], options.work.resolve())
            with open(lines, "a") as file:
                file.write(json.dumps(done[number]) + "\n")
            print(
                number,
                fault["arm"],
                fault["kind"],
                fault["moment"],
                "->",
                done[number]["outcome"],
                flush=True,
            )
    faults = [done[number] for number in range(options.faults)]
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


def _fresh(place: Path) -> Path:
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    return place


if __name__ == "__main__":
    main()

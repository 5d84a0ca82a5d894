"""Faults drawn from a seed, one run each, and how the run ended."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from benchmarks.faults.child import resumed, touched, untouched
from benchmarks.faults.processes import in_children
from benchmarks.faults.runs import ARMS, policy, task_of
from grpo_kit.record._digests import checkpoints
from grpo_kit.record._lines import COMPLETIONS_LINES, METRICS_LINES
from grpo_kit.record.files import KEPT

KINDS = {
    "kill": 4, "press": 3, "two presses": 2, "full tmpfs": 2, "file size limit": 2, "read-only folder": 2, "damage": 3,
    "torn line": 1, "damage at rest": 4,
}  # of 23 faults  # fmt: skip
HOWS = ("cut", "changed", "removed", "emptied")
MOMENTS = ("any", "sampling", "update", "writing", "saving", "evaluation")
ROOM = (
    0,
    4_000,
    60_000,
    3_000_000,
    8_000_000,
)  # bytes a full disk still takes; a checkpoint is 23 MB, adapters 5
LOST = "the damaged best is named, the rest equal"
LINES = "the damaged table is named and lacks lines, the rest equal"
FINE = (
    "equal", "words, then equal", "equal; the fault came after the end", "nothing saved yet, in words", LOST, LINES,
)  # fmt: skip
TABLES = {METRICS_LINES: "rows", COMPLETIONS_LINES: "completions", KEPT: "kept"}


def drawn(seed: int, number: int) -> dict[str, Any]:
    """Fault `number` of the campaign."""
    draw = random.Random(f"fault {seed} {number}")
    kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
    damaged = kind in (
        "damage",
        "torn line",
        "damage at rest",
    )  # a process that was killed once there may be a checkpoint
    return {
        "number": number,
        "arm": list(ARMS)[number % len(ARMS)],
        "kind": kind,
        "moment": draw.choice(MOMENTS[1:] if damaged else MOMENTS),
        # which of the run's samplings, updates, ...: the first, the last, one between
        "place": draw.uniform(0.4, 1)
        if damaged
        else draw.choice([0.0, 0.999, draw.random(), draw.random()]),
        "at": draw.random(),  # fraction of the run, or of the sampling, the update, ...
        "second": draw.uniform(0, 0.4),  # seconds to a second press
        "whom": draw.choice([0, 1, "all"]),  # of several processes
        "room": draw.choice(ROOM),
        "new_process": draw.random() < 0.5,
        "stays": draw.randrange(2),  # calls of train() on a disk still full
        "damage": draw.choice(HOWS),
        "file": draw.random(),  # which of a checkpoint's files
        "checkpoint": draw.choice([-1, -1, -1, 0]),  # the last one, or the first
        "files": [
            [draw.random(), draw.choice(HOWS)] for _ in range(draw.choice([1, 1, 2, 3]))
        ],  # at rest: of all
    }


def one(fault: dict[str, Any], reference: dict[str, Any], work: Path) -> dict[str, Any]:
    """The fault, going on after it, and how it ended."""
    place = work / f"fault-{fault['number']}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    mounted = fault["kind"] == "full tmpfs" and mount(place)
    if fault["kind"] == "full tmpfs" and not mounted:
        fault = fault | {
            "kind": "file size limit",
            "asked": "full tmpfs, which cannot be mounted here",
        }
    count, folder, what = ARMS[fault["arm"]].processes, place / "run", ""
    try:
        first = last = in_children(lambda: touched(fault, folder, reference), place, count)
        if (place / "hit").exists():
            first = first | {"hit": [int((place / "hit").read_text())]}
        if "killed" in first or "goes_on" in first:
            what = damage(fault, folder) if "killed" in first else ""
            last = in_children(lambda: resumed(fault, folder), place, count)
        outcome = ended(first, last, reference, what, ARMS[fault["arm"]].keep)
    finally:
        if mounted:
            subprocess.run(["umount", str(place)], check=True)
    if outcome in FINE:
        shutil.rmtree(place, ignore_errors=True)
    words = [
        what,
        *first.get("said", []),
        *(last.get(name, "") for name in ("nothing_yet", "words", "error")),
    ]
    words = "; ".join(dict.fromkeys(filter(None, words))).replace(str(place), "...")
    return fault | {"outcome": outcome, "hit": first.get("hit", []), "words": words}


def damage(fault: dict[str, Any], folder: Path) -> str:
    """What a disk does to the folder while nobody runs; in words."""
    if fault["kind"] == "torn line":
        path = folder / (METRICS_LINES if fault["file"] < 0.5 else COMPLETIONS_LINES)
        if not path.exists():
            return ""
        with open(path, "ab") as file:
            file.write(b'{"step": 5, "rew')
        return f"half a line at the end of {path.name}"
    if fault["kind"] == "damage at rest":
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        # A table or a file beside them as often as a file of a checkpoint: of those there are many.
        beside = [path for path in files if path.parent == folder]
        inside = [path for path in files if path.parent != folder] or beside
        hurt = {}
        for place, how in fault["files"] if beside else ():
            among = beside if place < 0.5 else inside
            hurt[among[int(2 * place % 1 * len(among))]] = how
        return "; ".join(
            f"{path.relative_to(folder)} {_hurt(path, how)}" for path, how in hurt.items()
        )
    if fault["kind"] != "damage" or not (saved := checkpoints(folder)):
        return ""
    files = sorted(path for path in saved[fault["checkpoint"]].rglob("*") if path.is_file())
    if not files:
        return ""
    path = files[int(fault["file"] * len(files))]
    return f"{path.relative_to(folder)} {_hurt(path, fault['damage'])}, of {', '.join(one.name for one in saved)}"


def _hurt(path: Path, how: str) -> str:
    data = path.read_bytes()
    middle = len(data) // 2
    if how == "removed":
        path.unlink()
    elif how in ("cut", "emptied"):
        path.write_bytes(data[: middle if how == "cut" else 0])
    elif data:
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    return how


def ended(
    first: dict[str, Any],
    last: dict[str, Any],
    reference: dict[str, Any],
    what: str = "",
    keep: str = "last",
) -> str:
    """A name of FINE; different ...; hung; a raw error. what: the damage at rest, as damage says it."""
    if "nothing_yet" in last:
        return "nothing saved yet, in words"
    if "weights" not in last:
        return "hung" if "hung" in last else "a raw error"
    names = [name for name in reference if name not in ("lasts", "counts")]
    unlike = [name for name in names if last[name] != reference[name]]
    if (
        unlike
        and {*unlike} <= {"weights", "kept"}
        and "cannot be kept" in last.get("words", "")
    ):
        return LOST
    # file -> how
    hurt = dict(one.split(" ") for one in what.split("; ") if one.count(" ") == 1)
    own = {TABLES[name] for name in hurt if name in TABLES}
    # the best is that of the evaluations on record
    if METRICS_LINES in hurt and keep == "best":
        own |= {"weights", "kept"}
    if unlike and {*unlike} <= own:
        named = [name for name in hurt if name in TABLES and name in last.get("words", "")]
        if all(name in named for name in hurt if TABLES.get(name) in unlike):
            return LINES
    if unlike:
        return "different " + ", ".join(unlike)
    if "killed" not in first and not first.get("hit"):
        return "equal; the fault came after the end"
    return "words, then equal" if first.get("said") or last.get("words") else "equal"


def mount(place: Path) -> bool:
    """A tmpfs of 160 MB there; False where this user may not."""
    command = ["mount", "-t", "tmpfs", "-o", "size=160m", "tmpfs", str(place)]
    return (
        shutil.which("mount") is not None
        and subprocess.run(command, capture_output=True).returncode == 0
    )


def campaign(work: Path, numbers: list[int], seed: int) -> list[dict[str, Any]]:
    """These faults of the seed, each with its outcome. Those in work/faults.jsonl are not run again."""
    work.mkdir(parents=True, exist_ok=True)
    lines = work / "faults.jsonl"
    done = (
        {f["number"]: f for f in map(json.loads, lines.read_text().splitlines())}
        if lines.exists()
        else {}
    )
    missing = [drawn(seed, number) for number in numbers if number not in done]
    references: dict[str, dict[str, Any]] = {}
    for fault in missing:
        arm, number = fault["arm"], fault["number"]
        ready(arm)
        if arm not in references:
            references[arm] = reference_of(arm, work)
        done[number] = one(fault, references[arm], work.resolve())
        with open(lines, "a") as file:
            file.write(json.dumps(done[number]) + "\n")
        about = f"{arm}, {fault['kind']}, {fault['moment']}"
        print(f"{number}: {about} -> {done[number]['outcome']}", flush=True)
    return [done[number] for number in numbers]


def ready(arm: str) -> None:
    """Make what all processes of the arm have, once."""
    torch.set_num_threads(1)  # forked processes and thread pools do not mix
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    policy(arm), task_of(arm)


def reference_of(arm: str, work: Path) -> dict[str, Any]:
    """The arm's run that nobody touches."""
    place = work / f"untouched-{list(ARMS).index(arm)}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    found = in_children(lambda: untouched(arm, place / "run"), place, ARMS[arm].processes)
    if "weights" not in found:
        raise RuntimeError(f"the untouched run of {arm!r} did not end: {found}")
    shutil.rmtree(place)
    return found

"""Faults drawn from a seed, one run each, and how the run ended: the campaign, whatever trainer it strikes."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

ARMS = (  # what is trained; a fault's arm goes by its number
    "full",
    "full, 2 iterations",
    "LoRA",
    "LoRA, 2 iterations",
    "off-policy, full",
    "off-policy, LoRA",
    "positives, full, 2 iterations",
    "positives, LoRA",
)
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


class Implementation(NamedTuple):
    """What trains: three functions, each called in a forked process; child.py has those of today's trainer.

    untouched(arm, folder): the run that nobody touches: {"lasts": {"train", "evaluation", "saving": seconds}} and the
    digests "weights", "rows" and "completions". touched(fault, folder, lasts): the run with the fault, to its end: the
    digests, with "hit" and "said"; or {"goes_on": True, ...} where a new process goes on. resumed(fault, folder): a new
    process goes on: the digests, or {"nothing_yet": words}. arm: a name of ARMS.
    """

    untouched: Callable[[str, Path], dict[str, Any]]
    touched: Callable[[dict[str, Any], Path, dict[str, float]], dict[str, Any]]
    resumed: Callable[[dict[str, Any], Path], dict[str, Any]]


def drawn(seed: int, number: int) -> dict[str, Any]:
    """Fault `number` of the campaign."""
    draw = random.Random(f"fault {seed} {number}")
    kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
    moment = "any" if kind in ("full tmpfs", "file size limit") else draw.choice(MOMENTS)
    return {
        "number": number,
        "arm": ARMS[number % len(ARMS)],
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


def one(
    fault: dict[str, Any], reference: dict[str, Any], work: Path, trains: Implementation
) -> dict[str, Any]:
    """The fault, going on after it, and how it ended."""
    place = work / f"fault-{fault['number']}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    mounted = fault["kind"] == "full tmpfs" and mount(place)
    if fault["kind"] == "full tmpfs" and not mounted:
        fault = fault | {"kind": "file size limit", "asked": "full tmpfs, which cannot be mounted here"}
    try:
        folder = place / "run"
        first = last = in_child(lambda: trains.touched(fault, folder, reference["lasts"]), folder)
        if "killed" in first or "goes_on" in first:
            last = in_child(lambda: trains.resumed(fault, folder), folder)
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


def campaign(work: Path, count: int, seed: int, trains: Implementation) -> list[dict[str, Any]]:
    """The faults 0 to count - 1 of the seed, each with its outcome. Those in work/faults.jsonl are not run again."""
    torch.set_num_threads(1)  # forked processes and thread pools do not mix
    work.mkdir(parents=True, exist_ok=True)
    lines = work / "faults.jsonl"
    done = {f["number"]: f for f in map(json.loads, lines.read_text().splitlines())} if lines.exists() else {}
    missing = [drawn(seed, number) for number in range(count) if number not in done]
    references = {
        arm: in_child(lambda arm=arm, place=place: trains.untouched(arm, place / "run"), place / "run")
        for number, arm in enumerate(ARMS)
        if any(fault["arm"] == arm for fault in missing) and (place := _fresh(work / f"untouched-{number}"))
    }
    for fault in missing:
        number = fault["number"]
        done[number] = one(fault, references[fault["arm"]], work.resolve(), trains)
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
    return [done[number] for number in range(count)]


def _fresh(place: Path) -> Path:
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    return place

"""Exports of a real model killed at drawn moments and on disks that fill up: whole, or not there.

    python -m benchmarks.export_faults --model RUN/adapter --tuning lora --kills 6 --disks 4

Each kill: a forked process exports, proof included, and is killed (signal 9) after a drawn share of the time that an
undisturbed export took. Each disk: a tmpfs (as root; else it is skipped) of a drawn share of what the export takes,
too small in most draws, that the check before writing is told is larger. Afterwards the folder under the export's name
is either not there or passes its digests, and loads to the same weights; what is left beside it is hidden, is named as
unfinished, and goes with the next export. Writes benchmarks/results/export_faults.json.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import grpo_kit as kit
from benchmarks.result import RESULTS, command_line, origin, save
from grpo_kit.more.export import ExportError, export
from grpo_kit.more.export._export_folder import is_unfinished, read_report

FORMS = [("merged", "f16"), ("gguf", "q8_0")]


def state(folder: Path, name: str) -> dict[str, Any]:
    """What lies there: whole (digests agree), not there, or, what must not be, something else."""
    target, beside = folder / name, [p for p in folder.iterdir() if p.name != name]
    found = "not there"
    if target.exists():
        try:
            found = "whole" if read_report(target) else "HALF"
        except (ExportError, TypeError, AttributeError):
            found = "HALF"
    strange = [p.name for p in beside if not is_unfinished(p)]
    return {"found": found, "left": len(beside), "strange": strange}


def killed(
    model: Any, tokenizer: Any, task: Any, form: tuple[str, str], after: float, folder: Path
) -> dict:
    """One export in a forked process, killed after so many seconds."""
    child = os.fork()
    if not child:
        os.setpgrp()
        try:
            export(
                model,
                tokenizer,
                folder / "out",
                task=task,
                format=form[0],
                quant=form[1],
                rows=2,
            )
        finally:
            os._exit(0)
    time.sleep(after)
    done = os.waitpid(child, os.WNOHANG)[0] != 0
    if not done:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    found = state(folder, "out") | {
        "fault": "kill",
        "format": form[0],
        "after": after,
        "ended before": done,
    }
    shutil.rmtree(folder / "out", ignore_errors=True)
    export(model, tokenizer, folder / "out", task=task, format="adapter", proof=False)  # sweeps
    found["left after the next export"] = len(list(folder.iterdir())) - 1
    return found


def full(model: Any, tokenizer: Any, task: Any, form: tuple[str, str], size: int) -> dict:
    """One export onto a disk of so many bytes."""
    disk = Path(tempfile.mkdtemp(prefix="disk-"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], check=True)
    said = ""
    room = type("Usage", (), {"free": 10**12})()
    try:
        with mock.patch("shutil.disk_usage", lambda path: room):
            export(
                model,
                tokenizer,
                disk / "out",
                task=task,
                format=form[0],
                quant=form[1],
                proof=False,
            )
    except ExportError as error:
        said = str(error).replace(str(disk), "DISK")
    finally:
        found = state(disk, "out") | {
            "fault": "disk",
            "format": form[0],
            "bytes": size,
            "said": said,
        }
        subprocess.run(["umount", disk], check=True)
        disk.rmdir()
    return found


def main() -> None:
    """Run and save."""
    parser = command_line(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tuning", default="lora")
    parser.add_argument("--kills", type=int, default=6, help="of each format")
    parser.add_argument("--disks", type=int, default=4, help="of each format")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw, task = random.Random(options.seed), kit.tasks.largest(n_train=8, n_held_out=8)
    model, tokenizer = kit.load_policy(options.model, tuning=options.tuning, quiet=True)
    command = (
        f"python -m benchmarks.export_faults --kills {options.kills} --disks {options.disks}"
    )
    result = origin(command, "torch", "transformers", "gguf") | {
        "seed": options.seed,
        "runs": [],
    }
    with tempfile.TemporaryDirectory(prefix="export-faults-") as held:
        for number, form in enumerate(FORMS):
            folder = Path(held) / str(number)
            started = time.time()
            made = export(
                model,
                tokenizer,
                folder / "whole",
                task=task,
                format=form[0],
                quant=form[1],
                rows=2,
            )
            took = time.time() - started
            shutil.rmtree(folder / "whole")
            for _ in range(options.kills):
                result["runs"].append(
                    killed(model, tokenizer, task, form, took * draw.random(), folder)
                )
                print(result["runs"][-1], flush=True)
            for _ in range(options.disks if os.geteuid() == 0 else 0):
                result["runs"].append(
                    full(
                        model, tokenizer, task, form, int(made.bytes * draw.uniform(0.05, 1.1))
                    )
                )
                print(result["runs"][-1], flush=True)
    bad = [
        r
        for r in result["runs"]
        if r["found"] == "HALF" or r["strange"] or r.get("left after the next export")
    ]
    result["half-written that looks whole, or left behind"] = len(bad)
    print(f"{len(result['runs'])} faults, {len(bad)} bad")
    save(RESULTS, "export_faults", result)


if __name__ == "__main__":
    main()

"""Processor seconds until `kit.GRPOTrainer` can be called, in fresh interpreters: torch's, transformers', the kit's.

    python -m benchmarks.imports --before ../older_checkout

Of the kit: what comes on top once torch and transformers' Llama are there, and which large packages come with it.
Medians of --rounds, the checkouts in turn. Writes results/imports.json.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.result import RESULTS, ROOT, command_line, origin, write_result

PATH = RESULTS / "imports.json"
PROGRAM = """
import json, sys, time
began = time.process_time()
import torch
torch_there = time.process_time()
import transformers.models.llama.modeling_llama
transformers_there, modules = time.process_time(), set(sys.modules)
import grpo_kit as kit
kit.GRPOTrainer
packages = sorted({name for name in set(sys.modules) - modules if "." not in name} & set(sys.argv[1:]))
print(json.dumps({
    "torch": torch_there - began,
    "transformers": transformers_there - torch_there,
    "kit": time.process_time() - transformers_there,
    "kit_modules": sum(name.startswith("grpo_kit") for name in sys.modules),
    "modules": len(sys.modules),
    "packages": packages,
}))
"""
LARGE = ("bitsandbytes", "datasets", "matplotlib", "pandas", "peft", "scipy", "sklearn", "trl")


def measured(checkout: Path) -> dict:
    """One fresh interpreter's."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *LARGE],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument(
        "--before", type=Path, help="an older checkout, measured beside this one"
    )
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    checkouts = {"before": args.before} if args.before else {}
    checkouts["now"] = ROOT
    rounds: dict[str, list[dict]] = {name: [] for name in checkouts}
    for _ in range(args.rounds):
        for name, checkout in checkouts.items():
            rounds[name].append(measured(checkout.resolve()))
    rows = {}
    for name, seen in rounds.items():
        seconds = {
            part: statistics.median(run[part] for run in seen)
            for part in ("torch", "transformers", "kit")
        }
        rows[name] = {part: round(value, 2) for part, value in seconds.items()}
        rows[name] |= {part: seen[0][part] for part in ("kit_modules", "modules", "packages")}
        print(name, rows[name])
    about = origin(
        "python -m benchmarks.imports --before ../older_checkout", "torch", "transformers"
    )
    write_result(
        PATH, about | {"rounds": args.rounds, "load": os.getloadavg()[0], "rows": rows}
    )


if __name__ == "__main__":
    main()

"""Final held-out accuracy of the loop on the recorded jobs, three seeds each, beside the former trainer's intervals.

    python -m benchmarks.oracle.loop_accuracy --job "main job, full" "main job, LoRA" "grid episodes"

Writes benchmarks/results/oracle/loop_accuracy.json, a row a run; seeds that are there are not run again.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import agents
from benchmarks.oracle.accuracy import WEIGHTS, compare_accuracy
from benchmarks.oracle.cases import FOLDER
from benchmarks.oracle.compare import table
from benchmarks.result import ROOT, command_line, origin, read_result, write_result
from grpo_kit import evaluate, next_run_folder, preset
from grpo_kit.loop import Config
from grpo_kit.models import load_policy
from grpo_kit.trainer.grpo_trainer import GRPOTrainer

JOBS = {"main job, full": "full", "main job, LoRA": "lora", "grid episodes": "episodes"}


def run(job: str, seed: int) -> dict[str, Any]:
    """One seed: trained by the loop and evaluated as notebooks 05 and 06 do, or as benchmarks.agents does."""
    if job == "grid episodes":
        none = {"sampled": [], "greedy": []}  # what it could before is on record
        made = agents.run("grid", seed, agents.STEPS, none)
        right, n = sum(made["after"]["sampled"]), agents.ROWS * agents.SAMPLES
        row = {"job": job, "seed": seed, "right": right, "n": n}
        return row | {"training seconds": round(made["seconds"], 1)}
    tuning = JOBS[job]
    cfg = preset("cpu", tuning=tuning, seed=seed)
    if tuning == "lora":
        cfg.learning_rate = 2e-4  # of the saved runs
    task = cfg.make_task()
    torch.manual_seed(seed)
    model, tokenizer = load_policy(
        cfg.model, tuning=tuning, dtype=cfg.dtype, seed=seed, quiet=True
    )
    config = Config(
        steps=cfg.steps, prompts_per_step=cfg.prompts_per_step, group_size=cfg.group_size,
        learning_rate=cfg.learning_rate, temperature=cfg.temperature, beta=cfg.beta, seed=seed,
    )  # fmt: skip
    folder = next_run_folder(ROOT / "runs", f"oracle_loop_{tuning}_seed{seed}")
    trainer = GRPOTrainer(
        model, task, config, tokenizer=tokenizer, folder=Path(folder), live=None
    )
    began = time.monotonic()
    trainer.train()
    seconds = time.monotonic() - began
    after = evaluate(model, tokenizer, task, batch_size=cfg.eval_batch).strict
    right = round(after.value * len(task.held_out))
    return {
        "job": job,
        "seed": seed,
        "right": right,
        "n": len(task.held_out),
        "training seconds": round(seconds, 1),
    }


def main() -> None:
    """Run what is missing, save, compare."""
    parser = command_line(__doc__)
    parser.add_argument("--job", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    path = FOLDER / "loop_accuracy.json"
    saved = read_result(path, runs=[])
    saved |= origin("python -m benchmarks.oracle.loop_accuracy", "torch", "transformers") | {
        "weights": WEIGHTS
    }
    for job in options.job:
        for seed in options.seeds:
            if not any((row["job"], row["seed"]) == (job, seed) for row in saved["runs"]):
                saved["runs"].append(run(job, seed))
                write_result(path, saved)
                print(json.dumps(saved["runs"][-1]), flush=True)
        rows = [row for row in saved["runs"] if row["job"] == job]
        if len(rows) == 3:
            print(
                f"{job}: {table(compare_accuracy(job, [row['right'] / row['n'] for row in rows], rows[0]['n']))}"
            )


if __name__ == "__main__":
    main()

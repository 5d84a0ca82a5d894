"""The main job over several seeds: notebook 05 executed once a seed, every run kept in the table.

    python -m benchmarks.main_job --seeds 0 1 2
    python -m benchmarks.main_job --seeds 0 1 2 --tuning lora        # notebook 06, into main_job_lora_<profile>.json,
                                                                     # at 2e-4 on a laptop, as its saved runs

Writes benchmarks/results/main_job_<profile>.json: hardware, weights, versions, date, and one row a run with the
held-out accuracy before and after (Wilson 95 %), the best constant strategy, steps, minutes and peak memory; under
"seconds" the same runs' seconds by part (main_job_parts.py).
"""

from __future__ import annotations

import json
import os
from typing import Any

import papermill

from benchmarks.main_job_parts import seconds_of_run
from benchmarks.result import (
    RESULTS,
    ROOT,
    WEIGHTS,
    command_line,
    origin,
    read_result,
    write_result,
)
from grpo_kit import next_run_folder, preset

NOTEBOOKS = {"full": "05_train_full.ipynb", "lora": "06_train_lora.ipynb"}


LORA_RATE = 2e-4  # of the saved LoRA runs on a CPU; the preset has 1e-4 since


def interval(result: dict) -> str:
    """'57.8 % [51.7, 63.7]'"""
    return f"{result['accuracy']:.1%} [{100 * result['low']:.1f}, {100 * result['high']:.1f}]"


def run(
    profile_name: str, seed: int, tuning: str = "full"
) -> tuple[dict[str, Any], dict[str, float]]:
    """One seed of the notebook: the row of the table, and the seconds by part."""
    name = f"main_job_{'lora_' * (tuning == 'lora')}{profile_name}_seed{seed}"
    folder = next_run_folder(ROOT / "runs", name).resolve()
    folder.mkdir(parents=True)
    # the kernel inherits them
    os.environ |= {"KIT_RUN_FOLDER": str(folder), "PYTHONPATH": str(ROOT)}
    executed = folder / NOTEBOOKS[tuning]
    rate = preset(profile_name, tuning=tuning).learning_rate
    if (profile_name, tuning) == ("cpu", "lora"):
        rate = LORA_RATE
    papermill.execute_notebook(
        ROOT / "notebooks" / NOTEBOOKS[tuning],
        executed,
        parameters={
            "PROFILE": profile_name,
            "SEED": seed,
            "LEARNING_RATE": rate,
        },
        cwd=ROOT / "notebooks",
        kernel_name="python3",
        progress_bar=False,
    )
    result = json.loads((folder / "results.json").read_text())
    best = result.get("best_constant")  # notebook 06 refers to 05's
    row = {
        "seed": seed,
        "n": result["n"],
        "before": interval(result["before"]),
        "after": interval(result["after"]),
        **({"best constant": f"{best['accuracy']:.1%} ({best['name']})"} if best else {}),
        "steps": result["steps"],
        "training minutes": round(result["train_seconds"] / 60, 1),
        "peak GiB": round(result["peak_gib"], 1),
    }
    return row, {
        part: round(took, 1) for part, took in seconds_of_run(folder, executed).items()
    }


def main() -> None:
    """Run and save; a table that exists is extended, seeds it already has are not run again."""
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--profile", default="cpu")
    parser.add_argument("--tuning", choices=NOTEBOOKS, default="full")
    options = parser.parse_args()
    cfg = preset(options.profile)
    lora = options.tuning == "lora"
    path = RESULTS / f"main_job_{'lora_' * lora}{cfg.preset}.json"
    saved = read_result(path, runs=[])
    command = (
        f"python -m benchmarks.main_job --profile {cfg.preset} --seeds {' '.join(map(str, options.seeds))}"
        + " --tuning lora" * lora
    )
    saved |= origin(command, "torch", "transformers")
    saved |= {"weights": WEIGHTS.get(cfg.model, cfg.model)}
    for seed in options.seeds:
        if any(run["seed"] == seed for run in saved["runs"]):
            continue
        row, seconds = run(cfg.preset, seed, options.tuning)
        saved["runs"].append(row)
        saved.setdefault("seconds", []).append({"seed": seed} | seconds)
        write_result(path, saved)
        print(json.dumps(row), json.dumps(saved["seconds"][-1]), sep="\n", flush=True)


if __name__ == "__main__":
    main()

"""The main job over several seeds: notebook 05 executed once a seed, every run kept in the table.

    python -m benchmarks.main_job --seeds 0 1 2

Writes benchmarks/results/main_job_<profile>.json: hardware, weights, versions, date, and one row a run with the
held-out accuracy before and after (Wilson 95 %), the best constant strategy, steps, minutes and peak memory.
"""

from __future__ import annotations

import json
import os

import papermill

from benchmarks.result import RESULTS, ROOT, WEIGHTS, command_line, origin
from grpo_kit import next_run_folder, profile


def interval(result: dict) -> str:
    """'57.8 % [51.7, 63.7]'"""
    return f"{result['accuracy']:.1%} [{100 * result['low']:.1f}, {100 * result['high']:.1f}]"


def main() -> None:
    """Run and save; a table that exists is extended, seeds it already has are not run again."""
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--profile", default="cpu")
    options = parser.parse_args()
    cfg = profile(options.profile)
    path = RESULTS / f"main_job_{cfg.name}.json"
    saved = json.loads(path.read_text()) if path.exists() else {"runs": []}
    command = (
        f"python -m benchmarks.main_job --profile {cfg.name} --seeds {' '.join(map(str, options.seeds))}"
    )
    saved |= origin(command, "torch", "transformers", "trl")
    saved |= {"weights": WEIGHTS.get(cfg.model, cfg.model)}
    for seed in options.seeds:
        if any(run["seed"] == seed for run in saved["runs"]):
            continue
        folder = next_run_folder(ROOT / "runs", f"main_job_{cfg.name}_seed{seed}").resolve()
        folder.mkdir(parents=True)
        os.environ["KIT_RUN_FOLDER"] = str(folder)
        papermill.execute_notebook(
            ROOT / "notebooks" / "05_train_full.ipynb",
            folder / "05_train_full.ipynb",
            parameters={"PROFILE": cfg.name, "SEED": seed},
            cwd=ROOT / "notebooks",
            kernel_name="python3",
            progress_bar=False,
        )
        result = json.loads((folder / "results.json").read_text())
        saved["runs"].append(
            {
                "seed": seed,
                "n": result["n"],
                "before": interval(result["before"]),
                "after": interval(result["after"]),
                "best constant": f"{result['best_constant']['accuracy']:.1%} ({result['best_constant']['name']})",
                "steps": result["steps"],
                "training minutes": round(result["train_seconds"] / 60, 1),
                "peak GiB": round(result["peak_gib"], 1),
            }
        )
        path.write_text(json.dumps(saved, indent=2) + "\n")
        print(json.dumps(saved["runs"][-1]), flush=True)


if __name__ == "__main__":
    main()

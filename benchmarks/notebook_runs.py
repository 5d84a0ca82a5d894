"""Runs of notebooks 10 and 11, as the results that the advice's table reads.

    KIT_PROFILE=cpu python -m papermill notebooks/10_preferences_then_grpo.ipynb 10.ipynb --cwd notebooks
    python -m benchmarks.notebook_runs runs/10_preferences_cpu_a2ca89    # the folder that its config cell names
    KIT_PROFILE=cpu python -m papermill notebooks/11_ppo_and_reward_models.ipynb 11.ipynb --cwd notebooks
    python -m benchmarks.notebook_runs runs/11_ppo_cpu_b5de35

Trains nothing. Writes benchmarks/results/dpo_smollm2-135m-instruct.json or ppo_smollm2-135m-instruct.json: one row an
arm and seed with the held-out questions that it answers right (greedy), in their order, and the seconds that it took.
Notebook 10: "GRPO", "DPO, then GRPO" (its seconds count the sampling and DPO too), "GRPO, same seconds". Notebook 11:
"GRPO", "PPO" (both with the exact reward), "PPO, reward model"; equal are the steps and the completions of a step, and
PPO makes four updates of a rollout. A notebook called with more SEEDS adds them to its folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.result import RESULTS, WEIGHTS, command_line, origin, write_result
from grpo_kit.more import lab

MODEL = "smollm2-135m-instruct"
GRPO = {"dpo": ["GRPO", "DPO, then GRPO", "GRPO, same seconds"], "ppo": ["GRPO"]}
PPO = ("PPO", "PPO, reward model")


def kind_of(folder: Path) -> str:
    """ "dpo" for a folder of notebook 10, "ppo" for one of notebook 11. Raises SystemExit for any other."""
    if any(folder.glob("DPO *.json")):
        return "dpo"
    if any(folder.glob("PPO seed *.json")):
        return "ppo"
    raise SystemExit(
        f"{folder} has no runs of notebook 10 or 11; give the folder that their config cell names"
    )


def runs_of(folder: Path) -> list[dict[str, Any]]:
    """All that is done in a folder of notebook 10 or 11, by arm and seed."""
    kind = kind_of(folder)
    trained = lab.load(folder / "grpo", GRPO[kind])
    seconds = trained.runs.set_index(["arm", "seed"])["seconds"]
    found = []
    for arm in trained.arms:
        for seed in trained.seeds(arm):
            took = seconds[arm, seed] + (
                _dpo_seconds(folder, seed) if arm.startswith("DPO") else 0.0
            )
            found.append(_run(arm, seed, trained.right[arm, seed], took))
    for arm in PPO if kind == "ppo" else ():
        made = {
            int(path.stem.rsplit(" ", 1)[1]): path for path in folder.glob(f"{arm} seed *.json")
        }
        for seed, path in sorted(made.items()):
            run = _read(path)
            found.append(_run(arm, seed, run["right"], run["seconds"]))
    return found


def _dpo_seconds(folder: Path, seed: int) -> float:
    """What came before GRPO: the samples that pairs are made of, and DPO on those."""
    return (
        _read(folder / f"sampling {seed} 0.json")
        + _read(folder / f"DPO {seed}.json")["seconds"]
    )


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _run(arm: str, seed: int, right: Any, seconds: float) -> dict[str, Any]:
    return {
        "arm": arm,
        "seed": seed,
        "right": [int(r) for r in right],
        "seconds": float(seconds),
    }


def main() -> None:
    """Read the folder, write the result."""
    parser = command_line(__doc__)
    parser.add_argument(
        "folder", type=Path, help="runs/10_preferences_cpu_<digest> or runs/11_ppo_cpu_<digest>"
    )
    folder = parser.parse_args().folder
    command = f"python -m benchmarks.notebook_runs runs/{folder.name}"
    said = origin(command, "torch", "transformers", "trl") | {"weights": WEIGHTS[MODEL]}
    path = RESULTS / f"{kind_of(folder)}_{MODEL}.json"
    write_result(path, said | {"runs": runs_of(folder)})
    print(path)


if __name__ == "__main__":
    main()

"""PPO beside GRPO: what notebook 11 has trained, as the result that the advice reads.

    KIT_PROFILE=cpu python -m papermill notebooks/11_ppo_and_reward_models.ipynb 11.ipynb --cwd notebooks
    python -m benchmarks.ppo runs/11_ppo_cpu_b56f36     # the folder that its config cell names; trains nothing

Writes benchmarks/results/ppo_smollm2-135m-instruct.json: one row an arm and seed with the held-out questions that it
answers right (greedy), in their order, and the seconds of its training. Arms: "GRPO", "PPO" (both with the exact
reward), "PPO, reward model". Equal are the completions of a step and the steps; PPO makes four updates of a rollout.
The notebook called with more SEEDS adds them to its folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.result import RESULTS, WEIGHTS, as_text, command_line, origin, six_digits
from grpo_kit import lab

MODEL = "smollm2-135m-instruct"
PATH = RESULTS / f"ppo_{MODEL}.json"
PPO = ("PPO", "PPO, reward model")


def runs_of(folder: Path) -> list[dict[str, Any]]:
    """All that is done in a folder of notebook 11, by arm and seed. Raises FileNotFoundError where no GRPO run is."""
    grpo = lab.load(folder / "grpo", ["GRPO"])
    seconds = grpo.runs.set_index("seed")["seconds"]
    found = [_run("GRPO", seed, grpo.right["GRPO", seed], seconds[seed]) for seed in grpo.seeds()]
    for arm in PPO:
        made = {int(path.stem.rsplit(" ", 1)[1]): path for path in folder.glob(f"{arm} seed *.json")}
        for seed, path in sorted(made.items()):
            run = json.loads(path.read_text(encoding="utf-8"))
            found.append(_run(arm, seed, run["right"], run["seconds"]))
    return found


def _run(arm: str, seed: int, right: Any, seconds: float) -> dict[str, Any]:
    return {"arm": arm, "seed": seed, "right": [int(r) for r in right], "seconds": float(seconds)}


def main() -> None:
    """Read the folder, write the result."""
    parser = command_line(__doc__)
    parser.add_argument("folder", type=Path, help="runs/11_ppo_cpu_<digest>")
    folder = parser.parse_args().folder
    command = f"python -m benchmarks.ppo runs/{folder.name}"
    said = origin(command, "torch", "transformers", "trl") | {"weights": WEIGHTS[MODEL]}
    PATH.write_text(as_text(six_digits(said | {"runs": runs_of(folder)})), encoding="utf-8")
    print(PATH)


if __name__ == "__main__":
    main()

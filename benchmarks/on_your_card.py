"""A real model on a task that takes thinking: notebook 16 executed once a seed and tuning, every run kept in the table.

    python -m benchmarks.on_your_card --tunings lora --seeds 0 1 2         # with a card
    python -m benchmarks.on_your_card --task gsm8k --steps 500             # GSM8K: its whole train and test set
    python -m benchmarks.on_your_card --model FOLDER --name qwen2.5-coder-0.5b-instruct \\
        --weights "what they are" --profile gpu24 --prompts-per-step 4 --steps 40        # without one: hours

Writes benchmarks/results/on_your_card_<task>_<name>.json: one row a run with held-out accuracy before and after (Wilson
95 %; strict in the tags, lenient the last number), the best constant strategy, tokens an answer, steps and minutes.
Runs go to runs/on_your_card_<task>_...; a run that was cut off is taken up at its last checkpoint, one that is in the
table is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import papermill

from benchmarks.result import RESULTS, ROOT, command_line, origin
from grpo_kit import profile

NOTEBOOK = "16_on_your_card.ipynb"


def run(options: argparse.Namespace, tuning: str, seed: int) -> dict[str, Any]:
    """Execute the notebook for one tuning and seed; what it wrote of the run."""
    runs = ROOT / "runs"
    runs.mkdir(exist_ok=True)
    name = f"on_your_card_{options.task}"
    wishes = {
        "STEPS": options.steps,
        "PROMPTS_PER_STEP": options.prompts_per_step,
        "SAVE_STEPS": options.save_steps,
    }
    wishes |= {"LEARNING_RATE": options.learning_rate, "LORA_LEARNING_RATE": options.lora_learning_rate}
    wishes |= {"NUMBERS": options.numbers}
    wishes |= {"PROFILE": options.profile, "MODEL": options.model, "TASK": options.task}
    os.environ |= {"PYTHONPATH": str(ROOT), "KIT_RUNS": str(runs)}  # the kernel inherits them
    papermill.execute_notebook(
        ROOT / "notebooks" / NOTEBOOK,
        runs / f"{name}_{tuning}_seed{seed}.ipynb",
        parameters={name: value for name, value in wishes.items() if value is not None}
        | {"TUNINGS": [tuning], "SEED": seed, "RUN_NAME": name, "RESUME": True},
        cwd=ROOT / "notebooks",
        kernel_name="python3",
        progress_bar=False,
    )
    found = sorted(
        runs.glob(f"{name}_{tuning}_seed{seed}*/results.json"), key=lambda path: path.stat().st_mtime
    )
    return json.loads(found[-1].read_text())


def row(result: dict[str, Any]) -> dict[str, Any]:
    """A run's row of the table."""
    made = {name: result[name] for name in ("tuning", "seed", "steps")} | {"n": result["before"]["n"]}
    for name in ("before", "after"):
        e = result[name]
        made[name] = f"{e['accuracy']:.1%} [{100 * e['low']:.1f}, {100 * e['high']:.1f}]"
        made[f"{name}, lenient"] = f"{e['lenient']:.1%}"
        made[f"tokens {name}"] = round(e["tokens"], 1)
    best = result["best_constant"]
    return made | {
        "best constant": f"{best['accuracy']:.1%} ({best['name']})",
        "minutes": round(result["minutes"], 1),
    }


def main() -> None:
    """Run what the table does not have, save after each."""
    parser = command_line(__doc__)
    parser.add_argument("--task", default="countdown", choices=["countdown", "gsm8k"])
    parser.add_argument("--profile", default="gpu24")
    parser.add_argument("--model", help="as load_policy takes it; default: the profile's")
    parser.add_argument("--name", help="of the model, where --model is a path")
    parser.add_argument("--weights", help="what the weights are, for the record, where --model is a path")
    parser.add_argument("--tunings", nargs="+", default=["lora", "full"], choices=["lora", "full", "qlora"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--numbers", type=int, nargs=2, help="of countdown: fewest and most in a question")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--prompts-per-step", type=int)
    parser.add_argument("--save-steps", type=int)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--lora-learning-rate", type=float)
    options = parser.parse_args()
    name = options.name or options.model or profile(options.profile).model.partition("/")[2].lower()
    path = RESULTS / f"on_your_card_{options.task}_{name}.json"
    saved = json.loads(path.read_text()) if path.exists() else {"runs": []}
    shown = {"task": options.task, "profile": options.profile, "model": name}
    wishes = (
        "tunings",
        "seeds",
        "numbers",
        "steps",
        "prompts_per_step",
        "save_steps",
        "learning_rate",
        "lora_learning_rate",
    )
    for wish in wishes:
        value = getattr(options, wish)
        if value is not None:
            shown[wish] = " ".join(map(str, value)) if isinstance(value, list) else value
    command = " ".join(f"--{wish.replace('_', '-')} {value}" for wish, value in shown.items())
    command = f"python -m benchmarks.on_your_card {command}"
    for tuning in options.tunings:
        for seed in options.seeds:
            if any((run["tuning"], run["seed"]) == (tuning, seed) for run in saved["runs"]):
                continue
            saved["runs"].append(row(run(options, tuning, seed)))
            saved = (
                origin(command, "torch", "transformers", "trl") | {"weights": options.weights or name} | saved
            )
            path.write_text(json.dumps(saved, indent=2) + "\n")
            print(json.dumps(saved["runs"][-1]), flush=True)


if __name__ == "__main__":
    main()

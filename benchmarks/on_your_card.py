"""A real model on a task that takes thinking: notebook 16 executed once a seed and tuning, every run kept in the table.

    python -m benchmarks.on_your_card --tunings lora --seeds 0 1 2         # with a card
    python -m benchmarks.on_your_card --task gsm8k --steps 500             # GSM8K: its whole train and test set
    python -m benchmarks.on_your_card --model FOLDER --name qwen2.5-coder-0.5b-instruct \\
        --weights "what they are" --profile gpu24 --numbers 2 2 --steps 30 --save-steps 5   # no card: 40 min a run

Writes benchmarks/results/on_your_card_<task>_<name>.json: one row a run with held-out accuracy before and after (Wilson
95 %; strict in the tags, lenient the last number), the best constant strategy, tokens an answer, steps and minutes.
Runs go to runs/on_your_card_<task>_...; a run that was cut off is taken up at its last checkpoint, one that is in the
table is not run again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from typing import Any

import papermill

from benchmarks.result import RESULTS, ROOT, command_line, origin, read_result, write_result
from grpo_kit import preset

NOTEBOOK = "16_on_your_card.ipynb"


# Options that are arguments of the task, by the task's own names; the others are the notebook's parameters.
OF_THE_TASK = {
    "numbers": "numbers",
    "partial_credit": "partial_credit",
    "gsm8k_train": "train",
    "held_out": "n_held_out",
    "max_completion_tokens": "max_completion_tokens",
}
SETTINGS = (
    *OF_THE_TASK,
    "steps",
    "prompts_per_step",
    "learning_rate",
    "lora_learning_rate",
    "temperatures",
    "save_steps",
)


def wishes(options: argparse.Namespace) -> dict[str, Any]:
    """What was asked for in place of the profile's."""
    return {name: value for name in SETTINGS if (value := getattr(options, name)) is not None}


def settings(options: argparse.Namespace, tuning: str) -> str:
    """What tells a row from one with the same seed and tuning: what was asked for and matters to it."""
    no_matter = {"save_steps", "lora_learning_rate" if tuning == "full" else "learning_rate"}
    told = {name: value for name, value in wishes(options).items() if name not in no_matter}
    return ", ".join(
        f"{name.replace('_', ' ')} {' '.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in told.items()
    )


def run(options: argparse.Namespace, tuning: str, seed: int) -> dict[str, Any]:
    """Execute the notebook for one tuning and seed; what it wrote of the run."""
    runs = ROOT / "runs"
    runs.mkdir(exist_ok=True)
    # Runs of other settings lie beside it, and are not gone on with.
    name = f"on_your_card_{options.task}_{hashlib.sha256(settings(options, tuning).encode()).hexdigest()[:8]}"
    wished = wishes(options)
    asked = {wish.upper(): value for wish, value in wished.items() if wish not in OF_THE_TASK}
    of_the_task = {own: wished[wish] for wish, own in OF_THE_TASK.items() if wish in wished}
    asked |= {"TASK": options.task, "TASK_OPTIONS": of_the_task}
    asked |= {
        "PROFILE": options.profile,
        "MODEL": options.model,
        "TUNINGS": [tuning],
        "SEED": seed,
    }
    os.environ |= {"PYTHONPATH": str(ROOT), "KIT_RUNS": str(runs)}  # the kernel inherits them
    papermill.execute_notebook(
        ROOT / "notebooks" / NOTEBOOK,
        runs / f"{name}_{tuning}_seed{seed}.ipynb",
        parameters=asked | {"RUN_NAME": name, "RESUME": True},
        cwd=ROOT / "notebooks",
        kernel_name="python3",
        progress_bar=False,
    )
    found = sorted(
        runs.glob(f"{name}_{tuning}_seed{seed}*/results.json"),
        key=lambda path: path.stat().st_mtime,
    )
    return json.loads(found[-1].read_text())


def row(result: dict[str, Any], how: str) -> dict[str, Any]:
    """A run's row of the table."""
    made = {name: result[name] for name in ("tuning", "seed", "steps")}
    made |= {"settings": how, "n": result["before"]["n"]}
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
    parser.add_argument(
        "--weights", help="what the weights are, for the record, where --model is a path"
    )
    parser.add_argument(
        "--tunings", nargs="+", default=["lora", "full"], choices=["lora", "full", "qlora"]
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument(
        "--numbers", type=int, nargs=2, help="of countdown: fewest and most in a question"
    )
    parser.add_argument(
        "--partial-credit", action="store_const", const=True, help="of countdown"
    )
    parser.add_argument("--gsm8k-train", help="of gsm8k: hub, a file, or test")
    parser.add_argument("--held-out", type=int, help="questions before and after")
    parser.add_argument("--max-completion-tokens", type=int, help="of gsm8k")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--prompts-per-step", type=int)
    parser.add_argument("--save-steps", type=int)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--lora-learning-rate", type=float)
    parser.add_argument(
        "--temperatures", type=float, nargs=2, help="first and last; default: the notebook's"
    )
    options = parser.parse_args()
    name = (
        options.name or options.model or preset(options.profile).model.partition("/")[2].lower()
    )
    path = RESULTS / f"on_your_card_{options.task}_{name}.json"
    saved = read_result(path, runs=[])
    for tuning in options.tunings:
        how = settings(options, tuning)
        for seed in options.seeds:
            same = {"tuning": tuning, "seed": seed, "settings": how}
            if any(same.items() <= made.items() for made in saved["runs"]):
                continue
            command = f"python -m benchmarks.on_your_card --task {options.task} --profile {options.profile}"
            facts = origin(
                f"{command} --model {name}, and a row's settings", "torch", "transformers"
            )
            made = row(run(options, tuning, seed), how) | {"date": facts["date"]}
            saved = facts | {"weights": options.weights or name, "runs": [*saved["runs"], made]}
            write_result(path, saved)
            print(json.dumps(saved["runs"][-1]), flush=True)


if __name__ == "__main__":
    main()

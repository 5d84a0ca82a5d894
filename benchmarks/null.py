"""Did the reward do it? The main job beside its null: the same runs with each group's rewards shuffled.

    python -m benchmarks.null                # three seeds, six runs of a few minutes; goes on where it was stopped
    python -m benchmarks.null --seeds 0      # fewer
    python -m benchmarks.null --countdown FILE.gguf --weights "what they are" --seeds 0   # an hour of one core a seed

Both arms have the main job's preset (cpu: the largest of 3 to 5 numbers, 32 steps), the same prompts, seeds and steps.
In the null a group's rewards go to its completions by lot, so none says which was right. Written down before the runs:
the null ends between 10 and 30 % (20 % before training), its gain within 10 points of 0 in each seed.
--countdown: notebook 16's LoRA run of two numbers (30 steps, 8 prompts a step) with shuffled rewards; the run with the
right ones is in on_your_card_countdown_*.json. Written down before: it ends within 5 points of 51.2 %.
Writes benchmarks/results/null.json.
"""

from __future__ import annotations

import argparse

from benchmarks.result import (
    RESULTS,
    ROOT,
    WEIGHTS,
    command_line,
    origin,
    read_result,
    write_result,
)
from grpo_kit import lab, linear, preset
from grpo_kit.more.lab.statistics import difference_over_seeds

PATH = RESULTS / "null.json"
MODEL = "smollm2-135m-instruct"
ARMS = {"trained": {}, "null": lab.null()}
PREDICTED = "the null ends between 10 and 30 %, its gain within 10 points of 0 in each seed"


def main() -> None:
    """Run what is missing, print the table, write the result."""
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", default=str(ROOT / "runs" / "null"))
    parser.add_argument("--countdown", metavar="MODEL", help="a .gguf file, a folder or a name")
    parser.add_argument("--weights", help="what they are, for the record")
    options = parser.parse_args()
    if options.countdown:
        countdown(options)
        return
    runs = lab.compare_arms(ARMS, options.seeds, "cpu", folder=options.folder, model=MODEL)
    print(runs.summary().to_string())
    rows = []
    for seed in runs.seeds(*ARMS):
        of_seed = runs.runs[runs.runs["seed"] == seed].set_index("arm")
        accuracies = {arm: float(of_seed.loc[arm, "accuracy"]) for arm in ARMS}
        rows.append(
            {"seed": seed, "before": float(of_seed.loc["null", "before"]), **accuracies}
        )
        print(rows[-1])
    right = {arm: [runs.right[arm, seed] for seed in runs.seeds(*ARMS)] for arm in ARMS}
    difference, p = difference_over_seeds(right["null"], right["trained"])
    result = origin("python -m benchmarks.null", "torch", "transformers") | {
        "weights": WEIGHTS[MODEL],
        "predicted": PREDICTED,
        "n": len(right["null"][0]),
        "accuracy over seeds": {arm: str(runs.accuracy(arm)) for arm in ARMS},
        "trained minus null": {"points": str(difference), "p": p, "seeds": len(rows)},
        "runs": rows,
        "right": right,
    }
    write_result(PATH, result | {"countdown": read_result(PATH).get("countdown", {})})
    print(f"trained minus null: {difference}, p = {p:.2g}")


def countdown(options: argparse.Namespace) -> None:
    """The null of notebook 16's LoRA run, with its settings; its rows go into the result under "countdown"."""
    config = preset(
        "gpu24",
        model=options.countdown,
        task="countdown",
        task_options={"numbers": (2, 2), "balanced": True, "think": True},
        tuning="lora",
        steps=30,
        prompts_per_step=8,
        learning_rate=2e-5,
        temperature=linear(1.2, 0.9),
        autocast="bfloat16",
        save_steps=5,
    )
    folder = f"{options.folder}_countdown"
    runs = lab.compare_arms({"null": lab.null()}, options.seeds, config, folder=folder)
    rows = []
    for seed in runs.seeds("null"):
        (row,) = runs.runs[runs.runs["seed"] == seed].to_dict("records")
        right = runs.right["null", seed]
        rows.append(
            {"seed": seed, "before": row["before"], "null": row["accuracy"], "right": right}
        )
    saved = read_result(PATH)
    saved["countdown"] = origin(
        "python -m benchmarks.null --countdown", "torch", "transformers"
    ) | {
        "weights": options.weights or options.countdown,
        "settings": "LoRA, numbers 2 2, steps 30, prompts per step 8, learning rate 2e-05, temperatures 1.2 0.9",
        "predicted": "the null ends within 5 points of 51.2 %",
        "n": len(rows[0]["right"]),
        "runs": rows,
    }
    write_result(PATH, saved)
    print(runs.summary().to_string())


if __name__ == "__main__":
    main()

"""Did the reward do it? The main job beside its null: the same runs with each group's rewards shuffled.

    python -m benchmarks.null                # three seeds, six runs of a few minutes; goes on where it was stopped
    python -m benchmarks.null --seeds 0      # fewer

Both arms have the main job's preset (cpu: the largest of 3 to 5 numbers, 32 steps), the same prompts, seeds and steps.
In the null a group's rewards go to its completions by lot, so none says which was right. Written down before the runs:
the null ends between 10 and 30 % (20 % before training), its gain within 10 points of 0 in each seed.
Writes benchmarks/results/null.json.
"""

from __future__ import annotations

from benchmarks.result import RESULTS, ROOT, WEIGHTS, command_line, origin, write_result
from grpo_kit import lab
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
    options = parser.parse_args()
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
    write_result(PATH, result)
    print(f"trained minus null: {difference}, p = {p:.2g}")


if __name__ == "__main__":
    main()

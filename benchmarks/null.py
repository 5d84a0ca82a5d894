"""Did the reward do it? The main job beside its null: the same runs with each group's rewards shuffled.

    python -m benchmarks.null                # three seeds, six runs of a few minutes; goes on where it was stopped
    python -m benchmarks.null --seeds 0      # fewer
    python -m benchmarks.null --beside diversity    # or groups; three seeds, six runs of a few minutes
    python -m benchmarks.null --countdown FILE.gguf --weights "what they are" --seeds 0   # an hour of one core a seed

Both arms have the main job's preset (cpu: the largest of 3 to 5 numbers, 32 steps), the same prompts, seeds and steps.
In the null a group's rewards go to its completions by lot, so none says which was right. Written down before the runs:
the null ends between 10 and 30 % (20 % before training), its gain within 10 points of 0 in each seed.
--beside NAME: the same job beside another change than shuffled rewards, both arms on equal rows.
  diversity   a tenth of the reward for being unlike the group's others (examples/graded.py, `different`). Written down
              before: accuracy no lower than without by ten points, and self-BLEU within groups lower at the end.
  groups      paid for a mention of the right number, a reward that can be hacked, by 4 groups of 8 beside 8 of 4.
              Written down before: reward that no right answer earns ends less than 10 points lower with groups of 4.
--countdown: notebook 16's LoRA run of two numbers (30 steps, 8 prompts a step) with shuffled rewards; the run with the
right ones is in on_your_card_countdown_*.json. Written down before: it ends within 5 points of 51.2 %.
Writes benchmarks/results/null.json, or null_beside_NAME.json.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.advice.plan import tasks
from benchmarks.result import (
    RESULTS,
    ROOT,
    WEIGHTS,
    command_line,
    origin,
    read_result,
    write_result,
)
from examples.graded import different
from grpo_kit import lab, linear, preset, read_metrics
from grpo_kit.more.lab._arm import last_quarter
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
    parser.add_argument("--beside", choices=["diversity", "groups"], metavar="NAME")
    parser.add_argument(
        "--preset", default="cpu", help="of --beside; smoke to see that it runs"
    )
    options = parser.parse_args()
    if options.beside:
        beside(options)
        return
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


def changes(name: str, profile: str) -> dict[str, dict[str, Any]]:
    """The two arms, the one without the change first. Both have a Task, so that their rows are equal."""
    if name == "groups":
        shared = {"task": tasks.MENTION}
        sizes = {"4 groups of 8": (4, 8), "8 groups of 4": (8, 4)}
        return {
            arm: shared | {"prompts_per_step": prompts, "group_size": size}
            for arm, (prompts, size) in sizes.items()
        }
    task = preset(profile).make_task()
    paid = replace(task, rewards=[*task.rewards, different], reward_weights=[0.675, 0.225, 0.1])
    return {"as it is": {"task": task}, "paid to differ": {"task": paid}}


def beside(options: argparse.Namespace) -> None:
    """Both arms over the seeds, their accuracy, and what the change is about at the end of each run."""
    arms = changes(options.beside, options.preset)
    folder = Path(f"{options.folder}_{options.beside}")
    model = {} if options.preset == "smoke" else {"model": MODEL}
    runs = lab.compare_arms(arms, options.seeds, options.preset, folder=folder, **model)
    print(runs.summary().to_string())
    rows = []
    for row in runs.runs.sort_values(["seed", "arm"]).to_dict("records"):
        metrics = read_metrics(folder / row["arm"] / f"seed-{row['seed']}")
        rows.append(
            {name: row[name] for name in ("arm", "seed", "before", "accuracy", "equal_groups")}
        )
        if options.beside == "groups":
            rows[-1]["hacked"] = row["reward_last"] - row["reward/exact_answer_last"]
        else:
            for measure in ("diversity/self_bleu", "diversity/unique"):
                rows[-1][measure] = last_quarter(metrics[measure].astype(float))
        print(rows[-1])
    first, second = ([runs.right[arm, seed] for seed in runs.seeds(*arms)] for arm in arms)
    result = origin(
        f"python -m benchmarks.null --beside {options.beside}", "torch", "transformers"
    )
    result |= {"weights": WEIGHTS[MODEL], "n": len(first[0]), "runs": rows}
    if len(first) > 1:
        difference, p = difference_over_seeds(first, second)
        result["second minus first"] = {"points": str(difference), "p": p, "seeds": len(first)}
        print(f"{' minus '.join(reversed(arms))}: {difference}, p = {p:.2g}")
    write_result(PATH.with_name(f"null_beside_{options.beside}.json"), result)


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

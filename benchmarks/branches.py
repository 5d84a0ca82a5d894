"""What a branch can tell that two seeds cannot: the same change, paired from one checkpoint, and between other runs.

    python -m benchmarks.branches                # three seeds of the main job, two changes each, 10 GB; goes on
    python -m benchmarks.branches --seeds 0 1    # fewer
    python -m benchmarks.branches --table        # what is saved, and the picture

Every seed is one run of the main job (preset cpu, 20 steps). kit.branch goes on from its step 8, changed. Paired: the
changed run less the run that it left. Unpaired: the changed run less the runs of the other seeds. Both ask what the
change does from step 8 on. Writes benchmarks/results/branches.json and branches.png.
"""

from __future__ import annotations

import shutil
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.result import (
    RESULTS,
    ROOT,
    WEIGHTS,
    command_line,
    origin,
    read_result,
    write_result,
)
from grpo_kit import (
    GRPOTrainer,
    branch,
    load_policy,
    next_run_folder,
    preset,
    read_completions,
    read_metrics,
)
from grpo_kit._support.display import BASE, TUNED, new_figure, to_png
from grpo_kit.evaluation.intervals import bootstrap_mean

PATH = RESULTS / "branches.json"
STEPS, LEAVES = 20, 8
CHANGES: dict[str, dict[str, Any]] = {
    "half the rate": {"learning_rate": 5e-6},
    "temperature 0.6": {"temperature": 0.6},
}


def run(seed: int) -> dict[str, Any]:
    """One run and its branches: which held-out rows are right, reward by step, mean rewards of groups after LEAVES."""
    config = preset("cpu", seed=seed, steps=STEPS, save_steps=LEAVES, save_total_limit=9)
    model, tokenizer = load_policy(config.model, seed=seed, quiet=True)
    folder = next_run_folder(ROOT / "runs", f"branches-{seed}")
    trainer = GRPOTrainer(
        model, config.make_task(), config, tokenizer=tokenizer, folder=folder, live=None
    )
    trainer.train()
    trainer.save_model(folder / "model")
    found: dict[str, Any] = {"seed": seed, "branches": {}}
    for late in folder.glob("checkpoint-*"):  # 1.6 GB each
        if late.name != f"checkpoint-{LEAVES}":
            shutil.rmtree(late)
    for name, change in CHANGES.items():
        made = branch(folder, LEAVES, live=None, **change)
        found["as it was"] = _of(folder, made.comparison.base)
        found["branches"][name] = _of(made.folders[1], made.comparison.tuned) | {
            "rewards": vars(made.rewards), "sentence": made.comparison.sentence,
        }  # fmt: skip
        shutil.rmtree(made.folders[1])
    shutil.rmtree(folder)
    return found


def _of(folder: Path, evaluation: Any) -> dict[str, Any]:
    table = read_completions(folder)
    groups = table[table["step"] > LEAVES].groupby(["step", "group"])["reward"].mean()
    return {
        "right": "".join(str(int(one)) for one in evaluation.rows["strict"]),
        "reward": read_metrics(folder)["reward"].tolist(),
        "groups": groups.tolist(),
    }


def compared(runs: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Both kinds of difference, held out and in training rewards, with their intervals' widths and spread.

    half_width: mean half of the 95 % interval of one difference. spread: standard deviation of the differences over
    runs: what another seed would change, which no interval of one pair knows.
    """
    right = {r["seed"]: _rows(r["as it was"]) for r in runs}
    changed = {r["seed"]: _rows(r["branches"][name]) for r in runs}
    groups = {r["seed"]: np.array(r["as it was"]["groups"]) for r in runs}
    other = {r["seed"]: np.array(r["branches"][name]["groups"]) for r in runs}
    pairs = {"paired": [(s, s) for s in right], "unpaired": list(permutations(right, 2))}
    found: dict[str, Any] = {}
    for kind, each in pairs.items():
        held_out = [
            bootstrap_mean((changed[b] - right[a]).tolist(), lowest=-1) for a, b in each
        ]
        means = [float(other[b].mean() - groups[a].mean()) for a, b in each]
        halves = [
            _half(other[b] - groups[a])
            if kind == "paired"
            else float(np.hypot(_half(other[b]), _half(groups[a])))
            for a, b in each
        ]
        found[kind] = {
            "held out": _summary(
                [e.value for e in held_out], [(e.high - e.low) / 2 for e in held_out]
            ),
            "training reward": _summary(means, halves),
        }
    return found


def _rows(side: dict[str, Any]) -> np.ndarray:
    return np.array([int(one) for one in side["right"]], float)


def _half(values: np.ndarray) -> float:
    return float(1.96 * values.std(ddof=1) / np.sqrt(len(values)))


def _summary(values: list[float], halves: list[float]) -> dict[str, Any]:
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return {
        "differences": values,
        "mean": float(np.mean(values)),
        "half_width": float(np.mean(halves)),
        "spread": spread,
    }


def table(saved: dict[str, Any]) -> str:
    """Each change: its mean difference, the half width of one interval and the spread over seeds, both ways."""
    lines = [
        "| change | measure | mean | paired: ± of one | spread | unpaired: ± of one | spread |",
        "|---" * 7 + "|",
    ]
    for name, kinds in saved["compared"].items():
        for measure in ("held out", "training reward"):
            paired, unpaired = (kinds[kind][measure] for kind in ("paired", "unpaired"))
            numbers = [
                paired["mean"],
                *(v for k in (paired, unpaired) for v in (k["half_width"], k["spread"])),
            ]
            lines.append(
                f"| {name} | {measure} | "
                + " | ".join(f"{100 * v:.1f}" for v in numbers)
                + " |"
            )
    return "\n".join(lines)


def picture(saved: dict[str, Any]) -> bytes:
    """Two lines from one point of every run, and the differences of held-out accuracy, paired and not."""
    figure = new_figure(11, 3.2)
    lines, dots = figure.subplots(1, 2, gridspec_kw={"width_ratios": [3, 2]})
    name, first = list(CHANGES)[-1], saved["runs"][0]
    steps = range(1, STEPS + 1)
    lines.plot(
        steps, first["as it was"]["reward"], color=BASE, label="as it was", linewidth=1.8
    )
    after = slice(LEAVES - 1, None)
    lines.plot(
        list(steps)[after],
        first["branches"][name]["reward"][after],
        color=TUNED,
        label=name,
        linewidth=1.8,
    )
    lines.set_xticks(range(2, STEPS + 1, 2))
    lines.axvline(LEAVES, color="#555555", linewidth=0.8, linestyle=":")
    lines.set(
        xlabel="step", ylabel="reward", title=f"one run, and its branch (seed {first['seed']})"
    )
    lines.legend(frameon=False)
    rows = [(change, kind) for change in CHANGES for kind in ("paired", "unpaired")]
    for place, (change, kind) in enumerate(rows):
        values = saved["compared"][change][kind]["held out"]["differences"]
        dots.plot(
            [100 * v for v in values],
            [place] * len(values),
            "o",
            alpha=0.6,
            color=TUNED if kind == "paired" else BASE,
        )
    dots.set_yticks(
        range(len(rows)), [f"{change}, {kind}" for change, kind in rows], fontsize=8
    )
    dots.invert_yaxis()
    dots.axvline(0, color="#555555", linewidth=0.8)
    dots.set(xlabel="held-out accuracy, changed less as it was (points)")
    for axes in (lines, dots):
        axes.spines[["top", "right"]].set_visible(False)
    return to_png(figure)


def main() -> None:
    """Run what is missing, then show all."""
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--table", action="store_true", help="show what is saved; trains nothing"
    )
    options = parser.parse_args()
    saved = read_result(PATH, runs=[])
    if not options.table:
        for seed in options.seeds:
            if seed not in [r["seed"] for r in saved["runs"]]:
                saved["runs"].append(run(seed))
                told = origin("python -m benchmarks.branches", "torch", "transformers")
                saved = told | {
                    "weights": WEIGHTS["smollm2-135m-instruct"],
                    "runs": saved["runs"],
                }
                write_result(PATH, saved)
    if len(saved["runs"]) > 1:
        saved["compared"] = {name: compared(saved["runs"], name) for name in CHANGES}
        write_result(PATH, saved)
        PATH.with_suffix(".png").write_bytes(picture(saved))
        print(table(saved))


if __name__ == "__main__":
    main()

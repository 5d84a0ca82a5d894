"""What a decode step costs on a CPU by the number of rows, beside the floor, and where the time of a step goes.

    python -m benchmarks.decode
    python -m benchmarks.decode --rows 1 32

Rows are completions of up to four prompts of 160 to 350 tokens, sampled at temperature 1. A step is the time between
two calls of the sampler. The floor is the larger of weight bytes / bandwidth and 2 x parameters x rows / peak FLOP/s,
both measured in the same run; attention is not in it. The profile is torch's own time by operator at the largest
number of rows up to 32. The least and the median of all steps are given: on a busy machine the least says more.
"rollouts" are whole ones, prompts included, of what has little or nothing to share: few rows, prompts of their own,
LoRA, a tiny model. Writes results/decode.json.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from benchmarks.result import RESULTS, WEIGHTS, command_line, origin, save
from benchmarks.step.floor import device_peaks
from grpo_kit.engine import RolloutEngine
from grpo_kit.engine.sampling import Sampler
from grpo_kit.models import load_policy

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 64)
LENGTHS = (160, 350, 220, 280)
# Whole rollouts: (prompts, completions of each, model if not --model, tuning)
ROLLOUTS = {
    "one row": (1, 1, None, "full"),
    "4 prompts, 1 completion each": (4, 1, None, "full"),
    "4 prompts, 2 completions each": (4, 2, None, "full"),
    "32 prompts, 1 completion each": (32, 1, None, "full"),
    "4 prompts, 8 completions each, LoRA": (4, 8, None, "lora"),
    "4 prompts, 8 completions each, a tiny model": (4, 8, "tiny-random", "full"),
}


@contextmanager
def sampler_clock() -> Iterator[list[float]]:
    """A list that gets the time of each call of the sampler, inside."""
    clock, inner = [], Sampler.__call__

    def timed(self: Sampler, *args: Any, **kwargs: Any) -> Any:
        clock.append(time.perf_counter())
        return inner(self, *args, **kwargs)

    Sampler.__call__ = timed
    try:
        yield clock
    finally:
        Sampler.__call__ = inner


class Measure:
    """The engine's steps and rollouts on random tokens; every call samples other prompts of the same lengths."""

    def __init__(self, model: str, tokens: int) -> None:
        self.name, self.model = model, load_policy(model, quiet=True)[0].eval()
        self._draw, self._vocabulary = (
            torch.Generator().manual_seed(0),
            self.model.config.vocab_size,
        )
        self._config = GenerationConfig(
            max_new_tokens=tokens, do_sample=True, top_k=0, eos_token_id=[], pad_token_id=0
        )

    def _prompts(self, n: int) -> list[list[int]]:
        lengths = [LENGTHS[i % len(LENGTHS)] for i in range(n)]
        return [
            torch.randint(20, self._vocabulary - 20, (n,), generator=self._draw).tolist()
            for n in lengths
        ]

    def sample(self, rows: int) -> None:
        """One rollout of `rows` completions of up to four prompts."""
        some = self._prompts(min(rows, len(LENGTHS)))
        prompts = [some[row * len(some) // rows] for row in range(rows)]
        RolloutEngine(self.model).generate(prompts, self._config, seed=0)

    def steps(self, rows: int) -> list[float]:
        """Seconds of each decode step but the first."""
        with sampler_clock() as clock:
            self.sample(rows)
        return [later - earlier for earlier, later in pairwise(clock[1:])]

    def rollouts(
        self, prompts: int, completions: int, other: str | None, tuning: str
    ) -> list[float]:
        """Seconds of three whole rollouts, after one that warms up."""
        policy, _ = load_policy(other or self.name, tuning=tuning, quiet=True)
        engine, seconds = RolloutEngine(policy.eval()), []
        for _ in range(4):
            rows = [ids for ids in self._prompts(prompts) for _ in range(completions)]
            start = time.perf_counter()
            engine.generate(rows, self._config, seed=0)
            seconds.append(time.perf_counter() - start)
        return seconds[1:]

    def profile(self, rows: int) -> dict[str, list[float]]:
        """Operator -> [milliseconds, calls] of one rollout, by torch's profiler."""
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU]
        ) as profiler:
            self.sample(rows)
        return {e.key: [e.self_cpu_time_total / 1e3, e.count] for e in profiler.key_averages()}


def shares(profile: dict[str, list[float]], least: float = 0.01) -> dict[str, dict[str, float]]:
    """Operators by their share of all time, those above `least`; "others" is the rest."""
    total = sum(ms for ms, _ in profile.values())
    table = {
        name: {"share": ms / total, "ms": ms, "calls": calls}
        for name, (ms, calls) in sorted(profile.items(), key=lambda item: -item[1][0])
        if ms >= least * total
    }
    table["others"] = {"share": 1 - sum(row["share"] for row in table.values())}
    return table


def main() -> None:
    """Measure in turn, save, print."""
    parser = command_line(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    load = os.getloadavg()[0]
    measure = Measure(options.model, options.tokens)
    steps: dict[int, list[float]] = {rows: [] for rows in options.rows}
    rollouts: dict[str, list[float]] = {name: [] for name in ROLLOUTS}
    for _ in range(options.rounds):
        for rows, seconds in steps.items():
            seconds += measure.steps(rows)
        for name, seconds in rollouts.items():
            seconds += measure.rollouts(*ROLLOUTS[name])
    profiled = max((n for n in options.rows if n <= 32), default=None)
    peaks, parameters = device_peaks(False, torch.float32), measure.model.num_parameters()
    floors = {
        rows: 1e3 * parameters * max(4 / peaks["bytes/s"], 2 * rows / peaks["FLOP/s"])
        for rows in options.rows
    }
    result = origin("python -m benchmarks.decode", "torch", "transformers", "peft")
    result |= {
        "weights": WEIGHTS.get(options.model, options.model),
        "threads": options.threads,
        "seed": 0,
    }
    result |= {"n": len(steps[options.rows[0]]), "unit": "ms a step"}
    result |= {"load average before": load, "peaks": peaks, "floor": floors}
    result["now"] = {rows: _least_and_median(seconds, 1e3) for rows, seconds in steps.items()}
    result["seconds of a rollout"] = {
        name: _least_and_median(s) for name, s in rollouts.items()
    }
    result["profile"] = shares(measure.profile(profiled)) if profiled else {}
    print(save(options.out, "decode", result))
    for rows in options.rows:
        found = result["now"][rows]
        print(
            f"{rows:3} rows  floor {floors[rows]:5.1f}  {found['least']:6.1f} (median {found['median']:6.1f})"
        )
    for name, found in result["seconds of a rollout"].items():
        print(f"{name}: {found['median']:.3f} s")


def _least_and_median(values: list[float], times: float = 1) -> dict[str, float]:
    return {"least": times * min(values), "median": times * sorted(values)[len(values) // 2]}


if __name__ == "__main__":
    main()

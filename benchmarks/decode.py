"""What a decode step costs on a CPU by the number of rows, beside the floor, and where the time of a step goes.

    python -m benchmarks.decode
    python -m benchmarks.decode --rows 1 32
    python -m benchmarks.decode --products    # the products of one token alone, by the ways that torch has

Rows are completions of up to four prompts of 160 to 350 tokens, sampled at temperature 1. A step is the time between
two calls of the sampler. The floor is the larger of weight bytes / bandwidth and 2 x parameters x rows / peak FLOP/s,
both measured after each number of rows in each round, since a machine's memory may be fast for a minute and slow the
next: "times" is the least step of a round by its floor, the median of rounds. Attention is not in it. The profile is
torch's own time by operator at the largest number of rows up to 32. The least and the median of all steps are given: on
a busy machine the least says more. "rollouts" are whole ones, prompts included, of what has little or nothing to share:
few rows, prompts of their own, LoRA, a tiny model. Writes results/decode.json.

--products writes results/decode_products.json: all products of one token, weights read from memory each time, by
torch's linear layer, by the kit's choice, and by oneDNN over weights that it laid out before (and, with joined
matrices, query, key and value in one, gate and up in one), in float32 and bfloat16; what laying out costs, once a
rollout; and the layers without attention, eager and by torch.compile, its cold start counted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch.nn.functional import linear, rms_norm, silu
from transformers import GenerationConfig

from benchmarks.result import RESULTS, WEIGHTS, command_line, origin, save
from benchmarks.step.floor import device_peaks
from grpo_kit.engine import RolloutEngine
from grpo_kit.engine.cpu._matmul import product
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
def sampler_clock() -> Iterator[list[tuple[float, float]]]:
    """A list that gets start and end of each call of the sampler, inside."""
    clock, inner = [], Sampler.__call__

    def timed(self: Sampler, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        sampled = inner(self, *args, **kwargs)
        clock.append((start, time.perf_counter()))
        return sampled

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
        return [later - earlier for (earlier, _), (later, _) in pairwise(clock[1:])]

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


# ---- products alone ------------------------------------------------------------------------------------------------

WIDTH, INNER, KEYS, LAYERS, VOCABULARY = 576, 1536, 192, 30, 49_152  # of SmolLM2-135M
TRIES = 9


def products(rows: list[int]) -> dict[str, Any]:
    """Milliseconds of a token's products, by way and rows; of laying out; of the layers eager and compiled."""
    sizes = [(WIDTH, WIDTH), (KEYS, WIDTH), (KEYS, WIDTH), (WIDTH, WIDTH)]
    sizes += [(INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER)]
    joined = [(WIDTH + 2 * KEYS, WIDTH), (WIDTH, WIDTH), (2 * INNER, WIDTH), (WIDTH, INNER)]
    plain, fused = (
        [torch.randn(size) for size in layer * LAYERS + [(VOCABULARY, WIDTH)]]
        for layer in (sizes, joined)
    )
    ways: dict[str, dict[int, float]] = {}
    laying_out = []
    for n in rows:
        inputs = {width: torch.randn(n, width) for width in (WIDTH, INNER)}
        start = time.perf_counter()
        packed = [_laid_out(weight, n) for weight in plain]
        laying_out.append(time.perf_counter() - start)
        rounded = [_laid_out(weight.bfloat16(), n) for weight in plain]
        arms = {
            "linear": (linear, plain),
            "the kit's": (lambda x, weight: product(weight, x), plain),
            "laid out": (_oneDNN, packed),
            "joined, laid out": (_oneDNN, [_laid_out(weight, n) for weight in fused]),
            "bfloat16, laid out": (lambda x, w: _oneDNN(x.bfloat16(), w), rounded),
        }
        for name, (way, weights) in arms.items():
            by_width = [(inputs[weight.shape[1]], weight) for weight in weights]
            ways.setdefault(name, {})[n] = _least(lambda: [way(*pair) for pair in by_width])  # noqa: B023
    eager_and_compiled, cold_start = _compiled(rows)
    return {
        "milliseconds": ways,
        "laying out, ms": 1e3 * min(laying_out),
        "eager and compiled": eager_and_compiled,
        "cold start, s": cold_start,
    }


def _laid_out(weight: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)


def _oneDNN(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def _least(work: Callable[[], Any]) -> float:
    """Milliseconds of the fastest of TRIES."""
    seconds = []
    for _ in range(TRIES):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return 1e3 * min(seconds)


@torch.no_grad()
def _compiled(rows: list[int]) -> tuple[dict[str, dict[int, float]], float]:
    """The layers without attention, eager and compiled, by rows; seconds of the first compiled token."""
    weights = [
        [
            torch.randn(*size) / 50
            for size in ((WIDTH, WIDTH), (INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER))
        ]
        for _ in range(LAYERS)
    ]
    ones = torch.ones(WIDTH)

    def layer(x: torch.Tensor, out: Any, gate: Any, up: Any, down: Any) -> torch.Tensor:
        x = x + linear(rms_norm(x, (WIDTH,), ones, 1e-5), out)
        h = rms_norm(x, (WIDTH,), ones, 1e-5)
        return x + linear(silu(linear(h, gate)) * linear(h, up), down)

    def token(layer: Callable, x: torch.Tensor) -> torch.Tensor:
        for matrices in weights:
            x = layer(x, *matrices)
        return x

    torch._dynamo.reset()
    fast = torch.compile(layer, dynamic=True)
    start = time.perf_counter()
    token(fast, torch.randn(8, WIDTH))
    cold_start = time.perf_counter() - start
    table: dict[str, dict[int, float]] = {"eager": {}, "compiled": {}}
    for n in rows:
        x = torch.randn(n, WIDTH)
        for name, way in (("eager", layer), ("compiled", fast)):
            token(way, x)
            table[name][n] = _least(lambda: token(way, x))  # noqa: B023
    return table, cold_start


def main() -> None:
    """Measure in turn, save, print."""
    parser = command_line(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--products", action="store_true", help="products alone")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    load = os.getloadavg()[0]
    if options.products:
        result = origin("python -m benchmarks.decode --products", "torch")
        result |= {
            "threads": options.threads,
            "load average before": load,
            "unit": "ms a token",
        }
        result |= {"n": f"the least of {TRIES}", "weights": "random, of SmolLM2-135M's shapes"}
        result |= products(options.rows)
        print(save(options.out, "decode_products", result))
        for name in ("milliseconds", "eager and compiled"):
            print(pd.DataFrame(result[name]).round(1).to_string())
        print({name: round(result[name], 2) for name in ("laying out, ms", "cold start, s")})
        return
    measure = Measure(options.model, options.tokens)
    steps: dict[int, list[float]] = {rows: [] for rows in options.rows}
    rollouts: dict[str, list[float]] = {name: [] for name in ROLLOUTS}
    rounds, parameters = [], measure.model.num_parameters()
    for _ in range(options.rounds):
        for rows, seconds in steps.items():
            seconds += (new := measure.steps(rows))
            peaks = device_peaks(False, torch.float32)
            floor = parameters * max(4 / peaks["bytes/s"], 2 * rows / peaks["FLOP/s"])
            rounds.append({"rows": rows, "floor": floor, "times": min(new) / floor, **peaks})
    for name, seconds in rollouts.items():
        seconds += measure.rollouts(*ROLLOUTS[name])
    profiled = max((n for n in options.rows if n <= 32), default=None)
    floors = pd.DataFrame(rounds).groupby("rows").median()
    result = origin("python -m benchmarks.decode", "torch", "transformers", "peft")
    result |= {
        "weights": WEIGHTS.get(options.model, options.model),
        "threads": options.threads,
        "seed": 0,
    }
    result |= {"n": len(steps[options.rows[0]]), "unit": "ms a step"}
    result |= {"load average before": load, "rounds": rounds}
    result |= {"floor": (1e3 * floors["floor"]).to_dict(), "times": floors["times"].to_dict()}
    result["now"] = {rows: _least_and_median(seconds, 1e3) for rows, seconds in steps.items()}
    result["seconds of a rollout"] = {
        name: _least_and_median(s) for name, s in rollouts.items()
    }
    result["profile"] = shares(measure.profile(profiled)) if profiled else {}
    print(save(options.out, "decode", result))
    for rows in options.rows:
        found = result["now"][rows]
        print(
            f"{rows:3} rows  {found['least']:6.1f} (median {found['median']:6.1f}),"
            f" {floors['times'][rows]:.2f} x the floor"
        )
    for name, found in result["seconds of a rollout"].items():
        print(f"{name}: {found['median']:.3f} s")


def _least_and_median(values: list[float], times: float = 1) -> dict[str, float]:
    return {"least": times * min(values), "median": times * sorted(values)[len(values) // 2]}


if __name__ == "__main__":
    main()

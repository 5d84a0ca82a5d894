"""How busy trainer and sampler cards would be if rollouts were made by weights up to some steps old.

    python -m benchmarks.utilisation                        # seconds; reads what benchmarks.step measured
    python -m benchmarks.utilisation --run runs/NAME        # lengths of another run
    python -m benchmarks.utilisation --sync-seconds 2       # weights sent over a network

Computed, not measured: the kit runs on one device, where sampler and trainer take turns. The model: every k steps the
sampler gets the trainer's weights (sync, s seconds, both wait); then it makes the rollouts of k steps one after
the other, r seconds each, while the trainer takes each as soon as it is there, u seconds each. This is
sync_every=k of a sample by older weights: rollouts 0 to k - 1 steps old. The end of the i-th update is

    e_0 = 0,  e_i = max(e_(i-1), r_1 + ... + r_i) + u_i

and an interval takes T = e_k + s; with equal steps T = r + u + (k - 1) max(r, u) + s. A trainer card is busy
sum(u) / T, a sampler card sum(r) / T, all of them the mean over cards. As k grows the slower side's share goes to 1 and
the other's to their ratio, so the limit depends on how cards are divided, not on k.

r is prefill + decode + reward, u the rest of a step of `benchmarks.step`. "As in the run": r and u of each step are
scaled by what that run's step sampled (decode by its longest completion, u by its tokens), so waiting for an uneven
sampler counts too. s, where not given, is one copy of the weights within this machine's memory.
Saves benchmarks/results/utilisation.json.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Sequence
from itertools import accumulate, product
from pathlib import Path

import pandas as pd
import torch

from benchmarks.result import RESULTS, command_line, origin, save
from grpo_kit.record.files import read_completions, read_metrics

INTERVALS = (1, 5, 10, 20)
# a practitioner's: 1.5B, Webshop, 8 + 2 cards
PUBLISHED = {1: 0.62, 5: 0.72, 10: 0.81, 20: 0.85}
ROLLOUT = ("prefill", "decode", "reward")
WEIGHT_BYTES = 4 * 134_515_008  # SmolLM2-135M in float32


def interval_seconds(rollouts: Sequence[float], updates: Sequence[float], sync: float) -> float:
    """Seconds from one sync to the next, for the steps between them.

    >>> interval_seconds([2, 2, 2], [3, 3, 3], sync=1)  # 2 + 3 + 3 + 3 + 1
    12.0
    """
    end = 0.0
    for there, update in zip(accumulate(rollouts), updates, strict=True):
        end = max(end, there) + update
    return end + sync


def utilisation(
    rollouts: Sequence[float],
    updates: Sequence[float],
    sync_every: int,
    sync: float,
    cards: tuple[int, int],
) -> dict[str, float]:
    """Busy shares of a run's steps: "trainer", "sampler", "all" (the mean over cards).

    rollouts, updates: seconds of each step, on the cards they have; steps after the last whole interval are left out.
    cards: (trainer's, sampler's). Raises ValueError where not one interval is whole.

    >>> utilisation([1.0], [3.0], 1, 0.0, (1, 1))
    {'trainer': 0.75, 'sampler': 0.25, 'all': 0.5}
    """
    whole = len(rollouts) // sync_every * sync_every
    if not whole:
        raise ValueError(
            f"sync_every={sync_every} is more than the {len(rollouts)} steps; give a longer run"
        )
    seconds = sum(
        interval_seconds(rollouts[i : i + sync_every], updates[i : i + sync_every], sync)
        for i in range(0, whole, sync_every)
    )
    trainer, sampler = sum(updates[:whole]) / seconds, sum(rollouts[:whole]) / seconds
    everything = (cards[0] * trainer + cards[1] * sampler) / sum(cards)
    return {"trainer": trainer, "sampler": sampler, "all": everything}


def as_in_run(
    phases: dict[str, float], metrics: pd.DataFrame
) -> tuple[list[float], list[float]]:
    """Seconds of rollout and update by step: the phases, scaled by what each step of a run sampled.

    Raises ValueError for a run with steps that sampled nothing.
    """
    longest, tokens = metrics["completions/max_length"], metrics["completion_length"]
    if longest.isna().any() or tokens.isna().any():
        raise ValueError(
            "the run has steps without rollouts (num_iterations > 1?); give one that samples in each"
        )
    decode, size = longest / longest.mean(), tokens / tokens.mean()
    update = sum(seconds for phase, seconds in phases.items() if phase not in ROLLOUT)
    rollouts = phases["prefill"] + phases["decode"] * decode + phases["reward"]
    return rollouts.tolist(), (update * size).tolist()


def lengths_of(run: Path) -> pd.DataFrame:
    """A run's steps, with the tokens of the mean completion and of the longest one."""
    metrics = read_metrics(run)
    if "completions/max_length" in metrics:  # a run by TRL, or by the kit's former trainer
        return metrics
    written = read_completions(run)
    longest = (
        written["tokens"]
        .map(len)
        .groupby(written["step"])
        .max()
        .rename("completions/max_length")
    )
    return metrics[metrics["completion_length"].notna()].join(longest, on="step")


def nearest_to_published(cards: tuple[int, int] = (8, 2)) -> dict[str, float]:
    """The ratios r / u and s / u whose model is nearest to the published shares, and the largest miss left."""
    best: dict[str, float] = {}
    for ratio, sync in product([i / 50 for i in range(1, 251)], [i / 50 for i in range(101)]):
        shares = {
            k: utilisation([ratio] * k, [1.0] * k, k, sync, cards)["all"] for k in PUBLISHED
        }
        squares = sum((shares[k] - PUBLISHED[k]) ** 2 for k in PUBLISHED)
        if not best or squares < best["squares"]:
            miss = max(abs(shares[k] - PUBLISHED[k]) for k in PUBLISHED)
            best = {
                "rollout / update": ratio,
                "sync / update": sync,
                "largest miss": miss,
                "squares": squares,
            }
            best |= {f"share at {k}": round(share, 3) for k, share in shares.items()}
    return {name: value for name, value in best.items() if name != "squares"}


def copy_seconds(bytes_: int = WEIGHT_BYTES) -> float:
    """Median seconds of one copy of that many bytes in memory."""
    source = torch.ones(bytes_ // 4)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def measure(step: dict, arm: str, runs: Sequence[Path], sync: float) -> dict:
    """The table: rows of (steps, cards, sync interval) -> shares."""
    phases = {phase: value["median"] for phase, value in step["arms"][arm]["phases"].items()}
    rollout = sum(phases[p] for p in ROLLOUT)
    update = sum(phases.values()) - rollout
    steps = {"equal": ([rollout] * max(INTERVALS), [update] * max(INTERVALS))}
    steps |= {str(run): as_in_run(phases, lengths_of(run)) for run in runs}
    rows = []
    for (name, (rollouts, updates)), k in product(steps.items(), INTERVALS):
        if k <= len(rollouts):
            shares = utilisation(rollouts, updates, k, sync, (1, 1))
            rows.append(
                {"steps": name, "sync_every": k, **{n: round(v, 4) for n, v in shares.items()}}
            )
    return {
        "arm": arm,
        "rollout seconds": round(rollout, 3),
        "update seconds": round(update, 3),
        "sync seconds": round(sync, 3),
        "cards": "1 trainer + 1 sampler",
        "rows": rows,
    }


def show(result: dict) -> None:
    print(
        f"{result['arm']}: rollout {result['rollout seconds']} s, update {result['update seconds']} s, "
        f"sync {result['sync seconds']} s; {result['cards']}\n"
    )
    print(
        "| steps | sync every | trainer busy | sampler busy | all | published (8 + 2) |\n|---|---|---|---|---|---|"
    )
    for row in result["rows"]:
        k = row["sync_every"]
        shares = " | ".join(f"{row[name]:.0%}" for name in ("trainer", "sampler", "all"))
        print(f"| {row['steps']} | {k} | {shares} | {PUBLISHED[k]:.0%} |")
    print("\nnearest to the published shares:", result["nearest to published"])


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--phases", type=Path, default=RESULTS / "step_cpu_realistic.json")
    parser.add_argument("--arm", default="kit")
    parser.add_argument(
        "--run", type=Path, action="append", default=[], help="run folder; may be repeated"
    )
    parser.add_argument(
        "--sync-seconds",
        type=float,
        help="default: one copy of the weights in memory, measured",
    )
    options = parser.parse_args()
    load = os.getloadavg()[0]
    step = json.loads(options.phases.read_text())
    sync = options.sync_seconds if options.sync_seconds is not None else copy_seconds()
    result = measure(step, options.arm, options.run, sync)
    result |= origin("python -m benchmarks.utilisation", "torch") | {
        "published": PUBLISHED,
        "nearest to published": nearest_to_published(),
        "phases from": options.phases.name,
        "phases' command": step["command"],
        "hardware": step["hardware"],
        "sync": "given"
        if options.sync_seconds is not None
        else "one copy of the weights in memory",
        "load average before": load,
    }
    save(RESULTS, "utilisation", result)
    show(result)


if __name__ == "__main__":
    main()

"""Two processes of one thread beside one process of two, on the main job: seconds a step, and the weights they end in.

    python -m benchmarks.two_processes

One step is the main job's (cpu profile: 4 prompts x 8 completions), whoever does it: two processes get half of its
prompts each. A completion's random numbers do not depend on who makes it, so both runs sample the same; where rounding
has turned a token, the weights are those of different completions, and the result says in how many. The first step of
a run is left out of the seconds. Writes benchmarks/results/two_processes_<weights>.json.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.result import RESULTS, WEIGHTS, command_line, origin, save
from grpo_kit import GRPOTrainer, load_policy, preset, tasks
from grpo_kit.record.files import read_completions, read_metrics


def child(arm: str, folder: Path, model: str, steps: int, seed: int, threads: int) -> None:
    """Train, and keep the weights and how far they have moved."""
    torch.set_num_threads(threads)
    cfg = preset("cpu", steps=steps, seed=seed)
    policy, tokenizer = load_policy(model, quiet=True)
    before = [p.detach().clone() for p in policy.parameters()]
    trainer = GRPOTrainer(
        policy,
        tasks.largest(seed=seed),
        preset(cfg, save_steps=0),
        tokenizer=tokenizer,
        folder=folder / arm,
        live=None,
    )
    trainer.train()
    weights = [p.detach() for p in policy.parameters()]
    moved = [w - b for w, b in zip(weights, before, strict=True)]
    torch.save((weights, moved), folder / f"{arm} {trainer.processes.rank}.pt")


def run(arm: str, folder: Path, options: Any, processes: int, threads: int) -> list[float]:
    """One run in processes of its own; its steps' seconds, rollout to weights."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *(start if processes > 1 else []), "-m", "benchmarks.two_processes"]
    more = [options.model, *(str(n) for n in (options.steps, options.seed, threads))]
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    subprocess.run([*command, "--child", arm, str(folder), *more], env=env, check=True)
    return read_metrics(folder / arm)["step_seconds"].tolist()[1:]


def apart(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """The relative difference of all weights, as of one vector."""
    difference = sum(((x - y).double() ** 2).sum() for x, y in zip(a, b, strict=True))
    return (difference / sum((y.double() ** 2).sum() for y in b)).sqrt().item()


def main() -> None:
    """Run both, compare, save."""
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default=preset("cpu").model)
    parser.add_argument(
        "--child", nargs=6, help="arm, folder, model, steps, seed, threads: for the benchmark itself"
    )
    options = parser.parse_args()
    if options.child:
        arm, folder, model, *numbers = options.child
        return child(arm, Path(folder), model, *map(int, numbers))
    with tempfile.TemporaryDirectory() as made:
        folder, cores = Path(made), len(os.sched_getaffinity(0))
        seconds = {"one": run("one", folder, options, 1, cores), "two": run("two", folder, options, 2, 1)}
        names = ("one 0", "two 0", "two 1")
        weights, moved = zip(*(torch.load(folder / f"{name}.pt") for name in names), strict=True)
        written = [read_completions(folder / arm)["completion"].tolist() for arm in ("one", "two")]
    result = origin("python -m benchmarks.two_processes", "torch", "transformers")
    result |= {
        "weights": WEIGHTS.get(options.model, options.model),
        "seed": options.seed,
        "steps": options.steps,
        "cores": cores,
        "load average": os.getloadavg()[0],  # above the number of cores the seconds say nothing
        "seconds a step": seconds,
        "median": {arm: statistics.median(taken) for arm, taken in seconds.items()},
        "completions": len(written[0]),
        "completions that differ": sum(a != b for a, b in zip(*written, strict=True)),
        "relative difference": {
            "weights, process 0 and 1": apart(weights[1], weights[2]),
            "weights, two processes and one": apart(weights[1], weights[0]),
            "change of the weights, two processes and one": apart(moved[1], moved[0]),
        },
    }
    print(save(RESULTS, f"two_processes_{options.model}", result))
    shown = ("median", "completions that differ", "relative difference")
    print(json.dumps({name: result[name] for name in shown}, indent=2))


if __name__ == "__main__":
    main()

"""Two processes of one thread beside one process of two, on the main job: seconds a step, and the weights they end in.

    python -m benchmarks.two_processes

One step is the main job's (cpu profile: 4 prompts x 8 completions), whoever does it: two processes get half of its rows
each. Three runs, in turn: `one` (one process, as many threads as cores), `two` (torchrun, one thread each) and `again`,
one process on the completions that `two` sampled, to compare the weights; its seconds say nothing. The first step of a
run is left out of the seconds. Writes benchmarks/results/two_processes_<weights>.json.
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
from grpo_kit import GRPOTrainer, load_policy, profile, tasks
from grpo_kit.models import base_model
from grpo_kit.record.files import read_metrics


def child(arm: str, folder: Path, steps: int, seed: int, threads: int) -> None:
    """Train, and keep the weights and what was sampled."""
    torch.set_num_threads(threads)
    cfg = profile("cpu", steps=steps, seed=seed)
    task = tasks.largest(seed=seed)
    rank, processes = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    rows = cfg.completions_per_step // 2  # of a micro-batch: one process has two of them, two have one each
    batch = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 2 // processes}
    args = cfg.grpo_config(folder / arm, task=task, **batch, save_strategy="no", report_to=[])
    model, tokenizer = load_policy(cfg.model, quiet=True)
    trainer = GRPOTrainer(model, task, args, processing_class=tokenizer, live=None)
    made, inner = [], trainer._generate_single_turn
    before = [p.detach().clone() for p in base_model(model).parameters()]

    def generate(prompts: list, *rest: Any, **options: Any) -> tuple:
        if arm == "again":
            return next(kept)
        made.append(inner(prompts, *rest, **options))
        return made[-1]

    if arm == "again":
        both = [torch.load(folder / f"two {other}.pt", weights_only=False)[0] for other in (0, 1)]
        kept = iter([tuple(a + b for a, b in zip(*pair, strict=True)) for pair in zip(*both, strict=True)])
    trainer._generate_single_turn = generate
    trainer.train()
    weights = [p.detach() for p in base_model(model).parameters()]
    moved = [w - b for w, b in zip(weights, before, strict=True)]
    torch.save((made, weights, moved), folder / f"{arm} {rank}.pt")


def run(arm: str, folder: Path, options: Any, processes: int, threads: int) -> list[float]:
    """One run in processes of its own; its steps' seconds, rollout to weights."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *(start if processes > 1 else []), "-m", "benchmarks.two_processes"]
    more = [str(n) for n in (options.steps, options.seed, threads)]
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": str(threads)}
    subprocess.run([*command, "--child", arm, str(folder), *more], env=env, check=True)
    seconds = read_metrics(folder / arm)["seconds"].tolist()
    return [after - before for before, after in zip(seconds, seconds[1:], strict=False)]


def apart(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """The relative difference of all weights, as of one vector."""
    difference = sum(((x - y).double() ** 2).sum() for x, y in zip(a, b, strict=True))
    return (difference / sum((y.double() ** 2).sum() for y in b)).sqrt().item()


def main() -> None:
    """Run the three, compare, save."""
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--child", nargs=5, help="arm, folder, steps, seed, threads: for the benchmark itself"
    )
    options = parser.parse_args()
    if options.child:
        arm, folder, *numbers = options.child
        return child(arm, Path(folder), *map(int, numbers))
    with tempfile.TemporaryDirectory() as made:
        folder, cores = Path(made), len(os.sched_getaffinity(0))
        seconds = {"one": run("one", folder, options, 1, cores), "two": run("two", folder, options, 2, 1)}
        run("again", folder, options, 1, cores)
        load = {
            name: torch.load(folder / f"{name}.pt", weights_only=False)
            for name in ("two 0", "two 1", "again 0")
        }
    cfg = profile("cpu")
    result = origin("python -m benchmarks.two_processes", "torch", "transformers", "trl", "accelerate")
    result |= {
        "weights": WEIGHTS.get(cfg.model, cfg.model),
        "seed": options.seed,
        "steps": options.steps,
        "cores": cores,
        "load average": os.getloadavg()[0],  # above the number of cores the seconds say nothing
        "seconds a step": seconds,
        "median": {arm: statistics.median(taken) for arm, taken in seconds.items()},
        "relative difference": {
            "weights, process 0 and 1": apart(load["two 0"][1], load["two 1"][1]),
            "weights, two processes and one": apart(load["two 0"][1], load["again 0"][1]),
            "change of the weights, two processes and one": apart(load["two 0"][2], load["again 0"][2]),
        },
    }
    print(save(RESULTS, f"two_processes_{cfg.model}", result))
    print(json.dumps({name: result[name] for name in ("median", "relative difference")}, indent=2))


if __name__ == "__main__":
    main()

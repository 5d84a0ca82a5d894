"""What runs in a process of its own: making the work, and one measurement. `processes.py` starts it.

So that no arm finds memory, threads or graphs that another left behind, and an arm can have another checkout's kit.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import grpo_kit
from benchmarks.result import WEIGHTS
from benchmarks.step import task_prompts
from benchmarks.step.arms import measure
from benchmarks.step.floor import device_peaks, floor, needed
from benchmarks.step.setup import Setup
from benchmarks.step.sizes import SIZES, qwen_config, random_weights, tiny_config
from benchmarks.step.workload import Shape, Workload, make_workload
from grpo_kit import load_policy


def main(request: Path, kit: str) -> None:
    """Do what the request asks with the kit of that folder; its answer goes to request.with_suffix(".answer")."""
    found = Path(grpo_kit.__file__).resolve().parents[1]
    if found != Path(kit).resolve():
        raise SystemExit(f"grpo_kit was to come from {kit}, but came from {found}")
    warnings.filterwarnings("ignore", ".*gradient_checkpointing.*", FutureWarning)
    # words are no chat, on purpose
    warnings.filterwarnings("ignore", "train_dataset: the first prompt")
    asked = json.loads(request.read_text())
    try:
        answer = {"prepare": prepare, "measure": measure_once}[asked.pop("do")](**asked)
    except torch.cuda.OutOfMemoryError:
        answer = {"error": "out of memory"}
    request.with_suffix(".answer").write_text(json.dumps(answer))


def prepare(
    model: dict[str, Any], work: dict[str, Any], peaks: dict[str, float] | None = None
) -> dict[str, Any]:
    """The work, and what the floor is made of. Keys: weights, threads, work, checksum, least, peaks, floor.

    peaks: the machine's, None to measure them.
    """
    policy, tokenizer = _policy(**model)
    made = _work(policy, tokenizer, **work)
    policy = policy.to("cpu")
    peaks = peaks or device_peaks(model["cuda"], getattr(torch, model["dtype"]))
    return {
        "weights": _weights(**model),
        "threads": torch.get_num_threads(),
        "work": asdict(made),
        "checksum": made.checksum,
        "least": asdict(needed(made)),
        "peaks": peaks,
        "floor": {
            "seconds": floor(policy, made, peaks, skip=False),
            "seconds with attention": floor(policy, made, peaks, skip=False, attention=True),
            "seconds with skipping": floor(policy, made, peaks, skip=True),
        },
    }


def measure_once(
    model: dict[str, Any], work: dict[str, Any], arm: str, tuned: tuple[int, bool], warmup: int
) -> dict[str, Any]:
    """The fields of Step. warmup: unmeasured steps of the same trainer before it."""
    policy, tokenizer = _policy(**model)
    cuda = model["cuda"]
    setup = Setup(
        model=policy.to("cpu"),
        tokenizer=tokenizer,
        workload=Workload(**work),
        cuda=cuda,
        bf16=cuda,
        warmup=warmup,
        tuned=tuple(tuned),
    )
    return asdict(measure(arm, setup, say=lambda text: print(f"  {arm}: {text}", flush=True)))


def _policy(
    name: str | None,
    tiny: bool,
    dtype: str,
    tuning: str,
    seed: int,
    cuda: bool,
    memory_cap: float | None,
) -> tuple[Any, Any]:
    """name None: random weights, of Qwen2.5-1.5B's shapes unless `tiny`. memory_cap: GiB of the card."""
    if memory_cap:
        total = torch.cuda.get_device_properties(0).total_memory / 2**30
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory_cap / total))
    torch.manual_seed(seed)
    if name is None:
        return random_weights(tuning, dtype, tiny_config() if tiny else qwen_config())
    return load_policy(name, tuning=tuning, dtype=dtype, quiet=True)


def _weights(name: str | None, tiny: bool, **rest: Any) -> str:
    if name is None:
        shapes = "tiny" if tiny else "Qwen2.5-1.5B's"
        return f"{shapes} shapes, random weights; made-up words as tokens"
    return WEIGHTS.get(name, name)


def _work(
    policy: Any, tokenizer: Any, kind: str, size: str, shape: dict[str, Any], seed: int
) -> Workload:
    shape = Shape(**shape)
    if kind == "main-job":
        return task_prompts.main_job(policy, tokenizer, SIZES[size].profile, shape, seed)
    if kind == "think":
        return task_prompts.think(tokenizer, shape, seed)
    return make_workload(tokenizer, shape, seed)

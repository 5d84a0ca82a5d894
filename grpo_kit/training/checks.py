"""What is checked of the settings before training starts; of data and rewards see data.py."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

_ROLLOUTS = ("kit", "hf", "vllm", "continuous")


def choose_rollout(rollout: str | None, args: Any) -> str:
    """The engine's name; sets what trl reads of args (use_vllm, use_transformers_continuous_batching).

    Raises ValueError for an unknown name, one that contradicts args, and for vllm where it is not installed.
    """
    asked = "vllm" if args.use_vllm else "continuous" if args.use_transformers_continuous_batching else None
    if rollout is None:
        return asked or "kit"
    if rollout not in _ROLLOUTS:
        raise ValueError(f"rollout={rollout!r} is not known; use one of {', '.join(map(repr, _ROLLOUTS))}")
    if asked not in (None, rollout):
        raise ValueError(f"rollout={rollout!r}, but args ask for {asked!r}; say one of the two")
    if rollout == "vllm" and asked is None:
        if find_spec("vllm") is None:
            raise ValueError(
                "rollout='vllm', but vllm is not installed; pip install grpo-kit[vllm], or use 'kit'"
            )
        args.use_vllm, args.vllm_mode = True, "colocate"
    args.use_transformers_continuous_batching = rollout == "continuous"
    return rollout


def one_card(args: Any) -> None:
    """One card a process: transformers would copy the model to every card that it sees (DataParallel), trl refuses."""
    if args.n_gpu > 1:
        print(
            f"{args.n_gpu} cards are visible, and this process trains on {args.device} alone. To use all of them start "
            f"the script by `accelerate launch --num_processes {args.n_gpu}`, or in a notebook put everything from "
            f"loading the model on into a function for accelerate.notebook_launcher(f, num_processes={args.n_gpu})."
        )
        args._n_gpu = 1


def buffer_steps(args: Any) -> int:
    """Optimizer steps that share one rollout buffer."""
    return max(1, args.steps_per_generation * args.num_iterations // args.gradient_accumulation_steps)


def align(args: Any, warmup: float) -> None:
    """One row a step, warmup, and checkpoints where a rollout buffer ends (elsewhere resuming is not exact)."""
    if not 0 <= warmup < 1:
        raise ValueError(f"warmup={warmup} must be a fraction of the steps in [0, 1)")
    args.logging_steps = 1
    if args.warmup_steps == 0:
        args.warmup_steps = warmup
    size = buffer_steps(args)
    if args.save_strategy == "steps" and args.save_steps >= 1 and args.save_steps % size:
        args.save_steps = int(-(-args.save_steps // size) * size)
        print(
            f"save_steps is now {args.save_steps}, a multiple of the {size} steps that share a rollout buffer"
        )


def check_temperature(value: float, name: str) -> float:
    """value as a float; raises ValueError, naming it, unless it is above 0."""
    if not value > 0:
        raise ValueError(f"{name}={value} must be above 0; greedy decoding has no gradient to learn from")
    return float(value)

"""What is checked of the settings before training starts; of data and rewards see data.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from transformers import __version__ as transformers_version
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from trl import GRPOConfig
from trl import __version__ as trl_version

from grpo_kit.argument_checks import check_choice
from grpo_kit.cuda import has_bf16
from grpo_kit.record.files import RunFolderError, holds_run, next_run_folder
from grpo_kit.training.checkpoints import last_whole_checkpoint
from grpo_kit.unsloth import warn_if_late

_GOES_ON: ContextVar[bool] = ContextVar("_GOES_ON", default=False)


@contextmanager
def to_go_on() -> Iterator[None]:
    """Inside, a trainer is made for the run that its folder holds: nobody has to be told of it."""
    token = _GOES_ON.set(True)
    try:
        yield
    finally:
        _GOES_ON.reset(token)


def check_run_folder(folder: str, *, quiet: bool) -> None:
    """Refuse a folder that training could not begin in, before anything is loaded; say how to go on with its run.

    Raises RunFolderError for a file, for what cannot be written, and for a run without a checkpoint to go on from.
    """
    path = Path(folder)
    there = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise RunFolderError(
            f"output_dir={folder!r}: {there} is no folder that can be written; name another."
        )
    if not holds_run(path):
        return
    free, last = next_run_folder(path.parent, path.name), last_whole_checkpoint(path, digests=False)
    if last is None:
        raise RunFolderError(
            f"output_dir={folder!r} already holds a run, without a checkpoint to go on from, and no run is "
            f"overwritten. The next free name is {str(free)!r}."
        )
    if not quiet and not _GOES_ON.get():
        print(
            f"{folder} holds a run: train(resume_from_checkpoint=True) goes on from {last.name}. For a new run take "
            f"{str(free)!r}.",
            flush=True,
        )


def default_args() -> GRPOConfig:
    """trl's own defaults; a machine without bfloat16, which they ask for, computes in float32."""
    return GRPOConfig("runs/grpo", use_cpu=not torch.cuda.is_available(), bf16=has_bf16())


# trl 1.15 is what Unsloth takes: tasks, prompts and rewards run with it, this trainer does not.
_LOWEST = {"trl": (trl_version, "1.16"), "transformers": (transformers_version, "5.15")}


def _older() -> str:
    """What is here and older than the trainer runs with, and what installs it; "" where nothing is."""
    old = [name for name, (here, needed) in _LOWEST.items() if Version(here) < Version(needed)]
    if not old:
        return ""
    here = " and ".join(f"{name} {_LOWEST[name][0]} (it needs {_LOWEST[name][1]})" for name in old)
    install = " ".join(f'"{name}>={_LOWEST[name][1]}"' for name in old)
    return f"{here} is installed; `pip install -U {install}` mends it"


def check_base(base: type) -> None:
    """Refuse a trl that is not the one whose private methods the kit's trainer overrides; see also warn_if_late.

    base: trl.GRPOTrainer, as the kit's trainer was built on. Raises ValueError for Unsloth's, and for a trl or
    transformers so old that training would end in an AttributeError.
    """
    warn_if_late()
    why = ""
    if base.__name__.startswith("Unsloth"):
        why = f"trl.GRPOTrainer is {base.__name__}, whose private methods are not trl's"
    elif old := _older():
        why = old
    if why:
        raise ValueError(
            f"grpo_kit.GRPOTrainer cannot run here: {why}. Train by trl.GRPOTrainer itself, with task.rewards, "
            "task.dataset(tokenizer) and profile.grpo_config(folder, task=task); docs/tasks_and_rewards.md shows it"
        )


_ROLLOUTS = ("kit", "hf", "vllm", "continuous")


def evaluation_of(args: Any, held_out: Any, keep: str) -> dict[str, Any]:
    """What args are to say of evaluation and of the best checkpoint, once trl's trainer is made.

    Until then they say nothing of it: transformers refuses to evaluate without an eval_dataset.
    Raises ValueError for another keep, and for "best" with nothing to judge by.
    """
    check_choice("keep", keep, ("last", "best"))
    if keep == "best" and held_out is None:
        raise ValueError(
            "keep='best' needs held_out, a grpo_kit.HeldOut(task), to judge by: give it, or keep='last'"
        )
    if held_out is None:
        return {}
    found: dict[str, Any] = {"eval_strategy": args.eval_strategy, "eval_steps": args.eval_steps}
    if args.eval_strategy == IntervalStrategy.NO:
        found = {"eval_strategy": IntervalStrategy.STEPS, "eval_steps": held_out.every}
    args.eval_strategy = IntervalStrategy.NO
    if keep == "best":
        found |= {
            "load_best_model_at_end": True,
            "metric_for_best_model": held_out.judged_by,
            "greater_is_better": True,
        }
        found["save_strategy"] = (
            SaveStrategy.BEST if args.save_strategy == SaveStrategy.NO else args.save_strategy
        )
        # The best, and the last to go on from: of 1 transformers deletes the last.
        found["save_total_limit"] = max(args.save_total_limit or 2, 2)
    return found


def check_engine(rollout: str | None, *, use_vllm: bool, torch_compile: bool, pack: bool) -> None:
    """Refuse vLLM where it is not installed, and torch.compile around what the kit computes by itself.

    Raises ValueError naming the argument; no model is needed for that.
    """
    if (rollout == "vllm" or use_vllm) and find_spec("vllm") is None:
        asked = "rollout='vllm'" if rollout == "vllm" else "use_vllm=True"
        raise ValueError(
            f"{asked}, but vllm is not installed; `pip install \"grpo-kit[vllm]\"`, or use rollout='kit'"
        )
    if torch_compile and ((rollout or "kit") == "kit" and not use_vllm or pack):
        raise ValueError(
            "torch_compile=True compiles the model as a whole, but the kit's sampler and packed update run its layers "
            "one by one; leave it out, or give rollout='hf' and pack=False, which are trl's own ways"
        )


def choose_rollout(rollout: str | None, args: Any) -> str:
    """The engine's name; sets what trl reads of args (use_vllm, use_transformers_continuous_batching).

    Raises ValueError for an unknown name, and for one that contradicts args.
    """
    asked = "vllm" if args.use_vllm else "continuous" if args.use_transformers_continuous_batching else None
    if rollout is None:
        return asked or "kit"
    check_choice("rollout", rollout, _ROLLOUTS)
    if asked not in (None, rollout):
        raise ValueError(f"rollout={rollout!r}, but args ask for {asked!r}; say one of the two")
    if rollout == "vllm" and asked is None:
        args.use_vllm = True  # in args.vllm_mode, colocated unless said otherwise
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


def check_sharded(trainer: Any, *, held_out: Any, optimizer: str | None) -> str:
    """Who makes completions where no process has all weights: trl, unless vllm or the like was asked for.

    Raises ValueError for what needs all weights in one process.
    """
    needs = {"held_out": held_out is not None, "optimizer": optimizer is not None}
    instead = {
        "held_out": "give eval_dataset, which trl evaluates",
        "optimizer": "leave the choice to args.optim",
    }
    for name, given in needs.items():
        if given:
            raise ValueError(
                f"{name} needs all weights in each process, and here {trainer.ranks.sharded} shards them; "
                f"{instead[name]}"
            )
    return "hf" if trainer.rollout == "kit" else trainer.rollout


def in_trls_way(ranks: Any) -> str:
    """One line for a run whose weights are sharded."""
    return (
        f"{ranks.sharded} shards the weights over {ranks.count} processes: rollouts, log-probabilities and update are "
        "trl's own. Records, red flags, changes and a stop at the end of a step work as ever; where a process fails "
        "nothing is saved, and the run goes on from its last checkpoint."
    )


def buffer_steps(args: Any) -> int:
    """Optimizer steps that share one rollout buffer."""
    return max(1, args.steps_per_generation * args.num_iterations // args.gradient_accumulation_steps)


def align(args: Any, warmup: float) -> None:
    """One row a step, and warmup."""
    if not 0 <= warmup < 1:
        raise ValueError(f"warmup={warmup} must be a fraction of the steps in [0, 1)")
    if args.logging_strategy != IntervalStrategy.STEPS:
        was = IntervalStrategy(args.logging_strategy).value
        print(f"logging_strategy is now 'steps', not {was!r}: metrics.csv has a row a step")
    args.logging_strategy, args.logging_steps = IntervalStrategy.STEPS, 1
    if args.warmup_steps == 0:
        args.warmup_steps = warmup

"""Can GRPO learn anything from this model on this task? Counted before any training.

examples:
  grpo-kit readiness                              the profile's model and task
  grpo-kit readiness my_recipe.py                 a file's
  grpo-kit readiness --model Qwen/Qwen2.5-0.5B-Instruct --task countdown --samples 64
  grpo-kit readiness my_recipe.py && grpo-kit train my_recipe.py

The exit code is 0 for GO and 1 for CHANGE SOMETHING FIRST.
"""

from __future__ import annotations

import argparse

from grpo_kit.commands.recipes import add_recipe, recipe_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    add_recipe(parser)
    parser.add_argument(
        "--rows", type=int, default=32, metavar="N", help="training questions asked; default: 32"
    )
    parser.add_argument("--samples", type=int, metavar="N", help="completions a question; default: one group")
    parser.add_argument(
        "--seconds",
        type=float,
        default=300,
        metavar="S",
        help="about the most that it may take; ends sooner where the verdict is sure; default: 300",
    )


def run(arguments: argparse.Namespace) -> int:
    """Sample, count, and print the verdict."""
    from grpo_kit.evaluation.readiness import readiness

    if arguments.rows < 1:
        raise ValueError(f"--rows {arguments.rows} must be at least 1")
    recipe = recipe_of(arguments)
    task, size = recipe.make_task(), recipe.cfg.group_size
    if arguments.samples is not None and arguments.samples < size:
        raise ValueError(f"--samples {arguments.samples} must be at least a group's {size}")
    model, tokenizer = recipe.policy(quiet=True)
    heat = recipe.schedule(0.0) if recipe.schedule else recipe.cfg.temperature
    found = readiness(
        model, tokenizer, task, rows=task.train[: arguments.rows], samples=arguments.samples or size, group_size=size,
        temperature=heat, seconds=arguments.seconds, quiet=True,
    )  # fmt: skip
    ready = found.verdict == "ready"
    print(
        f"{recipe.cfg.model} on {task.name}: {'GO' if ready else 'CHANGE SOMETHING FIRST'}\n{found.reason}\n"
    )
    print(found.table().to_string(float_format="{:.3f}".format, na_rep=""))
    print(f"\n{found.lengths.table()}")
    return 0 if ready else 1

"""Turns command-line arguments into a Recipe: a Python file or a run folder, and the changes to it."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from grpo_kit.literal_calls import value_from_text

if TYPE_CHECKING:
    from grpo_kit.recipe import Recipe

# Command-line names of a profile's numbers, where they differ.
_OWN = {
    "model": "--model", "task": "--task", "steps": "--steps", "seed": "--seed", "temperature": "--temperature",
    "learning_rate": "--learning-rate", "lora_learning_rate": "--learning-rate", "report_to": "--report-to",
    "optimizer": "--optimizer", "save_steps": "--save-every",
}  # fmt: skip


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """The arguments for the recipe's place and for changes of its model or prompt."""
    parser.add_argument(
        "recipe", nargs="?", metavar="RECIPE",
        help="a Python file that defines `recipe` or `task` (or FILE.py:NAME), or a run folder, for its recipe once "
        "more; left out: the profile's task",
    )  # fmt: skip
    parser.add_argument(
        "--profile", metavar="NAME", help="smoke, cpu, t4, gpu24; default: what this machine can run"
    )
    parser.add_argument("--model", metavar="NAME", help="a name on the hub, a folder or a .gguf file")
    parser.add_argument(
        "--task", metavar="NAME", help="one of the kit's (largest, countdown, gsm8k, ...), or FILE.py"
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", help="of the order of the questions and the sampling"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE",
        help="any other number of the profile or field of kit.Config, such as group_size=16 or iterations=2",
    )  # fmt: skip


def add_training(parser: argparse.ArgumentParser) -> None:
    """The arguments for training."""
    parser.add_argument("--tuning", choices=("full", "lora", "qlora"), help="what is trained; default: full")
    parser.add_argument("--rank", type=int, metavar="R", help="of LoRA adapters; their alpha is twice that")
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps")
    parser.add_argument("--learning-rate", type=float, metavar="X", help="after the warmup")
    parser.add_argument(
        "--temperature",
        metavar="X|X:Y",
        help="a number; 1.2:0.8 goes from 1.2 to 0.8 in a line; or 'cosine(1.2, 0.8)'",
    )
    parser.add_argument("--optimizer", metavar="NAME", help="adamw, adamw-8bit-split, ...")
    parser.add_argument(
        "--save-every", type=int, metavar="N", help="steps between two checkpoints; 0: at a stop only"
    )
    parser.add_argument(
        "--held-out-every",
        type=int,
        metavar="N",
        help="steps between two looks at held-out questions; 0: none",
    )
    parser.add_argument("--keep", choices=("last", "best"), help="which weights the model has in the end")
    parser.add_argument("--on-flag", choices=("warn", "stop"), help="what a red flag does")
    parser.add_argument(
        "--report-to", action="append", metavar="NAME", help="a tracker: tensorboard, trackio, wandb"
    )


def recipe_of(arguments: argparse.Namespace) -> Recipe:
    """The Recipe of a command line. Raises ValueError naming the argument that does not fit."""
    from grpo_kit.recipe import Recipe

    changed = changes(arguments)
    if arguments.recipe is not None:
        if arguments.task is not None:
            raise ValueError(f"RECIPE {arguments.recipe} brings its task; leave --task {arguments.task} out")
        recipe = Recipe.of(arguments.recipe, **changed)
    else:
        recipe = Recipe(**changed)
    return with_numbers(recipe, arguments)


def changes(arguments: argparse.Namespace) -> dict[str, Any]:
    """The values of the options, by the names of Recipe's fields; options not given are left out."""
    names = (
        "profile",
        "model",
        "task",
        "seed",
        "tuning",
        "steps",
        "learning_rate",
        "optimizer",
        "keep",
        "on_flag",
    )
    given = {name: getattr(arguments, name, None) for name in (*names, "report_to")}
    if (text := getattr(arguments, "temperature", None)) is not None:
        given["temperature"] = temperature_of(text)
    if (rank := getattr(arguments, "rank", None)) is not None:
        given["lora"] = {"r": rank, "lora_alpha": 2 * rank}
    given = {name: value for name, value in given.items() if value is not None}
    if (every := getattr(arguments, "held_out_every", None)) is not None:
        given["held_out_every"] = every or None
    return given


def with_numbers(recipe: Recipe, arguments: argparse.Namespace) -> Recipe:
    """The recipe with the values of --set and --save-every.

    Raises ValueError for an unknown field, and for a field with its own option.
    """
    from grpo_kit.loop.grpo_config import FIELDS
    from grpo_kit.presets import preset
    from grpo_kit.recipe.remembered import NUMBERS

    numbers, config = {}, dict(recipe.config)
    for text in arguments.set:
        name, there, value = text.partition("=")
        if not there:
            raise ValueError(f"--set {text}: write it as NAME=VALUE, such as group_size=16")
        if name in _OWN:
            raise ValueError(f"--set {text}: use {_OWN[name]}")
        if name not in FIELDS:
            raise ValueError(
                f"--set {text}: {name} is no field of kit.Config ({', '.join(n for n in FIELDS if n not in _OWN)})"
            )
        (numbers if name in NUMBERS else config)[name] = _value(value)
    if (every := getattr(arguments, "save_every", None)) is not None:
        numbers["save_steps"] = every
    if numbers:
        recipe = replace(recipe, profile=preset(recipe.cfg, **numbers))
    return replace(recipe, config=config) if config != dict(recipe.config) else recipe


def temperature_of(text: str) -> float | str:
    """1.2, 1.2:0.8 or the text of a schedule. Raises ValueError for any other text.

    >>> temperature_of("1.2:0.8")
    'linear(1.2, 0.8)'
    """
    from grpo_kit.schedules import schedule_from

    start, both, end = text.partition(":")
    try:
        return f"linear({float(start)}, {float(end)})" if both else float(text)
    except ValueError:
        pass
    try:
        schedule_from(text)
    except ValueError:
        raise ValueError(
            f"--temperature {text}: give a number, START:END such as 1.2:0.8, or a schedule such as 'cosine(1.2, 0.8)'"
        ) from None
    return text


def _value(text: str) -> Any:
    """A number, a list, True, ...; a text if Python cannot read it as a value."""
    try:
        return value_from_text(text)
    except ValueError:
        return text

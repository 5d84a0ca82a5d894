"""Accuracy on held-out questions, base beside tuned, with 95 % intervals and a paired test.

examples:
  grpo-kit evaluate runs/mine                     base and trained model, asked the same questions greedily
  grpo-kit evaluate runs/mine --samples 8         pass@k besides
  grpo-kit evaluate runs/mine --examples 5        the first five that training fixed, and that it broke
  grpo-kit evaluate runs/05_train_full --task largest --profile cpu
                                                  a notebook's run does not remember its task
  grpo-kit evaluate my_recipe.py                  the base model alone, before any training
"""

from __future__ import annotations

import argparse
from pathlib import Path

from grpo_kit.commands.recipes import add_recipe, recipe_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    add_recipe(parser)
    parser.add_argument("--rows", type=int, metavar="N", help="the first N held-out questions; default: all")
    parser.add_argument(
        "--samples", type=int, default=0, metavar="N", help="completions a question, for pass@k"
    )
    parser.add_argument(
        "--examples", type=int, default=0, metavar="N", help="so many that were fixed, and that broke"
    )
    parser.add_argument(
        "--save",
        metavar="FOLDER",
        help="keep every answer there, as base.json and tuned.json; no file is overwritten",
    )


def run(arguments: argparse.Namespace) -> int:
    """Evaluate, and print."""
    from grpo_kit.commands.trained import is_run, trained_in
    from grpo_kit.evaluation.accuracy import evaluate
    from grpo_kit.evaluation.comparison import compare

    for name in ("rows", "samples", "examples"):
        least = 1 if name == "rows" else 0
        if (value := getattr(arguments, name)) is not None and value < least:
            raise ValueError(f"--{name} {value} must be at least {least}")
    trained = None
    if arguments.recipe is not None and is_run(arguments.recipe):
        if arguments.model or arguments.seed is not None or arguments.set:
            raise ValueError("a run is evaluated as it was made: leave --model, --seed and --set out")
        trained = trained_in(arguments.recipe, task=arguments.task, profile=arguments.profile)
    recipe = trained.recipe if trained is not None else recipe_of(arguments)
    task = recipe.make_task()
    rows = task.held_out[: arguments.rows]
    folder = _new_folder(arguments.save, ["base.json", "tuned.json"] if trained else ["base.json"])
    found = {}
    for name in ("base", "tuned") if trained else ("base",):
        model, tokenizer = trained.load() if name == "tuned" else recipe.policy(quiet=True)
        found[name] = evaluate(
            model, tokenizer, task, rows=rows, samples=arguments.samples, k=_powers(arguments.samples),
            batch_size=recipe.cfg.eval_batch,
        )  # fmt: skip
        del model
        if folder is not None:
            found[name].save(folder / f"{name}.json")
    if trained is None:
        print(f"{recipe.cfg.model}, as it is, on {task.name}:\n{found['base'].table()}")
        return 0
    print(f"{recipe.cfg.model} -> {trained.model} ({trained.what}), on {task.name}:")
    comparison = compare(found["base"], found["tuned"])
    print(comparison)
    if arguments.samples:
        for name, one in found.items():
            print(f"\n{name}\n{one.table()}")
    if arguments.examples:
        print(f"\n{comparison.examples(arguments.examples)}")
    return 0


def _powers(samples: int) -> list[int]:
    return [1 << n for n in range(samples.bit_length())] or [1]


def _new_folder(where: str | None, names: list[str]) -> Path | None:
    if where is None:
        return None
    folder = Path(where)
    if there := [name for name in names if (folder / name).exists()]:
        raise ValueError(f"--save {where}: {folder / there[0]} is there already, and no file is overwritten")
    folder.mkdir(parents=True, exist_ok=True)
    return folder

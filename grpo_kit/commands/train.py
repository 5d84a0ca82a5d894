"""Train a model: readiness, accuracy before, GRPO, accuracy after, model and card; what notebook 05 does.

examples:
  grpo-kit train                                  the profile that fits this machine, its task
  grpo-kit train --profile cpu --task largest --tuning lora --steps 40 \\
      --temperature 1.2:0.8 --seed 1 --run runs/mine
  grpo-kit train my_recipe.py                     a file with recipe = kit.Recipe(...), or with task = ...
  grpo-kit train runs/mine --seed 2               that run's recipe, with another seed
  grpo-kit train --resume runs/mine               go on where it was stopped or killed
  torchrun --nproc_per_node 2 -m -- grpo_kit train my_recipe.py --run runs/mine

Ctrl-C ends the step, saves and says how to go on (exit code 130). While it trains, `grpo-kit watch runs/mine` follows
it from another terminal. No run is overwritten.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from grpo_kit.commands.errors import in_a_line, tell
from grpo_kit.commands.recipes import add_recipe, add_training, changes, recipe_of, with_numbers

# Options that may differ for a resumed run.
_CAN_CHANGE = ("steps", "temperature", "learning_rate", "save_every", "on_flag")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    add_recipe(parser)
    add_training(parser)
    parser.add_argument("--run", metavar="FOLDER", help="the run folder; default: the next free runs/<task>")
    parser.add_argument(
        "--resume", metavar="FOLDER",
        help="go on with this run, by what it remembers of its recipe; --steps, --temperature, --learning-rate, "
        "--save-every and --on-flag may be others",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Train; 0, or 1 for a failed run, or 130 for a stopped one."""
    from grpo_kit.episodes.environment import EpisodeError
    from grpo_kit.hooks.watch_run import StoppedByFlag
    from grpo_kit.record.files import next_run_folder
    from grpo_kit.rewards import RewardError

    resumed, several = arguments.resume is not None, int(os.environ.get("WORLD_SIZE", "1")) > 1
    recipe = _goes_on(arguments) if resumed else recipe_of(arguments)
    folder = arguments.resume or arguments.run
    if folder is None and not several:
        folder = next_run_folder("runs", recipe.make_task().name)
    try:
        outcome = recipe.run(folder, resume=resumed)
    except StoppedByFlag as error:
        tell(f"\nA red flag ended it. {_where(error)} {how_to_go_on(folder)}")
        return 1
    except KeyboardInterrupt as error:
        tell(f"\n{_where(error)} {how_to_go_on(folder)}")
        return 130
    except (RewardError, EpisodeError, OSError) as error:
        tell(f"grpo-kit train: {in_a_line(error)} {how_to_go_on(folder)}")
        return 1
    if several:
        from torch.distributed import destroy_process_group

        destroy_process_group()
    if outcome.before is not None:
        print(
            f"\nThe model is in {outcome.model}. Try it: grpo-kit chat {outcome.folder}   Ship it: grpo-kit export "
            f"{outcome.folder} exports/{outcome.folder.name}"
        )
    return 0


def how_to_go_on(folder: str | Path | None) -> str:
    """A sentence, if there is something to resume."""
    kept = folder is not None and (Path(folder) / "recipe.json").is_file()
    return f"To go on: grpo-kit train --resume {folder}" if kept else "Nothing was left behind."


def _where(error: KeyboardInterrupt) -> str:
    step = getattr(error, "step", None)
    if step is None:
        return "Stopped while it was evaluated."
    if not step:
        return "Stopped before the first step."
    return f"Stopped after step {step}, {'not saved' if 'not saved' in str(error) else 'saved'}."


def _goes_on(arguments: argparse.Namespace) -> object:
    from grpo_kit.recipe import Recipe

    given = changes(arguments)
    if not Path(arguments.resume).is_dir():
        raise ValueError(f"--resume {arguments.resume} is no folder; give a run's, such as runs/largest")
    if arguments.run is not None:
        raise ValueError(f"--run {arguments.run}: a run goes on in its own folder; leave it out")
    other = [name for name in [*given, *(["set"] if arguments.set else [])] if name not in _CAN_CHANGE]
    if other:
        named = {"lora": "rank"}.get(other[0], other[0]).replace("_", "-")
        raise ValueError(
            f"--{named} is for a new run; one that goes on keeps what it was begun with (what can change: "
            f"{', '.join('--' + name.replace('_', '-') for name in _CAN_CHANGE)})"
        )
    if arguments.recipe is not None:
        given["task"] = arguments.recipe
    return with_numbers(Recipe.of(arguments.resume, **given), arguments)

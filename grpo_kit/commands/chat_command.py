"""Ask a trained model, an export or any model by hand, with the training's prompt around the question.

examples:
  grpo-kit chat runs/mine                         question after question; an empty line ends it
  grpo-kit chat runs/mine "Which number is the largest: 4, 19, 7?"
  grpo-kit chat runs/mine --base                  the base model beside it
  grpo-kit chat exports/mine                      an export brings its prompt
  grpo-kit chat smollm2-135m-instruct --task largest
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("model", metavar="MODEL", help="a run folder, an export, a model's folder or name")
    parser.add_argument("question", nargs="?", metavar="QUESTION", help="ask this alone")
    parser.add_argument("--base", action="store_true", help="of a run: ask the base model too")
    parser.add_argument("--temperature", type=float, metavar="X", help="0 (default, but for exports): greedy")
    parser.add_argument(
        "--tokens", type=int, metavar="N", help="that a completion has at most; default: the task's"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of sampling; it moves on with each question"
    )
    parser.add_argument(
        "--task", metavar="NAME", help="whose prompt is put around the question, where nothing says it"
    )
    parser.add_argument("--profile", metavar="NAME", help="of a run that no recipe made")


def run(arguments: argparse.Namespace) -> int:
    """Answer typed questions, or the one question."""
    from grpo_kit.commands.trained import is_run, trained_in
    from grpo_kit.exports.chat import chat

    how = {
        "temperature": arguments.temperature,
        "max_completion_tokens": arguments.tokens,
        "seed": arguments.seed,
    }
    if arguments.tokens is not None and arguments.tokens < 1:
        raise ValueError(f"--tokens {arguments.tokens} must be at least 1")
    if is_run(arguments.model):
        trained = trained_in(arguments.model, task=arguments.task, profile=arguments.profile)
        if trained.model.name.startswith("checkpoint-"):
            print(f"{trained.folder} is {trained.what}.")
        base = trained.recipe.policy(quiet=True) if arguments.base else None
        talk = chat(*trained.load(), task=trained.recipe.make_task(), base=base and base[0], **how)
    else:
        if arguments.base:
            raise ValueError("--base is for run folders: of others the base is not known")
        task = None
        if arguments.task is not None:
            from grpo_kit.recipe import Recipe

            task = Recipe(arguments.task, profile=arguments.profile or "auto").make_task()
        talk = chat(arguments.model, task=task, **how)
    if arguments.question is None:
        talk.run()
        return 0
    for name, text in talk.ask(arguments.question).items():
        print(f"{name}: {text}" if len(talk.sides) > 1 else text)
    return 0

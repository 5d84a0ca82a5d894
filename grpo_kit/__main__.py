"""The command line: `grpo-kit train`, or `python -m grpo_kit train`.

A command loads torch and the like only when it runs. Exit codes: 0; 1 for what failed; 2 for what was asked wrongly;
130 for Ctrl-C. An error is one line.
"""

import argparse
import inspect
import os
import sys
from collections.abc import Sequence
from typing import Any

import grpo_kit
from grpo_kit.commands import CommandEnds
from grpo_kit.commands import without_training as other
from grpo_kit.commands.train import train
from grpo_kit.doctor import command as doctor


def _text(words: str, what: str, **how: Any) -> tuple[list[str], dict[str, Any]]:
    """An argument: its names, with the word that stands for its value; its help; more for argparse."""
    *names, metavar = words.split()
    return names or [metavar.lower()], {"metavar": metavar, "help": what} | how


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number of at least 1")
    return int(text)


def _every(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} must be a whole number of at least 1, or 0 for none")
    return int(text)


def _number(
    words: str, what: str, default: float | None = None, type: Any = _count
) -> tuple[list[str], dict]:
    return _text(words, what, type=type, default=default)


def _choice(name: str, choices: Sequence[str], what: str, **how: Any) -> tuple[list[str], dict[str, Any]]:
    return [name], {"choices": choices, "help": what} | how


def _switch(name: str, what: str) -> tuple[list[str], dict[str, Any]]:
    return [name], {"action": "store_true", "help": what}


# fmt: off
_RUN = _text("RUN", "a run folder")
_RUNS_TASK = _text("--task TASK", "FILE.py or a name; default: what the run says")
_NEW = [
    _text("TASK", "FILE.py with task = ..., or a name: countdown, ...", nargs="?"),
    _text("--preset NAME", "smoke, cpu, t4, gpu24; default: what this machine can run"),
    _text("--set NAME=VALUE", "a field of kit.Config, as often as needed: steps=24, seed=1, model=FOLDER, "
          "learning_rate=1e-5, 'temperature=linear(1.2, 0.8)'", action="append", default=[]),
]
_COMMANDS = {
    "train": (train, [
        *_NEW,
        _choice("--tuning", ("full", "lora", "qlora"), "what is trained; default: full"),
        _number("--rank R", "of LoRA adapters; their alpha is twice that"),
        _text("--folder RUN", "the run folder; default: the next free runs/<task>"),
        _text("--resume RUN", "go on with the run in RUN, or in --folder", nargs="?", const=True),
        _number("--held-out-every N", "steps between two looks at held-out rows, default 8; 0: none", None, _every),
        _choice("--keep", ("last", "best"), "whose weights the model has in the end; default: last"),
        _choice("--on-flag", ("warn", "stop"), "what a red flag does; default: warn"),
        _text("--report-to NAME", "a tracker: tensorboard, trackio, wandb", action="append"),
    ]),
    "watch": (other.watch, [
        _RUN,
        _switch("--once", "print what there is and end"),
        _number("--last N", "earlier steps that are shown; default: 10", 10, int),
        _number("--every SECONDS", "between two looks; default: 1", 1.0, float),
    ]),
    "diagnose": (other.diagnose, [
        _text("LOG", "trainer_state.json, a notebook, a printed log, a CSV, TensorBoard's or a run folder"),
    ]),
    "evaluate": (other.evaluate, [
        _RUN, _RUNS_TASK,
        _number("--rows N", "the first N held-out questions; default: all"),
        _number("--samples N", "completions a question, for pass@k", 0),
        _number("--examples N", "so many that were fixed, and that broke", 0),
    ]),
    "readiness": (other.readiness, [
        *_NEW,
        _number("--rows N", "training questions asked; default: 32", 32),
        _number("--samples N", "completions a question; default: one group"),
        _number("--seconds S", "about the most that it may take; default: 300", 300.0, float),
    ]),
    "chat": (other.chat, [
        _text("MODEL", "a run folder, an export, a model's folder or name"),
        _text("QUESTION", "ask this alone; default: one after another", nargs="?"),
        _RUNS_TASK,
        _switch("--base", "of a run: ask the base model too"),
        _number("--temperature X", "0 (default, but for exports): greedy", None, float),
        _number("--tokens N", "that a completion has at most; default: the task's"),
        _number("--seed N", "of sampling; it moves on with each question", 0, int),
    ]),
    "export": (other.export, [
        _RUN, _text("FOLDER", "where the export goes; it must not be there, or be empty"), _RUNS_TASK,
        _choice("--format", ("merged", "adapter", "gguf"), "default: merged", default="merged"),
        _choice("--quant", ("f32", "f16", "bf16", "q8_0"), "how weights are stored; default: f16"),
        _number("--temperature X", "to serve at; default: the training's last", None, float),
        _number("--rows N", "held-out questions both answer; default: 64", 64),
        _switch("--no-proof", "write it, and do not read it back"),
        _text("--license ID", "of the base, as the hub names it, such as apache-2.0"),
    ]),
    "doctor": (doctor.run, []),
}
# fmt: on


def make_parser() -> argparse.ArgumentParser:
    """Every command with its arguments. A command's docstring is its help."""
    parser = argparse.ArgumentParser(prog="grpo-kit", description=grpo_kit.__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"grpo_kit {grpo_kit.__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (run, arguments) in _COMMANDS.items():
        text = inspect.cleandoc(doctor.__doc__ if name == "doctor" else run.__doc__)
        short = text.partition("\n")[0].replace("%", "%%")  # argparse fills in what follows a %
        how = {"description": text, "formatter_class": argparse.RawDescriptionHelpFormatter}
        one = subparsers.add_parser(name, help=short, **how)
        one.set_defaults(execute=run)
        for names, about in arguments:
            one.add_argument(*names, **about)
    doctor.add_arguments(one)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. argv: without the program's name; None: the process's."""
    arguments, said = make_parser().parse_args(argv), ""
    try:
        return arguments.execute(arguments) or 0
    except CommandEnds as error:
        code, said = error.code, str(error)
    except ValueError as error:  # of the kit: it says in words what would do
        code, said = 2, str(error) or type(error).__name__
    except KeyboardInterrupt:
        code, said = 130, "interrupted"
    if os.environ.get("RANK", "0") == "0":  # of several processes the first one speaks
        print(f"grpo-kit {arguments.command}: {' '.join(said.split())}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())

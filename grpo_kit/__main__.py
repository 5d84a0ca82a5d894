"""The command line: `grpo-kit train`, or `python -m grpo_kit train`.

A command is one line in _COMMANDS: a module with `add_arguments(parser)` and `run(arguments) -> exit code`. It loads
torch and the like only when it runs. Exit codes: 0; 1 for what failed; 2 for what was asked wrongly; 130 for Ctrl-C.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

import grpo_kit
from grpo_kit.commands.errors import in_a_line, tell

# command: (module, one line)
_COMMANDS = {
    "train": ("grpo_kit.commands.train", "train a model: what notebook 05 does, without the notebook"),
    "watch": ("grpo_kit.commands.watch_command", "follow a run from another terminal"),
    "evaluate": ("grpo_kit.commands.evaluate", "accuracy of a run, base beside tuned, with intervals"),
    "readiness": ("grpo_kit.commands.readiness_command", "can GRPO learn anything from this model here?"),
    "chat": ("grpo_kit.commands.chat_command", "ask a run's model, an export or any model by hand"),
    "export": (
        "grpo_kit.commands.export",
        "a run's model with its prompt as a folder, an adapter or a GGUF file",
    ),
    "doctor": ("grpo_kit.doctor.command", "what this machine has, a check of every part, and what to do"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. argv: without the program's name; None: the process's."""
    parser = argparse.ArgumentParser(prog="grpo-kit", description=grpo_kit.__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"grpo_kit {grpo_kit.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, line) in _COMMANDS.items():
        command = importlib.import_module(module)
        one = commands.add_parser(
            name, help=line, description=command.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.add_arguments(one)
        one.set_defaults(execute=command.run)  # of which no option has the name
    arguments = parser.parse_args(argv)
    try:
        return arguments.execute(arguments)
    except ValueError as error:  # of the kit: it says in words what would do
        tell(f"grpo-kit {arguments.command}: {in_a_line(error)}")
        return 2
    except KeyboardInterrupt:
        tell("interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main())

"""The command line: `python -m grpo_kit doctor`, or `grpo-kit doctor`.

A command is one line in _COMMANDS: a module with `add_arguments(parser)` and `run(arguments) -> exit code`. It is
imported when it is asked for, and loads torch and the like only when it runs.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

import grpo_kit

# command: (module, one line)
_COMMANDS = {
    "doctor": ("grpo_kit.doctor.command", "what this machine has, a check of every part, and what to do"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. argv: without the program's name; None: the process's."""
    parser = argparse.ArgumentParser(prog="grpo-kit", description=grpo_kit.__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"grpo_kit {grpo_kit.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, line) in _COMMANDS.items():
        command = importlib.import_module(module)
        one = commands.add_parser(name, help=line, description=command.__doc__.splitlines()[0])
        command.add_arguments(one)
        one.set_defaults(run=command.run)
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())

"""The command line: `grpo-kit train`, or `python -m grpo_kit train`.

A command loads torch and the like only when it runs. Exit codes: 0; 1 for what failed; 2 for what was asked wrongly;
130 for Ctrl-C. What a command refuses is one line. `grpo-kit --install-completion` completes words in the shell.
"""

import sys
from collections.abc import Sequence

from typer import Option, Typer

import grpo_kit as kit
from grpo_kit.more.commands import MAIN, CommandEnds
from grpo_kit.more.commands.train import train
from grpo_kit.more.commands.without_training import (
    chat,
    diagnose,
    doctor,
    evaluate,
    export,
    readiness,
    watch,
)

app = Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
for command in (train, watch, diagnose, evaluate, readiness, chat, export, doctor):
    app.command()(command)


# commands that ask a model
LOADING = {"train", "evaluate", "readiness", "chat", "export", "doctor"}


@app.callback(invoke_without_command=True, help=kit.__doc__.splitlines()[0])
def _kit(version: bool = Option(False, "--version", help="Show the version and exit.")) -> None:
    if version:
        print(f"grpo_kit {kit.__version__}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. argv: without the program's name; None: the process's."""
    words = sys.argv[1:] if argv is None else [*argv]
    asks_a_model = words[:1] and words[0] in LOADING and "--help" not in words
    if asks_a_model and sys.stderr.isatty() and "torch" not in sys.modules:
        print("Loading torch and transformers: some seconds.", file=sys.stderr, flush=True)
    try:
        app(words, prog_name="grpo-kit")
    except SystemExit as end:  # what was asked wrongly is said by then
        return end.code
    except CommandEnds as error:
        code, message = error.code, str(error)
    except ValueError as error:  # of the kit: it says in words what would do
        code, message = 2, str(error)
    if MAIN:
        from grpo_kit._support.kernel import visible

        print(
            visible(f"grpo-kit {words[0]}: {' '.join(message.split())}"),
            file=sys.stderr,
            flush=True,
        )
    return code


if __name__ == "__main__":
    sys.exit(main())

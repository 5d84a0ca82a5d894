"""What the commands of the command line do, in the library's public names, which load when they are called."""

import os
from typing import Literal

from typer import Argument, Option

# Of the processes that torchrun starts the first one writes and speaks.
MAIN = os.environ.get("RANK", "0") == "0"

# What several commands take.
Preset = Literal["auto", "smoke", "cpu", "t4", "gpu24"] | None
RUN = Argument(help="a run folder")
RUNS_TASK = Option(None, "--task", help="FILE.py or a name; default: what the run says")
NEW_TASK = Argument(None, help="FILE.py with task = ..., or a name: countdown, ...")
PRESET = Option(None, help="default: auto, what this machine can run")
_FIELDS = "a field of kit.preset; as often as needed: steps=24, model=FOLDER, 'temperature=linear(1.2, 0.8)'"
SETTINGS = Option(None, "--set", metavar="NAME=VALUE", help=_FIELDS)


class CommandEnds(Exception):
    """A command that did not do what it was asked, and why. code: the process's exit code."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code

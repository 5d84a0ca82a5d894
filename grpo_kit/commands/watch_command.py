"""Follow a run from another terminal: a line a step, held-out accuracy, red flags, changes; it ends when the run ends.

examples:
  grpo-kit watch runs/mine                        from the last ten steps on
  grpo-kit watch runs/mine --once                 how far it is, and no more
  grpo-kit watch runs/mine --last 1000            every step of a run that is done
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("run", metavar="RUN", help="a run folder, of a run that goes on or is done")
    parser.add_argument("--once", action="store_true", help="print what there is and end")
    parser.add_argument(
        "--last", type=int, default=10, metavar="N", help="earlier steps that are shown; default: 10"
    )
    parser.add_argument(
        "--every", type=float, default=1.0, metavar="SECONDS", help="between two looks; default: 1"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print new lines until the run has ended."""
    from grpo_kit.watch.terminal import Lines, where_it_is

    folder = Path(arguments.run)
    if arguments.last < 0 or not arguments.every > 0:
        raise ValueError(
            f"--last {arguments.last} must be at least 0 and --every {arguments.every:g} above 0"
        )
    if not folder.is_dir():
        raise ValueError(f"RUN {folder} is no folder; give a run's, such as runs/largest")
    lines = Lines(folder, last=arguments.last)
    while True:
        state, ended = where_it_is(folder)
        for line in lines.new():
            print(line, flush=True)
        if ended or arguments.once:
            print(state, flush=True)
            return 0
        time.sleep(arguments.every)

"""The command line: `grpo-kit train`, or `python -m grpo_kit train`.

A command loads torch and the like only when it runs. Exit codes: 0; 1 for what failed; 2 for what was asked wrongly;
130 for Ctrl-C. An error is one line.
"""

import argparse
import inspect
import os
import sys
from collections.abc import Sequence

import grpo_kit
from grpo_kit.commands import CommandEnds, trained
from grpo_kit.commands.train import train
from grpo_kit.doctor import command as doctor

_COMMANDS = {
    "train": train, "watch": trained.watch, "evaluate": trained.evaluate, "readiness": trained.readiness,
    "chat": trained.chat, "export": trained.export, "doctor": doctor.run,
}  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    """Every command with its arguments. A command's docstring is its help."""
    parser = argparse.ArgumentParser(prog="grpo-kit", description=grpo_kit.__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"grpo_kit {grpo_kit.__version__}")
    subparsers, add = parser.add_subparsers(dest="command", required=True, metavar="COMMAND"), {}
    for name, run in _COMMANDS.items():
        text = inspect.cleandoc(doctor.__doc__ if name == "doctor" else run.__doc__)
        one = subparsers.add_parser(
            name,
            help=text.partition("\n")[0].replace("%", "%%"),  # argparse fills in what follows a %
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        one.set_defaults(execute=run)
        add[name] = one.add_argument
    doctor.add_arguments(one)
    preset = {"metavar": "NAME", "help": "smoke, cpu, t4, gpu24; default: what this machine can run"}
    for name in ("train", "readiness"):
        add[name](
            "task",
            nargs="?",
            metavar="TASK",
            help="FILE.py with task = ..., or a name: countdown, ...",
        )
        add[name]("--preset", **preset)
        add[name](
            "--set", action="append", default=[], metavar="NAME=VALUE",
            help="a field of kit.Config, as often as needed: steps=24, seed=1, model=FOLDER, "
            "learning_rate=1e-5, 'temperature=linear(1.2, 0.8)'",
        )  # fmt: skip
    for name in ("watch", "evaluate", "export"):
        add[name]("run", metavar="RUN", help="a run folder")
    for name in ("evaluate", "chat", "export"):
        add[name]("--task", metavar="TASK", help="where the run does not say it: a file, or one of the kit's")
        add[name]("--preset", **preset)

    more = add["train"]
    more("--tuning", choices=("full", "lora", "qlora"), help="what is trained; default: full")
    more("--rank", type=int, metavar="R", help="of LoRA adapters; their alpha is twice that")
    more("--folder", metavar="RUN", help="the run folder; default: the next free runs/<task>")
    more("--resume", nargs="?", const=True, metavar="RUN", help="go on with the run in RUN, or in --folder")
    more(
        "--held-out-every",
        type=int,
        metavar="N",
        help="steps between two looks at held-out rows; 0: none",
    )
    more("--keep", choices=("last", "best"), help="whose weights the model has in the end; default: last")
    more("--on-flag", choices=("warn", "stop"), help="what a red flag does; default: warn")
    more("--report-to", action="append", metavar="NAME", help="a tracker: tensorboard, trackio, wandb")
    more = add["watch"]
    more("--once", action="store_true", help="print what there is and end")
    more("--last", type=int, default=10, metavar="N", help="earlier steps that are shown; default: 10")
    more("--every", type=float, default=1.0, metavar="SECONDS", help="between two looks; default: 1")
    more = add["evaluate"]
    more("--rows", type=int, metavar="N", help="the first N held-out questions; default: all")
    more("--samples", type=int, default=0, metavar="N", help="completions a question, for pass@k")
    more("--examples", type=int, default=0, metavar="N", help="so many that were fixed, and that broke")
    more = add["readiness"]
    more("--rows", type=int, default=32, metavar="N", help="training questions asked; default: 32")
    more("--samples", type=int, metavar="N", help="completions a question; default: one group")
    more(
        "--seconds",
        type=float,
        default=300,
        metavar="S",
        help="about the most that it may take; default: 300",
    )
    more = add["chat"]
    more("model", metavar="MODEL", help="a run folder, an export, a model's folder or name")
    more("question", nargs="?", metavar="QUESTION", help="ask this alone; default: one after another")
    more("--base", action="store_true", help="of a run: ask the base model too")
    more("--temperature", type=float, metavar="X", help="0 (default, but for exports): greedy")
    more("--tokens", type=int, metavar="N", help="that a completion has at most; default: the task's")
    more("--seed", type=int, default=0, metavar="N", help="of sampling; it moves on with each question")
    more = add["export"]
    more("folder", metavar="FOLDER", help="where the export goes; it must not be there, or be empty")
    more("--format", choices=("merged", "adapter", "gguf"), default="merged", help="default: merged")
    more("--quant", choices=("f32", "f16", "bf16", "q8_0"), help="how weights are stored; default: f16")
    more("--temperature", type=float, metavar="X", help="to serve at; default: the training's last")
    more("--rows", type=int, default=64, metavar="N", help="held-out questions both answer; default: 64")
    more("--no-proof", action="store_true", help="write it, and do not read it back")
    more("--license", metavar="ID", help="of the base, as the hub names it, such as apache-2.0")
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

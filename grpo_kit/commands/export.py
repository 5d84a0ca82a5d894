"""Write a run's model with its prompt into a folder that others load, read it back, and compare.

examples:
  grpo-kit export runs/mine exports/mine                               a folder for transformers, vLLM and the like
  grpo-kit export runs/mine exports/mine --format gguf --quant q8_0    one file for llama.cpp and Ollama
  grpo-kit export runs/mine exports/mine --format adapter              a LoRA adapter alone

The export is read back in a fresh process and answers the held-out questions beside the trained model. One that is not
the trained model is refused (exit code 1), and left with its report.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from grpo_kit.commands.errors import in_a_line, tell


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.add_argument(
        "folder", metavar="FOLDER", help="where the export goes; it must not be there, or be empty"
    )
    parser.add_argument(
        "--format", choices=("merged", "adapter", "gguf"), default="merged", help="default: merged"
    )
    parser.add_argument(
        "--quant", choices=("f32", "f16", "bf16", "q8_0"), help="how weights are stored; default: f16"
    )
    parser.add_argument(
        "--temperature", type=float, metavar="X", help="to serve at; default: the training's last"
    )
    parser.add_argument(
        "--rows", type=int, default=64, metavar="N", help="held-out questions both answer; default: 64"
    )
    parser.add_argument("--no-proof", action="store_true", help="write it, and do not read it back")
    parser.add_argument(
        "--license", metavar="ID", help="of the base, as the hub names it, such as apache-2.0"
    )
    parser.add_argument(
        "--task", metavar="NAME", help="of a run that no recipe made: a task of the kit's, or FILE.py"
    )
    parser.add_argument("--profile", metavar="NAME", help="of a run that no recipe made")


def run(arguments: argparse.Namespace) -> int:
    """Export; 0, or 1 if the export was refused."""
    from grpo_kit.commands.trained import trained_in
    from grpo_kit.exports import export
    from grpo_kit.exports.template import ExportError

    target = Path(arguments.folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"FOLDER {target} is there and not empty; nothing is overwritten, name another")
    trained = trained_in(arguments.run, task=arguments.task, profile=arguments.profile)
    recipe, heat = trained.recipe, arguments.temperature
    if heat is None:
        heat = recipe.schedule(1.0) if recipe.schedule else recipe.cfg.temperature
    if trained.model.name.startswith("checkpoint-"):
        print(f"{trained.folder} is {trained.what}.")
    model, tokenizer = trained.load()
    try:
        made = export(
            model, tokenizer, target, task=recipe.make_task(), format=arguments.format, quant=arguments.quant,
            temperature=heat, rows=arguments.rows, proof=not arguments.no_proof, run=trained.folder,
            comparison=trained.comparison(), license=arguments.license,
        )  # fmt: skip
    except ExportError as error:
        tell(f"grpo-kit export: {in_a_line(error)}")
        return 1
    print(made)
    print(f"Try it: grpo-kit chat {target}")
    return 0

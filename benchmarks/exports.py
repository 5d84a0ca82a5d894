"""What is left of a trained model in each format: exported, read back in a fresh process, put beside itself.

    python -m benchmarks.exports --name smollm2-135m-instruct --full RUN05/model --lora RUN06/adapter --rows 128
    python -m benchmarks.exports --name qwen2.5-coder-0.5b-instruct --weights "what they are" --base FOLDER \\
        --train-steps 4 --rows 32 --formats merged:f16 adapter:f32 gguf:f16 gguf:q8_0

RUN05 and RUN06: run folders of the notebooks 05 and 06. With --base and --train-steps a LoRA run of the task `largest`
is made first, under --keep. Writes benchmarks/results/exports_<name>.json: a row a tuning and format with the
proof's numbers (KL, log-probabilities, agreement, the same greedy answers, held-out accuracy of base, trained and
exported model with the paired interval), size and seconds (one thread; the proof's answers are decoded one by one).
--keep FOLDER keeps what was exported there.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import grpo_kit as kit
from benchmarks.result import RESULTS, WEIGHTS, command_line, origin, save

FORMATS = [
    "merged:f32",
    "merged:f16",
    "merged:bf16",
    "adapter:f32",
    "gguf:f16",
    "gguf:bf16",
    "gguf:q8_0",
]


def train(base: str, folder: Path, task: Any, steps: int) -> Path:
    """A short LoRA run; the folder of its adapter."""
    if not (folder / "adapter").is_dir():
        cfg = kit.preset("cpu", tuning="lora", steps=steps, model=base, prompts_per_step=2)
        cfg.learning_rate = 2e-4  # of the saved runs
        model, tokenizer = kit.load_policy(base, tuning="lora", dtype=cfg.dtype, seed=cfg.seed)
        trainer = kit.GRPOTrainer(
            model, task, cfg, tokenizer=tokenizer, folder=folder, live=None
        )
        trainer.train()
        trainer.save_model(folder / "adapter")
    return folder / "adapter"


def row(
    source: Path, tuning: str, form: str, task: Any, rows: int, keep: Path
) -> dict[str, Any]:
    """One export of one trained model."""
    model, tokenizer = kit.load_policy(source, tuning=tuning, quiet=True)
    format, _, quant = form.partition(":")
    target = keep / f"{tuning}_{format}_{quant}"
    shutil.rmtree(target, ignore_errors=True)
    started = time.time()
    made = kit.export(
        model,
        tokenizer,
        target,
        task=task,
        format=format,
        quant=quant,
        rows=rows,
        run=source.parent,
        temperature=0.7,
    )
    took = time.time() - started
    return {
        "tuning": tuning,
        "format": format,
        "stored": quant,
        "megabytes": round(made.bytes / 1e6, 1),
        "seconds": round(took, 1),
        "notes": list(made.notes),
        **made.proof.to_dict(),
    }


def main() -> None:
    """Train where asked for, export, measure, save after each row."""
    parser = command_line(__doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--weights", help="what the weights are; known of the embedded SmolLM2")
    parser.add_argument(
        "--full", type=Path, help="the folder of a fully trained model, in its run's folder"
    )
    parser.add_argument(
        "--lora", type=Path, help="the folder of an adapter, in its run's folder"
    )
    parser.add_argument("--base", help="to train by LoRA, with --train-steps")
    parser.add_argument("--train-steps", type=int, default=0)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    if (weights := options.weights or WEIGHTS.get(options.name)) is None:
        parser.error(
            f"--name {options.name}: say by --weights what these weights are; known are those of {', '.join(WEIGHTS)}"
        )
    task = kit.tasks.largest()
    keep = options.keep or Path(tempfile.mkdtemp(prefix="exports-"))
    result = origin(
        f"python -m benchmarks.exports --name {options.name} --rows {options.rows}",
        "torch",
        "transformers",
        "gguf",
    )
    result |= {"weights": weights, "task": task.name, "rows": []}
    if options.base:
        held = task.held_out[: options.rows]
        before = kit.evaluate(*kit.load_policy(options.base, quiet=True), task, rows=held)
        result["base"] = {"n": before.n, "accuracy": str(before.strict)}
        options.lora = train(options.base, keep / "run", task, options.train_steps)
        result["steps"] = options.train_steps
    for tuning, source in (("full", options.full), ("lora", options.lora)):
        for form in options.formats if source else ():
            if form.startswith("adapter") and tuning == "full":
                continue
            result["rows"].append(row(source, tuning, form, task, options.rows, keep))
            print(result["rows"][-1], flush=True)
            save(RESULTS, f"exports_{options.name}", result)
    if not options.keep:
        shutil.rmtree(keep)


if __name__ == "__main__":
    main()

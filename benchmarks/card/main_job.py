"""The main job with SmolLM2-135M on a card: three seeds each of float32, bfloat16 by LoRA and bfloat16 fully.

python -m benchmarks.card.main_job OUT.json
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import torch

import grpo_kit as kit
from benchmarks.result import command_line

KINDS = (
    ("float32", "none", "full", "adamw"),
    ("bfloat16", "bfloat16", "lora", "adamw"),
    ("bfloat16", "bfloat16", "full", "adamw-8bit-split"),
)


def main() -> None:
    """Train and evaluate what KINDS has, seeds 0 to 2 each; saved after each run."""
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    out, rows = parser.parse_args().out, []
    for (dtype, autocast, tuning, optimizer), seed in (
        (kind, seed) for kind in KINDS for seed in range(3)
    ):
        cfg = kit.preset("cpu", tuning=tuning, seed=seed)
        if tuning == "lora":
            cfg.learning_rate = 2e-4  # of the saved runs
        task = cfg.make_task()
        torch.manual_seed(seed)
        model, tokenizer = kit.load_policy(
            cfg.model, tuning=tuning, dtype=dtype, seed=seed, quiet=True
        )
        model = model.cuda()
        before = (
            kit.evaluate(model, tokenizer, task, batch_size=256).strict.value
            if seed == 0
            else None
        )
        config = kit.Config(
            steps=cfg.steps, prompts_per_step=cfg.prompts_per_step, group_size=cfg.group_size,
            learning_rate=cfg.learning_rate, temperature=cfg.temperature, beta=cfg.beta, seed=seed, autocast=autocast,
            optimizer=optimizer,
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            begin = time.perf_counter()
            trainer = kit.GRPOTrainer(
                model, task, config, tokenizer=tokenizer, folder=f"{folder}/run", live=None
            )
            trainer.train()
            took = time.perf_counter() - begin
            gap = float(kit.read_metrics(trainer.folder)["rollout/logprob_gap"].max())
        row = {
            "dtype": dtype,
            "autocast": autocast,
            "tuning": tuning,
            "optimizer": optimizer,
            "seed": seed,
        }
        row |= {"before": before, "seconds": took, "logprob_gap": gap}
        row |= {"after": kit.evaluate(model, tokenizer, task, batch_size=256).strict.value}
        rows.append(row)
        print(row, flush=True)
        out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

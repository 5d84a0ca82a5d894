"""What is trained, and what of it must be equal: weights, rows and completions."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from datasets import Dataset
from trl import GRPOConfig

import grpo_kit as kit

STEPS, SAVE, EVALUATE = 6, 2, 2
OFF = {"sync_every": 2, "buffer": "fifo", "lead": 1}
POSITIVES = {"positive_weight": 2.0, "resample": 1}
ARMS: dict[str, tuple[type, str, int, dict[str, Any]]] = {  # trainer, tuning, num_iterations, its options
    "full": (kit.GRPOTrainer, "full", 1, {}),
    "full, 2 iterations": (kit.GRPOTrainer, "full", 2, {}),
    "LoRA": (kit.GRPOTrainer, "lora", 1, {}),
    "LoRA, 2 iterations": (kit.GRPOTrainer, "lora", 2, {}),
    "off-policy, full": (kit.OffPolicyTrainer, "full", 1, OFF),
    "off-policy, LoRA": (kit.OffPolicyTrainer, "lora", 1, OFF),
    "positives, full, 2 iterations": (kit.PositivesTrainer, "full", 2, POSITIVES),
    "positives, LoRA": (kit.PositivesTrainer, "lora", 1, POSITIVES),
}


def rows(count: int, first: int = 0) -> Dataset:
    """Prompts of three lengths."""
    return Dataset.from_dict({"prompt": [f"Say {first + i} and {'more ' * (i % 3)}:" for i in range(count)]})


def letters(completions: list[str], **columns: Any) -> list[float]:
    """Share of characters that are letters: differs inside a group on a random model."""
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]


def make(arm: str, folder: Path) -> Any:
    """A fresh trainer of the arm on fresh weights."""
    trainer, tuning, iterations, options = ARMS[arm]
    lora = {"lora_dropout": 0.1} if tuning == "lora" else None
    model, tokenizer = kit.load_policy("tiny-random", tuning=tuning, lora=lora, quiet=True)
    args = GRPOConfig(
        output_dir=str(folder), per_device_train_batch_size=8, per_device_eval_batch_size=4, num_generations=4,
        max_steps=STEPS, max_completion_length=6, learning_rate=1e-2, lr_scheduler_type="constant", save_steps=SAVE,
        eval_strategy="steps", eval_steps=EVALUATE, num_iterations=iterations, report_to=[], bf16=False, use_cpu=True,
        gradient_checkpointing=False, disable_tqdm=True, seed=3,
    )  # fmt: skip
    torch.manual_seed(0)
    return trainer(
        model,
        letters,
        args,
        rows(8),
        rows(8, 100),
        processing_class=tokenizer,
        live=False,
        warmup=0,
        **options,
    )


def result_of(trainer: Any) -> dict[str, str]:
    """Digests of the weights, and of both tables as pandas reads the files."""
    folder = Path(trainer.args.output_dir)
    weights = hashlib.sha256()
    for name, parameter in trainer.model.named_parameters():
        weights.update(name.encode() + parameter.detach().numpy().tobytes())
    metrics = pd.read_csv(folder / "metrics.csv", float_precision="round_trip")
    extra = [json.loads(cell) for cell in metrics.pop("extra")]
    table = metrics.join(pd.DataFrame(extra))
    times = [name for name in table if "seconds" in name or name == "step_time"]
    table = table.drop(columns=times).astype(float)
    seen = pd.read_parquet(folder / "completions.parquet")
    return {
        "weights": weights.hexdigest()[:16],
        "rows": _digest(table[sorted(table)].to_csv(index=False)),
        "completions": _digest(seen[sorted(seen)].to_csv(index=False)),
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]

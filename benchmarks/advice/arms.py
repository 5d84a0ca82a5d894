"""The arms behind "the advice, measured": what each changes.

All on SmolLM2-135M-Instruct, full fine-tuning, `largest` (which of three to five two-digit numbers is the largest?),
10 steps of 4 prompts x 8 completions: small enough that the whole table reruns in a night on 2 cores. The learning
rate is twice the main job's, because there are a third of its steps; LoRA has the preset's own (adapters start at 0).

The recorded runs were made before the kit had a loop of its own, by a trainer on trl's: their result.json says settings
in its words. A step was one update there, so that 10 steps were 5 rollouts used twice, or two used 4 times and half of
a third; here a step is a rollout with all its updates.
In these runs the arms with a task of their own (NO_PREFILL, BINARY, LONGER, rewards -1 to 1) had other train questions
than the arms without; the held-out questions are the same. Only arms of one kind can be compared; the two claims that
compared across are withdrawn (claims.py).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from grpo_kit import cosine, exponential, linear, tasks
from grpo_kit.engine.older_weights import OlderWeights
from grpo_kit.prompts import build_prompt
from grpo_kit.rewards import ExactAnswer
from grpo_kit.tasks import Task

BASE: dict[str, Any] = {"steps": 10, "learning_rate": 2e-5, "held_out": 128}
_TASK = tasks.largest()
# Without the prefill a model of this size keeps the format in one completion of four and is right in one of thirty.
NO_PREFILL = replace(_TASK, prefill="", max_completion_tokens=16)
BINARY = replace(NO_PREFILL, rewards=[ExactAnswer()], reward_weights=[1.0])
LONGER = replace(NO_PREFILL, max_completion_tokens=32)


def one(completions: list, **columns: Any) -> list[float]:
    """1.0 for each completion: with a weight of -1 what is taken off every reward."""
    return [1.0] * len(completions)


def with_one(task: Task) -> Task:
    """The task with the reward `one`, of weight 0; a task's weights are never below 0."""
    return replace(task, rewards=[*task.rewards, one], reward_weights=[*task.reward_weights, 0.0])


def negative(task: Task) -> dict[str, Any]:
    """Settings that train on 2 r - 1 in place of the task's r: in [-1, 1], where r is in [0, 1]."""
    return {
        "task": with_one(task),
        "reward_weights": [*(2 * weight for weight in task.reward_weights), -1.0],
    }


def cold_start(model: Any, tokenizer: Any, task: Task, seed: int, *, rows: int = 32, batch: int = 4) -> None:
    """A brief SFT before GRPO: one pass over a few right responses (the last train rows), 8 steps at 1e-5."""
    examples = [
        (
            build_prompt(tokenizer, row["question"], system=task.system, prefill="", examples=task.examples),
            f"<{task.answer_tag}>{row['answer']}</{task.answer_tag}>{tokenizer.eos_token}",
        )
        for row in task.train[-rows:]
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    model.train()
    for first in range(0, rows, batch):
        pairs = [[tokenizer(text)["input_ids"] for text in pair] for pair in examples[first : first + batch]]
        for prompt, response in pairs:
            ids = torch.tensor([prompt + response], device=model.device)
            labels = torch.tensor([[-100] * len(prompt) + response], device=model.device)
            (model(input_ids=ids, labels=labels).loss / batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


# Long enough for rollouts to grow old; the main job's learning rate. With sync 20 the untrained model makes them all.
OLD: dict[str, Any] = {"steps": 20, "learning_rate": 1e-5}


def old(**how: Any) -> dict[str, Any]:
    """Settings whose rollouts are made by older weights; how: of OlderWeights."""
    return {"sample": partial(OlderWeights, **how)}


# family -> arm -> what it changes; what is compared with what stands in claims.py
FAMILIES: dict[str, dict[str, dict[str, Any]]] = {
    "main": {
        "control": {"eval_temperatures": (0.7, 1.0, 1.3)},
        "temperature 0.7": {"temperature": 0.7, "eval_temperatures": (0.7, 1.0, 1.3)},
        "temperature 1.3": {"temperature": 1.3, "eval_temperatures": (0.7, 1.0, 1.3)},
        "linear": {"temperature": linear(1.3, 0.7)},
        "group of 2": {"prompts_per_step": 16, "group_size": 2},
        "group of 16": {"prompts_per_step": 2, "group_size": 16},
        "4 x 16": {"group_size": 16},
        "2 iterations": {"iterations": 2, "steps": 5},
        "beta 0.04": {"beta": 0.04},
        "no warmup": {"warmup": 0.0},
        "8-bit AdamW": {"optimizer": "adamw-8bit"},
        "rewards -1 to 1": negative(_TASK),
        "LoRA": {"tuning": "lora", "learning_rate": 2e-4},
        "GSPO, 2 iterations": {"level": "sequence", "loss": "grpo", "iterations": 2, "steps": 5},
        "cosine": {"temperature": cosine(1.3, 0.7)},
        "exponential": {"temperature": exponential(1.3, 0.7)},
        "top-p 0.9": {"top_p": 0.9},
        "group of 4": {"prompts_per_step": 8, "group_size": 4},
        "4 iterations": {"iterations": 4, "steps": 3},
    },
    "no prefill": {
        "no prefill": {"task": NO_PREFILL},
        "no prefill, binary": {"task": BINARY},
        "no prefill, SFT first": {"task": NO_PREFILL, "prepare": cold_start},
    },
    # against "no prefill, binary": right once in thirty
    "low success": {
        "binary, positives x 4": {"task": BINARY, "positive_weight": 4.0},
        "binary, positives only": {"task": BINARY, "negative_weight": 0.0},
        "binary, resampled": {"task": BINARY, "resample": 3},
    },
    "longer": {
        "longer, GRPO": {"task": LONGER, "loss": "grpo"},
        "longer, Dr. GRPO": {"task": LONGER, "loss": "dr_grpo"},
        "longer, DAPO": {"task": LONGER},
    },
    "off-policy": {
        "sync 1": OLD | old(sync_every=1),
        "sync 5": OLD | old(sync_every=5),
        "sync 10": OLD | old(sync_every=10),
        "sync 10, no weights": OLD | old(sync_every=10, importance_weights=False),
        "oldest first": OLD | old(buffer="fifo", lead=5),
        "newest first": OLD | old(buffer="newest", lead=5),
        "sync 20": OLD | old(sync_every=20),
    },
}

"""The arms of the first campaign by name, and what an arm of the plan does beyond settings.

The first campaign: SmolLM2-135M-Instruct, full fine-tuning, `largest` (which of three to five two-digit numbers is the
largest?), 10 steps of 4 prompts x 8 completions, seeds 0 to 4. Its runs are in results/advice; each result.json has the
arm's settings, in the words of the trainer of that time, on trl's. Commit ebb1683 has what made them. A step was one
update there, so that 10 steps were 5 rollouts used twice, or two used 4 times and half of a third.
The arms with a task of their own ("no prefill", "longer", rewards -1 to 1) had other train questions than the arms
without; the held-out questions are the same. Only arms of one kind can be compared; the two claims that compared
across are withdrawn (claims.py).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from examples.older_weights import OlderWeights
from grpo_kit.prompts import build_prompt
from grpo_kit.tasks import Task


def one(completions: list, **columns: Any) -> list[float]:
    """1.0 for each completion: with a weight of -1 what is taken off every reward."""
    return [1.0] * len(completions)


def with_one(task: Task) -> Task:
    """The task with the reward `one`, of weight 0; a task's weights are never below 0."""
    return replace(
        task, rewards=[*task.rewards, one], reward_weights=[*task.reward_weights, 0.0]
    )


def negative(task: Task) -> dict[str, Any]:
    """Settings that train on 2 r - 1 in place of the task's r: in [-1, 1], where r is in [0, 1]."""
    return {
        "task": with_one(task),
        "reward_weights": [*(2 * weight for weight in task.reward_weights), -1.0],
    }


def cold_start(
    model: Any, tokenizer: Any, task: Task, seed: int, *, rows: int = 32, batch: int = 4
) -> None:
    """A brief SFT before GRPO: one pass over a few right responses (the last train rows), 8 steps at 1e-5."""
    examples = [
        (
            build_prompt(
                tokenizer,
                row["question"],
                system=task.system,
                prefill="",
                examples=task.examples,
            ),
            f"<{task.answer_tag}>{row['answer']}</{task.answer_tag}>{tokenizer.eos_token}",
        )
        for row in task.train[-rows:]
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    model.train()
    for first in range(0, rows, batch):
        pairs = [
            [tokenizer(text)["input_ids"] for text in pair]
            for pair in examples[first : first + batch]
        ]
        for prompt, response in pairs:
            ids = torch.tensor([prompt + response], device=model.device)
            labels = torch.tensor([[-100] * len(prompt) + response], device=model.device)
            (model(input_ids=ids, labels=labels).loss / batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def old(**how: Any) -> dict[str, Any]:
    """Settings whose rollouts are made by older weights; how: of OlderWeights."""
    return {"sample": partial(OlderWeights, **how)}


# family -> its arms, the first of which the others are compared with; which pairs are claims stands in claims.py
FAMILIES: dict[str, tuple[str, ...]] = {
    "main": (
        "control", "temperature 0.7", "temperature 1.3", "linear", "group of 2", "group of 16", "4 x 16",
        "2 iterations", "beta 0.04", "no warmup", "8-bit AdamW", "rewards -1 to 1", "LoRA", "GSPO, 2 iterations",
        "cosine", "exponential", "top-p 0.9", "group of 4", "4 iterations",
    ),
    "no prefill": ("no prefill", "no prefill, binary", "no prefill, SFT first"),
    # against "no prefill, binary": right once in thirty
    "low success": ("binary, positives x 4", "binary, positives only", "binary, resampled"),
    "longer": ("longer, GRPO", "longer, Dr. GRPO", "longer, DAPO"),
    "off-policy": (
        "sync 1", "sync 5", "sync 10", "sync 10, no weights", "oldest first", "newest first", "sync 20",
    ),
}  # fmt: skip

"""The seven tiny runs whose first steps are on record: their tasks and settings, and nothing of any trainer.

tiny-random never writes a right answer, so each task also pays for letters, and any word is a move in the grid.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.oracle.cases import policy_of
from grpo_kit.models import load_policy
from grpo_kit.more.episodes import grid
from grpo_kit.more.episodes.grid_world import MOVES, Grid
from grpo_kit.schedules import constant, linear
from grpo_kit.tasks import code, countdown, from_rows, largest

STEPS = 2
END, ENDS_LIKE = (
    9.0,
    100,
)  # the end token's row of the head is 9 times token 100's, so that some completions end
EPSILON, EPSILON_HIGH, MAX_GRAD_NORM = 0.2, 0.28, 1.0


@dataclass(frozen=True)
class Run:
    """A run of STEPS steps, as any trainer can be built from it.

    task: makes a Task, or an EpisodeTask where episodes is True: there a row is a turn, with its episode's advantage.
    The loss is DAPO's with EPSILON and EPSILON_HIGH, over all rows of a step at once. Advantages are divided by the
    spread of their group (ddof=1) plus 1e-4. A completion without a total reward has advantage 0.
    Each step makes prompts_per_step groups of group_size completions, then `iterations` updates by AdamW (0.9, 0.999,
    eps 1e-8, no weight decay), the gradient clipped to the norm MAX_GRAD_NORM. Update k, from 0, has the learning rate
    learning_rate * min(1, (k + 1) / (warmup + 1)). temperature: a schedule; step k has progress k / (STEPS - 1).
    beta: the weight of the KL to the policy that the run starts from. seed: of the order of the rows and of sampling.
    """

    name: str
    task: Callable[[], Any]
    tuning: str = "full"
    episodes: bool = False
    prompts_per_step: int = 2
    group_size: int = 4
    iterations: int = 1
    learning_rate: float = 1e-3
    warmup: int = 0
    temperature: Callable[[float], float] = constant(1.0)
    beta: float = 0.0
    seed: int = 0

    def policy(self) -> tuple[Any, Any]:
        """A new model on the fixed weights, in training mode, and its tokenizer."""
        tokenizer = load_policy("tiny-random", quiet=True)[1]
        model = copy.deepcopy(policy_of(self.tuning)).train()
        with torch.no_grad():
            head = model.get_output_embeddings().weight
            head[tokenizer.eos_token_id] = END * head[ENDS_LIKE]
        return model, tokenizer

    def rate(self, update: int) -> float:
        """The learning rate of an update, counted from 0 over all steps."""
        return self.learning_rate * min(1.0, (update + 1) / (self.warmup + 1))


def letters(completions: list[str], **columns: Any) -> list[float]:
    """The share of characters that are letters, in [0, 1]."""
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]


def sometimes(completions: list[str], **columns: Any) -> list[float | None]:
    """A number in [0, 1] by the text alone, None for one text in three."""
    drawn = [zlib.crc32(text.encode()) for text in completions]
    return [None if number % 3 == 0 else number % 101 / 100 for number in drawn]


def long_ones(completions: list[str], even: list[bool], **columns: Any) -> list[float | None]:
    """Pays for length, in [0, 1], and judges no completion of a row that is not even."""
    return [
        min(len(text), 40) / 40 if judged else None
        for text, judged in zip(completions, even, strict=True)
    ]


class AnyWord(Grid):
    """The grid, where any text is a move."""

    def step(self, text: str) -> tuple[str, float, bool]:
        """The move that the text's checksum names."""
        return super().step(list(MOVES)[zlib.crc32(text.encode()) % len(MOVES)])


def _paid_for_letters(
    make: Callable[..., Any], max_completion_tokens: int = 6, **options: Any
) -> Any:
    """The task with its own rewards at half of their weights, letters at the other half, and short completions."""
    task = make(n_held_out=4, **options)
    weights = [weight / 2 for weight in task.reward_weights] + [0.5]
    return replace(
        task,
        rewards=[*task.rewards, letters],
        reward_weights=weights,
        max_completion_tokens=max_completion_tokens,
    )


def _parts() -> Any:
    rows = [
        {"question": f"Say something about {i}.", "answer": str(i), "even": i % 2 == 0}
        for i in range(8)
    ]
    rewards = [letters, sometimes, long_ones]
    held_out = [{"question": "Say it.", "answer": "", "even": True}]
    weights = [0.5, 0.3, 0.2]
    return from_rows(
        "parts", rows, held_out, reward=rewards, reward_weights=weights, max_completion_tokens=6
    )


def _grid() -> Any:
    return replace(
        grid(8, 4, size=3, max_turns=3), environment=AnyWord, max_completion_tokens=4
    )


_LARGEST = partial(_paid_for_letters, largest, n_train=16)
RUNS = {
    run.name: run
    for run in (
        Run("main job", _LARGEST, warmup=2),
        Run("lora", _LARGEST, tuning="lora", learning_rate=1e-2, seed=2),
        Run(
            "countdown with thoughts",
            partial(_paid_for_letters, countdown, 12, n_train=16, numbers=(2, 2), think=True),
            temperature=linear(1.2, 0.8),
        ),
        Run("code", partial(_paid_for_letters, code, 10, levels=(1,))),
        Run("grid episodes", _grid, episodes=True, prompts_per_step=2),
        Run("two iterations", _LARGEST, iterations=2, beta=0.04),
        Run("several rewards, some None", _parts, prompts_per_step=3),
    )
}

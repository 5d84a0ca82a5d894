"""What the gradient is taken of: sampled completions of a task with their advantages, or words drawn at random."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from benchmarks.step.sizes import SIZES
from benchmarks.step.workload import make_workload
from grpo_kit.evaluation.generate_and_score import answer


class Group(NamedTuple):
    """One prompt's token ids, its G completions', and their advantages (G,)."""

    prompt: tuple[int, ...]
    completions: list[list[int]]
    advantages: torch.Tensor


def advantages_of(rewards: list[float]) -> torch.Tensor:
    """Less the group's mean, by its standard deviation (ddof=1) + 1e-4.

    >>> advantages_of([1.0, 0.0, 1.0, 0.0]).sign().tolist()
    [1.0, -1.0, 1.0, -1.0]
    """
    scores = torch.tensor(rewards, dtype=torch.float64)
    return (scores - scores.mean()) / (scores.std() + 1e-4)


def sampled(
    model: Any, tokenizer: Any, task: Any, *, groups: int, group_size: int, skip: int, seed: int
) -> list[Group]:
    """The first `groups` groups with a signal of the task's training rows behind `skip`, sampled at temperature 1."""
    rows = task.train[skip : skip + 4 * groups]
    made = answer(model, tokenizer, task, rows, samples=group_size, temperature=1.0, seed=seed)
    prompts = [tuple(ids) for ids in tokenizer(made.prompts)["input_ids"]]
    completions = made.by_row([list(completion.ids) for completion in made.completions])
    found = []
    for prompt, written, rewards in zip(prompts, completions, made.by_row(made.rewards), strict=True):
        if None not in rewards and max(rewards) > min(rewards):
            found.append(Group(prompt, written, advantages_of(rewards)))
    return found[:groups]


def random_words(tokenizer: Any, *, group_size: int, seed: int) -> list[Group]:
    """The forced work of `benchmarks.step --size cpu`: prompts and completions of words drawn at random."""
    work = make_workload(tokenizer, replace(SIZES["cpu"].realistic, group_size=group_size), seed)
    found = []
    for number, prompt in enumerate(work.prompt_ids):
        written = work.completion_ids[number * group_size : (number + 1) * group_size]
        rewards = work.reward(written, completion_ids=written, flat=[False] * group_size)
        found.append(Group(tuple(prompt), written, advantages_of(rewards)))
    return found

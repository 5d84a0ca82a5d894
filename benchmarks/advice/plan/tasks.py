"""Tasks and rewards of the plan's arms. A reward of weight 0 is read and not paid: outcomes that no arm is paid for."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from grpo_kit import tasks
from grpo_kit.rewards import ExactAnswer, SoftFormat
from grpo_kit.rewards.answers import AnswerReward, as_number
from grpo_kit.rewards.response import last_number
from grpo_kit.tasks import Task


def last_is_right(
    completions: Sequence[str], *, answer: Sequence[str], **columns: Any
) -> list[float]:
    """1.0 where the last number that was written is the right one, in whatever format."""
    return [
        float(last_number(text) == gold) for text, gold in zip(completions, answer, strict=True)
    ]


def mention(
    completions: Sequence[str], *, answer: Sequence[str], **columns: Any
) -> list[float]:
    """1.0 where the right number stands anywhere: a reward that listing all numbers satisfies."""
    return [
        float(gold in re.findall(r"\d+", text))
        for text, gold in zip(completions, answer, strict=True)
    ]


last_is_right.columns = mention.columns = ("answer",)


class Close(AnswerReward):
    """exp(-alpha * distance) of a number from the gold, the distance relative to the gold; 0.0 without a number."""

    def __init__(self, alpha: float = 2.0) -> None:
        super().__init__("close", "answer", tag="answer")
        self.alpha = alpha

    def __repr__(self) -> str:
        return f"Close(alpha={self.alpha!r})"

    def score(self, answer: str | None, gold: Any) -> float | None:
        given, wanted = as_number(answer), as_number(gold)
        return (
            0.0
            if given is None
            else math.exp(-self.alpha * float(abs(given - wanted) / wanted))
        )


def paid(task: Task, rewards: Sequence[Callable], weights: Sequence[float]) -> Task:
    """The task with these rewards."""
    return replace(task, rewards=list(rewards), reward_weights=list(weights))


LARGEST = tasks.largest()
# Room for the tags: with the prefill as many tokens are allowed, so that lengths are not what differs.
PREFILLED = replace(LARGEST, max_completion_tokens=16)
BARE = replace(LARGEST, prefill="", max_completion_tokens=16)
READ = [*LARGEST.rewards, last_is_right]
PREFILLED_READ, BARE_READ = (paid(task, READ, [0.75, 0.25, 0.0]) for task in (PREFILLED, BARE))
BINARY = paid(BARE, [ExactAnswer()], [1.0])
THRESHOLD = paid(LARGEST, [ExactAnswer()], [1.0])
SMOOTH = paid(LARGEST, [Close(), ExactAnswer()], [1.0, 0.0])
# Long enough to list five numbers.
MENTION = paid(replace(BARE, max_completion_tokens=24), [mention, ExactAnswer()], [1.0, 0.0])
ANSWER = paid(replace(BARE, max_completion_tokens=24), [ExactAnswer()], [1.0])
ROOMY = replace(BARE, max_completion_tokens=256)
# 4 of 256 samples right before training (1.6 %, 0.6 to 3.9): temperature 1, 32 train rows x 8, seed 0, 2026-11-24.
RARE = paid(
    replace(tasks.largest(numbers=(8, 10)), prefill="", max_completion_tokens=16),
    [ExactAnswer()],
    [1.0],
)
# Without the worked example too the tags are nearly never there: 0.2 % readable of 1,536 samples (notebook 12).
NEVER = replace(BINARY, examples=())
TAGGED_THINK = replace(
    paid(
        BARE, [ExactAnswer(tag="think"), SoftFormat(think=None, answer="think")], [0.75, 0.25]
    ),
    answer_tag="think",
    system="Answer in <think> tags.",
    examples=tuple((q, a.replace("answer>", "think>")) for q, a in LARGEST.examples),
)


def passes_all(program: str, row: dict) -> bool:
    """Accuracy of every arm on CODE, whatever it pays for."""
    return _CODE.is_correct(program, row)


# the name by which the recorded runs' keys know it
passes_all.__qualname__ = "code.<locals>.is_correct"
_CODE = tasks.code(levels=(1, 2), n_held_out=28, max_completion_tokens=128)
# Notebook 08 with EXAMPLE = False: no example, no prefill, free to ramble; 28 problems are held out.
CODE = replace(
    _CODE,
    is_correct=passes_all,
    system="Answer with one ```python block and nothing else.",
    prefill="",
    examples=(),
)
FORMAT_ONLY = replace(CODE, reward_weights=[1.0, 0.0, 0.0])

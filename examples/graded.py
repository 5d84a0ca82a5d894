"""Graded credit for a number by its distance: exp(-a * |difference|); and a task that pays it.

    python -m grpo_kit train examples/graded.py:graded --preset smoke

trains a tiny random model for two steps, to see that it runs; leave --preset out for what fits this machine. In
Python, in the repository's folder: `from examples.graded import Near, graded`, then `graded()` is a task.

Advised where right or wrong leaves too many groups without a signal. Measured: `smooth-rewards` of notebook 15.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from grpo_kit.rewards import ExactAnswer, SoftFormat
from grpo_kit.rewards.answers import AnswerReward, as_number
from grpo_kit.tasks import Task, largest


class Near(AnswerReward):
    """exp(-a * |answer - gold|) of the number in the answer tags, in [0, 1]; 0.0 where it is no number.

    a: at least 0, per unit of the answer: a = log(2) / 5 halves the pay every 5; at 0 any number is paid in full.
    Numbers are read as NumericAnswer reads them, without their units. None if the gold is no number.
    Not for counting what is right: at 1e-17 from the gold the pay is 1.0.

    >>> Near(a=math.log(2) / 5)(["<answer>80</answer>", "<answer>eighty-five</answer>"], answer=["85", "85"])
    [0.5, 1.0]
    """

    soft = True  # results lead with the mean reward, unless the task says what is right

    def __init__(self, a: float = 0.1, *, column: str = "answer", tag: str = "answer") -> None:
        super().__init__("near", column, tag=tag)
        if not 0 <= a < math.inf:
            raise ValueError(f"a={a!r} must be a number from 0 on, such as 0.1")
        self.a = a

    def score(self, answer: str | None, gold: Any) -> float | None:
        number, gold_number = as_number(answer), as_number(gold)
        if gold_number is None:
            return None
        if number is None:
            return 0.0
        difference = min(abs(number - gold_number), 10**9)  # a float holds no 10**400
        return math.exp(-self.a * float(difference))


def graded(*, n_train: int = 512, n_held_out: int = 256, a: float = 0.1, seed: int = 0) -> Task:
    """The largest of some numbers; half the reward is for the exact number, a quarter for being near, a quarter format.

    Right, as accuracy counts it, is the exact number.

    >>> [reward.__name__ for reward in graded().rewards]
    ['exact_answer', 'near', 'soft_format']
    """
    return replace(
        largest(n_train=n_train, n_held_out=n_held_out, seed=seed),
        name="graded",
        rewards=[ExactAnswer(), Near(a), SoftFormat(think=None)],
        reward_weights=[0.5, 0.25, 0.25],
    )

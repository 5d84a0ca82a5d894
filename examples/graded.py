"""Two rewards of one's own: a number paid by its distance, a completion by how it differs; and a task that pays them.

    python -m grpo_kit train examples/graded.py:graded --preset smoke

trains a tiny random model for two steps, to see that it runs; leave --preset out for what fits this machine. In
Python, in the repository's folder: `from examples.graded import Near, different, graded`, then `graded()` is a task.

Near is advised where right or wrong leaves too many groups without a signal; measured: `smooth-rewards` of notebook 15.
`different` is advised against mode collapse; three seeds showed no gain
(docs/results.md, "A reward for being different").
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from statistics import fmean
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


def different(
    completions: Sequence[str], prompts: Sequence[Any] | None = None, **columns: Any
) -> list[float | None]:
    """How unlike the others of its group each completion is, in [0, 1]: its mean Jaccard distance to them.

    The distance of two: 1 - (what both have) / (what either has), of their words, signs and pairs of adjacent ones.
    A group: adjacent completions of equal prompts, which trainers give; without prompts nothing can be judged.
    A blank completion earns 0.0; one without others None.
    It pays noise as well as thought, so give it a small weight, or put it behind a right answer:
    `Gated(different, on=ExactAnswer())`.

    >>> different(["a b", "a c", "a b"], prompts=["p"] * 3)  # a b and a c share 1 of 5: a distance of 0.8
    [0.4, 0.8, 0.4]
    """
    if prompts is None:
        return [None] * len(completions)
    scores: list[float | None] = []
    pieces = [_pieces(text) for text in completions]
    for _, group in groupby(range(len(pieces)), key=lambda place: prompts[place]):
        places = list(group)
        for place in places:
            others = [pieces[other] for other in places if other != place]
            if not others:
                scores.append(None)
            elif not pieces[place]:
                scores.append(0.0)
            else:
                scores.append(fmean(_distance(pieces[place], other) for other in others))
    return scores


def _pieces(text: str) -> set[Any]:
    words = re.findall(r"\w+|[^\w\s]", text.lower())
    return {*words, *pairwise(words)}


def _distance(one: set[Any], other: set[Any]) -> float:
    return 1 - len(one & other) / len(one | other)


def graded(*, n_train: int = 512, n_held_out: int = 256, a: float = 0.1, seed: int = 0) -> Task:
    """The largest of some numbers: half is paid for the exact one, a quarter for being near, an eighth for the format
    and an eighth for being different.

    Right, as accuracy counts it, is the exact number.

    >>> [reward.__name__ for reward in graded().rewards]
    ['exact_answer', 'near', 'soft_format', 'different']
    """
    return replace(
        largest(n_train=n_train, n_held_out=n_held_out, seed=seed),
        name="graded",
        rewards=[ExactAnswer(), Near(a), SoftFormat(think=None), different],
        reward_weights=[0.5, 0.25, 0.125, 0.125],
    )

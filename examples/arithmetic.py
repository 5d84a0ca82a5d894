"""One addition, subtraction or multiplication of two numbers.

    python -m grpo_kit train examples/arithmetic.py:arithmetic --preset smoke

trains a tiny random model for two steps, to see that it runs; leave --preset out for what fits this machine. In
Python, in the repository's folder: `from examples.arithmetic import arithmetic`, then `arithmetic()` is a task.
"""

from __future__ import annotations

import random

from grpo_kit.rewards import NumericAnswer, SoftFormat
from grpo_kit.tasks.rows import split_distinct
from grpo_kit.tasks.task import Strategy, Task, most_frequent_answer

_APPLY = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
_EXAMPLE = ("What is 21 + 34?", "<answer>55</answer>")


def arithmetic(
    *,
    n_train: int = 512,
    n_held_out: int = 256,
    digits: tuple[int, int] = (2, 2),
    operations: str = "+-",
    seed: int = 0,
) -> Task:
    """Rows "What is 34 + 57?"; differences may be negative.

    digits: fewest and most digits of each number. operations: any of "+", "-", "*", each as likely.
    Row columns: question, answer, a, b, operation. Rewards: numeric answer (0.75), soft format (0.25).
    Constant strategies: always a, b, a + b, a - b, a * b, and the most frequent answer.

    >>> arithmetic().train[0]["question"].startswith("What is ")
    True
    """
    low, high = digits
    if not 1 <= low <= high <= 12:
        raise ValueError(
            f"digits={digits!r} must be (fewest, most) with 1 <= fewest <= most <= 12"
        )
    if not operations or set(operations) - set(_APPLY):
        raise ValueError(
            f"operations={operations!r} must be some of '+', '-', '*', such as '+-'"
        )
    rng = random.Random(f"arithmetic {seed}")

    def number() -> int:
        size = rng.randint(low, high)
        return rng.randint(10 ** (size - 1), 10**size - 1)

    def draw() -> dict:
        a, b, operation = number(), number(), rng.choice(operations)
        answer = str(_APPLY[operation](a, b))
        return {
            "question": f"What is {a} {operation} {b}?",
            "answer": answer,
            "a": a,
            "b": b,
            "operation": operation,
        }

    what = f"arithmetic with digits={digits!r}, operations={operations!r}"
    train, held_out = split_distinct(draw, n_train, n_held_out, what=what, avoid=[_EXAMPLE[0]])
    strategies: dict[str, Strategy] = {
        "always a": lambda row: str(row["a"]),
        "always b": lambda row: str(row["b"]),
    }
    strategies |= {
        f"always a {sign} b": _apply(sign) for sign in _APPLY
    } | most_frequent_answer(train)
    return Task(
        name="arithmetic",
        train=train,
        held_out=held_out,
        rewards=[NumericAnswer(), SoftFormat(think=None)],
        reward_weights=[0.75, 0.25],
        strategies=strategies,
        system="Answer in <answer> tags.",
        prefill="<answer>",
        examples=(_EXAMPLE,),
        max_completion_tokens=16,
    )


def _apply(sign: str) -> Strategy:
    return lambda row: str(_APPLY[sign](row["a"], row["b"]))

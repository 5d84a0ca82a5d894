"""largest: which of three to five two-digit numbers is the largest? The CPU default.

Before training, SmolLM2-135M in greedy decoding gives about one right answer in ten and nearly always keeps the format.
So there is room to improve, and right answers exist to learn from.
"""

from __future__ import annotations

import random

from grpo_kit._support.argument_checks import check_whole
from grpo_kit.rewards import ExactAnswer, SoftFormat
from grpo_kit.tasks.rows import check_range, split_distinct
from grpo_kit.tasks.task import Strategy, Task, with_answer_tag

_EXAMPLE = [47, 82, 15]


def largest(
    *,
    n_train: int = 512,
    n_held_out: int = 256,
    numbers: tuple[int, int] = (3, 5),
    seed: int = 0,
    max_completion_tokens: int = 12,
    prefill: str | None = None,
    answer_tag: str = "answer",
) -> Task:
    """Rows "Which number is the largest: 47, 82, 15?" with distinct numbers from 10 to 99.

    numbers: fewest and most numbers in a question. Row columns: question, answer, numbers (list of int).
    prefill: the assistant's opening words; None: the answer tag. Another where a chat template does not let it through.
    answer_tag: name of the tag around answers, such as a plainer one that audit_tags suggests.
    Rewards: exact answer (0.75) and soft format (0.25). Constant strategies: always the first, ..., the last.
    Raises ValueError if `numbers` is no range within 2..90.

    >>> largest().held_out[0]["question"].startswith("Which number is the largest: ")
    True
    """
    low, high = check_range("numbers", numbers, 2, 90)
    check_whole("seed", seed, 0)
    rng = random.Random(f"largest {seed}")

    def draw() -> dict:
        row_numbers = rng.sample(range(10, 100), rng.randint(low, high))
        question = _question(row_numbers)
        return {"question": question, "answer": str(max(row_numbers)), "numbers": row_numbers}

    train, held_out = split_distinct(
        draw,
        n_train,
        n_held_out,
        what=f"largest with numbers={numbers!r}",
        avoid=[_question(_EXAMPLE)],
    )
    strategies = {f"always number {i + 1}": _at(i) for i in range(high)}
    strategies["always the last number"] = _at(-1)
    task = Task(
        name="largest",
        train=train,
        held_out=held_out,
        rewards=[ExactAnswer(), SoftFormat(think=None)],
        reward_weights=[0.75, 0.25],
        # Given explicitly, not left to the rewards: other rewards are tried on this task and compared by its accuracy.
        is_correct=lambda text, row: text.strip() == row["answer"],
        strategies=strategies,
        system="Answer in <answer> tags.",
        prefill="<answer>" if prefill is None else prefill,
        examples=((_question(_EXAMPLE), f"<answer>{max(_EXAMPLE)}</answer>"),),
        max_completion_tokens=max_completion_tokens,
    )
    return with_answer_tag(task, answer_tag)


def _question(numbers: list[int]) -> str:
    return f"Which number is the largest: {', '.join(map(str, numbers))}?"


def _at(place: int) -> Strategy:
    def answer(row: dict) -> str | None:
        return str(row["numbers"][place]) if place < len(row["numbers"]) else None

    return answer

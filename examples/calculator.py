"""A calculator that must be used: sums too long for the head, one operation at a time. No constant policy scores.

    python -m grpo_kit train examples/calculator.py:calculator --preset smoke

trains a tiny random model for two steps, to see that it runs; leave --preset out for what fits this machine. In
Python, in the repository's folder: `from examples.calculator import calculator`, then `calculator()` is a task.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Mapping
from typing import Any

from grpo_kit.more.episodes import EpisodeTask, View, worked
from grpo_kit.tasks.rows import distinct_rows

_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_SHOWN = 3  # worked episodes, whose rows are in no split
_CALL = re.compile(r"(-?\d{1,9})\s*([-+*])\s*(-?\d{1,9})")


class Calculator:
    """Row: question, answer (digits). Reward 1 for the right number, 0 for a wrong one."""

    def reset(self, row: Mapping[str, Any]) -> str:
        """An empty display."""
        self.answer, self.invalid = row["answer"], False
        return "The display is empty."

    def step(self, text: str) -> tuple[str, float, bool]:
        """`calc A op B`, two numbers and one of + - *; or `say N`, which ends the episode."""
        verb, _, rest = text.strip().partition(" ")
        rest = rest.strip().removesuffix(".")
        call = _CALL.fullmatch(rest) if verb.lower() == "calc" else None
        if call:
            return (
                f"The display shows {_OPERATIONS[call[2]](int(call[1]), int(call[3]))}.",
                0.0,
                False,
            )
        if verb.lower() == "say" and re.fullmatch(r"-?\d{1,12}", rest):
            right = int(rest) == int(self.answer)
            return ("Right." if right else "Wrong."), float(right), True
        self.invalid = True
        return (
            "Write `calc` and two numbers with + - or * between them, or `say` and a number.",
            0.0,
            False,
        )


def presser(row: Mapping[str, Any], rng: random.Random) -> Any:
    """The policy that computes in order and then gives the displayed number."""
    numbers = re.findall(r"\d+", row["question"])
    operations = re.findall(r"[-+*]", row["question"])
    step = 0

    def respond(observation: str) -> str:
        nonlocal step
        step += 1
        shown = re.findall(r"-?\d+", observation)
        if step > len(operations):
            return f"say {shown[-1]}"
        return (
            f"calc {shown[-1] if shown else numbers[0]} {operations[step - 1]} {numbers[step]}"
        )

    return respond


def calculator(
    n_train: int = 256,
    n_held_out: int = 64,
    *,
    operations: int = 2,
    max_turns: int = 4,
    seed: int = 0,
) -> EpisodeTask:
    """`operations` on numbers of two digits, left to right. Raises ValueError for fewer turns than that takes."""
    if max_turns <= operations:
        raise ValueError(
            f"max_turns={max_turns} leaves no turn to say the answer; give at least {operations + 1}"
        )
    rng = random.Random(seed)
    count = _SHOWN + n_held_out + n_train
    rows = distinct_rows(
        lambda: _row(rng, operations), count, what=f"calculator of {operations} operations"
    )
    shown, held_out, train = (
        rows[:_SHOWN],
        rows[_SHOWN : count - n_train],
        rows[count - n_train :],
    )
    return EpisodeTask(
        "calculator",
        train=train,
        held_out=held_out,
        environment=Calculator,
        view=View(
            chat=True,
            repeat_goal=False,
            system="Use the calculator: one operation a turn. Then say the number.",
            examples=tuple(
                (row["question"], worked(Calculator(), presser, row)) for row in shown
            ),
        ),
        max_turns=max_turns,
        max_completion_tokens=16,
        optimum=presser,
    )


def _row(rng: random.Random, operations: int) -> dict[str, Any]:
    """A first product, then sums and differences: read from left to right as written."""
    value = rng.randint(11, 99)
    text = str(value)
    for place in range(operations):
        sign, number = ("*" if place == 0 else rng.choice("+-")), rng.randint(11, 99)
        value, text = _OPERATIONS[sign](value, number), f"{text} {sign} {number}"
    return {"question": f"What is {text}?", "answer": str(value)}

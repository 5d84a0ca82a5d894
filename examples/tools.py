"""Turn a request, such as "turn on the lamp", into the calls that carry it out, in the right order.

    python -m grpo_kit train examples/tools.py:tools --preset smoke

trains a tiny random model for two steps, to see that it runs; leave --preset out for what fits this machine. In
Python, in the repository's folder: `from examples.tools import tools`, then `tools()` is a task.

The reward is `call_reward`: valid calls, near the gold, not too many. Accuracy has a weight of 0.75 in it. With
the usual 0.4 / 0.5 / 0.1 a constant valid call earns 0.69 of the whole reward. Mean reward, format included, of answers
that ignore the question, on the 256 held-out rows (seed 0):

| answer                                    | right | mean reward |
|-------------------------------------------|-------|-------------|
| always the call 'door("side", "lock")'    | 0.0 % | 0.534       |
| always the example's answer               | 0.0 % | 0.532       |
| always 'blinds("bathroom", 20)'           | 0.0 % | 0.530       |

Base rate: SmolLM2-135M-Instruct, 24 held-out prompts x 8 samples at temperature 1 (`python -m benchmarks.base_rates
--prompts 24`, CPU, seed 0, 2026-11-21): right 0 %, mean reward 0.18 [0.15, 0.22], well-formed 43 %,
rewards differ in every group.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from grpo_kit.more.episodes.tool_calls import call_reward
from grpo_kit.rewards import SoftFormat
from grpo_kit.tasks.rows import split_distinct
from grpo_kit.tasks.task import Strategy, Task, most_frequent_answer

OPERATIONS: dict[str, int | None] = {
    "lamp": 2,
    "door": 2,
    "heating": 2,
    "blinds": 2,
    "oven": 1,
    "timer": 1,
}

_WEIGHTS = (0.125, 0.75, 0.125)  # validity, accuracy, efficiency
_SYSTEM = (
    "Answer in <answer> tags with calls in the order they happen, separated by ; out of "
    'lamp(room, "on" or "off"), door(which, "lock" or "unlock"), heating(room, degrees), blinds(room, percent), '
    "oven(degrees), timer(minutes)."
)
_ROOMS = ("kitchen", "bedroom", "office", "hall", "bathroom", "attic", "cellar", "nursery")
_EXAMPLES = (
    (
        "Turn on the lamp in the garage, then set the oven to 185.",
        '<answer>lamp("garage", "on"); oven(185)</answer>',
    ),
)


def tools(
    *, n_train: int = 512, n_held_out: int = 256, calls: tuple[int, int] = (1, 3), seed: int = 0
) -> Task:
    """Rows "Turn on the lamp in the kitchen, then set the oven to 180." -> `lamp("kitchen", "on"); oven(180)`.

    calls: fewest and most calls in a question, within 1..5. In a quarter of the questions with two or more calls,
    the last-named call must be done first ("..., but first lock the front door").
    Row columns: question, answer (the calls, with ; between them), calls (list of them).
    Rewards: call_reward (0.75; in it validity 0.125, accuracy 0.75, efficiency 0.125), soft format (0.25).
    Right: the same calls in the same order, by value: 180 equals 180.0, 'on' equals "on".
    Strategies: the most frequent train answer, the most frequent call, the example's answer.
    Raises ValueError if `calls` is no range within 1..5.

    >>> tools().train[0]["answer"].endswith(")")
    True
    """
    low, high = calls
    if not 1 <= low <= high <= 5:
        raise ValueError(
            f"calls={calls!r} must be (fewest, most) with 1 <= fewest <= most <= 5"
        )
    rng = random.Random(f"tools {seed}")

    def draw() -> dict:
        makers = rng.sample(_MAKERS, rng.randint(low, high))
        asked = [maker(rng) for maker in makers]
        said = [words for words, _ in asked]
        made = [call for _, call in asked]
        if len(made) > 1 and rng.random() < 0.25:
            question = f"{_in_turn(said[1:], rng)}, but first {said[0]}."
        else:
            question = f"{_in_turn(said, rng)}."
        question = question[0].upper() + question[1:]
        return {"question": question, "answer": "; ".join(made), "calls": made}

    train, held_out = split_distinct(
        draw,
        n_train,
        n_held_out,
        what=f"tools with calls={calls!r}",
        avoid=[q for q, _ in _EXAMPLES],
    )
    return Task(
        name="tools",
        train=train,
        held_out=held_out,
        rewards=[call_reward(OPERATIONS, weights=_WEIGHTS), SoftFormat(think=None)],
        reward_weights=[0.75, 0.25],
        strategies=_strategies(train),
        system=_SYSTEM,
        prefill="<answer>",
        examples=_EXAMPLES,
        max_completion_tokens=12 * high + 12,
    )


def _in_turn(said: Sequence[str], rng: random.Random) -> str:
    text = said[0]
    for words in said[1:]:
        text += rng.choice((", then ", " and then ", ", after that ")) + words
    return text


def _strategies(train: Sequence[dict]) -> dict[str, Strategy]:
    single = most_frequent_answer([{"answer": call} for row in train for call in row["calls"]])
    (call,) = (strategy({}) for strategy in single.values())
    example = _EXAMPLES[0][1].removeprefix("<answer>").removesuffix("</answer>")
    return {
        **most_frequent_answer(train),
        f"always the call {call!r}": lambda row: call,
        "always the example's answer": lambda row: example,
    }


def _lamp(rng: random.Random) -> tuple[str, str]:
    room, state = rng.choice(_ROOMS), rng.choice(("on", "off"))
    words = rng.choice(
        (f"turn {state} the lamp in the {room}", f"switch the {room} lamp {state}")
    )
    return words, f'lamp("{room}", "{state}")'


def _door(rng: random.Random) -> tuple[str, str]:
    which, action = (
        rng.choice(("front", "back", "garden", "side")),
        rng.choice(("lock", "unlock")),
    )
    words = rng.choice(
        (f"{action} the {which} door", f"see to it that the {which} door is {action}ed")
    )
    return words, f'door("{which}", "{action}")'


def _heating(rng: random.Random) -> tuple[str, str]:
    room, degrees = rng.choice(_ROOMS), rng.randint(15, 25)
    words = rng.choice(
        (f"heat the {room} to {degrees} degrees", f"set the heating in the {room} to {degrees}")
    )
    return words, f'heating("{room}", {degrees})'


def _blinds(rng: random.Random) -> tuple[str, str]:
    room, percent = rng.choice(_ROOMS), rng.randrange(10, 100, 10)
    words = rng.choice(
        (
            f"lower the blinds in the {room} to {percent} percent",
            f"put the {room} blinds at {percent} %",
        )
    )
    return words, f'blinds("{room}", {percent})'


def _oven(rng: random.Random) -> tuple[str, str]:
    degrees = rng.randrange(100, 255, 5)
    words = rng.choice((f"set the oven to {degrees}", f"heat the oven to {degrees} degrees"))
    return words, f"oven({degrees})"


def _timer(rng: random.Random) -> tuple[str, str]:
    minutes = rng.randint(2, 60)
    words = rng.choice(
        (f"start a timer of {minutes} minutes", f"remind me in {minutes} minutes")
    )
    return words, f"timer({minutes})"


_Maker = Callable[[random.Random], tuple[str, str]]  # -> (its wording, the call)
_MAKERS: tuple[_Maker, ...] = (_lamp, _door, _heating, _blinds, _oven, _timer)

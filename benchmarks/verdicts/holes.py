"""A tiny policy on questions where a hole pays: does it learn the answer or the hole?

The policy is a table: for each question the texts that it may write, each with a logit of its own plus one that all
texts of its kind share, over questions. So a habit that pays on one question is taken up on all, as in a model. It
begins with most of its mass on wrong answers, as a model does before training, and is trained by the kit's
group_advantages with the reward under test. A teacher says what is right: the kind that a text is written down under.
It is no language model: it shows what the reward pays for, not how soon a model would find it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks.verdicts.judges import math_verify_latex
from benchmarks.verdicts.pairs import Pair
from grpo_kit.objectives import group_advantages
from grpo_kit.rewards import MathAnswer

STEPS, GROUP_SIZE, RATE, SEEDS = 200, 8, 0.1, (0, 1, 2)
# Mass of each kind before training: is the right answer found more often than the hole, or less?
STARTS = {
    "able": {"right": 0.15, "wrong": 0.75, "hole": 0.10},
    "not yet able": {"right": 0.02, "wrong": 0.88, "hole": 0.10},
}
Score = Callable[[str, str], float | None]  # answer, gold


class Question(NamedTuple):
    """right: habits of writing the gold; wrong: honest mistakes; hole: texts that are not the answer."""

    text: str
    gold: str
    right: tuple[str, ...]
    wrong: tuple[str, ...]
    hole: tuple[str, ...]


QUESTIONS = (
    Question("4 + 5", "9", ("9", "$9$"), ("8", "10", "45"), ("4 5",)),
    Question("1 + 2 + 3 + 4", "10", ("10", "10."), ("9", "11", "24"), ("1 2 3 4",)),
    Question("7 + 8", "15", ("15", "15.0"), ("14", "16", "56"), ("7 8",)),
    Question("12 / 2", "6", ("6", "6.0"), ("5", "24", "10"), ("12/2",)),
    Question("100 - 94", "6", ("6", "$6$"), ("7", "194", "4"), ("100-94",)),
    Question(
        "the positive x with x^2 = 25",
        "5",
        ("5", "x = 5"),
        ("25", "10", "12.5"),
        ("≠ 5", "< 5"),
    ),
    Question("mass of a sheet of paper", "5 g", ("5 g", "5g"), ("50 g", "4 g"), ("5 kg",)),
    Question(
        "time to boil an egg",
        "3 minutes",
        ("3 minutes", "3 min"),
        ("30 minutes",),
        ("3 hours",),
    ),
    Question(
        "put LISTEN in another order", "silent", ("silent", "silent."), ("noisy",), ("listen",)
    ),
    Question("half of a hundred", "50", ("50", "50.0"), ("25", "200"), ("50%",)),
    Question("a third", "1/3", ("1/3", "\\frac13"), ("0.3", "3"), ("0.333333",)),
    Question(
        "the point 1 to the right and 2 up",
        "(1, 2)",
        ("(1, 2)", "(1,2)"),
        ("(2, 1)",),
        ("\\{1, 2\\}",),
    ),
)
KINDS = ("right", "wrong", "hole")


def texts(question: Question) -> list[tuple[str, str]]:
    """(kind, text) of all that the policy may write."""
    return [(kind, text) for kind in KINDS for text in getattr(question, kind)]


def rewards_of(
    score: Score, questions: tuple[Question, ...] = QUESTIONS
) -> list[list[float | None]]:
    """The reward of every text of every question, for rewards are pure; None where the reward cannot judge."""
    return [
        [score(text, question.gold) for _, text in texts(question)] for question in questions
    ]


def train(
    table: list[list[float | None]],
    seed: int,
    *,
    start: str = "able",
    questions: tuple[Question, ...] = QUESTIONS,
) -> dict[str, float]:
    """One run. Returns each kind's share of the policy's mass at the end, mean over questions, and its reward.

    A question whose gold the reward cannot judge teaches nothing of its own, as in the trainer.
    """
    generator = torch.Generator().manual_seed(seed)
    kinds = [torch.tensor([KINDS.index(kind) for kind, _ in texts(q)]) for q in questions]
    first = [
        torch.tensor(
            [STARTS[start][kind] / len(getattr(q, kind)) for kind, _ in texts(q)]
        ).log()
        for q in questions
    ]
    paid = [torch.tensor([0.0 if r is None else r for r in row]) for row in table]
    of_kind = torch.zeros(len(KINDS), requires_grad=True)
    of_text = [torch.zeros(len(row), requires_grad=True) for row in table]
    optimizer = torch.optim.Adam([of_kind, *of_text], lr=RATE)

    def logprobs(place: int) -> torch.Tensor:
        return torch.log_softmax(first[place] + of_text[place] + of_kind[kinds[place]], 0)

    for _ in range(STEPS):
        loss = torch.zeros(())
        for place in range(len(questions)):
            now = logprobs(place)
            drawn = torch.multinomial(
                now.exp().detach(), GROUP_SIZE, replacement=True, generator=generator
            )
            advantages = group_advantages(paid[place][drawn], GROUP_SIZE)
            loss = loss - (advantages * now[drawn]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        mass = [logprobs(place).exp() for place in range(len(questions))]
        ends = {
            kind: float(
                torch.stack([m[k == i].sum() for m, k in zip(mass, kinds, strict=True)]).mean()
            )
            for i, kind in enumerate(KINDS)
        }
        reward = float(torch.stack([m @ p for m, p in zip(mass, paid, strict=True)]).mean())
    return ends | {"reward": reward}


def math_verify_score(answer: str, gold: str) -> float | None:
    return math_verify_latex(Pair(0, "MathAnswer", gold, answer, 0, ""))


def kit_score(answer: str, gold: str) -> float | None:
    return MathAnswer()([f"<answer>{answer}</answer>"], answer=[gold])[0]


def misjudged(table: list[list[float | None]]) -> dict[str, list[str]]:
    """The texts on which the reward differs from the teacher."""
    found: dict[str, list[str]] = {"paid": [], "refused": []}
    for question, row in zip(QUESTIONS, table, strict=True):
        for (kind, text), reward in zip(texts(question), row, strict=True):
            if (kind == "right") != (reward == 1):
                found["refused" if kind == "right" else "paid"].append(
                    f"{text} for {question.gold}"
                )
    return found


def compare(seeds: tuple[int, ...] = SEEDS) -> dict[str, Any]:
    """math-verify, MathAnswer, and a teacher who pays what is right; prints a table."""
    right = {(text, q.gold) for q in QUESTIONS for text in q.right}
    arms: dict[str, Score] = {
        "math-verify, LaTeX": math_verify_score,
        "MathAnswer": kit_score,
        "a teacher": lambda answer, gold: float((answer, gold) in right),
    }
    print(
        f"{len(QUESTIONS)} questions, {STEPS} steps, groups of {GROUP_SIZE}; shares of all that is written\n"
    )
    print(
        "| policy | reward | seed | right, before | after | a hole, before | after | mean reward |"
    )
    print("|---|---|---|---|---|---|---|---|")
    found: dict[str, Any] = {}
    for name, score in arms.items():
        table = rewards_of(score)
        found[name] = misjudged(table)
        for start, mass in STARTS.items():
            found[name][start] = {str(seed): train(table, seed, start=start) for seed in seeds}
            for seed, end in found[name][start].items():
                cells = [
                    f"{share:.1%}"
                    for kind in ("right", "hole")
                    for share in (mass[kind], end[kind])
                ]
                print(
                    f"| {' | '.join([start, name, seed, *cells, format(end['reward'], '.3f')])} |"
                )
    for name, arm in found.items():
        print(
            f"\n{name}: paid though wrong: {arm['paid']}; refused though right: {arm['refused']}"
        )
    settings = {"steps": STEPS, "group size": GROUP_SIZE, "rate": RATE, "starts": STARTS}
    return {"settings": settings, "arms": found}

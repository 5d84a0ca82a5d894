"""Rewards of examples/graded.py against numbers by hand."""

import math

import pytest

from examples.graded import Near, graded
from grpo_kit.rewards import check_rewards


@pytest.mark.parametrize(
    "a, answer, gold, score, why",
    [
        (0.5, "80", "82", math.exp(-1), "two below: 0.5 * 2"),
        (0.5, "84", "82", math.exp(-1), "and two above"),
        (0.5, "82", "82", 1.0, "the gold"),
        (0.5, "82.0 km", 82, 1.0, "read as a number, its unit left out"),
        (1.0, "1/2", "0.25", math.exp(-0.25), "fractions"),
        (2.0, "-1", "1", math.exp(-4), "on the other side of 0"),
        (0.0, "-5", "82", 1.0, "a = 0: any number is paid in full"),
        (0.0, "no idea", "82", 0.0, "but what is no number is not"),
        (0.0, "1e400", "82", 1.0, "a = 0 at any distance"),
        (0.5, "eighty-two or so", "82", 0.0, "no number"),
        (0.5, "82 or 83", "82", 0.0, "two numbers"),
        (0.5, "inf", "82", 0.0, "infinity is no number"),
        (0.5, r"-\infty", "82", 0.0, "nor is it in LaTeX"),
        (0.5, "nan", "82", 0.0, "nor is what is no number by its name"),
        (0.5, "1e400", "82", 0.0, "larger than a float holds: the pay rounds to 0"),
        (0.5, "82", "1e400", 0.0, "and from a gold as large"),
        (0.5, "82", "a lot", None, "a gold that is no number cannot be judged"),
        (0.5, "82", float("inf"), None, "nor one that is infinite"),
        (0.5, "82", None, None, "nor a missing one"),
    ],
)
def test_pay_falls_with_the_distance(a, answer, gold, score, why):
    (got,) = Near(a)([f"{answer}</answer>"], prefill="<answer>", answer=[gold])
    assert got == (score if score is None else pytest.approx(score, abs=1e-12)), why


def test_no_answer_and_two_answers_are_paid_nothing():
    texts = ["82", "<answer>82</answer><answer>82</answer>"]
    assert Near(0.0)(texts, answer=["82", "82"]) == [0.0, 0.0]


@pytest.mark.parametrize("a", [-0.1, math.inf, math.nan])
def test_a_rate_that_is_none_is_refused(a):
    with pytest.raises(ValueError, match=f"a={a!r} must be a number from 0 on, such as 0.1"):
        Near(a)


def test_the_task_pays_by_distance_and_its_cheats_earn_less_than_the_answer():
    task = graded(n_train=8, n_held_out=8, a=math.log(2))
    row = task.train[0]
    near = str(int(row["answer"]) + 1)
    check_rewards(task.rewards, task)  # raises where a cheat earns as much
    assert task.rewards[1](
        [f"{near}</answer>"], prefill="<answer>", answer=[row["answer"]]
    ) == [pytest.approx(0.5)]
    assert task.is_correct(row["answer"], row) and not task.is_correct(near, row)

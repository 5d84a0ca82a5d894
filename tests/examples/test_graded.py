"""Rewards of examples/graded.py against numbers by hand."""

import math

import pytest

import grpo_kit as kit
from examples.graded import Near, different, graded
from grpo_kit.rewards import ExactAnswer, Gated, check_rewards
from grpo_kit.rewards.scoring import totals


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


@pytest.mark.parametrize(
    "texts, scores, why",
    [
        (["a b", "a b", "a b"], [0.0, 0.0, 0.0], "all alike: mode collapse"),
        (["a b", "c d"], [1.0, 1.0], "nothing shared"),
        (["a b", "a c"], [0.8, 0.8], "of a, b, ab and a, c, ac: 1 of 5 is shared"),
        (["a b", "a c", "a b"], [0.4, 0.8, 0.4], "the mean over the others"),
        (["A  b", "a B."], [0.4, 0.4], "a, b, ab of these and ., b. : 3 of 5"),
        (["3+4", "3*4"], [0.75, 0.75], "signs count: 2 of 8 are shared"),
        (["b a", "a b"], [0.5, 0.5], "and so does order: 2 of 4"),
        (["", "a b"], [0.0, 1.0], "a blank one is no other thought"),
        (["", " "], [0.0, 0.0], "nor are two"),
        (["a"], [None], "nothing to differ from"),
    ],
)
def test_a_completion_is_paid_by_its_distance_from_the_others(texts, scores, why):
    assert different(texts, prompts=["p"] * len(texts)) == [
        score if score is None else pytest.approx(score) for score in scores
    ], why


def test_groups_are_adjacent_equal_prompts_and_do_not_see_each_other():
    texts = ["a b", "a b", "a b", "c d", "x"]
    prompts = ["p", "p", "q", "q", "r"]
    assert different(texts, prompts=prompts) == [0.0, 0.0, 1.0, 1.0, None]


def test_where_a_completion_is_alone_the_reward_is_left_out_and_not_0():
    """As in evaluation, which asks once a row."""
    parts = [[1.0, 0.0], different(["a", "b"], prompts=["p", "q"])]
    assert totals(parts, [1.0, 0.1], ["p", "q"]) == [1.0, 0.0]


def test_behind_a_right_answer_noise_is_not_paid():
    texts = ["<answer>82</answer>", "zebra quartz", "so <answer>82</answer>"]
    gated = Gated(different, on=ExactAnswer())
    right, noise, other_words = gated(texts, prompts=["p"] * 3, answer=["82"] * 3)
    assert noise == 0.0 < right and 0.0 < other_words


def test_a_run_records_what_it_paid_for_being_different(tmp_path):
    """By the groups of the record: the reward saw the groups that the loop made."""
    model, tokenizer = kit.load_policy("tiny-random", quiet=True)
    config = kit.Config(steps=1, prompts_per_step=2, group_size=3)
    task = graded(n_train=8, n_held_out=4)
    trainer = kit.GRPOTrainer(
        model, task, config, tokenizer=tokenizer, folder=tmp_path / "run", live=None
    )
    trainer.train()
    table = kit.read_completions(tmp_path / "run")
    for _, group in table.groupby("group"):
        texts = group["completion"].tolist()
        assert group["reward/different"].tolist() == pytest.approx(
            different(texts, prompts=["p"] * len(texts)), abs=1e-6
        )
    assert table["reward/different"].gt(0).any()

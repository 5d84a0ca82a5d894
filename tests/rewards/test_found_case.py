"""A completion that a run paid for wrongly, as a case: a reward that pays for it fails its check."""

import dataclasses

import pytest

import grpo_kit as kit
from grpo_kit.rewards import Case, ExactAnswer, RewardCheckError, check_rewards

HACK = "'82' \\ <answer>82</answer><answer>47</answer>"


class PaysForTheLength:
    """A reward with a hole: who writes long earns most."""

    columns = ("answer",)
    __name__ = "length"

    def __call__(self, completions, answer, **columns):
        return [1.0 if "82" in c and len(c) > 30 else 0.9 * ("82" in c) for c in completions]


@pytest.fixture
def task():
    return kit.tasks.largest(n_train=8, n_held_out=4)


def test_a_reward_that_pays_the_found_hack_fails_the_check(task):
    """End to end: found in a run, tried beside the task's own cases."""
    hack = Case("found at step 2", HACK, columns=task.held_out[0] | {"answer": "82"})
    hole = PaysForTheLength()
    honest = Case("honest", "<answer>82</answer>", honest=True, columns={"answer": "82"})
    assert len(check_rewards(hole, [honest])) == 1, "it passes without the case"
    with pytest.raises(RewardCheckError, match=r"'found at step 2' \(1\) outranks"):
        check_rewards(hole, [honest], found=[hack])
    with pytest.raises(RewardCheckError, match="found at step 2"):
        check_rewards(hole, [honest, hack])
    table = check_rewards(task.rewards, task, found=[hack])
    assert table["case"].tolist()[-1] == hack.name and table["total"].tolist()[-1] < 1
    kept = dataclasses.replace(task, cheats=lambda row, honest: [hack])  # for good
    assert hack.name in check_rewards(kept.rewards, kept)["case"].tolist()


def test_a_found_case_without_a_column_is_not_passed_over():
    honest = Case("honest", "<answer>82</answer>", honest=True, columns={"answer": "82"})
    with pytest.raises(
        ValueError,
        match="'found at step 2' has no column 'answer', which exact_answer asks for",
    ):
        check_rewards(ExactAnswer(), [honest], found=[Case("found at step 2", "82")])

"""The null of an arm: the same run, whose rewards are shuffled within groups."""

import re
from collections import Counter

import numpy as np
import pandas as pd
import pytest
from lab_runs import base

import grpo_kit as kit
from grpo_kit import lab
from grpo_kit.evaluation.accuracy import Evaluation
from grpo_kit.evaluation.comparison import compare
from grpo_kit.evaluation.intervals import share
from grpo_kit.loop.score import advantages
from grpo_kit.more.lab.null import _shuffled_within, _ShuffledRewards


def test_the_null_shuffles_within_groups_and_nowhere_else():
    groups = [0] * 8 + [1] * 8 + [2] * 3 + [7]
    rewards = [place / 100 for place in range(19)] + [None]
    seeds = [f"null 0 {step}" for step in range(20)]
    drawn = [_shuffled_within(rewards, groups, seed) for seed in seeds]
    for shuffled in drawn:
        for group in set(groups):
            places = [place for place, other in enumerate(groups) if other == group]
            assert Counter(shuffled[p] for p in places) == Counter(rewards[p] for p in places)
    assert drawn == [_shuffled_within(rewards, groups, seed) for seed in seeds], (
        "the seed draws it"
    )
    assert len({tuple(map(str, each)) for each in drawn}) == 20 and rewards[:3] == [
        0.0,
        0.01,
        0.02,
    ]
    mixed = _shuffled_within([1, 2, 3, 4], [0, 1, 0, 1], "any")
    assert set(mixed[::2]) == {1, 3} and set(mixed[1::2]) == {2, 4}, (
        "groups that do not lie together"
    )


def test_over_many_shuffles_no_completion_is_better_than_another():
    """So the gradient is 0 in the mean: what such a run gains has another cause than the reward."""
    rewards, groups = [1.0, 0.0, 0.0, 0.25, 1.0, 1.0], [0, 0, 0, 0, 1, 1]
    drawn = [
        advantages(_shuffled_within(rewards, groups, f"s{n}"), groups) for n in range(4000)
    ]
    assert np.abs(np.mean(drawn, axis=0)).max() < 4 * np.std(drawn) / 4000**0.5
    assert np.abs(drawn).max() > 1


def rewards_by_group(folder):
    """(step, prompt) -> the rewards that its completions earned, as they stand in the record."""
    table = kit.read_completions(folder)
    return {key: [*group] for key, group in table.groupby(["step", "prompt"])["reward"]}


def test_a_null_run_earns_what_the_run_earns_in_its_first_step_and_goes_another_way(tmp_path):
    """The same prompts and completions; the rewards of a group are the same numbers, at other completions."""
    lab.compare_arms(
        {"trained": {}, "null": lab.null()}, [0], **base(), folder=tmp_path, quiet=True
    )
    trained, null_run = (
        rewards_by_group(tmp_path / arm / "seed-0") for arm in ("trained", "null")
    )
    first = [key for key in trained if key[0] == 1]
    assert first and all(Counter(trained[key]) == Counter(null_run[key]) for key in first)
    assert any(trained[key] != null_run[key] for key in first)
    assert lab.load(tmp_path, ["trained", "null"]).arms == ["trained", "null"]


def test_a_null_of_an_arm_with_a_sampler_of_its_own_keeps_it():
    class Sampler:
        def __init__(self, inner):
            self.inner = inner

        def state(self):
            return {"waiting": 3}

    arm = lab.null({"sample": Sampler, "beta": 0.1})
    shuffled = arm["sample"]("the trainer's own")
    assert arm["beta"] == 0.1 and shuffled.state() == {"waiting": 3}
    assert shuffled.inner.inner == "the trainer's own"
    assert _ShuffledRewards().around("the trainer's own").inner == "the trainer's own"


def test_episodes_bring_their_own_advantages_and_are_refused():
    class Played:
        advantages = [0.5, -0.5]

    with pytest.raises(ValueError, match="rewards to shuffle"):
        _ShuffledRewards(lambda *given: Played())(None, None, None, [], None, None)


def comparison(before, after, measure="strict"):
    """Of rows that were right before and after, by compare(); measure="reward": nothing is right or wrong."""
    settings = {"max_completion_tokens": 8}
    evaluations = []
    for scores in (before, after):
        table = pd.DataFrame(
            {"question": [*map(str, range(len(scores)))], "answer": "", "completion": ""}
        )
        rate = None
        if measure == "strict":
            rate = share(sum(scores), len(scores))
            table = table.assign(strict=scores, lenient=scores, formatted=True)
        table["reward"] = [*map(float, scores)]
        kind = "accuracy" if measure == "strict" else "reward"
        evaluations.append(
            Evaluation("toy", rate, rate, rate, None, {}, table, settings, measure=kind)
        )
    return compare(*evaluations)


def test_the_gain_is_said_beside_the_null():
    """By hand: 2 and 8 of 10 right, and 2 and 3 of 10 in the null. The words are those of the comparison's sentence."""
    run = comparison([True] * 2 + [False] * 8, [True] * 8 + [False] * 2)
    null_run = comparison([True] * 2 + [False] * 8, [True] * 3 + [False] * 7)
    said = run.beside(null_run)
    points = r"\+60\.0 points \[[\d.]+, [\d.]+\], of which \+10\.0 points \[[\d.]+, [\d.]+\]"
    assert re.fullmatch(f"{points} come without the right reward", said)
    assert said.split(", of which")[0] in run.sentence


def test_where_nothing_is_right_or_wrong_the_mean_reward_is_said_beside_the_null():
    run = comparison([0.25] * 8, [0.75] * 8, "reward")
    null_run = comparison([0.25] * 8, [0.125] * 8, "reward")
    said = run.beside(null_run)
    numbers = r"\+0\.500 \[[-\d., ]+\], of which -0\.125 \[[-\d., ]+\]"
    assert re.fullmatch(f"{numbers} come without the right reward", said)
    assert said.split(", of which")[0] in run.sentence


def test_a_card_says_the_gain_beside_the_null(tmp_path):
    lab.compare_arms({"trained": {}}, [0], **base(), folder=tmp_path, quiet=True)
    run = comparison([False] * 10, [True] * 10)
    null_run = comparison([False] * 10, [False] * 9 + [True])
    folder = tmp_path / "trained/seed-0"
    text = kit.model_card(folder, run, null=null_run).read_text()
    assert f"{run}\n{run.beside(null_run)}.\n```" in text
    assert "without the right reward" not in kit.model_card(folder, run).read_text()
    for wrong, name in (
        ((None, run), "comparison=None"),
        ((run, "strict 3.1"), "null='strict"),
    ):
        with pytest.raises(ValueError, match=f"{name}.* kit.compare"):
            kit.model_card(folder, wrong[0], null=wrong[1])

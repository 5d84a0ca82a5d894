"""The main job beside a change: the two arms differ in that alone, and the command runs."""

import json
import sys

import pytest

from benchmarks import null
from benchmarks.advice.plan.arms import unlike
from grpo_kit.more.lab._arm import arm_of


@pytest.mark.parametrize(
    "name, differ",
    [
        ("diversity", {"rewards", "weights"}),
        ("groups", {"prompts_per_step", "group_size"}),
    ],
)
def test_the_arms_differ_in_one_thing_on_equal_rows(name, differ):
    arms = [arm_of("cpu", settings) for settings in null.changes(name, "cpu").values()]
    assert unlike(*arms) == ()
    found = set()
    for field in ("prompts_per_step", "group_size", "steps", "learning_rate", "temperature"):
        if len({getattr(arm.config, field) for arm in arms}) > 1:
            found.add(field)
    tasks = [arm.task for arm in arms]
    if len({tuple(r.__name__ for r in task.rewards) for task in tasks}) > 1:
        found.add("rewards")
    if len({tuple(task.reward_weights) for task in tasks}) > 1:
        found.add("weights")
    assert found == differ


def test_a_tenth_is_paid_for_being_different_and_the_rest_as_before():
    plain, paid = (each["task"] for each in null.changes("diversity", "cpu").values())
    assert paid.reward_weights[-1] == 0.1 and paid.rewards[-1].__name__ == "different"
    before = [weight * 0.9 for weight in plain.reward_weights]
    assert paid.reward_weights[:-1] == pytest.approx(before)


def test_the_command_runs_and_saves(tmp_path, monkeypatch):
    monkeypatch.setattr(null, "PATH", tmp_path / "null.json")
    asked = ["--beside", "diversity", "--preset", "smoke", "--seeds", "0"]
    monkeypatch.setattr(sys, "argv", ["null", *asked, "--folder", str(tmp_path / "runs")])
    null.main()
    saved = json.loads((tmp_path / "null_beside_diversity.json").read_text())
    assert [run["arm"] for run in saved["runs"]] == ["as it is", "paid to differ"]
    assert all(0 <= run["diversity/unique"] <= 1 for run in saved["runs"])

"""Solved or collapsed onto a shortcut: what the best constant strategy earns decides, where it is known."""

import json

import numpy as np
import pandas as pd
import pytest
from loop_runs import letters
from standard_runs import make

from grpo_kit import tasks
from grpo_kit.record.files import read_metrics
from grpo_kit.rewards import ExactAnswer, Gated, Language, SoftFormat, WeightedSum
from grpo_kit.rewards._parts import answer_parts
from grpo_kit.watch._red_flag import Setup
from grpo_kit.watch.monitor import red_flags
from tests.watch.test_monitor import RUNS

COLLAPSED = ("events", "constant_strategy", "countdown_collapse")


def collapsed(right, constant=None, steps=12, args=None, **columns):
    """Flags of a run without entropy and without a signal, whose format is right and whose answers earn `right`."""
    config = {
        "reward_parts": ["exact", "format"],
        "reward_weights": [0.75, 0.25],
        "answer_parts": ["exact"],
    }
    config["args"] = args or {}
    if constant is not None:
        config["best_constant"] = {"strategy": "always a + b", "parts": {"exact": constant}}
    answers = np.resize(right, steps).astype(float)
    table = {
        "step": range(1, steps + 1),
        "reward": 0.75 * answers + 0.25,
        "reward/exact": answers,
        "entropy": np.full(steps, 0.004),
        "groups/equal_rewards": np.ones(steps),
        "diversity/self_bleu": np.ones(steps),
    }
    return {flag.name: flag for flag in red_flags(pd.DataFrame(table | columns), config=config)}


@pytest.mark.parametrize("name", COLLAPSED)
@pytest.mark.parametrize("told", [True, False])
def test_runs_that_collapsed_onto_a_shortcut_that_pays_are_told(name, told):
    """Also of a run whose config says nothing of the task."""
    config = json.loads((RUNS / "induced" / name / "config.json").read_text())
    if not told:
        config = {
            key: value
            for key, value in config.items()
            if key not in ("answer_parts", "best_constant")
        }
    assert "entropy collapse" in {
        flag.name for flag in red_flags(read_metrics(RUNS / "induced" / name), config=config)
    }


def test_solved_means_better_than_the_best_constant_strategy():
    assert set(collapsed(0.575, constant=0.58)) == {"entropy collapse", "mode collapse"}
    assert (
        "0.57 for answers where the best constant strategy earns 0.58"
        in collapsed(0.574, constant=0.58)["mode collapse"].saw
    )
    assert collapsed(0.575, constant=0.1) == {}
    # A window of few prompts lies above what the strategy earns half of the time: a quarter of the way to 1 is needed.
    assert collapsed(0.66, constant=0.58) != {} and collapsed(0.69, constant=0.58) == {}


@pytest.mark.parametrize(
    "row, run, words",
    [
        (1.0, {}, "an earlier checkpoint"),
        (0.3, {}, "a temperature near 1 (it was 0.3); else an earlier checkpoint"),
        (1.0, {"temperature": 0.3}, "an earlier checkpoint"),
        (np.nan, {"temperature": 1.0}, "an earlier checkpoint"),
        (np.nan, {"temperature": 0.3}, "a temperature near 1 (it was 0.3); else an earlier checkpoint"),
        (np.nan, {"temperature": "1 - progress"}, "a temperature near 1 where it is lower"),
        (np.nan, {}, "a temperature near 1 where it is lower; else an earlier checkpoint"),
    ],
)  # fmt: skip
def test_a_temperature_near_1_is_advised_only_where_it_is_lower(row, run, words):
    """row: of the step, which a schedule or a press may have changed; else the run's settings say it."""
    flags = collapsed(0.3, args=run, temperature=np.full(12, row))
    assert {*flags} == {"entropy collapse", "mode collapse"}
    assert all(flag.first.startswith(words) for flag in flags.values())


def test_without_a_task_a_frozen_policy_is_solved_only_near_the_highest():
    assert set(collapsed(0.575)) == {"entropy collapse", "mode collapse"}
    assert collapsed([0.75, 1, 1, 1]) == {}
    assert collapsed(0.575, entropy=np.full(12, 0.03)) == {}, "not frozen: it may go on"


def test_held_out_answers_are_believed_first():
    seldom = np.where(np.arange(12) % 5 == 4, 0.3, np.nan)
    assert set(collapsed(0.95, constant=0.3)) == set()
    assert set(collapsed(0.95, constant=0.3, **{"eval/reward/exact": seldom})) == {
        "entropy collapse",
        "mode collapse",
    }
    # the last five steps; an evaluation of long ago says nothing of them
    gone = np.r_[np.zeros(7), np.ones(5)]
    signs = {"entropy": 1 - gone, "groups/equal_rewards": gone, "diversity/self_bleu": gone}
    before = np.where(np.arange(12) == 0, 0.3, np.nan)
    assert collapsed(0.95, constant=0.3, **signs, **{"eval/reward/exact": before}) == {}
    assert collapsed(0.3, constant=0.3, **signs, **{"eval/reward/exact": before}) != {}


def test_an_evaluation_between_two_rollouts_counts():
    """With num_iterations=3 the rows 1, 4, 7, ... have a reward, and the evaluation is in row 12."""
    rows = 15
    fresh = np.arange(rows) % 3 == 0
    answers = np.where(fresh, 0.95, np.nan)
    held_out = {"eval/reward/exact": np.where(np.arange(rows) == 11, 0.3, np.nan)}
    passes = {"num_iterations": 3}
    assert collapsed(answers, constant=0.3, steps=rows, args=passes) == {}
    assert collapsed(answers, constant=0.3, steps=rows, args=passes, **held_out) != {}


def test_parts_that_judge_the_answer_are_those_that_read_the_row():
    def mine(completions, target, prefill, **columns):
        return [1.0] * len(completions)

    gated = Gated(ExactAnswer(), on=SoftFormat(think=None))
    rewards = [
        WeightedSum({ExactAnswer(): 0.5, SoftFormat(): 0.5}),
        gated,
        Language("latin"),
        mine,
    ]
    assert list(answer_parts(rewards)) == ["exact_answer", "gated_exact_answer", "mine"]


def test_a_task_states_what_its_best_constant_strategy_earns():
    two = tasks.countdown(numbers=(2, 2), n_train=64, n_held_out=8)
    name, accuracy = two.best_constant(two.train)
    assert two.best_constant_parts() == {
        "strategy": name,
        "parts": {"countdown_answer": pytest.approx(accuracy)},
    }
    soft = tasks.interval_scheduling(n_train=64, n_held_out=8)
    share = soft.best_constant_parts()["parts"]["schedule_share"]
    assert share > soft.best_constant(soft.train)[1], (
        "in the part's own unit, which pays for a good schedule too"
    )

    def mine(completions, answer, **columns):
        raise AssertionError("a reward that is not the kit's is not asked before training")

    rows = [{"question": f"{i}?", "answer": "yes" if i % 4 else "no"} for i in range(40)]
    own = tasks.from_rows("own", rows, reward=mine)
    share = sum(row["answer"] == "yes" for row in own.train) / len(own.train)
    assert own.best_constant_parts() == {
        "strategy": "always 'yes'",
        "parts": {"mine": share},
    }


def test_a_trainer_writes_both_down(tmp_path):
    task = tasks.largest(n_train=16, n_held_out=4)
    make(tmp_path / "run", task=task, steps=1).train()
    config = json.loads((tmp_path / "run" / "run.json").read_text())
    assert config["answer_parts"] == ["exact_answer"]
    assert config["data"] == {"task": "largest", "rows": 16}
    assert config["best_constant"]["strategy"] == task.best_constant(task.train)[0]
    assert Setup.of(config).constant == config["best_constant"]["parts"]["exact_answer"]
    make(tmp_path / "plain", rewards=letters, steps=1).train()
    config = json.loads((tmp_path / "plain" / "run.json").read_text())
    assert config["answer_parts"] == [] and Setup.of(config).constant is None


def test_who_earns_nearly_all_is_not_wrong_whatever_a_constant_earns():
    """An entropy collapse says "sure of itself and wrong", which at a reward of 0.97 it is not."""
    assert collapsed(0.96, constant=0.97) == {}
    assert collapsed(0.86, constant=0.97) != {}, "below 0.9 a constant that earns more tells"


def evaluated(same, gold, steps=(0, 8, 16)):
    table = pd.DataFrame({"step": list(steps), "eval/one_answer": same, "eval/one_gold": gold})
    return {flag.name: flag for flag in red_flags(table)}


def test_answers_that_fall_into_one_are_told():
    flag = evaluated([0.5, 0.6, 1.0], 0.45)["one answer"]
    assert flag.step == 16
    assert (
        "100% of held-out answers are the same, where the most frequent gold is 45%" in flag.saw
    )
    assert evaluated([1.0, 0.5, 0.6], 0.45) == {}, "the base was so, before training"
    assert evaluated([0.5, 0.6, 0.85], 0.45) == {}
    assert evaluated([1.0, 1.0, 1.0], 1.0) == {}, "all golds are the same"
    assert evaluated([0.9, 0.95, 0.95], 0.7) == {}
    assert evaluated([np.nan] * 3, np.nan) == {}, "answers that cannot be read"

"""The oracle's steps: a plain loop agrees with the record, and a wrong step does not."""

import copy
import math

import pytest
from plain_steps import Plain

from benchmarks.oracle.compare import worst
from benchmarks.oracle.step_runs import RUNS, STEPS
from benchmarks.oracle.steps import compare_steps, recorded_steps, step_differences

MAIN = RUNS["main job"]


def failures(differences):
    return {d.what: d.error for d in differences if not d.passes}


@pytest.mark.parametrize(
    "name", ["main job", "grid episodes", "two iterations", "several rewards, some None"]
)
def test_a_plain_loop_on_the_recorded_completions_makes_the_recorded_steps(name):
    differences = compare_steps(Plain(), runs=[RUNS[name]])
    assert len(differences) > 60 and not failures(differences), worst(differences)


@pytest.mark.parametrize(
    "broken, seen",
    [
        ({"shift": 1}, {"grad_norm"}),
        ({"hotter": 1.1}, {"sampler_logprobs", "grad_norm"}),
        ({"twice": "letters"}, {"rewards"}),
    ],
)
def test_a_wrong_step_differs(broken, seen):
    wrong = Plain()
    vars(wrong).update(broken)
    failed = failures(compare_steps(wrong, runs=[MAIN]))
    assert seen <= failed.keys(), failed
    assert sum(what.startswith("weights") for what in failed) > 10 or "rewards" in failed


def test_every_run_is_on_record_and_has_what_trainers_differ_by():
    record = recorded_steps()
    assert [*record] == [*RUNS]
    for name, steps in record.items():
        assert len(steps) == STEPS
        for step in steps:
            assert len(step["updates"]) == RUNS[name].iterations
            assert any(step["advantages"]) and len({*map(len, step["completion_ids"])}) > 1, (
                name
            )
    assert [step["temperature"] for step in record["countdown with thoughts"]] == [1.2, 0.8]
    (first, second) = (step["updates"][0]["learning_rate"] for step in record["main job"])
    assert second == pytest.approx(2 * first) and first == pytest.approx(MAIN.learning_rate / 3)
    parts = record["several rewards, some None"][0]
    assert None in parts["rewards"] and None in parts["parts"]["sometimes"]
    assert len({*record["grid episodes"][0]["episodes"]}) < len(
        record["grid episodes"][0]["episodes"]
    )
    first, second = (update["loss"] for update in record["two iterations"][0]["updates"])
    assert abs(first - second) > 1e-3, "the second update of a step is off policy"


def changed(**values):
    """What fails where a step of the main job has other values."""
    step = recorded_steps()["main job"][0]
    return failures(step_differences("main job, step 1", copy.deepcopy(step) | values, step))


def test_lists_of_another_length_numbers_for_none_and_other_tokens_differ():
    step = recorded_steps()["several rewards, some None"][0]
    zeros = [0.0 if reward is None else reward for reward in step["rewards"]]
    failed = failures(step_differences("several", step | {"rewards": zeros}, step))
    assert failed == {"rewards": math.inf}
    assert changed() == {}
    main = recorded_steps()["main job"][0]
    assert changed(advantages=main["advantages"][1:]) == {"advantages": math.inf}
    assert changed(completion_ids=main["completion_ids"][::-1]) == {"completion_ids": 1.0}
    assert changed(temperature=main["temperature"] + 0.1).keys() == {"temperature"}
    nan = changed(rewards=[math.nan] * len(main["rewards"]))
    assert nan == {"rewards": math.inf}

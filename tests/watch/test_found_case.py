"""A completion of a run becomes a case that a reward which pays for it fails."""

import dataclasses

import pytest

import grpo_kit as kit
from grpo_kit.record.files import RunFolderError
from grpo_kit.rewards import Case, ExactAnswer, RewardCheckError, check_rewards
from tests.made_metrics import Recorded

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


@pytest.fixture
def folder(tmp_path, task):
    run = Recorded(tmp_path / "run")
    row = task.train[0]
    for step in (1, 2):
        run.write_completions(
            {
                "step": [step] * 4,
                "group": [0, 0, 1, 1],
                "prompt": [f"Say. {row['question']} {task.prefill}"] * 2 + ["Something else?"] * 2,
                "prefill": [task.prefill] * 2 + [None] * 2,
                "completion": ["a", "b", "c", HACK if step == 2 else "d"],
                "answer": [row["answer"]] * 2 + ["82"] * 2,
                "seen by the judge": [None, 3, None, None],
                "reward/exact": [0.0] * 4,
                "reward": [0.0, 0.5, 0.0, 1.0],
                "advantage": [0.0] * 4,
                "temperature": [1.0] * 4,
            }
        )
    return tmp_path / "run"


def test_one_call_makes_the_case(folder):
    case = kit.case_from(folder, step=2, group=1, number=1)
    assert case == Case("found at step 2, group 1, number 1", HACK, columns={"answer": "82"})
    other = kit.case_from(folder, step=1, group=0, number=1, honest=True)
    assert other.honest and other.columns["seen by the judge"] == 3 and other.prefill


def test_the_task_gives_the_columns_of_its_row(folder, task):
    case = kit.case_from(folder, step=1, group=0, number=0, task=task)
    assert case.columns == task.train[0] and "numbers" in case.columns
    with pytest.raises(ValueError, match="no question that stands in"):
        kit.case_from(folder, step=1, group=1, number=0, task=task)


def test_a_longer_question_is_not_taken_for_one_inside_it(tmp_path):
    rows = [{"question": q, "answer": str(n)} for n, q in enumerate(("2 + 3?", "1 + 2 + 3?", "4?", "5?"))]
    task = kit.tasks.from_rows("sums", rows[:3], rows[3:], reward=ExactAnswer())
    run = Recorded(tmp_path / "run")
    one = {"step": [1], "group": [0], "prompt": ["1 + 2 + 3?"], "completion": ["x"], "reward": [0.0]}
    run.write_completions(one)
    assert kit.case_from(tmp_path / "run", step=1, group=0, number=0, task=task).columns["answer"] == "1"


def test_a_reward_that_pays_the_found_hack_fails_the_check(folder, task):
    """End to end: found in a run, tried beside the task's own cases."""
    hack = kit.case_from(folder, step=2, group=1, number=1)
    hole = PaysForTheLength()
    honest = Case("honest", "<answer>82</answer>", honest=True, columns={"answer": "82"})
    assert len(check_rewards(hole, [honest])) == 1, "it passes without the case"
    with pytest.raises(RewardCheckError, match=r"'found at step 2, group 1, number 1' \(1\) outranks"):
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
        ValueError, match="'found at step 2' has no column 'answer', which exact_answer asks for"
    ):
        check_rewards(ExactAnswer(), [honest], found=[Case("found at step 2", "82")])


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"step": 3}, "step=3 is not in .*; there is 1, 2"),
        ({"group": 2}, "group=2 is not in .*; there is 0, 1"),
        ({"number": 2}, "number=2 is not in .*; there is 0, 1"),
    ],
)
def test_what_is_not_there_is_named(folder, wrong, said):
    with pytest.raises(ValueError, match=said):
        kit.case_from(folder, **{"step": 1, "group": 0, "number": 0, **wrong})
    with pytest.raises(RunFolderError):
        kit.case_from(folder / "nowhere", step=1, group=0, number=0)

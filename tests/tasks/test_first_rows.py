"""What a newcomer's rows meet: worked solutions as answers, and GSM8K of one file."""

import json
import re

import pytest

from grpo_kit.rewards import NumericAnswer
from grpo_kit.tasks import from_rows, gsm8k

WORKED = [
    {"question": f"{n} and 1?", "answer": f"Add <<{n}+1={n + 1}>>.\n#### {n + 1}"}
    for n in range(10)
]


def test_worked_solutions_as_answers_are_said_with_what_reads_them():
    with pytest.raises(ValueError, match="answer_after='####'"):
        from_rows("mine", WORKED, reward=NumericAnswer())
    task = from_rows("mine", WORKED, reward=NumericAnswer(), answer_after="####")
    assert task.train[0]["answer"] == "1" and task.train[0]["solution"] == "Add <<0+1=1>>."
    with pytest.raises(
        ValueError, match=r"train row 0.*nothing stands behind answer_after='@@'"
    ):
        from_rows("mine", WORKED, reward=NumericAnswer(), answer_after="@@")


def test_gsm8k_of_one_file(tmp_path):
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    one.write_text("\n".join(map(json.dumps, WORKED)))
    other.write_text("\n".join(map(json.dumps, WORKED[8:])))
    with pytest.raises(
        ValueError, match="all of its 10 questions are in held_out=.*held_out='train'"
    ):
        gsm8k(train=one, held_out=one)
    task = gsm8k(train=one, held_out="train")
    assert [row["answer"] for row in task.held_out] == ["5", "10"] and len(task.train) == 8
    with pytest.warns(UserWarning, match="2 of 10 train questions are left out"):
        assert len(gsm8k(train=one, held_out=other).train) == 8


ROWS = [{"question": f"{i}?", "answer": str(i)} for i in range(10)]


def right(completions, answer, **columns):
    return [float(gold in text) for text, gold in zip(completions, answer, strict=True)]


def brief(completions, **columns):
    return [1 / (1 + len(text)) for text in completions]


@pytest.mark.parametrize(
    "weights, shares, said",
    [
        ([2, 1], [2 / 3, 1 / 3], "add up to 3; task 'sums' has 0.6667, 0.3333"),
        ([1.0, 1.0], [0.5, 0.5], ""),
        ((0.5, 0.25), [2 / 3, 1 / 3], "add up to 0.75"),
        ([0.75, 0.25], [0.75, 0.25], ""),
        ([5, 0], [1.0, 0.0], "add up to 5"),
        ([1e-6, 3e-6], [0.25, 0.75], "add up to 4e-06"),
        (None, [0.5, 0.5], ""),
    ],
)
def test_weights_of_any_sum_are_made_to_add_up_to_1(weights, shares, said, capsys):
    task = from_rows("sums", ROWS, reward=[right, brief], reward_weights=weights)
    assert list(task.reward_weights) == pytest.approx(shares, rel=1e-12)
    printed = capsys.readouterr().out
    assert said in printed and bool(printed) == bool(said)


@pytest.mark.parametrize(
    "weights", [[0, 0], [-1, 2], [float("nan"), 1], [float("inf"), 1], "1", [True, 1], [1]]
)
def test_weights_that_cannot_be_are_refused(weights):
    with pytest.raises(ValueError, match="reward_weights="):
        from_rows("sums", ROWS, reward=[right, brief], reward_weights=weights)


@pytest.mark.parametrize(
    "name, value, here",
    [
        ("rewards", [right], "here it is reward= of tasks.from_rows"),
        ("reward_funcs", [right], "here it is reward= of tasks.from_rows"),
        ("system_prompt", "Be brief.", "here it is system= of tasks.from_rows"),
        ("eval_dataset", ROWS, "here it is held_out= of tasks.from_rows"),
        ("max_new_tokens", 8, "here it is max_completion_tokens"),
        ("prefil", "<a>", "did you mean 'prefill'"),
    ],
)
def test_names_of_other_libraries_are_answered(name, value, here):
    with pytest.raises(ValueError, match=re.escape(f"{name}=") + ".*" + re.escape(here)):
        from_rows("sums", ROWS, **{name: value})

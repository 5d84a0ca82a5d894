"""A worked example shows a label that a row has; one that shows another is named."""

import warnings

import pytest

from grpo_kit.rewards import ExactAnswer
from grpo_kit.tasks import from_rows

LABELS = ("billing", "delivery", "refund")


def task_with(answer, golds):
    rows = [{"question": f"Message {i}?", "answer": gold} for i, gold in enumerate(golds)]
    example = ("A message.", f"<answer>{answer}</answer>")
    return from_rows("tickets", rows, reward=ExactAnswer(), examples=[example])


def test_an_example_with_a_label_that_no_row_has_is_named():
    with pytest.warns(UserWarning) as warned:
        task_with("Refunds", LABELS * 4)
    (warning,) = warned
    assert str(warning.message) == (
        "task 'tickets': examples has the answer 'Refunds', and no row has it, so that every prompt shows a label that "
        "is never right. The rows have 'billing', 'delivery', 'refund'; answer an example with one of them, or take it "
        "out; did you mean 'refund'?"
    )
    assert warning.filename == __file__
    with pytest.warns(UserWarning, match="the answer '7', and no row has it"):
        task_with("7", "12345" * 3)


@pytest.mark.parametrize(
    "answer, golds",
    {
        "a label of a row": (" refund ", LABELS * 4),
        "a label of a held-out row alone": ("rare", (*LABELS, "billing", "rare", *LABELS)),
        "sums are no labels": ("99", "123456" * 3),
        "every answer is another": ("Rome", [f"city {i}" for i in range(12)]),
        "no row has an answer": ("Rome", [""] * 12),
        "no answer in the tags": ("", LABELS * 4),
    }.values(),
)  # fmt: skip
def test_an_example_that_may_be_meant_is_not_warned_of(answer, golds):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        task_with(answer, golds)

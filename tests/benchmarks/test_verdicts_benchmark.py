"""The verdicts benchmark counts what a judge did, and no judge but the one asked decides what that is."""

import json

import pytest

from benchmarks.result import as_text
from benchmarks.verdicts import golds, holes
from benchmarks.verdicts.count import ask, count, lists, percent, rate
from benchmarks.verdicts.judges import JUDGES
from benchmarks.verdicts.pairs import Pair, load

SCORES = {"paid": 1.0, "half": 0.5, "zero": 0.0, "none": None}


def judge(pair):
    """Says what the pair's answer asks for."""
    if pair.answer == "raises":
        raise RecursionError("too deep")
    return SCORES[pair.answer]


def pairs(*rows):
    return [
        Pair(place, "MathAnswer", "1", answer, right, "")
        for place, (answer, right) in enumerate(rows, 1)
    ]


def test_each_verdict_is_counted_once_where_it_belongs():
    rows = pairs(
        # two wrong ones paid
        ("paid", 0), ("half", 0), ("zero", 0), ("none", 0), ("raises", 0),
        ("paid", 1), ("zero", 1), ("none", 1), ("raises", 1),  # three right ones refused
        ("none", None), ("zero", None), ("raises", None),  # one judged, though there is no gold
    )  # fmt: skip
    verdicts = ask(judge, rows)
    found = count(verdicts)
    rates = ("wrong ones paid", "right ones refused", "judged without a gold")
    numbers = {name: (found[name]["count"], found[name]["n"]) for name in rates}
    assert numbers == {
        "wrong ones paid": (2, 5), "right ones refused": (3, 4), "judged without a gold": (1, 3),
    }  # fmt: skip
    assert (found["None"], found["exceptions"]) == (2, 3)
    assert found["microseconds"]["median"] > 0 and found["microseconds of CPU"]["median"] >= 0
    listed = lists(verdicts)
    assert listed["wrong ones paid"] == {"1": '"paid" for "1"', "2": '"half" for "1"'}
    assert list(listed["right ones refused"]) == ["7", "8", "9"]
    assert listed["right ones refused"]["9"].endswith("(exception)")
    assert listed["exceptions"]["5"] == '"raises" for "1": RecursionError: too deep'


def test_a_timeout_of_math_verify_is_an_exception_like_any_other():
    from math_verify.errors import TimeoutException

    def slow(pair):
        raise TimeoutException("5 seconds")

    assert count(ask(slow, pairs(("paid", 0))))["exceptions"] == 1


def test_rates_have_wilson_intervals():
    assert percent(rate(2, 270)) == "2 of 270, 0.7 % [0.2, 2.7]"  # 0.0020 to 0.0266 by hand
    assert rate(0, 0) == {"count": 0, "n": 0} and percent(rate(0, 0)) == "none"


def test_the_pairs_are_those_decided_beforehand():
    rows = load()
    assert [row.line for row in rows] == list(range(1, 408))
    assert {row.reward for row in rows} == {"MathAnswer", "NumericAnswer", "ExactAnswer"}
    assert [sum(row.right == right for row in rows) for right in (0, 1, None)] == [270, 131, 6]


@pytest.mark.parametrize("judged", JUDGES, ids=lambda judged: judged.name)
def test_every_judge_tells_the_plainest_right_from_the_plainest_wrong(judged):
    right, wrong = (Pair(0, "MathAnswer", "17", answer, None, "") for answer in ("17", "18"))
    assert (judged.ask(right), judged.ask(wrong)) == (1.0, 0.0)


def test_a_result_is_read_back_as_it_was_saved():
    listed = {"wrong ones paid": {str(row.line): str(row) for row in load()}}
    assert json.loads(as_text(listed)) == listed


def test_the_last_box_of_a_solution():
    assert golds.last_boxed(r"first \boxed{1}, so $\boxed{\frac{1}{2}}$. $x$") == r"\frac{1}{2}"
    assert golds.last_boxed(r"so $\boxed 7$.") == "7"
    assert golds.last_boxed("no box") is None and golds.last_boxed(r"\boxed{open") is None


class Fixed:
    """A reward that pays equal texts, cannot judge "?", and pays "b" for "a" besides."""

    def __call__(self, completions, *, answer):
        text, gold = (
            completions[0].removeprefix("<answer>").removesuffix("</answer>"),
            answer[0],
        )
        return [None if gold == "?" else float(text == gold or (text, gold) == ("b", "a"))]


def test_own_answers_that_fail_are_named():
    found = golds.own(Fixed(), ["a", "b", "?"])
    assert found["paid"]["count"] == 2
    assert (found["refused"], found["cannot judge"]) == ([], ["?"])
    assert golds.own(Fixed(), ["a", "b", "?"], lambda gold: gold + ".")["refused"] == ["a", "b"]


def test_shuffled_golds_never_meet_themselves_and_equal_values_are_no_failure():
    found = golds.shuffled(Fixed(), ["a", "b"], golds.same_text, shuffles=3)
    assert found == {
        "pairs of different values": 6,
        "paid": ["b for a"],
        "same value, not paid": [],
    }
    equal = golds.shuffled(Fixed(), ["1", "1.0"], golds.same_number)
    assert equal["pairs of different values"] == 0
    assert equal["same value, not paid"] == ["1.0 for 1", "1 for 1.0"]


def test_every_text_of_the_holes_belongs_to_one_kind():
    for question in holes.QUESTIONS:
        written = [text for _, text in holes.texts(question)]
        assert (
            len(written) == len(set(written))
            and question.right
            and question.wrong
            and question.hole
        )
    assert all(sum(mass.values()) == pytest.approx(1) for mass in holes.STARTS.values())


def test_the_policy_learns_what_is_paid():
    """A reward that pays holes teaches holes, one that pays what is right teaches that."""
    questions = holes.QUESTIONS[:3]

    def trained(*paying):
        table = [[float(kind in paying) for kind, _ in holes.texts(q)] for q in questions]
        return holes.train(table, 0, start="not yet able", questions=questions)

    sound, holed = trained("right"), trained("right", "hole")
    assert sound["right"] > 0.9 and sound["hole"] < 0.05
    assert holed["hole"] > 0.6 and holed["right"] < 0.4
    assert min(sound["reward"], holed["reward"]) > 0.9
    assert sum(sound[kind] for kind in holes.KINDS) == pytest.approx(1, abs=1e-5)


def test_a_reward_that_cannot_judge_teaches_nothing():
    table = [[None] * len(holes.texts(q)) for q in holes.QUESTIONS[:2]]
    end = holes.train(table, 0, questions=holes.QUESTIONS[:2])
    assert {kind: end[kind] for kind in holes.KINDS} == pytest.approx(
        holes.STARTS["able"], abs=1e-5
    )


def test_math_verify_pays_every_hole_and_no_honest_mistake_and_the_kit_no_hole():
    paid = holes.misjudged(holes.rewards_of(holes.math_verify_score))["paid"]
    assert paid == [f"{text} for {q.gold}" for q in holes.QUESTIONS for text in q.hole]
    assert holes.misjudged(holes.rewards_of(holes.kit_score)) == {"paid": [], "refused": []}


def test_a_habit_that_pays_on_one_question_is_taken_up_on_another():
    """The second question is never judged: alone it would keep its 10 % of holes, and the mean would end at 55 %."""
    first, second = holes.QUESTIONS[:2]
    table = [
        [float(kind == "hole") for kind, _ in holes.texts(first)],
        [None] * len(holes.texts(second)),
    ]
    assert holes.train(table, 0, questions=(first, second))["hole"] > 0.6

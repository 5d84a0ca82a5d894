"""audit: every error that a reward is known to make is found, and the kit's own make next to none."""

import csv
import random
from collections import Counter
from pathlib import Path

import pytest

import grpo_kit.verdicts._neighbours
from examples.arithmetic import arithmetic
from examples.tools import tools
from grpo_kit.rewards import (
    Audit,
    Case,
    ExactAnswer,
    Gated,
    MathAnswer,
    NumericAnswer,
    RewardCheckError,
    SoftFormat,
    WeightedSum,
    audit,
    check_rewards,
    last_number,
    on_response,
)
from grpo_kit.tasks import code, countdown, from_rows, interval_scheduling, largest
from grpo_kit.verdicts._neighbours import (
    _BY_RULE,
    TRIED,
    equal_texts,
    excused,
    near_misses,
    why,
)

MONTHS = ["January", "May", "August", "December"]
WORDS = [
    "no solution",
    "Paris",
    "silent",
    "carbon dioxide",
    "even",
    "True",
    "ABC",
    "a few",
    "the red house",
    "level",
]
ALL = 100  # more than a gold has texts


def _golds(seed, count):
    """Golds of every kind, drawn."""
    rng = random.Random(seed)

    def n(low=1, high=99):
        return rng.randint(low, high)

    def two():
        return sorted(rng.sample(range(-9, 30), 2))

    made = []
    for _ in range(count):
        (a, b), (c, d), (low, high) = (n(), n()), (n(1, 12), n(13, 40)), two()
        ends = rng.choice(["[]", "[)", "(]", "()"])
        made += [
            f"{n(0, 12)}", f"-{a}", f"{n(1000, 99999)}", f"{n(1000, 999999):,}", f"{a}.{n(1, 9)}", f"-0.{n(1, 9)}5",
            f"{c}/{d}", rf"\frac{{{c}}}{{{d}}}", rf"-\frac{{{d}}}{{{c}}}", f"{c} {n(1, 4)}/5", f"${a}", f"-£{a}",
            f"€{n(1000, 9999):,}", f"{a}%", f"{a}.5\\%", f"{a} million", f"{a} {rng.choice(['km', 'kg', 'cm', 'L'])}",
            f"{c} {rng.choice(['hours', 'weeks', 'feet', 'apples'])}", rf"{a}^\circ", f"{a} cm^2",
            rf"{c} \times 10^{n(3, 9)}", rf"\sqrt{{{rng.choice([2, 3, 5, 7, 11])}}}", rf"{c}\sqrt{{{d * d + 1}}}",
            rf"{c}\pi", f"2^{{{d}}}", f"{c}x + {b}", f"x^2 + {c}x + {b}", rf"\frac{{x^2}}{{{c + 1}}} + C", f"{c}+{d}i",
            rf"\frac{{a}}{{b + {c}}}", f"({low}, {high})", f"({c}, {a}, {low})", f"({c}, {c})", f"[{low}, {high})",
            f"{ends[0]}{low}, {high}{ends[1]}", rf"(-\infty, {high}]", rf"(-\infty, {low}) \cup ({high}, \infty)",
            rf"\{{{low}, {high}, 31\}}", f"{low}, {high}", f"{low}, {high} and 31", rf"\pm {a}", f"x = {low}",
            f"y = {c + 1}x - {a}", f"f(x) = x + {b}", f"{c + 1}x - y + {d} = 0", f"x^2 + y^2 = {a}", f"x < {a}",
            rf"x \ge {low}", rf"{low} < x \le {high}", rf"x \ne {a}", f"x + {c}y > {a}",
            rf"\begin{{pmatrix}} {a} & {b} \\ {c} & {d} \end{{pmatrix}}", f"{n(1, 2)}:{n(3, 4)}",
            f"{c}:{d + 10} pm", f"{d % 24}:05",
            f"{c} {rng.choice(MONTHS)} {n(1900, 2024)}", rf"x \equiv {c} \pmod{{{d}}}", rng.choice("ABCDE"),
            f"({rng.choice('ABCDE')})", rng.choice(WORDS), f"{a + 8:b}_2", f"{a + 20:X}1_{{16}}", rng.choice("xyz"),
        ]  # fmt: skip
    return made


GOLDS = _golds(0, 5)


@pytest.mark.parametrize(
    ("reward", "texts"),
    [
        (MathAnswer(), 5000),
        (NumericAnswer(), 1500),
        (ExactAnswer(), 5000),
        (MathAnswer(units="required", case=True), 5000),
        (Gated(MathAnswer(), on=SoftFormat(think=None)), 5000),
    ],
    ids=repr,
)
def test_near_misses_are_not_paid(reward, texts):
    made = audit(reward, [{"answer": gold} for gold in GOLDS], n=ALL)
    paid = made.table().loc["near misses paid in full"]
    assert paid["n"] > texts and not paid["not judged"]
    assert paid["rate"] <= 1 / 1000, made.worst[made.worst["score"] == 1].to_string()


@pytest.mark.parametrize(
    "reward", [MathAnswer(), NumericAnswer(), MathAnswer(case=True, units="required")], ids=repr
)
def test_right_spellings_are_paid(reward):
    made = audit(reward, [{"answer": gold} for gold in GOLDS], n=ALL)
    refused = made.table().loc["right spellings refused"]
    assert refused["n"] > 1500 and not refused["not judged"]
    assert refused["rate"] < 0.02, made.worst.to_string()
    is_numeric = isinstance(reward, NumericAnswer)
    assert bool(made.left_out) == is_numeric and made.golds + len(made.left_out) == len(GOLDS)


@pytest.mark.parametrize("reward", [MathAnswer(), NumericAnswer()], ids=repr)
def test_every_unit_may_be_left_out(reward):
    golds = [
        "5 m",
        "7 g",
        "8 h",
        "9 s",
        "3 t",
        "4 l",
        "6 N",
        "12 V",
        "9 m²",
        "9 m^3",
        "5 km/h",
        r"30^\circ",
        "$7",
        "5 kg",
    ]
    texts = audit(reward, [{"answer": gold} for gold in golds], n=ALL).texts
    left_out = texts[texts["name"] == "without its unit"]
    assert set(left_out["gold"]) == set(golds) and (left_out["score"] == 1).all()


@pytest.mark.parametrize(
    "task",
    [largest, arithmetic, countdown, interval_scheduling, tools],
    ids=lambda make: make.__name__,
)
def test_no_task_of_the_kit_pays_near_misses(task):
    made = audit(task(n_train=8, n_held_out=30), n=ALL)
    assert made.golds == 30 and made.table().loc["near misses paid in full", "wrong"] == 0, made


def _of(judge):
    """A reward of a function of (answer text, gold); 0.0 where it raises."""

    @on_response
    def sloppy(responses, answer):
        scores = []
        for response, gold in zip(responses, answer, strict=True):
            text = response.removeprefix("<answer>").removesuffix("</answer>")
            try:
                scores.append(float(judge(text, gold)))
            except ValueError:
                scores.append(0.0)
        return scores

    return sloppy


@pytest.mark.parametrize(
    ("judge", "paid", "refused", "reason"),
    [
        (
            lambda text, gold: last_number(text) == gold,
            {"denied", "two answers", "at least", "its root", "between two"},
            {"digits of Arabic", "trailing zeros", "thousands with narrow spaces", "in words"},
            "the last number, whatever stands around it",
        ),
        (
            lambda text, gold: gold in text,
            {"either of two", "denied", "ten times", "the other sign", "an earlier draft", "an interval that holds it"},
            {"thousands with commas", "digits of full width", "in words"},
            "the gold anywhere",
        ),
        (
            lambda text, gold: abs(float(text) - float(gold)) <= 1,
            {"one more"},
            {"in bold", "in a sentence", "after a name", "in dollars"},
            "float with a tolerance that nobody asked for",
        ),
    ],
)  # fmt: skip
def test_what_a_sloppy_reward_gets_wrong_is_found(judge, paid, refused, reason):
    made = audit(_of(judge), [{"answer": gold} for gold in ("7", "1250", "18")], n=ALL)
    wrong = made.worst
    assert paid <= set(wrong.loc[wrong["score"] == 1, "name"]), reason
    assert refused <= set(wrong.loc[wrong["score"] < 1, "name"]), reason
    times = made.texts[made.texts["name"] == wrong["name"][0]]
    assert wrong["times"][0] == (times["score"] == 1).sum() and wrong["score"][0] == 1
    assert wrong["why"][0] == why(wrong["name"][0]) != ""
    assert reason and f"{made.reward} refuses" in repr(made)


def test_the_counts_of_one_gold_by_hand():
    right = ["**no**", "`no`", "The answer is no.", "no.", "\u200bno", "no\u00a0", r"$\text{no}$", r"\(\text{no}\)",
             r"\boxed{\text{no}}", r"\text{no}", "No"]  # fmt: skip
    wrong = ["on", "no and more", "not no", "The answer is not no", "no is wrong", "no, no, wait: on", "no or on",
             "on, no"]  # fmt: skip
    assert (list(equal_texts("no").values()), list(near_misses("no").values())) == (
        right,
        wrong,
    )
    cases = [
        (lambda text, gold: True, (0, 8)),
        (lambda text, gold: text == gold, (11, 0)),
        (lambda text, gold: text in (gold, "No", "on", "no or on"), (10, 2)),
        # half is not in full
        (lambda text, gold: 0.5 if text == "No" else text == gold, (11, 0)),
    ]
    for judge, counts in cases:
        made = audit(_of(judge), [{"answer": "no"}, {"answer": "no"}], n=ALL)
        table = made.table()
        assert table["n"].tolist() == [22, 16] and table["not judged"].tolist() == [0, 0]
        assert table["wrong"].tolist() == [2 * count for count in counts]
        assert table["rate"].tolist() == [counts[0] / 11, counts[1] / 8]
        assert (table["low"] <= table["rate"]).all() and (table["rate"] <= table["high"]).all()
    table = audit(
        _of(lambda text, gold: text in (gold, "on")), [{"answer": "no"}], n=ALL
    ).table()
    assert table.loc["near misses paid in full", ["low", "high"]].tolist() == pytest.approx(
        [0.0224, 0.4709], abs=1e-4
    )


def test_what_cannot_be_judged_is_counted_and_said():
    def shy(completions, answer, **columns):
        texts = [
            text.removeprefix("<answer>").removesuffix("</answer>") for text in completions
        ]
        known = {"yes": 1.0, "no": 1.0, "No": None, "on": None}
        return [
            known.get(text, 0.0) if gold != "odd" else None
            for text, gold in zip(texts, answer, strict=True)
        ]

    rows = [{"answer": gold} for gold in ("no", "odd", None, float("nan"), "even")]
    made = audit(shy, rows, n=ALL)
    assert made.table()["not judged"].tolist() == [1, 1] and made.table()["n"].tolist() == [
        10,
        7,
    ]
    assert made.golds == 1 and made.left_out == [
        ("None", None),
        ("nan", None),
        ("odd", None),
        ("even", 0.0),
    ]
    assert "Left out are 4 golds whose own text it cannot judge, such as 'None'" in made.summary
    assert set(made.worst["name"]).isdisjoint({"the other capital", "letters in another order"})
    nothing = audit(shy, [{"answer": "odd"}])
    assert (
        nothing.golds == 0
        and "none of 0" in nothing.summary
        and nothing.worst.empty
        and repr(nothing)
    )


def test_the_draw_is_bounded_and_repeats_with_its_seed():
    rows = [{"answer": gold} for gold in ("18", "1/3", "18", "x + 1")]
    one, same, other = (audit(MathAnswer(), rows, n=5, seed=seed).texts for seed in (3, 3, 4))
    assert one.equals(same) and not one["text"].equals(other["text"])
    assert (
        Counter(zip(one["gold"], one["right"], strict=True))[("1/3", True)] == 5
        and len(one) == 40
    )
    first = one["text"].tolist()
    assert first[:10] != first[20:30]  # the same gold in another row has other texts


def _recorded(seen):
    @on_response
    def recorder(responses, answer, question):
        seen.extend(zip(responses, answer, question, strict=True))
        return [
            float(f"<answer>{gold}</answer>" in text)
            for text, gold in zip(responses, answer, strict=True)
        ]

    return recorder


def test_of_a_task_the_texts_stand_where_the_answer_stood():
    seen = []
    rows = [{"question": f"What is {2 * n}/2?", "answer": str(n)} for n in range(10, 30)]
    rewards = [_recorded(seen), SoftFormat()]
    task = from_rows(
        "halves", rows, reward=rewards, reward_weights=[0.75, 0.25], prefill="<think>\n"
    )
    seen.clear()  # the rows' own answers, scored when the task was made
    made = audit(task, n=ALL)
    # the format is not what judges the answer
    assert made.golds == 4 and made.reward == "recorder"
    assert all(
        text.startswith("<think>\n") and "</think>" in text and text.endswith("</answer>")
        for text, *_ in seen
    )
    copied = made.texts[made.texts["name"] == "copied from the question"]
    assert copied["text"].tolist() == [f"{2 * int(row['answer'])}/2" for row in task.held_out]
    assert {question for *_, question in seen} == {row["question"] for row in task.held_out}
    bare = audit(rewards[0], task.train[:2], n=ALL)
    assert bare.golds == 2 and seen[-1][0].startswith("<answer>")


def test_of_a_composite_every_part_that_judges_must_pay():
    def anything(completions, answer, **columns):
        return [0.5] * len(completions)

    rows = [{"question": str(n), "answer": f"{n}"} for n in range(10)]
    task = from_rows("two", rows, reward=WeightedSum({ExactAnswer(): 0.5, anything: 0.5}))
    made, alone = audit(task, n=ALL), audit(ExactAnswer(), task.held_out, n=ALL)
    assert made.reward == "exact_answer + anything" and made.texts.equals(alone.texts)
    careless = audit(anything, task.held_out, n=5)
    # 0.5 is its full score
    assert careless.table()["wrong"].tolist() == [0, 10] and set(careless.texts["score"]) == {1}


def test_what_was_asked_for_is_not_held_against_a_reward():
    rows = [
        {"answer": "6", "question": "What is 12/2?"},
        {"answer": "5 km"},
        {"answer": "1/3"},
        {"answer": "Paris"},
    ]
    asked = [
        (
            MathAnswer(expressions=True),
            {"copied from the question", "a sum to be done", "a difference to be done"},
        ),
        (MathAnswer(units="required"), {"without its unit"}),
        (NumericAnswer(tolerance=0.2), {"rounded", "one more", "and a half"}),
        (MathAnswer(significant=3), {"rounded", "one more", "and a half"}),
        (MathAnswer(case=True), {"the other capital"}),
    ]
    everything = set(audit(MathAnswer(), rows, n=ALL).texts["name"])
    for reward, names in asked:
        made = audit(Gated(reward, on=SoftFormat(think=None)), rows, n=ALL)
        assert (
            names == excused(reward.rules)
            and names <= everything
            and not names & set(made.texts["name"])
        )
        assert made.table()["wrong"].tolist() == [0, 0], made.worst.to_string()


def test_its_shapes_and_errors():
    rows = [{"gold": 2.0}]
    made = audit(
        ExactAnswer(column="gold", tag="result"), rows, column="gold", tag="result", n=2
    )
    assert (
        isinstance(made, Audit)
        and set(made.texts["gold"]) == {"2"}
        and made.table().shape == (2, 6)
    )
    assert list(made.texts) == ["gold", "text", "name", "right", "score"]
    assert list(made.worst) == ["gold", "text", "score", "name", "why", "times"]
    page = audit(_of(lambda text, gold: True), [{"answer": "<b"}], n=ALL)._repr_html_()
    assert "&lt;b or" in page and "<b or" not in page and "pays 100.0 % of" in page
    whole = audit(
        lambda completions, gold, **columns: [float(t == "2") for t in completions],
        rows,
        column="gold",
        tag=None,
    )
    assert whole.table()["wrong"].tolist() == [12, 0]  # fmt: skip
    for call, message in (
        (lambda: audit(ExactAnswer()), "rows=None: give rows"),
        (lambda: audit(ExactAnswer(), []), r"rows=\[\]: give rows"),
        (
            lambda: audit(ExactAnswer(), rows),
            "row 0 has no column 'answer'; it has \\['gold'\\]",
        ),
        (
            lambda: audit(ExactAnswer(), [{"answer": "5"}], n=0),
            "n=0 must be a whole number of at least 1",
        ),
        (lambda: audit(code()), "has no answer tags"),
        (lambda: audit(ExactAnswer(), [{"answer": ["5", "6"]}]), "is a list, not one answer"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_task_whose_prefill_holds_the_answer_is_refused():
    rows = [{"question": str(n), "answer": "5"} for n in range(6)]
    task = from_rows("given", rows, reward=ExactAnswer(), prefill="<answer>")
    object.__setattr__(task, "prefill", "<answer>5")
    object.__setattr__(task, "cases", lambda row: _honest_in(task.prefill, row))
    with pytest.raises(ValueError, match="has no <answer> answer of its own"):
        audit(task)


def _honest_in(prefill, row):
    return [Case("honest", "</answer>", honest=True, prefill=prefill, columns=row)]


@pytest.mark.parametrize(
    ("gold", "never", "reason"),
    [
        ("0", {"the other sign", "ten times", "squared", "plus or minus", "times i", "a remainder"}, "0 is its own"),
        ("1", {"squared", "its root", "its reciprocal", "factorial"}, "1 is its own"),
        ("-1", {"squared", "its reciprocal", "factorial"}, "-1^2 is -1, and -1! is -1"),
        ("2", {"factorial"}, "2! is 2"),
        ("9", {"in base seven"}, "5_7 is 5"),
        ("1,221", {"digits turned round"}, "a palindrome"),
        ("10", {"digits turned round"}, "01 is 1, but who writes so"),
        ("0 km", {"another unit", "another power of its unit"}, "no length is no length in any unit"),
        ("1/4", {"rounded"}, "0.250000 is exact"),
        (r"\sqrt{16}", {"rounded"}, "4 is exact"),
        ("(3, 3)", {"items in another order"}, "the same pair"),
        (r"(-\infty, \infty)", {"brackets changed", "one bracket changed"}, "infinity has no closed end"),
        ("2:2", {"upside down"}, "the same ratio"),
        ("0:3", {"one more"}, "0:3 is 0:4"),
        ("Level", {"letters in another order"}, "a palindrome"),
        ("Paris", {"the other case"}, "words have no case"),
        (r"x \le 2", {"either of two", "two answers"}, "x <= 2 or x <= 1 is x <= 2"),
        (r"\{1, 2\}", {"an item twice"}, "a set has each item once"),
        (r"\frac{x^2}{2} + C", {"another constant"}, "any letter will do"),
    ],
)  # fmt: skip
def test_a_gold_is_not_its_own_neighbour(gold, never, reason):
    names = set(near_misses(gold))
    assert names and not names & never, reason
    assert gold not in near_misses(gold).values()


def test_the_table_says_why_and_every_name_is_in_it():
    path = Path(grpo_kit.verdicts._neighbours.__file__).with_name("neighbours.csv")
    with path.open(encoding="utf-8") as file:
        table = list(csv.DictReader(file, delimiter=";", quoting=csv.QUOTE_NONE))
    assert len(table) > 150 and all(
        row["name"] and row["why"] and None not in row for row in table
    )
    near = {row["name"] for row in table if row["list"] == "near"}
    assert set(TRIED) <= near
    assert set().union(*_BY_RULE.values()) <= {row["name"] for row in table}
    used = {
        name
        for gold in [*GOLDS, "6"]
        for texts in (equal_texts(gold), near_misses(gold, "12/2"))
        for name in texts
    }
    assert {row["name"] for row in table} - used <= set(), "rows that no gold has"


@pytest.mark.parametrize(
    ("question", "gold", "copied"),
    [
        ("What is 12/2?", "6", "12/2"),
        ("Sam has 100 - 94 eggs.", "6", "100 - 94"),
        ("What is 3 × 4 ÷ 2?", "6", "3 × 4 ÷ 2"),
        ("What is (2 + 4)?", "6", "(2 + 4)"),
        ("What is 12/2?", "7", None),
        ("Half of 12, on 1/2/2020", "6", None),
        ("Write 1/2 as a decimal", "0.5", None),  # a fraction is finished
        ("6", "6", None),
        ("", "6", None),
    ],
)
def test_the_questions_own_arithmetic_is_tried(question, gold, copied):
    assert near_misses(gold, question).get("copied from the question") == copied
    if copied:
        rows = [{"question": f"{question} {'!' * n}", "answer": gold} for n in range(6)]
        strict = from_rows("copied", rows, reward=MathAnswer())
        table = check_rewards(strict.rewards, strict).set_index("case")
        assert table.loc["copied from the question", "total"] == 0
        free = from_rows("copied", rows, reward=MathAnswer(expressions=True))
        assert (
            "copied from the question" not in check_rewards(free.rewards, free)["case"].tolist()
        )


def test_check_rewards_tries_the_near_misses_of_an_answer_reward():
    class Lenient(MathAnswer):
        def score(self, answer, gold, question=None):
            return 1.0 if answer and gold in answer else super().score(answer, gold, question)

    def task(reward, answers):
        rows = [
            {"question": f"question {n}", "answer": answer} for n, answer in enumerate(answers)
        ]
        return from_rows("near", rows, reward=reward, prefill="<answer>")

    lenient = task(Lenient(), ["15"] * 4 + ["16"] + ["14"] * 5)
    with pytest.raises(RewardCheckError) as caught:
        check_rewards(lenient.rewards, lenient)
    for name in (
        "either of two",
        "denied",
        "an earlier draft",
        "ten times",
        "a set that holds it",
    ):
        assert f"{name!r} (1) ties with the honest" in str(caught.value)
    words = task(MathAnswer(), ["ABC"] * 5 + ["BCD"] * 5)
    names = check_rewards(words.rewards, words)["case"].tolist()
    assert {"letters in another order", "the other case", "denied"} <= set(
        names
    ) and "ten times" not in names
    wide = task(NumericAnswer(tolerance=1), ["40"] * 4 + ["16"] + ["40"] * 4 + ["24"])
    assert "one more" not in check_rewards(wide.rewards, wide)["case"].tolist()
    assert MathAnswer().cheats(_honest_in("", {"answer": None})[0]) == []


@pytest.mark.parametrize(
    "row, column",
    [
        ({"completion": "5", "prompt": "2 + 3?"}, "completion"),
        ({"gold": "5", "completions": ["5"], "self": 1}, "gold"),
        ({"answer": "5", "prefill": "<a>", "images": None}, "answer"),
        ({"Final Answer": 5, 7: "a number as a name"}, "Final Answer"),
        ({"prompts": "5", "question": [{"role": "user", "content": "2 + 3?"}]}, "prompts"),
        ({"name": "5", "reward": 1.0, "log_extra": None, "trainer_state": {}}, "name"),
    ],
)
def test_rows_may_have_any_columns(row, column):
    made = audit(MathAnswer(), [row], column=column)
    assert made.golds == 1 and made.table()["n"].min() > 0 and not made.left_out
    with pytest.raises(ValueError, match="row 0 has no column 'elsewhere'; it has"):
        audit(MathAnswer(), [row], column="elsewhere")

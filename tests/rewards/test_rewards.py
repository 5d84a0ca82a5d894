"""Rewards: tables with a reason on each row, properties for any text, and the way TRL calls them."""

import math
import re
import threading
import time

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_trl import make_plain

from grpo_kit.rewards import (
    ExactAnswer,
    MathAnswer,
    NumericAnswer,
    SoftFormat,
    WeightedSum,
    extract_answer,
    last_number,
    on_response,
)
from grpo_kit.rewards.response import is_blank
from grpo_kit.tasks.countdown import CountdownAnswer, evaluate

# --- extract_answer, last_number -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "expected", "reason"),
    [
        ("<answer>82</answer>", "82", "the plain case"),
        (
            "so <answer>\n 82 \n</answer> done",
            "82",
            "white space inside is not the answer's; text around is fine",
        ),
        ("<answer>a < b</answer>", "a < b", "other angle brackets are text"),
        ("<think>a\nb</think>\n<answer>1\n2</answer>", "1\n2", "several lines"),
        ("<answer>82", None, "never closed"),
        ("82</answer>", None, "never opened"),
        ("</answer>82<answer>", None, "wrong order"),
        ("<answer></answer>", None, "nothing said"),
        ("<answer> \n </answer>", None, "white space is nothing"),
        ("<answer>82</answer><answer>47</answer>", None, "two answers are hedging"),
        ("<answer>82</answer><answer>82</answer>", None, "even the same one twice"),
        ("<answer><answer>82</answer>", None, "opened twice"),
        ("<answer>82</answer> or 47</answer>", None, "closed twice"),
        ("<Answer>82</Answer>", None, "tags are lower case"),
        ("", None, "nothing at all"),
    ],
)
def test_extract_answer(response, expected, reason):
    assert extract_answer(response) == expected, reason


def test_extract_answer_reads_the_tag_it_is_told():
    assert extract_answer("<a>1</a><answer>2</answer>", tag="a") == "1"


@pytest.mark.parametrize(
    ("text", "expected", "reason"),
    [
        ("18 - 5 = 13", "13", "the last, not the first"),
        ("it is -3.", "-3", "a sign belongs to it, a full stop does not"),
        ("18-5", "5", "a minus between two numbers is subtraction"),
        ("$1,300.50!", "1300.50", "thousands separators go"),
        ("47, 82, 15", "15", "commas of a list are no separators"),
        ("1,2345", "2345", "nor are groups that are not of three"),
        ("none", None, "no number"),
        ("", None, "no text"),
    ],
)
def test_last_number(text, expected, reason):
    assert last_number(text) == expected, reason


# --- format ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "expected", "reason"),
    [
        ("<think>a</think><answer>1</answer>", 1.0, "everything"),
        (
            "<think>a\nb</think>\n\n<answer>1\n2</answer>\n",
            1.0,
            "several lines (DOTALL) and white space at the end",
        ),
        ("<think>a</think><answer>1</answer> bye", 0.75, "something after the answer"),
        ("<think>a</think><answer>1", 0.375, "cut off: three tags"),
        ("<think>a</think>", 0.25, "two tags"),
        ("<think>a", 0.125, "one tag"),
        ("<answer>1</answer>", 0.5, "answer tags and nothing after; no order without thinking"),
        (
            "<answer>1</answer><think>a</think>",
            0.5,
            "all tags, but thinking after the answer: no order, no clean end",
        ),
        ("<think>a<answer>1</answer></think>", 0.5, "answer inside the thinking"),
        ("<think>a</think><answer></answer>", 0.75, "an empty answer is no answer"),
        (
            "<think> \u200b\n</think><answer>1</answer>",
            0.75,
            "nor is a thought that nobody sees one",
        ),
        ("<think>...</think><answer>1</answer>", 0.75, "nor one without a word"),
        (
            "<think><think>a</think><answer>1</answer>",
            0.625,
            "a tag twice earns nothing, and no order",
        ),
        ("<think></think><answer></answer>" * 3, 0.0, "tag spam earns nothing"),
        (
            "<think>a</think><answer>1</answer><answer>2</answer>",
            0.25,
            "two answers: only the think tags count",
        ),
        ("82", 0.0, "no format"),
        ("", 0.0, "nothing"),
    ],
)
def test_soft_format(response, expected, reason):
    assert SoftFormat()([response]) == [expected], reason


@pytest.mark.parametrize(
    ("prefill", "completion", "expected", "reason"),
    [
        ("<answer>", "82</answer>", 1.0, "the prefill is part of the response"),
        ("<answer>", "82", 0.25, "the prefill's tag alone"),
        ("<answer>", "82</answer> ok", 0.75, "text after the answer"),
        ("<answer>", "<answer>82</answer>", 0.5, "prefill said again: opened twice"),
        ("<answer>82</answer>", "", 0.75, "an answer the model did not write earns no order"),
        ("", "82</answer>", 0.5, "never opened: the closing tag and the clean end"),
        (None, "<answer>82</answer>", 1.0, "no prefill"),
    ],
)
def test_soft_format_without_thinking(prefill, completion, expected, reason):
    assert SoftFormat(think=None)([completion], prefill=[prefill]) == [expected], reason


def test_soft_format_with_own_tags_and_bad_ones():
    assert SoftFormat(think="r", answer="a")(["<r>x</r><a>1</a>"]) == [1.0]
    for bad in ({"think": ""}, {"answer": ""}, {"think": "answer"}):
        with pytest.raises(
            ValueError, match="two different names|name of a tag without brackets"
        ):
            SoftFormat(**bad)


# --- answers ---------------------------------------------------------------------------------------------


def _score(reward, answer, gold, *, prefill=""):
    return reward([f"<answer>{answer}</answer>"], prefill=[prefill], answer=[gold])[0]


@pytest.mark.parametrize(
    ("completion", "prefill", "gold", "expected", "reason"),
    [
        ("82</answer>", "<answer>", "82", 1.0, "right"),
        (" 82\n</answer>", "<answer>", "82", 1.0, "white space at the ends"),
        ("82.0</answer>", "<answer>", "82", 0.0, "exact means the characters"),
        ("47</answer>", "<answer>", "82", 0.0, "wrong"),
        ("82", "<answer>", "82", 0.0, "never closed"),
        ("The answer is 82.", "", "82", 0.0, "not in the tags"),
        ("", "<answer>82</answer>", "82", 0.0, "the prefill answered, not the model"),
        ("</answer>", "<answer>82", "82", 0.0, "the model only closed the tag"),
        ("2</answer>", "<answer>8", "82", 1.0, "the model finished the answer"),
        ("<answer>82</answer>", None, 82, 1.0, "a gold that is a number is compared as text"),
        ("<answer>82</answer>", "", None, None, "no gold: cannot judge"),
        ("<answer>82</answer>", "", " ", None, "an empty gold is no gold"),
    ],
)
def test_exact_answer(completion, prefill, gold, expected, reason):
    assert ExactAnswer()([completion], prefill=[prefill], answer=[gold]) == [expected], reason


@pytest.mark.parametrize(
    ("answer", "gold", "expected", "reason"),
    [
        ("18", "18", 1.0, "right"),
        ("18.0", "18", 1.0, "the same number"),
        ("$1,200.50", "1200.5", 1.0, "currency and thousands"),
        ("50%", "50", 0.0, "a half, and no fifty"),
        ("%50", "50", 0.0, "a percent sign before the number says nothing"),
        ("50%%", "50", 0.0, "one is enough"),
        ("1e3", "1000", 1.0, "an exponent"),
        ("-2.5E-3", "-0.0025", 1.0, "a negative exponent"),
        ("1000", "1e+03", 1.0, "as Python writes a large float"),
        ("1e-7", 1e-07, 1.0, "as Python writes a small one"),
        ("1e9999", "1000", 0.0, "more digits than an exponent has"),
        ("1e3/4", "250", 1.0, "a fraction of two numbers"),
        ("18.", "18", 1.0, "full stop"),
        ("3/4", "0.75", 1.0, "a fraction, exactly"),
        ("-3", "\N{MINUS SIGN}3", 1.0, "typographic minus"),
        (".5", "0.5", 1.0, "no leading zero"),
        ("19", "18", 0.0, "wrong"),
        ("18 or 19", "18", 0.0, "two numbers"),
        ("17, 18", "18", 0.0, "a list"),
        ("1,8", "18", 0.0, "no thousands separator there"),
        ("18 apples", "18", 1.0, "what is counted, though the gold leaves it out"),
        ("1/0", "18", 0.0, "no number, and no crash"),
        ("1" * 5000, "18", 0.0, "digits beyond Python's int limit do not crash"),
        ("nan", "18", 0.0, "not a number"),
        ("inf", "18", 0.0, "not a number either"),
        ("18", "eighteen", 1.0, "a number in words"),
        ("18", "a few", None, "gold is not a number: cannot judge"),
        ("18", None, None, "no gold"),
        ("18", True, None, "a truth value is no gold, though Python counts with it"),
    ],
)
def test_numeric_answer(answer, gold, expected, reason):
    assert _score(NumericAnswer(), answer, gold) == expected, reason


def test_numeric_tolerance_is_absolute_and_inclusive():
    reward = NumericAnswer(tolerance=0.5)
    assert [_score(reward, a, "10") for a in ("10.5", "9.5", "10.51")] == [1.0, 1.0, 0.0]
    for bad in (-1, math.nan, math.inf):
        with pytest.raises(ValueError, match="tolerance="):
            NumericAnswer(tolerance=bad)


MATH_ROWS = [
    (r"\frac{1}{2}", "0.5", 1.0, "LaTeX against decimal"),
    ("1/2", r"$\frac12$", 1.0, "plain against LaTeX with dollars"),
    (r"\boxed{7}", "7", 1.0, "a box is no content"),
    ("2x + 1", "1 + 2x", 1.0, "the same expression"),
    ("1,234", "1234", 1.0, "thousands"),
    ("(1, 2)", "(1,2)", 1.0, "a pair, when the gold is one"),
    (r"2\sqrt{2}", r"\sqrt{8}", 1.0, "equal after simplifying"),
    ("4", "5", 0.0, "wrong"),
    ("5, 4", "5", 0.0, "alternatives"),
    ("5 or 4", "5", 0.0, "alternatives in words"),
    ("$5$ $4$", "5", 0.0, "math-verify would take the first of them"),
    (r"\boxed{5} \boxed{4}", "5", 0.0, "or the first box"),
    (r"4 \boxed{5}", "5", 0.0, "or the box of what stands beside it"),
    (r"4, \boxed{5}", "5", 0.0, "or of a list"),
    ("4 $5$", "5", 0.0, "or the dollars"),
    ("4\n5", "5", 0.0, "two lines, two answers"),
    ("4=5", "5", 0.0, "math-verify takes the right side of an equation"),
    ("x = 5", "5", 1.0, "the name of the unknown is no alternative"),
    ("x = 5", "x = 5", 1.0, "nor where the gold has it"),
    (r"\(5\).", "5", 1.0, "LaTeX brackets and a full stop"),
    ("5", r"$\boxed{5}$", 1.0, "a wrapped gold"),
    ("???", "5", 0.0, "no mathematics"),
    ("10^{10^{10}}", "5", 0.0, "would not fit in memory"),
    ("9**9**9**9", "5", 0.0, "nor this"),
    ("999999999!", "5", 0.0, "nor this"),
    ("2^{99999999}", "5", 0.0, "nor this"),
    ("9^{99*99*99}", "5", 0.0, "nor this"),
    ("((9^{999})^{999})^{999}", "5", 0.0, "nor this"),
    ("y^2 + x^2", "x^2 + y^2", 1.0, "but small powers are fine"),
    ("(x-1)^2(x+1)^2", "(x+1)^2(x-1)^2", 1.0, "in products too"),
    ("5", "10^{10^{10}}", None, "nor can a gold be worked out that would not"),
    (
        r"x \equiv 3 \pmod{1/0}",
        r"x \equiv 3 \pmod{5}",
        0.0,
        "a modulus that has no value is no error",
    ),
    (r"x \ne 1/0, x \ne 2", r"x \ne 1, x \ne 2", 0.0, "nor is a bound"),
    ("x = 1/0", "x = 5", 0.0, "nor a value"),
    ("5", "", None, "no gold"),
    ("5", None, None, "no gold"),
    ("5", "???", None, "gold cannot be read: never 1, never 0"),
    ("???", "???", None, "not even where the texts agree: it says nothing"),
    (r"\int_0^1 f", r"\int_0^1 f", 1.0, "a gold that cannot be read, said word for word"),
    (r"\int_0^1 g", r"\int_0^1 f", None, "and in other words: cannot judge"),
]


@pytest.mark.parametrize(("answer", "gold", "expected", "reason"), MATH_ROWS)
def test_math_answer(answer, gold, expected, reason):
    assert _score(MathAnswer(timeout=30), answer, gold) == expected, reason


def test_math_answer_that_runs_out_of_time_cannot_judge():
    assert _score(MathAnswer(timeout=1e-9), "x + 1", "1 + y") is None
    assert _score(MathAnswer(timeout=30), "x + 1", "1 + y") == 0.0
    with pytest.raises(ValueError, match="timeout=0"):
        MathAnswer(timeout=0)


@pytest.mark.parametrize("answer", [
    r"\sum_{i=1}^{2000} \sum_{j=1}^{2000} \sqrt{i+j}", "e^{e^{e^{e^{9}}}}", r"\sin(10^{2000} \pi)", "9!!!!!!!!!",
    "+".join([r"\sqrt{2}"] * 60), "(" * 150 + "2" + ")" * 150, "9" * 390, "2^(2^(2^(2^(2^2))))",
    "x" + "^{x" * 40 + "}" * 40,
])  # fmt: skip
def test_a_verdict_takes_no_longer_than_it_may_off_the_main_thread_too(answer):
    """Seconds of this thread: other tests may hold the machine."""
    spent = []

    def judge():
        start = time.thread_time()
        spent.append(_score(MathAnswer(timeout=1), answer, r"\sqrt{2}"))
        spent.append(time.thread_time() - start)

    worker = threading.Thread(target=judge)
    worker.start()
    worker.join(timeout=60)
    assert spent[0] in (0.0, None) and spent[1] < 2


def test_math_answer_off_the_main_thread_gives_the_same_and_no_signal_error():
    got = []
    worker = threading.Thread(
        target=lambda: got.extend(_score(MathAnswer(), a, g) for a, g, _, _ in MATH_ROWS)
    )
    worker.start()
    worker.join(timeout=60)
    assert got == [expected for _, _, expected, _ in MATH_ROWS]


@pytest.mark.parametrize(
    ("answer", "binary", "tiers", "reason"),
    [
        ("(3 + 5) * 2", 1.0, 1.0, "right"),
        ("2 * (5 + 3)", 1.0, 1.0, "another order"),
        ("2 × (5 + 3)", 1.0, 1.0, "a typographic sign"),
        ("3 + 5 * 2", 0.0, 0.5, "all numbers, another value"),
        ("8 * 2", 0.0, 0.25, "other numbers, though it makes 16"),
        ("3 + 5 + 2 + 3 + 3", 0.0, 0.25, "numbers used again, though it makes 16"),
        ("(3 + 5) * 2 = 16", 0.0, 0.0, "an equation is no expression"),
        ("16", 0.0, 0.0, "the target alone"),
        ("2 ** 4", 0.0, 0.0, "no powers"),
        ("35 // 2", 0.0, 0.0, "no floor division"),
        ("-3 + 5 * 2", 0.0, 0.0, "no signs"),
        ("3 (5)", 0.0, 0.0, "a call"),
        ("__import__('os')", 0.0, 0.0, "no names"),
        ("(" * 90 + "1", 0.0, 0.0, "brackets without end"),
        ("1" * 5000, 0.0, 0.0, "too long"),
        ("05 + 3 * 2", 0.0, 0.0, "no Python number"),
    ],
)
def test_countdown_answer(answer, binary, tiers, reason):
    row = {"numbers": [[3, 5, 2]], "target": [16]}
    completion = [f"<answer>{answer}</answer>"]
    assert CountdownAnswer()(completion, **row) == [binary], reason
    assert CountdownAnswer(partial_credit=True)(completion, **row) == [tiers], reason


def test_evaluate_is_exact_and_bounded():
    assert evaluate("1 / 3 * 3") == 1
    assert evaluate("1 / (2 - 2)") is None
    assert evaluate("9" * 100) is not None
    assert evaluate("9" * 101) is None


# --- any text --------------------------------------------------------------------------------------------

PIECES = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<answer>",
        "</answer>",
        "82",
        "1/0",
        "\\frac{",
        "$",
        "^",
        "\n",
        " ",
        "(",
        "-",
        "é",
        "9,",
    ]
)
TEXT = st.one_of(st.text(max_size=60), st.lists(PIECES, max_size=12).map("".join))
CHEAP = [
    (SoftFormat(), {}),
    (SoftFormat(think=None), {}),
    (ExactAnswer(), {"answer": TEXT}),
    (NumericAnswer(tolerance=1), {"answer": TEXT}),
    (
        CountdownAnswer(),
        {"numbers": st.lists(st.integers(1, 9), max_size=4), "target": st.integers(0, 99)},
    ),
    (CountdownAnswer(partial_credit=True), {"numbers": st.just([8, 2]), "target": st.just(82)}),
    (WeightedSum({ExactAnswer(): 0.5, SoftFormat(): 0.5}), {"answer": TEXT}),
]


def _ids(case):
    return repr(case[0])


def _batch(draw, columns):
    rows = draw(
        st.lists(
            st.fixed_dictionaries({"completion": TEXT, "prefill": TEXT, **columns}), max_size=5
        )
    )
    return [row.pop("completion") for row in rows], rows


def _call(reward, completions, rows):
    names = rows[0].keys() if rows else ["prefill", *reward.columns]
    return reward(completions, **{name: [row[name] for row in rows] for name in names})


@pytest.mark.parametrize("case", CHEAP, ids=_ids)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_text_scores_in_range_and_the_order_of_the_batch_does_not_matter(case, data):
    reward, columns = case
    completions, rows = _batch(data.draw, columns)
    scores = _call(reward, completions, rows)
    assert len(scores) == len(completions)
    assert all(score is None or 0 <= score <= 1 for score in scores)
    assert _call(reward, completions[::-1], rows[::-1]) == scores[::-1]


@given(answer=TEXT, gold=TEXT)
@settings(max_examples=40, deadline=None)
def test_math_answer_survives_any_text(answer, gold):
    reward = MathAnswer(timeout=30)
    score = _score(reward, answer, gold)
    assert score in (None, 0.0, 1.0)
    assert reward([f"<answer>{answer}</answer>", ""], answer=[gold, gold])[0] == score


@given(TEXT)
def test_only_a_complete_format_is_worth_one(response):
    plain = re.fullmatch(r"(?s).*?<think>(.*?)</think>.*?<answer>(.*?)</answer>(.*)", response)
    counts = all(
        response.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>")
    )
    whole = bool(
        plain and counts and not is_blank(plain[1], words=True) and not is_blank(plain[2])
    )
    whole = whole and is_blank(plain[3])
    assert (SoftFormat()([response]) == [1.0]) == whole


# --- the contract: how trainers call them ----------------------------------------------------------------

TRL_KEYWORDS = {
    "prompts": ["p", "p"],
    "completion_ids": [[1, 2], [3]],
    "trainer_state": object(),
    "question": ["q", "q"],
    "environments": None,
}
REWARDS = [
    (ExactAnswer(), "exact_answer", {"answer": ["5", "5"]}),
    (NumericAnswer(), "numeric_answer", {"answer": ["5", "5"]}),
    (MathAnswer(), "math_answer", {"answer": ["5", "5"]}),
    (SoftFormat(think=None), "soft_format", {}),
    (CountdownAnswer(), "countdown_answer", {"numbers": [[3, 2], [3, 2]], "target": [5, 5]}),
    (
        WeightedSum({ExactAnswer(): 0.75, SoftFormat(think=None): 0.25}),
        "weighted_sum",
        {"answer": ["5", "5"]},
    ),
]


@pytest.mark.parametrize(
    ("reward", "name", "columns"), REWARDS, ids=[name for _, name, _ in REWARDS]
)
def test_called_as_trl_does(reward, name, columns):
    right = "3 + 2</answer>" if "numbers" in columns else "5</answer>"
    logged = {}
    scores = reward(
        completions=[right, "no"],
        prefill=["<answer>", "<answer>"],
        log_extra=logged.setdefault,
        log_metric=logged.setdefault,
        **TRL_KEYWORDS,
        **columns,
    )
    assert scores[0] == 1.0
    assert scores[1] < 0.5
    assert reward.__name__ == name
    assert set(reward.columns) == set(columns)
    conversation = [[{"role": "assistant", "content": text}] for text in (right, "no")]
    assert reward(completions=conversation, prefill="<answer>", **columns) == scores


@pytest.mark.parametrize(
    ("reward", "name", "columns"), [r for r in REWARDS if r[2]], ids=lambda v: str(v)[:20]
)
def test_a_missing_or_short_column_is_named(reward, name, columns):
    wanted = next(iter(columns))
    with pytest.raises(
        ValueError, match=f"(?s){'' if name == 'weighted_sum' else name}.*{wanted!r}"
    ):
        reward(["a", "b"])
    short = {**columns, wanted: columns[wanted][:1]}
    with pytest.raises(ValueError, match=f"{wanted!r} has 1 rows for 2 completions"):
        reward(["a", "b"], **short)


def test_plain_trl_trains_with_them_unchanged(tmp_path):
    total = WeightedSum({ExactAnswer(): 0.75, SoftFormat(think=None): 0.25})

    @on_response
    def starts_with_tag(responses):
        return [float(response.startswith("<answer>")) for response in responses]

    rows = Dataset.from_list(
        [{"prompt": "One: <answer>", "prefill": "<answer>", "answer": "5"}] * 4
    )
    trainer = make_plain(tmp_path, rewards=[total, starts_with_tag], dataset=rows, max_steps=1)
    trainer.train()
    log = trainer.state.log_history[0]
    # every completion begins after the prefill
    assert log["rewards/starts_with_tag/mean"] == 1.0
    assert log["rewards/weighted_sum/mean"] == pytest.approx(log["reward/soft_format"] / 4)
    assert log["reward/exact_answer"] == 0.0


# --- on_response -----------------------------------------------------------------------------------------


def test_on_response_gives_the_whole_response_and_only_the_named_columns():
    seen = {}

    @on_response
    def mine(responses, answer, *, step=0):
        """Doc."""
        seen.update(responses=responses, answer=answer, step=step)
        return [1.0] * len(responses)

    assert mine(["b", "c"], prefill=["a", None], answer=["x", "y"], trainer_state=None) == [
        1.0,
        1.0,
    ]
    assert seen == {"responses": ["ab", "c"], "answer": ["x", "y"], "step": 0}
    assert (mine.__name__, mine.__doc__, mine.columns) == ("mine", "Doc.", ("answer",))


def test_on_response_passes_everything_to_kwargs_and_the_prefill_on_request():
    @on_response
    def everything(responses, prefill, **columns):
        return [float(len(prefill) == 1 and "extra" in columns and "prompts" in columns)]

    assert everything(["b"], prefill=["a"], extra=["e"], prompts=["p"]) == [1.0]
    assert everything.columns == ()


def test_prefills_must_match_the_completions():
    with pytest.raises(ValueError, match="prefill has 1 rows for 2 completions"):
        SoftFormat()(["a", "b"], prefill=["<think>"])
    with pytest.raises(ValueError, match="neither text nor messages"):
        SoftFormat()([5])


# --- WeightedSum -----------------------------------------------------------------------------------------


def _constant(name, value):
    def reward(completions, **columns):
        return [value] * len(completions)

    reward.__name__ = name
    return reward


def test_weighted_sum_shows_its_parts():
    metrics, extra = {}, {}
    total = WeightedSum([(ExactAnswer(), 0.75), (SoftFormat(think=None), 0.25)])
    scores = total(
        ["5</answer>", "5", "4</answer>"],
        prefill="<answer>",
        answer=["5", "5", "5"],
        log_metric=metrics.__setitem__,
        log_extra=extra.__setitem__,
    )
    assert scores == [1.0, 0.0625, 0.25]
    assert extra == {
        "reward/exact_answer": [1.0, 0.0, 0.0],
        "reward/soft_format": [1.0, 0.25, 1.0],
    }
    assert metrics == {"reward/exact_answer": 1 / 3, "reward/soft_format": 0.75}


def test_weighted_sum_cannot_judge_where_a_part_cannot():
    metrics = {}
    total = WeightedSum({ExactAnswer(): 0.5, _constant("one", 1.0): 0.5})
    scores = total(
        ["<answer>5</answer>"] * 2, answer=["5", None], log_metric=metrics.__setitem__
    )
    assert scores == [1.0, None]
    assert metrics["reward/exact_answer"] == 1.0  # the mean of the one it judged


def test_ten_tenths_stay_within_one():
    total = WeightedSum(
        [(_constant(f"r{i}", 1.0), w) for i, w in enumerate([0.1, 0.2, 0.7, 1e-17])]
    )
    assert total(["a"])[0] <= 1.0


@pytest.mark.parametrize(
    ("parts", "message", "reason"),
    [
        ({}, "sum to 1", "nothing to sum"),
        ([(_constant("a", 1.0), 0.5)], "sum to 1", "half a reward"),
        (
            [(_constant("a", 1.0), 1.5), (_constant("b", 1.0), -0.5)],
            "positive",
            "accentuate the positive",
        ),
        (
            [(one := _constant("a", 1.0), 0.5), (one, 0.5)],
            "add its weights up",
            "one part twice",
        ),
        ([(MathAnswer.__call__, 0.5), (object(), 0.5)], "cannot be called", "no function"),
    ],
)
def test_weighted_sum_refuses(parts, message, reason):
    with pytest.raises(ValueError, match=message):
        WeightedSum(parts)


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf, 1e20])
def test_a_part_without_a_finite_score_is_named_with_row_and_completion(value):
    total = WeightedSum([(_constant("good", 1.0), 0.5), (_constant("bad", value), 0.5)])
    with pytest.raises(ValueError, match="'bad' gave .* in row 0, completion 'hello'"):
        total(["hello"])


def test_a_part_of_the_wrong_length_is_named_and_an_exception_is_never_a_score():
    def short(completions, **columns):
        return [1.0]

    def broken(completions, **columns):
        raise KeyError("boom")

    with pytest.raises(ValueError, match="'short' returned 1 scores for 2 completions"):
        WeightedSum({short: 1.0})(["a", "b"])
    with pytest.raises(
        ValueError, match="'broken' raised KeyError: 'boom'\nrow 0, completion 'a'"
    ):
        WeightedSum({broken: 1.0})(["a"])

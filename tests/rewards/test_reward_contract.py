"""The contract that every reward keeps, on any text. A new reward is one line in ROWS."""

import copy
import inspect
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import grpo_kit.rewards
from grpo_kit.more.code._code_runner import CodeRunner
from grpo_kit.more.code.code_rewards import CodeFormat, CodeRuns, CodeTests
from grpo_kit.more.code.sandbox import isolation
from grpo_kit.more.episodes.tool_calls import (
    CallAccuracy,
    CallEfficiency,
    CallShape,
    CallValidity,
)
from grpo_kit.more.tasks.bleu_rouge import Bleu, Rouge
from grpo_kit.more.tasks.interval_scheduling import ScheduleShare
from grpo_kit.rewards._parts import range_of
from grpo_kit.rewards.answers import ExactAnswer, MathAnswer, NumericAnswer
from grpo_kit.rewards.cheat_cases import Case
from grpo_kit.rewards.combine import Clipped, Gated, WeightedSum
from grpo_kit.rewards.form import Language, Repetition, RightSize, SoftFormat
from grpo_kit.rewards.scoring import off_scale
from grpo_kit.rewards.scoring import score as judge_ask
from grpo_kit.tasks.countdown import CountdownAnswer

PIECES = st.sampled_from(
    ["<think>", "</think>", "<answer>", "</answer>", "82", "1/0", "\\frac{", "$", "^", "\n", " ", "(", "-", "é", "9,",
     "```python\n", "```", "add(2, 3)", "水", "ответ", "water", "\x00", "\ud800", "\\(", "`", "&amp;", "ﷺ"]
)  # fmt: skip
ANY_CHARACTER = st.characters(exclude_categories=())  # lone surrogates too
TEXT = st.one_of(
    st.text(ANY_CHARACTER, max_size=60), st.lists(PIECES, max_size=12).map("".join)
)
GOLD = st.one_of(TEXT, st.none(), st.lists(TEXT, max_size=3))
WHOLE = 100_000
NASTY = {
    "empty": "",
    "white space": " \n\t\u2028",
    "NULs": "\x00" * 50,
    "lone surrogates": "<answer>\ud800\udfff</answer>",
    "one letter": "x" * WHOLE,
    "digits": "<answer>" + "9" * WHOLE + "</answer>",
    "words": "<answer>" + "water " * (WHOLE // 6) + "</answer>",
    "tags": "<answer>" * (WHOLE // 8),
    "brackets": "<answer>" + "(" * WHOLE + "</answer>",
    "backslashes": "\\(" * (WHOLE // 2),
    "fences": "```python\n" * (WHOLE // 10),
    "Chinese": "<answer>" + "水分子" * (WHOLE // 3) + "</answer>",
    "grows when normalized": "<answer>" + "ﷺ" * WHOLE + "</answer>",
}
FORMAT = SoftFormat(think=None)
CALLS = ["add(2, 3)", "mul(x, 4)"]
PROGRAM = "```python\ndef f(n):\n    return n + 1\n```"


class Row(NamedTuple):
    reward: Any
    right: str  # a completion worth the best there is, with these columns
    row: dict[str, Any]
    # other values of the columns; those left out keep the row's
    values: dict[str, st.SearchStrategy] = {}
    examples: int = 40
    best: float = 1.0


ROWS = [
    Row(ExactAnswer(), "<answer>5</answer>", {"answer": "5"}, {"answer": TEXT}),
    Row(NumericAnswer(), "<answer>5</answer>", {"answer": "5"}, {"answer": TEXT}),
    Row(MathAnswer(timeout=30), "<answer>x + 1</answer>", {"answer": "1 + x"}, {"answer": TEXT}, 15),
    Row(FORMAT, "<answer>5</answer>", {}),
    Row(SoftFormat(), "<think>a</think><answer>5</answer>", {}),
    Row(Bleu(), "<answer>cell wall</answer>", {"answer": "cell wall"}, {"answer": GOLD}),
    Row(Bleu(tag=None, tokenize="zh"), "水分子", {"answer": ["水分子"]}, {"answer": GOLD}),
    Row(Bleu(tag=None, tokenize="char", lowercase=False), "ab", {"answer": "ab"}, {"answer": GOLD}),
    Row(Bleu(tag=None, tokenize="intl"), "water", {"answer": "water"}, {"answer": GOLD}),
    Row(Rouge(), "<answer>cell wall</answer>", {"answer": "cell wall"}, {"answer": GOLD}),
    Row(Rouge("rouge1", tag=None), "cell wall", {"answer": "cell wall"}, {"answer": GOLD}),
    Row(Rouge("rouge2"), "<answer>cell wall</answer>", {"answer": "cell wall"}, {"answer": GOLD}),
    Row(RightSize(80, 100, unit="characters"), "some text", {}),
    Row(RightSize(8, 10, unit="tokens", shortest=2), "some text", {"completion_ids": [1, 2]},
        {"completion_ids": st.lists(st.integers(0, 9), max_size=12)}),
    Row(Repetition(), "some text", {}),
    Row(Language("latin"), "some text", {}),
    Row(Language("kana", "han"), "水", {}),
    Row(CountdownAnswer(), "<answer>(3 + 5) * 2</answer>", {"numbers": [3, 5, 2], "target": 16}),
    Row(CallValidity({"add": 2, "mul": 2}), "<answer>add(2, 3)</answer>", {}),
    Row(CallAccuracy(), "<answer>add(2, 3); mul(x, 4)</answer>", {"calls": CALLS}),
    Row(CallShape(), "<answer>add(9, 9); mul(x, x)</answer>", {"calls": CALLS}),
    # 1 - 1/50: one call is the least
    Row(CallEfficiency(), "<answer>add(2, 3)</answer>", {}, best=0.98),
    Row(ScheduleShare(), "<answer>A C</answer>", {"events": [[9, 11, 2], [10, 12, 1], [12, 13, 1]]}),
    Row(WeightedSum({ExactAnswer(): 0.75, FORMAT: 0.25}), "<answer>5</answer>", {"answer": "5"}, {"answer": TEXT}),
    Row(Gated(ExactAnswer(), on=FORMAT), "<answer>5</answer>", {"answer": "5"}, {"answer": TEXT}),
    Row(Clipped(ExactAnswer(), low=0, high=0.5), "<answer>5</answer>", {"answer": "5"}, {"answer": TEXT}),
    Row(CodeFormat(), PROGRAM, {}),
]  # fmt: skip
# isolation itself is the sandbox's tests' matter
RUN = CodeRunner(allow_unsafe=isolation() is None)
ROWS += [
    Row(CodeRuns(RUN), PROGRAM, {}, {}, 4),
    Row(CodeTests(RUN), PROGRAM, {"tests": "[[[1], 2], [[2], 3]]", "entry_point": "f"}, {}, 4),
]
each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: repr(row.reward)[:70])


def score(reward, completions, rows, *, names, prefill=None):
    columns = {name: [row[name] for row in rows] for name in names}
    return reward(completions, prefill=prefill, **columns)


def draw_rows(data, row):
    one = st.fixed_dictionaries(
        {"": TEXT, **{name: row.values.get(name, st.just(v)) for name, v in row.row.items()}}
    )
    rows = data.draw(st.lists(one, max_size=4))
    return [each[""] for each in rows], rows


def in_range(scores):
    return all(
        score is None or (isinstance(score, (int, float)) and 0 <= score <= 1)
        for score in scores
    )


def test_every_reward_that_the_package_exports_has_a_row():
    public = [getattr(grpo_kit.rewards, name) for name in grpo_kit.rewards.__all__]
    rewards = {
        each
        for each in public
        if inspect.isclass(each)
        and "__call__" in {n for base in each.__mro__[:-1] for n in vars(base)}
    }
    assert ExactAnswer in rewards and Case not in rewards
    assert rewards <= {type(row.reward) for row in ROWS}


@each_row
def test_it_says_its_name_and_columns(row):
    reward = row.reward
    assert isinstance(reward.__name__, str) and reward.__name__.isidentifier()
    assert isinstance(reward.columns, tuple) and set(reward.columns) <= set(row.row)
    assert type(reward).__name__ in repr(reward) and " object at 0x" not in repr(reward)
    assert ">>> " in inspect.getdoc(type(reward))


@each_row
def test_the_kits_own_keep_to_0_and_1(row):
    """Users' rewards may have any scale; see any_text for what the kit's give, and ask() for who states a range."""
    assert range_of(row.reward) in (None, (0.0, 1.0))
    columns = {name: [value] for name, value in row.row.items()}
    scores = judge_ask(row.reward, [row.right], **columns)
    assert (
        off_scale("kit", row.reward, scores) is None
        and scores == [row.best]
        and 0 < row.best <= 1
    )


@each_row
def test_the_right_completion_earns_the_most_however_it_is_given(row):
    columns = {name: [value] for name, value in row.row.items()}
    assert row.reward([row.right], **columns) == [row.best]
    message = [{"role": "assistant", "content": row.right}]
    trainers = {
        "prompts": ["p"],
        "trainer_state": object(),
        "environments": None,
        "question": ["q"],
    }
    trainers |= {
        "completion_ids": [[1, 2]],
        "log_extra": lambda *_: None,
        "log_metric": lambda *_: None,
    }
    assert row.reward(completions=[message], prefill=[""], **{**trainers, **columns}) == [
        row.best
    ]


def any_text(row, data):
    completions, rows = draw_rows(data, row)
    prefill = [data.draw(TEXT) for _ in rows]
    before = copy.deepcopy((completions, rows))
    scores = score(row.reward, completions, rows, names=row.row, prefill=prefill)
    assert len(scores) == len(completions) and in_range(scores)
    assert (
        score(row.reward, completions[::-1], rows[::-1], names=row.row, prefill=prefill[::-1])
        == scores[::-1]
    )
    alone = [
        score(row.reward, [c], [r], names=row.row, prefill=[p])
        for c, r, p in zip(completions, rows, prefill, strict=True)
    ]
    assert alone == [[score] for score in scores]
    assert (completions, rows) == before


@each_row
def test_any_text_is_scored_in_range_whatever_else_is_in_the_batch(row):
    @given(data=st.data())
    @settings(max_examples=row.examples, deadline=None, suppress_health_check=list(HealthCheck))
    def check(data):
        any_text(row, data)

    check()


@each_row
def test_a_bad_completion_is_never_none(row):
    @given(text=TEXT, prefill=TEXT)
    @settings(max_examples=row.examples, deadline=None, suppress_health_check=list(HealthCheck))
    def check(text, prefill):
        assert None not in score(
            row.reward, [text], [row.row], names=row.row, prefill=[prefill]
        )

    check()


@each_row
def test_nasty_texts_are_scored(row):
    texts = list(NASTY.values())
    scores = score(row.reward, texts, [row.row] * len(texts), names=row.row)
    assert len(scores) == len(texts) and in_range(scores) and None not in scores


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.reward.columns], ids=lambda row: repr(row.reward)[:70]
)
def test_a_missing_column_is_named(row):
    for name in row.reward.columns:
        rest = {key: [value] for key, value in row.row.items() if key != name}
        with pytest.raises(ValueError, match=repr(name)):
            row.reward(["text"], **rest)


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if hasattr(row.reward, "cheats")],
    ids=lambda row: repr(row.reward)[:70],
)
def test_its_cheats_are_cases_that_do_not_outrank_the_honest_one(row):
    honest = Case("honest", row.right, honest=True, columns=row.row)
    cheats = row.reward.cheats(honest)
    assert len({case.name for case in cheats}) == len(cheats)
    assert all(
        isinstance(case, Case) and not case.honest and case.name != "honest" for case in cheats
    )
    scores = score(
        row.reward, [c.completion for c in cheats], [c.columns for c in cheats], names=row.row
    )
    for case, paid in zip(cheats, scores, strict=True):
        may_tie = case.tie == "always" or (case.tie == "format" and not row.reward.columns)
        assert paid is None or paid < row.best or (may_tie and paid == row.best), case.name

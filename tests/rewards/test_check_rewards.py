"""check_rewards: every cheat it knows is caught when a reward falls for it, and good rewards pass."""

import math

import pandas as pd
import pytest

from examples.arithmetic import arithmetic
from grpo_kit.more.tasks.interval_scheduling import ScheduleShare
from grpo_kit.rewards import (
    CallAccuracy,
    Case,
    ExactAnswer,
    Gated,
    Language,
    MathAnswer,
    NumericAnswer,
    Repetition,
    RewardCheckError,
    RightSize,
    Rouge,
    SoftFormat,
    WeightedSum,
    check_rewards,
    crafted_cases,
    extract_answer,
    last_number,
    on_response,
    own_answer,
)
from grpo_kit.tasks import Task, countdown, from_reasoning_gym, from_rows, largest
from grpo_kit.tasks.countdown import CountdownAnswer, evaluate

CHEATS = [
    "empty",
    "truncated",
    "tag spam",
    "tag spam, right answer",
    "answer twice, right first",
    "answer twice, right last",
    "both answers in one block",
    "answer in the prefill",
    "prefill said again",
    "right answer, wrong format",
    "wrong answer, right format",
]


@pytest.mark.parametrize(
    "task",
    [
        largest(n_train=8, n_held_out=4),
        arithmetic(n_train=8, n_held_out=4),
        countdown(n_train=8, n_held_out=4),
        countdown(n_train=8, n_held_out=4, partial_credit=True),
        "reasoning-gym",
    ],
    ids=str,
)
def test_every_task_of_the_kit_passes(task):
    if task == "reasoning-gym":  # an extra: it compiles
        pytest.importorskip("reasoning_gym")
        task = from_reasoning_gym("leg_counting", n_train=8, n_held_out=4)
    table = check_rewards(task.rewards, task)
    assert table["case"].tolist()[:12] == ["honest", *CHEATS]
    assert ("the target itself" in table["case"].tolist()) == (task.name == "countdown")
    names = [reward.__name__ for reward in task.rewards]
    assert table.columns.tolist() == ["case", "response", *names, "total"]
    honest, cheats = table["total"].iloc[0], table["total"].iloc[1:]
    assert honest == 1.0
    assert (cheats < honest).all()


def test_the_table_holds_the_rewards_own_numbers():
    table = check_rewards(
        [ExactAnswer(), SoftFormat()],
        crafted_cases("82", "47", think="think"),
        weights=[0.75, 0.25],
    ).set_index("case")
    assert table.loc["honest"].tolist() == [
        "<think>\nReasoning.\n</think>\n<answer>82</answer>",
        1.0,
        1.0,
        1.0,
    ]
    assert table.loc["truncated", "soft_format"] == 0.375
    assert table.loc["right answer, wrong format", "total"] == 0.0
    assert table.loc["wrong answer, right format", "total"] == 0.25
    assert table.loc["answer in the prefill", "exact_answer"] == 0.0


def test_weights_default_to_the_tasks_and_to_equal():
    task = largest(n_train=8, n_held_out=4)
    exact, soft = task.rewards
    wrong = "wrong answer, right format"
    assert check_rewards([exact, soft], task).set_index("case").loc[wrong, "total"] == 0.25
    assert (
        check_rewards([exact, soft], crafted_cases("1", "2"))
        .set_index("case")
        .loc[wrong, "total"]
        == 0.5
    )


# Each reward falls for one cheat; the name of the cheat must be in the error.
def _says_nothing(responses):
    return [1.0 - min(len(response), 50) / 50 for response in responses]


def _counts_opening_tags(responses):
    return [min(1.0, response.count("<answer>") / 2) for response in responses]


def _never_closed(responses, answer):
    return [
        float(a in r.rpartition("<answer>")[2]) for r, a in zip(responses, answer, strict=True)
    ]


def _last_block(responses, answer):
    return [
        float(
            r.rpartition("<answer>")[2].partition("</answer>")[0] == a
            and r.endswith("</answer>")
        )
        for r, a in zip(responses, answer, strict=True)
    ]


def _first_block(responses, answer):
    return [
        float(r.partition("<answer>")[2].partition("</answer>")[0] == a)
        for r, a in zip(responses, answer, strict=True)
    ]


def _somewhere_in_the_block(responses, answer):
    return [
        float(
            r.count("<answer>") == 1
            and "</answer>" in r
            and a in r.partition("<answer>")[2].partition("</")[0]
        )
        for r, a in zip(responses, answer, strict=True)
    ]


def _anything_but_tags(responses, answer):
    return [
        0.5 if "<answer>" in r else float(last_number(r) == a)
        for r, a in zip(responses, answer, strict=True)
    ]


def _likes_wrong(responses, answer):
    return [
        float(a not in r and "</answer>" in r) for r, a in zip(responses, answer, strict=True)
    ]


def _always_one(responses, answer):
    return [1.0] * len(responses)


@pytest.mark.parametrize(
    ("fn", "prefill", "cheats", "reason"),
    [
        (_says_nothing, "", {"empty", "truncated"}, "shortness alone: saying nothing is best"),
        (
            _counts_opening_tags,
            "<answer>",
            {"tag spam", "prefill said again"},
            "counts tags instead of checking",
        ),
        (
            _never_closed,
            "<answer>",
            {"truncated", "both answers in one block"},
            "never asks for the closing tag",
        ),
        (
            _last_block,
            "",
            {"answer twice, right last", "tag spam, right answer"},
            "takes the last of many",
        ),
        (
            _first_block,
            "",
            {"answer twice, right first", "tag spam, right answer"},
            "takes the first of many",
        ),
        (
            _somewhere_in_the_block,
            "",
            {"both answers in one block"},
            "substring match: list all candidates",
        ),
        (
            _first_block,
            "<answer>",
            {"answer in the prefill"},
            "scores what it was given, not what was written",
        ),
        (_anything_but_tags, "", {"right answer, wrong format"}, "the wrong format outranks"),
        (_likes_wrong, "", {"wrong answer, right format"}, "upside down"),
        (
            _always_one,
            "",
            {*CHEATS} - {"right answer, wrong format"},
            "no signal: everything ties",
        ),
    ],
)
def test_a_reward_that_falls_for_a_cheat_is_named_with_it(fn, prefill, cheats, reason):
    reward = on_response(fn)
    with pytest.raises(RewardCheckError) as caught:
        check_rewards(reward, crafted_cases("82", "47", prefill=prefill))
    message = str(caught.value)
    assert fn.__name__ in message
    missed = {cheat for cheat in cheats if repr(cheat) not in message}
    if fn is _always_one:
        missed.discard("prefill said again")  # without a prefill it is the honest response
    assert not missed, f"{reason}: {message}"
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value.table, pd.DataFrame)


def test_a_reward_of_ones_own_that_reads_what_the_model_wrote_passes():
    """The fault names own_answer, and a reward that takes it has none."""

    @on_response
    def of_the_response(responses, answer):
        return [float(extract_answer(r) == a) for r, a in zip(responses, answer, strict=True)]

    def of_what_was_written(completions, prefill, answer, **columns):
        answers = [own_answer(c, p) for c, p in zip(completions, prefill, strict=True)]
        return [float(given == a) for given, a in zip(answers, answer, strict=True)]

    task = largest(n_train=8, n_held_out=8)
    with pytest.raises(
        RewardCheckError, match=r"'answer in the prefill' .*own_answer\(completion, prefill\)"
    ) as caught:
        check_rewards(of_the_response, task)
    others = [line for line in str(caught.value).split("\n")[1:] if "own_answer" not in line]
    assert not others
    assert check_rewards(of_what_was_written, task)["total"].iloc[0] == 1.0


def test_a_task_with_a_lenient_reward_fails_on_its_rows():
    rows = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(20)]

    @on_response
    def contains(responses, answer):
        return [float(a in r) for r, a in zip(responses, answer, strict=True)]

    task = from_rows("own", rows, reward=contains, prefill="<answer>")
    with pytest.raises(RewardCheckError, match="contains: 'truncated' .* ties with"):
        check_rewards(task.rewards, task)


def test_a_format_reward_alone_may_not_tell_right_from_wrong_but_an_answer_reward_must():
    check_rewards(SoftFormat(), crafted_cases("82", "47", think="think"))

    @on_response
    def blind(responses, answer):
        return SoftFormat(think=None)(responses)

    with pytest.raises(RewardCheckError, match="'wrong answer, right format' .* ties with"):
        check_rewards(blind, crafted_cases("82", "47"))


def test_in_a_weighted_sum_only_the_total_counts():
    @on_response
    def short(responses):
        return [1.0 - min(len(r), 60) / 60 for r in responses]

    cases = crafted_cases("82", "47")
    with pytest.raises(RewardCheckError, match="short: 'empty'"):
        check_rewards([ExactAnswer(), short], cases, weights=[0.75, 0.25])
    table = check_rewards(WeightedSum({ExactAnswer(): 0.75, short: 0.25}), cases)
    assert table["total"].idxmax() == 0


@pytest.mark.parametrize("answer", ["82", "7.5"])
@pytest.mark.parametrize("reward", [ExactAnswer(), NumericAnswer(), MathAnswer()], ids=repr)
@pytest.mark.parametrize(
    ("prefill", "think"),
    [("", None), ("<answer>", None), ("<think>\n", "think"), ("", "think")],
)
def test_answer_rewards_pass_with_any_prefill(answer, reward, prefill, think):
    cases = crafted_cases(answer, "47", prefill=prefill, think=think)
    assert check_rewards(reward, cases)["total"].iloc[0] == 1.0


@pytest.mark.parametrize("value", [math.nan, math.inf, "1"])
def test_a_broken_contract_is_named(value):
    def odd(completions, **columns):
        return [value] * len(completions)

    with pytest.raises(RewardCheckError, match="breaks its contract: reward 'odd' gave"):
        check_rewards(odd, crafted_cases("82", "47"))


def test_own_cases_and_the_honest_one_that_nobody_can_judge():
    cases = [
        Case("honest", "<answer>5</answer>", honest=True, columns={"answer": "5"}),
        Case("long", "<answer>5</answer> and more", tie="always", columns={"answer": "5"}),
    ]
    assert check_rewards(ExactAnswer(), cases)["exact_answer"].tolist() == [1.0, 1.0]
    with pytest.raises(RewardCheckError, match="'long' .* ties with"):
        check_rewards(
            ExactAnswer(),
            [cases[0], Case("long", cases[1].completion, columns={"answer": "5"})],
        )
    with pytest.raises(ValueError, match="honest=True"):
        check_rewards(ExactAnswer(), cases[1:])
    with pytest.raises(RewardCheckError, match="numeric_answer cannot judge the honest"):
        check_rewards(
            NumericAnswer(), [Case("honest", "a", honest=True, columns={"answer": "a few"})]
        )


def test_a_scorer_that_takes_any_answer_is_found():
    pytest.importorskip("reasoning_gym")
    # reasoning-gym 0.1.25 compares bool(answer) with bool(gold), and bool("False") is True.
    task = from_reasoning_gym("game_of_life_halting", n_train=8, n_held_out=4)
    with pytest.raises(ValueError, match="takes any answer|is not correct"):
        check_rewards(task.rewards, task)


def test_bad_arguments():
    cases = crafted_cases("82", "47")
    with pytest.raises(ValueError, match="rewards is empty"):
        check_rewards([], cases)
    with pytest.raises(ValueError, match="weights="):
        check_rewards([ExactAnswer()], cases, weights=[0.5, 0.5])
    with pytest.raises(ValueError, match="rows=0"):
        check_rewards(ExactAnswer(), largest(n_train=8, n_held_out=4), rows=0)
    with pytest.raises(ValueError, match="prefill='</answer>' closes <answer>"):
        crafted_cases("82", "47", prefill="</answer>")
    anything = from_rows(
        "any",
        [{"question": str(i), "answer": "1"} for i in range(9)],
        reward=ExactAnswer(),
        correct=lambda *_: True,
    )
    with pytest.raises(RewardCheckError, match="is_correct takes any answer"):
        check_rewards(anything.rewards, anything)
    unanswered = from_rows(
        "none", [{"question": str(i)} for i in range(9)], reward=SoftFormat()
    )
    with pytest.raises(ValueError, match="give a list of Case"):
        check_rewards(unanswered.rewards, unanswered)


def _lenient_task(**fields):
    """A task whose reward takes any response that names the answer, in brackets, with no tags at all."""

    @on_response
    def names_it(responses, answer):
        return [float(gold in text) for text, gold in zip(responses, answer, strict=True)]

    rows = [{"question": f"q{chr(n)}", "answer": str(n)} for n in range(100, 110)]
    reward = fields.pop("reward", names_it)
    return Task(
        name="brackets",
        train=rows[:8],
        held_out=rows[8:],
        rewards=[reward],
        reward_weights=[1.0],
        is_correct=lambda text, row: text == row["answer"],
        read_answer=lambda text, prefill: text.strip("[]") or None,
        cases=lambda row: [Case("honest", f"[{row['answer']}]", honest=True, columns=row)],
        **fields,
    )


def test_a_task_brings_its_own_cases_and_cheats():
    task = _lenient_task()
    assert check_rewards(task.rewards, task)["case"].tolist() == [
        "honest",
        "the question said again",
    ]
    assert task.answer_of("[108]") == "108" and task.answer_of("[]") is None

    def found(row, honest):
        return [
            Case("every number", " ".join(map(str, range(100, 110))), columns=honest.columns)
        ]

    with pytest.raises(
        RewardCheckError, match="names_it: 'every number' .* ties with the honest"
    ):
        check_rewards(task.rewards, _lenient_task(cheats=found))


def test_what_is_no_reward_and_no_task_is_named():
    task = _lenient_task()
    for rewards, cases, message in (
        (None, task, "rewards=None must be a reward or a list"),
        ([], task, "rewards is empty"),
        (task.rewards, None, "cases=None must be a task or a list of Case"),
        (task.rewards, {"question": "x"}, "must be a task or a list of Case"),
    ):
        with pytest.raises(ValueError, match=message):
            check_rewards(rewards, cases)


def test_copying_the_question_is_tried():
    """Where the question holds the answer, a reward that looks for it anywhere pays for reading nothing."""

    @on_response
    def holds_it(responses, answer):
        return [float(gold in text) for text, gold in zip(responses, answer, strict=True)]

    rows = [
        {"question": f"Which is larger, {n} or {n + 1}?", "answer": str(n + 1)}
        for n in range(10, 40, 2)
    ]
    lenient = from_rows("larger", rows, reward=holds_it, prefill="<answer>")
    with pytest.raises(
        RewardCheckError, match="holds_it: 'the question as the answer' .* ties with the honest"
    ):
        check_rewards(holds_it, lenient)
    strict = from_rows("larger", rows, reward=ExactAnswer(), prefill="<answer>")
    table = check_rewards(strict.rewards, strict).set_index("case")
    assert (
        table.loc["the question as the answer", "total"]
        == table.loc["the question said again", "total"]
        == 0
    )


@pytest.mark.parametrize(
    "reward", ["countdown_answer", "schedule_share", "call_accuracy", "rouge_l"]
)
def test_cheats_with_an_answer_keep_the_honest_reasoning(reward):
    made = {
        "countdown_answer": (CountdownAnswer(), "3 + 5", {"numbers": [3, 5], "target": 8}),
        "schedule_share": (ScheduleShare(), "A", {"events": [[9, 11, 2], [10, 12, 1]]}),
        "call_accuracy": (CallAccuracy(), "add(1)", {"calls": ["add(1)"]}),
        "rouge_l": (Rouge(), "cell wall", {"answer": "cell wall"}),
    }
    cheater, right, columns = made[reward]
    honest = crafted_cases(right, "wrong", prefill="<think>\n", think="think", columns=columns)[
        0
    ]
    cheats = cheater.cheats(honest)
    scores = SoftFormat()(
        [case.completion for case in cheats], prefill=[case.prefill for case in cheats]
    )
    # what a policy that cheats would write, at its best
    assert cheats and scores == [1.0] * len(cheats)


def test_what_training_found_is_tried_on_the_next_reward():
    task = countdown(n_train=8, n_held_out=4)

    @on_response
    def makes_target(responses, target):
        """Forgets to ask which numbers were used."""
        values = [evaluate(extract_answer(text) or "") for text in responses]
        return [float(value == wanted) for value, wanted in zip(values, target, strict=True)]

    with pytest.raises(
        RewardCheckError, match="makes_target: 'the target itself' .* ties with the honest"
    ):
        check_rewards([makes_target, CountdownAnswer()], task, weights=[0.5, 0.5])


def test_the_cheats_of_each_reward_are_tried_and_one_that_comes_out_honest_is_dropped():
    class Names:
        __name__ = "names"
        columns = ("answer",)

        def __call__(self, completions, *, answer, **columns):
            return [float(gold in text) for text, gold in zip(completions, answer, strict=True)]

        def cheats(self, honest):
            again = Case("the honest one again", honest.completion, columns=honest.columns)
            return [again, Case("nothing", "", columns=honest.columns)]

    task = _lenient_task(reward=Names())
    assert check_rewards(task.rewards, task)["case"].tolist() == [
        "honest",
        "the question said again",
        "nothing",
    ]


@pytest.mark.parametrize(
    "part",
    [RightSize(40, 60, unit="characters"), Repetition(), Language("latin")],
    ids=lambda r: r.__name__,
)
def test_what_is_only_a_part_counts_in_the_total_alone(part):
    task = largest(n_train=8, n_held_out=4)
    with pytest.raises(RewardCheckError, match=part.__name__):
        # by itself it pays for anything short, varied, in the right script
        check_rewards(part, task)
    table = check_rewards([*task.rewards, part], task, weights=[0.5, 0.25, 0.25])
    # a cheat ties in this part
    assert (table[part.__name__].iloc[1:] >= table[part.__name__].iloc[0]).any()
    assert (table["total"].iloc[1:] < table["total"].iloc[0]).all()


def test_the_thinking_tag_is_found_in_a_gate_inside_a_sum():
    gated = Gated(ExactAnswer(), on=SoftFormat())
    task = from_rows(
        "t", [{"question": f"q{n}", "answer": str(n)} for n in range(10)], reward=ExactAnswer()
    )
    table = check_rewards(WeightedSum([(gated, 0.75), (Repetition(), 0.25)]), task)
    assert table["response"].iloc[0].startswith("<think>") and table["total"].iloc[0] == 1.0


def test_a_task_whose_cases_have_no_honest_one_is_refused():
    task = _lenient_task()
    object.__setattr__(task, "cases", lambda row: [Case("nothing", "", columns=row)])
    with pytest.raises(ValueError, match="cases has no case with honest=True"):
        check_rewards(task.rewards, task)

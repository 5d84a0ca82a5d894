"""Right is what the answer rewards pay in full: in every task of the kit, strictly, leniently, in every reading."""

from dataclasses import replace

import pytest

from examples.arithmetic import arithmetic
from examples.tools import tools
from grpo_kit.engine.complete import Completion
from grpo_kit.evaluation.accuracy import evaluation_of
from grpo_kit.evaluation.generate_and_score import Answers
from grpo_kit.more.code import _code_runner as code_runner
from grpo_kit.more.code.sandbox import isolation
from grpo_kit.more.episodes.tool_calls import CallAccuracy, call_reward
from grpo_kit.more.lab._arm import arm_of, prompt_fingerprint
from grpo_kit.rewards import (
    Bleu,
    Clipped,
    CodeRunner,
    ExactAnswer,
    Gated,
    MathAnswer,
    NumericAnswer,
    RewardCheckError,
    RightSize,
    SoftFormat,
    WeightedSum,
    check_rewards,
)
from grpo_kit.rewards._parts import all_parts, judges_answer
from grpo_kit.rewards.scoring import score
from grpo_kit.tasks import (
    code,
    countdown,
    from_reasoning_gym,
    from_rows,
    gsm8k,
    interval_scheduling,
    largest,
    science,
)
from grpo_kit.tasks._right import giving, leniently_right
from grpo_kit.trainer.held_out import HeldOut

SMALL = {"n_train": 24, "n_held_out": 8}


def own(reward, gold="18", *, n=10, hint="", **options):
    rows = [
        {"question": f"Question {i}?", "answer": gold, "calls": gold, "hint": hint}
        for i in range(n)
    ]
    return from_rows("own", rows, reward=reward, prefill="<answer>", **options)


def answers(task, *texts):
    """One completion for each of the first held-out rows."""
    made = [Completion(text, 4, False, (5, 6, 7, 2)) for text in texts]
    return Answers(
        task,
        task.held_out[: len(texts)],
        ["prompt"] * len(texts),
        made,
        1,
        {"max_completion_tokens": 4},
    )


def readings(task, text):
    """(strict, lenient), the same asked one by one and in a batch."""
    row = task.held_out[0]
    one = (
        task.is_right(row, text),
        leniently_right(task, [row], [text], [task.is_right(row, text)])[0],
    )
    many = answers(task, text, "</answer>")
    assert one == (many.right[0], many.lenient[0])
    return one


# ---- one rule ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reward", "gold", "text", "strict", "lenient", "why"),
    [
        (NumericAnswer(), "18", "18.0</answer>", True, True, "a number is compared by its value"),
        (ExactAnswer(), "18", "18.0</answer>", False, False, "a text is not"),
        (NumericAnswer(), "18", "19</answer>", False, False, "wrong"),
        (NumericAnswer(), "18", "18.0", False, True, "behind an unclosed tag"),
        (NumericAnswer(), "18", "6 * 3, that is 18.00", False, True, "the last number"),
        (ExactAnswer(), "18", "6 * 3, that is 18.00", False, False, "and as strictly compared as in the tags"),
        (NumericAnswer(tolerance=0.5), "18", "17.6</answer>", True, True, "as near as the reward asks"),
        (MathAnswer(), "1/2", "0.5</answer>", True, True, "mathematics"),
        (Bleu(), "sodium chloride", "Sodium Chloride.</answer>", True, True, "the whole overlap"),
        (Bleu(), "sodium chloride", "sodium</answer>", False, False, "a part of it earns a part"),
        (CallAccuracy(), "oven(180)", "oven(180.0)</answer>", True, True, "calls by their values"),
        (CallAccuracy(), "oven(180)", "oven(185)</answer>", False, False, "near is not right"),
        (call_reward({"oven": 1}), "oven(180)", "oven(180.0)</answer>", True, True, "a sum that never comes to 1"),
        (call_reward({"oven": 1}), "oven(180)", "lamp(180)</answer>", False, False, "its part for the answer"),
        (Gated(NumericAnswer(), on=SoftFormat(think=None)), "18", "18.0</answer>", True, True, "an open gate"),
        (Gated(NumericAnswer(), on=SoftFormat(think=None)), "18", "18</answer> I hope", False, True, "a shut one"),
        (Gated(call_reward({"oven": 1}), on=SoftFormat(think=None)), "oven(1)", "oven(1)</answer>", True, True, "both"),
        (Gated(SoftFormat(think=None), on=NumericAnswer()), "18", "18.0</answer>", True, True, "the gate judges it"),
        (Gated(SoftFormat(think=None), on=NumericAnswer()), "18", "19</answer>", False, False, "the gate is shut"),
        (Clipped(NumericAnswer(), high=0.5), "18", "18.0</answer>", True, True, "on another scale"),
        ([ExactAnswer(), NumericAnswer()], "18", "18.0</answer>", False, False, "all of several"),
        ([ExactAnswer(), NumericAnswer()], "18", "18</answer>", True, True, "all of several"),
    ],
)  # fmt: skip
def test_right_is_what_the_answer_reward_pays_in_full(reward, gold, text, strict, lenient, why):
    assert readings(own(reward, gold), text) == (strict, lenient), why


def test_a_reward_without_weight_counts_only_where_no_other_judges_the_answer():
    pair = [NumericAnswer(), ExactAnswer(), SoftFormat(think=None)]
    paid = own(pair, reward_weights=[0.75, 0.0, 0.25])
    assert paid.answer_rewards == pair[:1] and readings(paid, "18.0</answer>") == (True, True)
    seen = own(pair, reward_weights=[0.0, 0.0, 1.0])
    assert seen.answer_rewards == pair[:2] and readings(seen, "18.0</answer>") == (False, False)


def half(completions, answer, prefill, **columns):
    """Own reward: 0.5 for the right answer."""
    return [score / 2 for score in ExactAnswer()(completions, answer=answer, prefill=prefill)]


def test_a_reward_says_what_its_full_pay_is():
    def stated(*args, **columns):
        return half(*args, **columns)

    stated.columns, stated.range = ("answer",), (0.0, 0.5)
    with pytest.warns(UserWarning, match="'half' needs a column .*0.5 at most, 1 is full"):
        unstated = own(half)
    assert unstated.answer_rewards == [] and readings(unstated, "18</answer>") == (
        True,
        True,
    ), "by the text"
    assert readings(own(stated), "18</answer>") == (True, True)
    assert readings(own(stated), "17</answer>") == (False, False)
    assert readings(own(WeightedSum([(stated, 0.5), (SoftFormat(), 0.5)])), "18</answer>") == (
        True,
        True,
    )


def pays(most, column="answer", least=0.0, wrong=0.0, **stated):
    """A reward of one's own: most for the column's text, least for nothing said, wrong otherwise."""

    def bonus(completions, **columns):
        pairs = zip(completions, columns[column], strict=True)
        return [most if gold in text else wrong if text else least for text, gold in pairs]

    bonus.columns = (column,)
    vars(bonus).update(stated)
    return bonus


def inside(*parts):
    return WeightedSum([(part, 1 / len(parts)) for part in parts])


def named(reward, name):
    reward.__name__ = name
    return reward


class Fifth(ExactAnswer):
    """A subclass of the kit's that pays a fifth."""

    def score(self, *given):
        return super().score(*given) / 5


NUMBER, SHAPE = NumericAnswer(), SoftFormat(think=None)
CANNOT_PAY = {
    "a bonus beside it": [NUMBER, pays(0.2)],
    "before it": [pays(0.2), NUMBER],
    "for another column": [NUMBER, pays(1.0, "hint")],
    "of a column, whatever is said": [NUMBER, pays(0.2, "hint", wrong=0.2)],
    "a penalty": [NUMBER, pays(0.0, wrong=-1.0)],
    "with a range that it does not reach": [NUMBER, pays(0.2, range=(0, 1))],
    "on a large scale": [NUMBER, pays(2.0, range=(0, 10))],
    "in a sum": inside(NUMBER, pays(0.2), SHAPE),
    "in a sum of a sum": inside(NUMBER, named(inside(pays(0.2), SHAPE), "extras")),
    "behind a gate": Gated(inside(NUMBER, pays(0.2)), on=SHAPE),
    "clipped": [NUMBER, named(Clipped(pays(0.2), high=2.0), "bonus")],
    "a subclass of the kit's": [NUMBER, named(Fifth(), "bonus")],
    "two of them": [NUMBER, pays(0.2), named(pays(0.3), "second")],
    "alone": [pays(0.5), SHAPE],
}


@pytest.mark.parametrize("name", CANNOT_PAY)
def test_a_reward_that_cannot_pay_the_rows_own_answers_is_named_and_does_not_say_what_is_right(
    name,
):
    with pytest.warns(UserWarning) as caught:
        task = own(CANNOT_PAY[name], hint="of the day")
    said = [str(one.message) for one in caught if "own answers" in str(one.message)]
    assert (
        len(said) == (2 if name == "two of them" else 1)
        and "reward 'bonus' needs a column" in said[0]
    )
    assert all(way in said[0] for way in ("bonus.range = (lowest, ", "correct=", "weight 0"))
    assert readings(task, "18</answer>") == (True, True) and readings(task, "17</answer>") == (
        False,
        False,
    )
    made = answers(task, "18</answer>", "17</answer>")
    assert evaluation_of(made).strict.value == 0.5
    if name != "alone":
        assert made.measure == "accuracy" and made.credit == [1.0, 0.0], (
            "what the other reward says"
        )


CAN_PAY = {
    "states its range": [NUMBER, pays(0.2, range=(0, 0.2))],
    "has no weight": ([NUMBER, pays(0.2)], [1.0, 0.0]),
    "on a scale of its own": pays(10.0),
    "behind a thought": lambda completions, answer, **columns: [
        2.0 * text.endswith(f"</think>\n<answer>{gold}</answer>")
        for text, gold in zip(completions, answer, strict=True)
    ],
    "in a box": lambda completions, answer, **columns: [
        float(f"boxed{{{gold}}}" in text)
        for text, gold in zip(completions, answer, strict=True)
    ],
    "reads prompts": lambda prompts, completions, answer, **columns: [
        float(gold in text) for text, gold in zip(completions, answer, strict=True)
    ],
    "cannot judge them": [
        NUMBER,
        lambda completions, answer, **columns: [None] * len(completions),
    ],
    "fails on them": lambda completions, answer, completion_ids, **columns: (
        [1.0] * len(completions)
    ),
}


@pytest.mark.parametrize("name", CAN_PAY)
def test_a_reward_that_can_pay_them_is_not_named(name, recwarn):
    reward, weights = (
        CAN_PAY[name] if isinstance(CAN_PAY[name], tuple) else (CAN_PAY[name], None)
    )
    own(reward, reward_weights=weights)
    assert not [one for one in recwarn if "own answers" in str(one.message)]


def test_a_task_made_of_another_is_scored_anew_where_its_rewards_change(recwarn):
    reward = pays(0.2)
    task = own([NUMBER, reward])
    recwarn.clear()
    assert (
        replace(task, held_out=task.held_out[:1]).answer_rewards == [NUMBER]
        and not recwarn.list
    )
    other = named(pays(0.3), "other")
    assert replace(task, rewards=[NUMBER, other]).answer_rewards == [NUMBER]
    assert "reward 'other'" in str(recwarn.pop(UserWarning).message)


def test_correct_as_given_comes_first_and_stays_where_rewards_are_exchanged():
    def even(text, row):
        return int(text) % 2 == 0

    task = own(ExactAnswer(), correct=even)
    assert task.is_correct is even and task.answer_rewards == []
    assert readings(task, "4</answer>") == (True, True) and readings(task, "5</answer>") == (
        False,
        False,
    )
    assert readings(replace(task, rewards=[NumericAnswer()]), "4</answer>") == (True, True)


def test_without_it_accuracy_goes_with_the_rewards_of_the_task():
    exact = own(ExactAnswer())
    number = replace(exact, rewards=[NumericAnswer()])
    assert exact.is_correct("18", exact.held_out[0]) and not exact.is_correct(
        "18.0", exact.held_out[0]
    )
    assert number.is_correct("18.0", number.held_out[0])


@pytest.mark.parametrize(
    "reward",
    [SoftFormat(think=None), RightSize(1, 40, unit="characters")],
    ids=["format", "length"],
)
def test_rewards_that_judge_no_answer_leave_it_to_the_text_of_the_rows_answer(reward):
    task = own(reward)
    assert task.answer_rewards == []
    assert readings(task, " 18 </answer>") == (True, True) and readings(
        task, "17</answer>"
    ) == (
        False,
        False,
    )
    assert readings(task, "so 18") == (False, True)


def test_where_no_row_has_an_answer_either_the_whole_reward_has_to_be_paid():
    task = own([SoftFormat(think=None)], gold="")
    assert readings(task, "anything</answer>") == (True, True)
    assert readings(task, "anything") == (False, False), "and nothing is read leniently"
    assert task.strategies == {}, "no answer is the most frequent one"


def test_what_cannot_be_judged_is_not_right_and_is_counted_once():
    rows = [{"question": f"q{i}", "answer": "18" if i % 2 else "a few"} for i in range(10)]
    task = from_rows("some", rows, reward=NumericAnswer(), prefill="<answer>")  # held out: 4, 9
    made = answers(task, "18</answer>", "18.0</answer>")
    assert made.verdicts == [None, True] and made.right == [False, True]
    found = evaluation_of(made)
    assert found.strict.value == 0.5 and found.rows["unjudged"].tolist() == [True, False]
    assert "n = 2, 1 of which could not be judged and count as wrong" in str(found.table())
    judged = evaluation_of(answers(own(NumericAnswer()), "18</answer>"))
    assert "unjudged" not in judged.rows and "judged" not in str(judged.table())


def test_rewards_for_different_questions_judge_each_their_own():
    def words(completions, word, **columns):
        return [
            None if w is None else float(w in t) for t, w in zip(completions, word, strict=True)
        ]

    rows = [
        {"question": f"q{i}", "answer": "18" if i % 2 else "", "word": None if i % 2 else "yes"}
        for i in range(10)
    ]
    task = from_rows("mixed", rows, reward=[NumericAnswer(), words], prefill="<answer>")
    assert answers(task, "yes</answer>", "18.0</answer>").verdicts == [True, True]
    assert answers(task, "18</answer>", "yes</answer>").verdicts == [False, False]


# ---- the tasks of the kit ---------------------------------------------------------------------------------------


def _reasoning_gym():
    pytest.importorskip("reasoning_gym")
    return from_reasoning_gym("leg_counting", **SMALL)


def _gsm8k(tmp_path):
    text = "\n".join(
        f'{{"question": "Story {i}?", "answer": "So.\\n#### {1000 + i}"}}' for i in range(12)
    )
    (tmp_path / "rows.jsonl").write_text(text)
    (tmp_path / "train.jsonl").write_text(text.replace("Story", "Tale"))
    return gsm8k(train=tmp_path / "train.jsonl", held_out=tmp_path / "rows.jsonl")


KIT = {
    "largest": lambda _: largest(**SMALL),
    "arithmetic": lambda _: arithmetic(**SMALL),
    "gsm8k": _gsm8k,
    "countdown": lambda _: countdown(**SMALL),
    "countdown, in tiers": lambda _: countdown(**SMALL, partial_credit=True),
    "countdown, thinking": lambda _: countdown(**SMALL, think=True),
    "interval_scheduling": lambda _: interval_scheduling(**SMALL),
    "science, ROUGE": lambda _: science(),
    "science, BLEU": lambda _: science(overlap="bleu"),
    "tools": lambda _: tools(**SMALL),
    "code": lambda _: code(
        levels=(1,), n_held_out=6, runner=CodeRunner(allow_unsafe=isolation() is None)
    ),
    "reasoning_gym": lambda _: _reasoning_gym(),
}


@pytest.mark.parametrize("name", KIT)
def test_every_case_of_check_rewards_is_right_where_it_is_paid_in_full(name, tmp_path):
    task = KIT[name](tmp_path)
    leaves = [
        part for one in task.rewards for part in [one, *all_parts(one)] if not all_parts(part)
    ]
    judges = [part for part in leaves if judges_answer(part)]
    assert len(judges) == 1, "of each task one reward judges the answer"
    honest = 0
    for row in task.held_out[:4]:
        for case in task.cases_for(row, task.rewards):
            columns = {key: [value] for key, value in row.items()} | {"prefill": [case.prefill]}
            paid = score(judges[0], [case.completion], **columns) == [1.0]
            asked = (
                task if case.prefill == task.prefill else replace(task, prefill=case.prefill)
            )
            assert asked.is_right(row, case.completion) == paid, case
            assert paid or not case.honest
            honest += case.honest
    assert honest == 4


@pytest.mark.parametrize("name", KIT)
def test_a_completion_that_gives_the_answer_earns_everything(name, tmp_path):
    """What lenient reading and constant strategies put an answer into."""
    task = KIT[name](tmp_path)
    row = task.held_out[0]
    for prefill in ("", task.prefill):
        asked = replace(task, prefill=prefill)
        (completion,) = giving(asked, [row["answer"]])
        columns = {key: [value] for key, value in row.items()} | {"prefill": [prefill]}
        scores = [score(reward, [completion], **columns)[0] for reward in task.rewards]
        assert all(score > 0.98 for score in scores), "a call costs a little"
        assert asked.is_right(row, completion) and asked.is_correct(row["answer"], row)


# ---- every reading ----------------------------------------------------------------------------------------------


class Counts(NumericAnswer):
    """NumericAnswer that keeps what it was asked about."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def __call__(self, completions, **columns):
        self.asked.append(list(completions))
        return super().__call__(completions, **columns)


@pytest.mark.parametrize("inside", [False, True])
def test_the_rewards_of_an_evaluation_are_asked_once(inside):
    reward = Counts()
    task = own(
        WeightedSum({reward: 0.75, SoftFormat(think=None): 0.25}) if inside else reward,
        strategies={},
    )
    made = answers(task, "18.0</answer>", "20</answer>")
    assert len(reward.asked) == 1, "of the rows' own answers"
    reward.asked.clear()
    evaluation_of(made)
    assert reward.asked == [["18.0</answer>", "20</answer>"], ["20</answer>"]], (
        "the second time for what seems meant"
    )
    assert made.right == [True, False] and made.parts and reward.asked[2:] == []


def test_each_program_of_an_evaluation_runs_once(monkeypatch):
    jobs, inner = [], code_runner.programs_of
    monkeypatch.setattr(
        code_runner, "programs_of", lambda job, mark: jobs.append(job) or inner(job, mark)
    )
    runner = CodeRunner(allow_unsafe=isolation() is None)
    task = code(levels=(1,), n_held_out=3, runner=runner)
    made = answers(
        task, *giving(task, [row["answer"] for row in task.held_out[:2]]), "no program"
    )
    found = evaluation_of(made)
    assert (
        found.rows["strict"].tolist() == found.rows["lenient"].tolist() == [True, True, False]
    )
    assert (
        found.rows["reward/code_tests"].tolist() == [1.0, 1.0, 0.0] and found.constant[1] == 0.0
    )
    assert len(jobs) == len(set(jobs)) > 2


def test_what_only_needs_accuracy_asks_no_other_reward(tiny):
    def costly(completions, **columns):
        raise AssertionError("asked")

    task = own([NumericAnswer(), costly])
    assert answers(task, "18.0</answer>").right == [True]
    assert HeldOut(task, rows=2).measure(*tiny)["accuracy"] == 0.0


def test_a_reward_that_reads_prompts_and_tokens_gets_them_leniently_too():
    def reads(completions, prompts, completion_ids, answer, **columns):
        assert set(prompts) == {"prompt"} and all(len(ids) == 4 for ids in completion_ids)
        return [
            float(f">{gold}<" in f">{text}")
            for text, gold in zip(completions, answer, strict=True)
        ]

    made = answers(own(reads), "17</answer>", "it is 18")
    assert made.right == [False, False] and made.lenient == [False, True]


def test_constant_strategies_are_judged_by_the_same_rule():
    strategies = {
        "as a decimal": lambda row: "18.00",
        "none": lambda row: None,
        "wrong": lambda row: "1",
    }
    task = own(NumericAnswer(), strategies=strategies)
    assert task.constant_accuracies() == {"as a decimal": 1.0, "none": 0.0, "wrong": 0.0}
    assert replace(task, rewards=[ExactAnswer()]).best_constant()[1] == 0.0


def test_check_rewards_takes_a_wrong_answer_that_is_not_paid():
    rows = [{"question": f"q{i}?", "answer": "18.0" if i % 2 else "18"} for i in range(9)]
    table = check_rewards(
        NumericAnswer(), from_rows("same", rows, reward=NumericAnswer(), prefill="<answer>")
    )
    wrong = table.set_index("case").loc["wrong answer, right format"]
    assert wrong["response"] == "<answer>181</answer>" and wrong["total"] == 0.0
    assert check_rewards(half, own(half))["total"][0] == 0.5, (
        "what the honest answer earns is shown, not refused"
    )

    def anything(completions, answer, **columns):
        return [1.0] * len(completions)

    with pytest.raises(RewardCheckError, match="takes any answer"):
        check_rewards(anything, own(anything))


def test_the_laboratory_measures_anew_what_another_reward_judges():
    def before(task):
        return prompt_fingerprint(arm_of("smoke", {"task": task}))

    task = own([NumericAnswer(), SoftFormat(think=None)])
    assert before(task) == before(own([NumericAnswer(), SoftFormat(think=None)]))
    assert before(task) != before(
        replace(task, rewards=[ExactAnswer(), SoftFormat(think=None)])
    )
    assert before(task) == before(
        replace(task, rewards=[NumericAnswer(), RightSize(1, 40, unit="characters")])
    ), "judges no answer"

"""Accuracy or reward: what a task is measured by, what the best constant completion earns, what is said first."""

import json
from dataclasses import replace

import pandas as pd
import pytest

from grpo_kit.engine.complete import Completion
from grpo_kit.evaluation._constant import constant_reward, no_better_than
from grpo_kit.evaluation.accuracy import Evaluation, evaluation_of
from grpo_kit.evaluation.comparison import compare
from grpo_kit.evaluation.generate_and_score import Answers
from grpo_kit.evaluation.intervals import Estimate, mean_reward
from grpo_kit.evaluation.readiness import VERDICTS, Readiness, readiness
from grpo_kit.more.lab._arm import arm_of
from grpo_kit.rewards import Bleu, ExactAnswer, Gated, NumericAnswer, SoftFormat
from grpo_kit.tasks import code, countdown, from_rows, largest
from grpo_kit.tasks._measure import has_accuracy, measure_of, reads_tag
from grpo_kit.trainer.held_out import HeldOut


def lively(completions, **columns):
    """Own reward that needs no answer: a tenth an exclamation mark."""
    return [text.count("!") / 10 for text in completions]


def points(completions, answer, **columns):
    """Own reward from 0 to 10: 10 with the answer, 2 for trying."""
    return [
        10.0 if gold in text else 2.0 if text else 0.0
        for text, gold in zip(completions, answer, strict=True)
    ]


def rows_of(*golds, per=1):
    return [
        {"question": f"Question {i}?"} | ({} if g is None else {"answer": g})
        for i, g in enumerate(golds * per)
    ]


def own(reward, *golds, held=None, **options):
    """A task whose held-out rows have these golds."""
    rows = [row | {"question": f"Held {row['question']}"} for row in rows_of(*golds)]
    return from_rows("own", rows_of(*golds), rows, reward=reward, **options)


def answers(task, texts, samples=1):
    made = [Completion(text, 4, False, (5, 6, 7, 2)) for text in texts]
    return Answers(
        task,
        task.held_out,
        ["p"] * len(task.held_out),
        made,
        samples,
        {"max_completion_tokens": 4},
    )


def evaluation(task, texts):
    return evaluation_of(answers(task, texts))


# ---- which measure ----------------------------------------------------------------------------------------------


def stated(completions, answer, **columns):
    return points(completions, answer)


stated.range = (0, 10)


@pytest.mark.parametrize(
    ("task", "accuracy", "measure", "tag", "why"),
    [
        (largest(n_train=4, n_held_out=4), True, "accuracy", True, "right or wrong"),
        (countdown(n_train=4, n_held_out=4, partial_credit=True), True, "accuracy", True, "a part of a whole"),
        (code(levels=(1,), n_held_out=2), True, "accuracy", True, "all tests pass, or not"),
        (own(Bleu(tag=None), "a b", "c d"), True, "reward", False, "another wording may be as good"),
        (own(Bleu(), "a b", "c d"), True, "reward", True, "and its tag has to be there"),
        (own(lively, None, None), False, "reward", False, "nothing is right or wrong"),
        (own(SoftFormat(), None, None), False, "reward", True, "a form without answers"),
        (own(SoftFormat(), "a", "b"), True, "reward", True, "trained on the form, whatever the answer"),
        (own(points, "a", "b"), True, None, False, "it may pay in part: known once it was asked"),
        (own(stated, "a", "b"), True, None, False, "also where it says what is full"),
        (own([NumericAnswer(), lively], "1", "2"), True, "accuracy", True, "one of several judges the answer"),
        (own(lively, None, None, correct=lambda text, row: True), True, "accuracy", True, "its own right and wrong"),
    ],
)  # fmt: skip
def test_what_a_task_is_measured_by(task, accuracy, measure, tag, why):
    assert (has_accuracy(task), measure_of(task), reads_tag(task)) == (
        accuracy,
        measure,
        tag,
    ), why


def test_an_own_reward_is_measured_by_accuracy_until_it_pays_in_part():
    task = own(points, "red", "blue")
    assert evaluation(task, ["red", ""]).measure == "accuracy"
    assert evaluation(task, ["red", "green"]).measure == "reward"

    def penalty(completions, answer, **columns):
        return [
            1.0 if gold in text else -1.0
            for text, gold in zip(completions, answer, strict=True)
        ]

    minus = own(penalty, "a", "b")
    assert evaluation(minus, ["a", "x"]).measure == "accuracy", (
        "a penalty is no part of the pay"
    )


def test_full_pay_is_what_the_gold_earns_on_a_scale_above_one():
    task = own(points, "red", "blue")
    made = answers(task, ["green", "so blue"])
    assert made.verdicts == [False, True], "2 of 10 is not in full"
    assert task.is_right(task.held_out[0], "red!") and not task.is_right(
        task.held_out[0], "green"
    )
    asked = []

    def counts(completions, answer, **columns):
        asked.append(list(completions))
        return points(completions, answer)

    task = own(counts, "red", "blue")
    answers(task, ["", "blue"]).verdicts  # noqa: B018
    assert asked[0] == ["<answer>red</answer>", "<answer>blue</answer>"], (
        "when the task was made"
    )
    assert len(asked) == 4 and asked[2:] == [["<answer>blue</answer>"], ["blue"]], (
        "of the row that earned above 1 alone"
    )
    answers(task, ["", "blue"]).verdicts  # noqa: B018
    assert len(asked) == 5, "and known from then on"


def test_a_gold_that_earns_less_does_not_lower_the_bar():
    """A reward that pays for the form too: a wrong answer in it earns what the bare gold does."""

    def formed(completions, answer, **columns):
        return [
            0.5 * t.startswith("So:") + 0.5 * (a in t)
            for t, a in zip(completions, answer, strict=True)
        ]

    formed.range = (0, 1)  # else it would be left out: of the rows' own answers none earns this
    made = answers(own(formed, "red", "blue"), ["So: green", "So: blue"])
    assert made.verdicts == [False, True] and made.measure == "reward"


# ---- without right and wrong ------------------------------------------------------------------------------------


def test_rows_without_answers_have_a_reward_and_no_accuracy(tmp_path):
    task = own(lively, None, None, None, None)
    base, tuned = (
        evaluation(task, ["", "!", "!!", "!"]),
        evaluation(task, ["!!!", "!!!!", "!", "!!!!"]),
    )
    assert (
        base.strict is base.lenient is base.formatted is base.constant is None
        and task.strategies == {}
    )
    assert base.result == mean_reward([0, 0.1, 0.2, 0.1]) and "strict" not in base.rows
    assert base.constant_reward == ("always '!!'", 0.2)
    found = compare(base, tuned)
    assert list(found.difference) == ["reward", "reward/lively"] and found.p["reward"] is None
    assert found.difference["reward"].value == pytest.approx(0.2) and (
        found.fixed,
        found.broken,
    ) == (3, 1)
    assert found.constant == ("always '!!!!'", pytest.approx(0.4)), "the better one of both"
    assert found.sentence.startswith(
        "No better than answering '!!!!' every time (0.400): mean reward 0.100 -> 0.300, n = 4"
    )
    assert repr(found).endswith("3 more, 1 less.") and "accura" not in repr(found)
    assert found.examples(1).index.get_level_values(0).tolist() == ["more", "less"]
    assert found.plot().axes[0].get_ylabel() == "mean reward"
    (tmp_path / "run.json").write_text(
        '{"model": "m", "data": {"task": "own"}, "config": {"seed": 3}}'
    )
    with pytest.raises(ValueError, match="holds no run that has trained"):
        found.save(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 7, "seconds": 1.5}\n')
    told = json.loads(found.save(tmp_path).read_text())
    assert (
        told["measure"] == "reward"
        and told["after"]["reward"] == pytest.approx(0.3)
        and told["no_better"]
    )
    assert (told["steps"], told["weights_of_step"], told["seed"], told["n"]) == (7, 7, 3, 4)
    assert told["best_constant"] == {"name": "always '!!!!'", "reward": pytest.approx(0.4)}
    tuned.save(tmp_path / "e.json")
    loaded = Evaluation.load(tmp_path / "e.json")
    assert loaded.sentence == tuned.sentence and loaded.strict is None
    pd.testing.assert_frame_equal(pd.DataFrame(loaded.table()), pd.DataFrame(tuned.table()))


def test_a_text_reward_leads_with_the_mean_and_keeps_its_accuracy_below():
    task = own(Bleu(tag=None), "the red stone fell", "a blue bird sang", "one green leaf grew")
    base = evaluation(task, ["the red stone", "a bird", "no"])
    tuned = evaluation(task, ["the red stone fell", "a blue bird sang", "one leaf grew"])
    found = compare(base, tuned)
    assert base.measure == "reward" and tuned.strict.value == pytest.approx(2 / 3)
    assert (
        found.leads == "reward"
        and found.sentence.startswith("mean reward ")
        and "%" not in found.sentence
    )
    assert "best constant completion (always '" in found.sentence
    assert "strict" in found.table().index


def test_rewards_of_any_scale_have_an_interval():
    task = own(points, "red", "blue", "green", "grey")
    found = evaluation(task, ["red", "blue", "x", ""])
    assert found.rewards["reward"].value == 5.5 and found.rewards["reward"].high > 1
    change = compare(found, evaluation(task, ["red"] * 4)).difference["reward"]
    assert change.value == pytest.approx((0 - 8 + 0 + 2) / 4) and change.low < -1


def test_the_best_constant_completion_is_the_best_of_four():
    task = own(points, "red", "red", "red", "blue")
    name, earned = constant_reward(answers(task, ["", "blue", "x", "blue"]))
    assert (name, earned) == ("always 'red'", 8.0), "the most frequent gold: 10, 10, 10, 2"
    assert constant_reward(answers(own(lively, None, None), ["", ""])) == (
        "always an empty completion",
        0.0,
    )

    def fails_on_nothing(completions, **columns):
        return [text.count("!") / len(text) for text in completions]

    assert constant_reward(answers(own(fails_on_nothing, None, None), ["!", "ab"])) == (
        "always '!'",
        1.0,
    )
    assert constant_reward(answers(code(levels=(1,), n_held_out=2), ["", ""])) is None, (
        "each would be run"
    )


# ---- no better than a constant ------------------------------------------------------------------------------------

LABELS = ["billing"] * 27 + ["delivery"] * 17 + ["account"] * 16


def labelled(texts):
    task = own(ExactAnswer(), *LABELS, prefill="<answer>")
    return evaluation(task, [f"{text}</answer>" for text in texts])


def test_no_better_than_a_constant_is_said_first():
    before = labelled(["billing"] * 10 + ["account"] * 33 + ["billing"] * 17)
    after = labelled(["billing"] * 60)
    found = compare(before, after)
    assert found.sentence.startswith(
        "No better than answering 'billing' every time (45.0 %): 16.7 % -> 45.0 %, n = 60, +28.3"
    )
    assert "p < 0.001" in found.sentence or "p = 0." in found.sentence
    assert repr(found).startswith("No better than answering 'billing'") and str(
        found.table()
    ).startswith("No better")
    assert (
        found.plot()
        .axes[0]
        .get_title()
        .startswith("No better than answering 'billing' every time (45.0 %)\n")
    )
    better = compare(before, labelled(LABELS))
    assert better.no_better is None and better.sentence.startswith("16.7 % -> 100.0 %")
    assert better.sentence.endswith("the best constant strategy has 45.0 %.")


def test_a_model_that_says_one_thing_is_no_better_than_that_thing(tmp_path):
    """Also where the strategy, which knows the train rows alone, has another answer."""
    rows = rows_of("billing", "billing", "account")
    held = [
        row | {"question": f"Held {i}", "answer": "delivery"}
        for i, row in enumerate(rows_of(*"aaaaaaaa"))
    ]
    held += [{"question": f"More {i}", "answer": "account"} for i in range(8)]
    task = from_rows("split", rows, held, reward=ExactAnswer(), prefill="<answer>")
    found = evaluation(task, ["delivery</answer>"] * 16)
    assert found.constant == ("always 'billing'", 0.0) and found.own_constant == (
        "always 'delivery'",
        0.5,
    )
    found.save(tmp_path / "e.json")
    found = Evaluation.load(tmp_path / "e.json")
    said = compare(
        evaluation(task, ["account</answer>"] * 4 + ["x</answer>"] * 12), found
    ).sentence
    assert said.startswith(
        "No better than answering 'delivery' every time (50.0 %): 0.0 % -> 50.0 %"
    )
    half = evaluation(task, ["delivery</answer>"] * 8 + ["account</answer>"] * 8)
    assert half.own_constant is None and half.strict.value == 1.0


def test_credit_of_a_task_with_a_rule_of_its_own():
    task = own(
        SoftFormat(think=None),
        "a",
        "b",
        prefill="<answer>",
        correct=lambda text, row: text == "x",
    )
    assert answers(task, ["x</answer>", "y</answer>"]).credit == [1.0, 0.0], (
        "not what the format earns"
    )


@pytest.mark.parametrize(
    ("result", "constant", "words"),
    [
        (Estimate(0.467, 0.35, 0.59, 60), ("always 'x'", 0.45), "No better than answering 'x' every time"),
        (Estimate(0.2, 0.12, 0.3, 60), ("always 'x'", 0.45), "Worse than answering 'x' every time"),
        (Estimate(0.6, 0.47, 0.72, 60), ("always 'x'", 0.45), None),
        (Estimate(0.2, 0.12, 0.3, 60), ("random", 0.2), "No better than the strategy 'random'"),
        (Estimate(0.0, 0.0, 0.1, 60), ("always 'x'", 0.0), None),
        (Estimate(0.0, 0.0, 0.1, 60), None, None),
    ],
)  # fmt: skip
def test_what_a_constant_is_compared_with(result, constant, words):
    assert no_better_than(constant, result) == words


# ---- readiness ----------------------------------------------------------------------------------------------------


def ready(task, texts, samples, tiny, monkeypatch):
    made = [Completion(text, 4, False, (5, 6, 7, 2)) for text in texts]
    monkeypatch.setattr(
        "grpo_kit.evaluation.generate_and_score.complete", lambda *_, **__: made
    )
    return readiness(*tiny, task, samples=samples, group_size=2, seconds=None)


def test_a_text_reward_that_differs_is_ready_though_no_sample_is_exact(
    tiny, monkeypatch, tmp_path
):
    golds = [
        "the red stone fell",
        "a blue bird sang",
        "my old dog ran",
        "his new car broke",
        "we all went home",
    ]
    task = own(Bleu(tag=None), *golds)
    halves = [text for gold in golds for text in (" ".join(gold.split()[:2]), gold.split()[3])]
    found = ready(task, halves, 2, tiny, monkeypatch)
    assert found.verdict == "ready" and found.measure == "reward" and sum(found.right) == 0
    assert (
        "in 100% of groups of 2 rewards would differ. So: train." in found.reason
        and "SFT" not in found.reason
    )
    assert found.table().index[0] == "mean reward" and found.audit is None
    found.save(tmp_path / "r.json")
    assert Readiness.load(tmp_path / "r.json") == found
    alike = ready(task, ["no"] * 10, 2, tiny, monkeypatch)
    assert alike.verdict == "never succeeds" and "do SFT first" in alike.reason


def test_a_text_reward_of_which_one_sentence_earns_more_than_the_samples_is_not_ready(
    tiny, monkeypatch
):
    task = own(Bleu(tag=None), *["the red stone fell"] * 3, "a blue bird sang")
    found = ready(task, ["the red", "stone"] * 4, 2, tiny, monkeypatch)
    assert found.verdict == "shortcut pays" and found.signal_reward().value == 0.75
    assert "answering 'the red stone fell' every time earns 0.75, so not ready" in found.reason


def scores(of, **stated):
    """A reward of one's own that compares the number of a completion with the answer."""

    def judged(completions, answer, **columns):
        return [of(text, gold) for text, gold in zip(completions, answer, strict=True)]

    vars(judged).update(stated)
    return judged


def signed(text, gold):
    return 1.0 if text == gold else 0.0 if text else -1.0


def near(text, gold):
    return -abs(int("".join(filter(str.isdigit, text)) or 0) - int(gold)) / 10


def bonus(completions, **columns):
    return [text.count("!") / 10 for text in completions]


TAG = {"prefill": "<answer>"}
RULE = TAG | {"correct": lambda text, row: text == "7"}
PAID = {
    "the answer alone is never right": (
        [NumericAnswer(), bonus],
        TAG,
        ["5", "5!"],
        "never succeeds",
    ),
    "a penalty for nothing said": (scores(signed), {}, ["5", ""], "never succeeds"),
    "the same, with its range": (
        scores(signed, range=(-1, 1)),
        {},
        ["5", ""],
        "never succeeds",
    ),
    "a gate that never opens": (
        Gated(NumericAnswer(), on=bonus),
        TAG,
        ["1", "2!"],
        "never succeeds",
    ),
    "right by a rule, and not paid": (
        [scores(lambda *_: 0.0), bonus],
        RULE,
        ["7", "5!"],
        "never succeeds",
    ),
    "right by a rule, paid by nearness": (
        scores(lambda t, g: -len(t) / 10),
        RULE,
        ["7", "15"],
        "ready",
    ),
    "right by a rule, and paid": (
        scores(lambda t, g: float("7" in t)),
        RULE,
        ["7", "15"],
        "ready",
    ),
    "near, with its range": (scores(near, range=(-1, 0)), {}, ["3", "2"], "ready"),
    "near, of any scale": (scores(near), {}, ["3", "2"], "ready"),
}


@pytest.mark.filterwarnings("ignore:task 'own'")
@pytest.mark.parametrize("name", PAID)
def test_it_says_go_only_where_the_answer_was_paid(name, tiny, monkeypatch):
    reward, options, texts, verdict = PAID[name]
    task = replace(own(reward, "1", "4", "6", "9", **options), strategies={})
    texts = [f"{text}</answer>" if task.prefill else text for text in texts]
    found = ready(task, texts * 4, 2, tiny, monkeypatch)
    assert found.signal_reward().value > 0.5 or "gate" in name
    assert found.verdict == verdict, found.reason


def test_an_own_reward_without_answers_asks_for_no_format(tiny, monkeypatch):
    task = own(lively, None, None)
    found = ready(task, ["!", "", "!!", "!"], 2, tiny, monkeypatch)
    assert (
        found.verdict == "ready"
        and found.right is found.lenient is found.formatted is found.constant is None
    )
    assert (
        "%" in found.reason
        and "readable" not in found.table().to_string()
        and "pass@" not in found.table().to_string()
    )
    assert ready(task, ["!" * 10] * 4, 2, tiny, monkeypatch).verdict == "too easy"
    assert ready(task, ["!"] * 4, 2, tiny, monkeypatch).verdict == "rarely succeeds"


def test_partial_credit_for_answers_is_something_to_learn_from_and_the_format_alone_is_not(
    tiny, monkeypatch
):
    task = replace(countdown(n_train=4, n_held_out=2, partial_credit=True), strategies={})
    rows = task.held_out
    near = ["".join(f"{n} + " for n in row["numbers"])[:-3] + "</answer>" for row in rows]
    found = ready(
        task, [near[0], "nothing</answer>", near[1], "nothing</answer>"], 2, tiny, monkeypatch
    )
    assert sum(found.right) == 0 and found.signal_credit().value == 1.0
    assert (
        found.verdict == "ready" and "see whether accuracy follows the reward" in found.reason
    )
    plain = largest(n_train=4, n_held_out=2)
    formed = ready(plain, ["x</answer>", "x</answer> y"] * 2, 2, tiny, monkeypatch)
    assert formed.signal_reward().value == 1.0 and formed.signal_credit().value == 0.0
    assert formed.verdict == "never succeeds" and "SFT" not in formed.reason
    assert (
        "training would learn the format and not the task" in formed.reason
        and formed.verdict in VERDICTS
    )


# ---- while it trains ----------------------------------------------------------------------------------------------


def held(task, texts, tiny, monkeypatch):
    made = [Completion(text, 4, False, (5, 6, 7, 2)) for text in texts]
    monkeypatch.setattr(
        "grpo_kit.evaluation.generate_and_score.complete", lambda *_, **__: made
    )
    return HeldOut(task, rows=len(texts)).measure(*tiny)


def test_held_out_measures_what_the_task_has(tiny, monkeypatch):
    labels = own(ExactAnswer(), *LABELS, prefill="<answer>")
    found = held(
        labels, ["billing</answer>"] * 54 + ["account</answer>"] * 6, tiny, monkeypatch
    )
    assert (found["one_answer"], found["one_gold"], found["constant"]) == (
        0.9,
        0.45,
        0.45,
    ) and "reward" not in found
    unread = held(labels, ["billing</answer>"] * 20 + ["no tag"] * 40, tiny, monkeypatch)
    assert "one_answer" not in unread, "of most completions it is not known what they answer"
    text = held(
        own(Bleu(tag=None), *(f"{a} b" for a in "cdefghijk")), ["c b"] * 9, tiny, monkeypatch
    )
    assert (
        text["one_answer"] == 1.0
        and 0 < text["reward"] < 1
        and text["reward_low"] <= text["reward"]
    )
    none = held(own(lively, *[None] * 9), ["!"] * 9, tiny, monkeypatch)
    assert set(none) == {"reward", "reward_low", "reward_high"}
    assert HeldOut(labels, rows=2).judged_by == "accuracy"
    assert HeldOut(own(points, "a", "b"), rows=2).judged_by == "reward"


def test_the_laboratory_refuses_a_task_without_right_and_wrong():
    task = own(lively, None, None)
    with pytest.raises(
        ValueError, match="'own' has no right and wrong, .*give the task correct="
    ):
        arm_of("smoke", {"task": task})
    assert arm_of("smoke", {"task": largest(n_train=4, n_held_out=4)})

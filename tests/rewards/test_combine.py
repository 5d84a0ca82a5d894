"""Gates, clipping and sums in one another: scores, what is logged, and the probe for parts that cancel out."""

import math
from dataclasses import replace

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop_runs import make, task
from trl.rewards import get_repetition_penalty_reward, get_soft_overlong_punishment

import grpo_kit
from grpo_kit.rewards.answers import ExactAnswer
from grpo_kit.rewards.cancel import cancelled_groups, cancelled_share
from grpo_kit.rewards.cheat_cases import crafted_cases
from grpo_kit.rewards.check import check_rewards
from grpo_kit.rewards.combine import Clipped, Gated, WeightedSum, all_parts
from grpo_kit.rewards.form import Repetition, RightSize, SoftFormat
from grpo_kit.trainer.watch_run import WatchRun


def given_scores(name, scores):
    """A reward that gives these scores, whatever the completions."""

    def reward(completions, **columns):
        reward.calls += 1
        return list(scores)[: len(completions)]

    reward.__name__, reward.calls = name, 0
    return reward


def logged(reward, completions, **columns):
    """(scores, metrics, columns) as a trainer would log them; a name logged twice fails."""
    metrics, extra = {}, {}

    def keep(store):
        def log(name, value):
            assert name not in store, f"{name} logged twice"
            store[name] = value

        return log

    scores = reward(completions, log_metric=keep(metrics), log_extra=keep(extra), **columns)
    return scores, metrics, extra


# --- Gated -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("score", "gate", "at", "expected", "reason"),
    [
        (0.75, 1.0, 1.0, 0.75, "open: the reward's own score"),
        (1.0, 0.99, 1.0, 0.0, "almost is not open"),
        (1.0, 0.5, 0.5, 1.0, "at is inclusive"),
        (1.0, 0.49, 0.5, 0.0, "below it"),
        (0.0, 1.0, 1.0, 0.0, "open, and nothing to give"),
        (None, 1.0, 1.0, None, "the reward cannot judge"),
        (1.0, None, 1.0, None, "the gate cannot judge"),
        (None, 0.0, 1.0, None, "shut, but a row that cannot be judged is no bad completion"),
    ],
)
def test_gated(score, gate, at, expected, reason):
    gated = Gated(given_scores("answer", [score]), on=given_scores("format", [gate]), at=at)
    assert gated(["text"]) == [expected], reason


@pytest.mark.parametrize(
    ("score", "stated", "gate", "at", "expected", "reason"),
    [
        (3, (-1, 3), 0, 0.5, 3, "half of the gate's (-1, 1) is 0"),
        (3, (-1, 3), -0.1, 0.5, -1, "shut: the low end that the reward states"),
        (3, (-1, 3), 0.999, 1.0, -1, "the gate's full score is 1"),
        (3, None, -1, 0.5, 0, "shut: nothing, where no range is stated"),
        (-2, None, -1, 0.5, -2, "a shut gate never pays more than the reward"),
        (-2, None, 1, 1.0, -2, "open"),
    ],
)
def test_gated_of_other_ranges(score, stated, gate, at, expected, reason):
    points, on = given_scores("points", [score]), given_scores("gate", [gate])
    points.range, on.range = stated, (-1, 1)
    assert Gated(points, on=on, at=at)(["text"]) == [expected], reason


def test_gated_on_real_rewards_keeps_both_in_sight():
    gated = Gated(ExactAnswer(), on=SoftFormat(think=None))
    completions = ["5</answer>", "5</answer> I hope", "4</answer>"]
    scores, metrics, extra = logged(gated, completions, prefill="<answer>", answer=["5"] * 3)
    assert scores == [1.0, 0.0, 0.0]
    assert extra == {
        "reward/exact_answer": [1.0, 1.0, 0.0],
        "reward/soft_format": [1.0, 0.75, 1.0],
    }
    assert metrics == {
        "reward/exact_answer": 2 / 3,
        "reward/soft_format": pytest.approx(2.75 / 3),
    }
    assert (gated.__name__, gated.columns) == ("gated_exact_answer", ("answer",))
    assert repr(gated).startswith("Gated(ExactAnswer(") and repr(gated).endswith("at=1)")


@pytest.mark.parametrize("at", [0, -1, 1.1, math.nan])
def test_gated_refuses_what_is_no_threshold(at):
    with pytest.raises(ValueError, match="at="):
        Gated(ExactAnswer(), on=SoftFormat(), at=at)


def test_gated_names_two_of_one_name_apart_and_refuses_one_reward_as_its_own_gate():
    with pytest.warns(UserWarning, match="several rewards are named 'exact_answer'"):
        gated = Gated(ExactAnswer(), on=ExactAnswer(column="other"))
    assert gated.names == ["exact_answer", "exact_answer_2"]
    columns = {"answer": ["5"], "other": ["4"]}
    scores, metrics, _ = logged(gated, ["<answer>5</answer>"], **columns)
    assert (
        scores == [0.0]
        and metrics["reward/exact_answer"] == 1
        and metrics["reward/exact_answer_2"] == 0
    )
    with pytest.raises(ValueError, match="the same"):
        Gated(reward := ExactAnswer(), on=reward)


# --- Clipped ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("score", "expected", "reason"),
    [
        (-10, 0.0, "the low end"),
        (-5, 0.5, "half way"),
        (0, 1.0, "the high end"),
        (3, 1.0, "above"),
        (-99, 0.0, "below"),
        (math.inf, 1.0, "as far above as can be"),
        (-math.inf, 0.0, "and below"),
        (None, None, "cannot judge stays so"),
    ],
)
def test_clipped(score, expected, reason):
    assert Clipped(given_scores("raw", [score]), low=-10, high=0)(["text"]) == [expected], (
        reason
    )


def test_clipped_makes_trls_rewards_fit():
    ids = [[1] * 90, [1, 2, 3, 4], [5] * 120]
    texts = ["a", "b", "c"]
    overlong = Clipped(get_soft_overlong_punishment(100, 20), low=-1, high=0)
    assert overlong(texts, completion_ids=ids) == RightSize(80, 100, unit="tokens")(
        texts, completion_ids=ids
    )
    repetition = Clipped(get_repetition_penalty_reward(2), low=-1, high=0)
    assert repetition(texts, completion_ids=ids)[1] == 1.0
    scores, metrics, extra = logged(overlong, texts, completion_ids=ids)
    assert extra == {"reward/soft_overlong_punishment_reward": [-0.5, 0.0, -1.0]}
    assert overlong.__name__ == "clipped_soft_overlong_punishment_reward"


def test_clipped_says_where_a_nan_is_and_what_has_the_wrong_length():
    with pytest.raises(ValueError, match="'raw' gave nan in row 1, completion 'b'"):
        Clipped(given_scores("raw", [0.5, math.nan]))(["a", "b"])
    with pytest.raises(ValueError, match="'raw' returned 1 scores for 2 completions"):
        Clipped(given_scores("raw", [0.5]))(["a", "b"])
    for low, high in ((1, 1), (1, 0), (0, math.inf), (math.nan, 1)):
        with pytest.raises(ValueError, match="low < high"):
            Clipped(ExactAnswer(), low=low, high=high)


# --- in one another --------------------------------------------------------------------------------------


def test_a_gate_in_a_sum_shares_its_format_and_everything_is_logged_once():
    answer, soft = given_scores("answer", [1, 1, 0]), given_scores("format", [1, 0.5, 1])
    total = WeightedSum({Gated(answer, on=soft): 0.75, soft: 0.25})
    scores, metrics, extra = logged(total, ["a", "b", "c"])
    assert scores == [1.0, 0.125, 0.25]
    assert extra == {
        "reward/gated_answer": [1, 0, 0],
        "reward/format": [1, 0.5, 1],
        "reward/answer": [1, 1, 0],
    }
    assert set(metrics) == set(extra)
    assert (answer.calls, soft.calls) == (1, 1)
    assert [part.__name__ for part in all_parts(total)] == ["gated_answer", "format", "answer"]
    assert repr(total) == "WeightedSum({gated_answer: 0.75, format: 0.25})"


def test_sums_in_sums_and_clipped_in_gates():
    raw = given_scores("raw", [5, -5])
    inner = WeightedSum({Clipped(raw, low=0, high=10): 0.5, given_scores("b", [1, 1]): 0.5})
    inner.__name__ = "inner"
    total = WeightedSum(
        {Gated(inner, on=given_scores("gate", [1, 1])): 0.5, given_scores("c", [0, 1]): 0.5}
    )
    scores, _, extra = logged(total, ["x", "y"])
    assert scores == [0.375, 0.75]
    assert extra["reward/raw"] == [5, -5]
    assert set(extra) == {
        f"reward/{n}" for n in ("gated_inner", "c", "inner", "gate", "clipped_raw", "b", "raw")
    }


def test_two_rewards_of_one_name_are_told_apart_however_deep():
    with pytest.warns(UserWarning, match="several rewards are named 'soft_format'"):
        total = WeightedSum(
            {Gated(ExactAnswer(), on=SoftFormat()): 0.5, SoftFormat(think=None): 0.5}
        )
    assert total.names == ["gated_exact_answer", "soft_format", "exact_answer", "soft_format_2"]


def test_a_part_of_the_sums_own_name_is_refused():
    inner = WeightedSum({ExactAnswer(): 1.0})
    # both would be reward/weighted_sum
    with pytest.raises(ValueError, match="'weighted_sum'.*set __name__"):
        WeightedSum({inner: 0.5, SoftFormat(): 0.5})


def test_a_part_that_returns_no_list_is_named():
    def forgot(completions, **columns):
        pass

    with pytest.raises(ValueError, match="'forgot' returned NoneType"):
        WeightedSum({forgot: 1.0})(["a"])


def test_parts_without_weights_are_refused():
    with pytest.raises(ValueError, match=r"parts=\[ExactAnswer\(.*\{reward: weight\}"):
        WeightedSum([ExactAnswer(), SoftFormat()])


def test_what_another_reward_calls_parts_is_its_own_affair():
    reward = given_scores("mine", [1.0])
    reward.parts = 3
    assert all_parts(reward) == []
    assert (
        check_rewards(
            WeightedSum({reward: 0.5, ExactAnswer(): 0.5}), crafted_cases("5", "6")[:1]
        )["total"][0]
        == 1
    )


def test_parts_are_called_as_trl_calls_them_and_may_log_too():
    def first(prompts, completions, log_metric, log_extra, **columns):
        log_metric("its own", 0.25)
        log_extra("its column", prompts)
        return [1.0] * len(completions)

    scores, metrics, extra = logged(WeightedSum({first: 1.0}), ["a", "b"], prompts=["p", "p"])
    assert scores == [1.0, 1.0]
    assert (metrics["its own"], extra["its column"]) == (0.25, ["p", "p"])


def test_an_infinite_part_is_found_also_where_clipped_asked_first():
    raw = given_scores("raw", [math.inf])
    with pytest.raises(ValueError, match="'raw' gave inf in row 0"):
        WeightedSum([(Clipped(raw, high=10), 0.5), (raw, 0.5)])(["a"])
    with pytest.raises(ValueError, match="'raw' gave inf in row 0"):
        Gated(raw, on=SoftFormat())(["a"])


def test_parts_of_any_finite_scale_are_taken():
    points, penalty = given_scores("points", [2, -3]), given_scores("penalty", [-1, 0])
    assert WeightedSum({points: 0.5, penalty: 0.5})(["a", "b"]) == [0.5, -1.5]
    assert WeightedSum({Gated(points, on=given_scores("gate", [1, 0])): 1.0})(["a", "b"]) == [
        2,
        -3,
    ]


def test_a_part_outside_its_stated_range_is_named_however_deep():
    points = given_scores("points", [2, 5])
    points.range = (0, 4)
    with pytest.raises(
        ValueError, match=r"'points' gave 5 in row 1, .*\[0, 4\], the range that it states"
    ):
        WeightedSum(
            {
                Gated(points, on=given_scores("gate", [1, 1])): 0.5,
                given_scores("b", [1, 1]): 0.5,
            }
        )(["a", "b"])
    whole = WeightedSum({given_scores("c", [1, 1]): 1.0})
    whole.range, whole.__name__ = (0, 0.5), "whole"
    with pytest.raises(ValueError, match="'whole' gave 1.0 in row 0"):
        WeightedSum({whole: 1.0})(["a", "b"])


def test_none_in_the_depth_makes_the_sum_none():
    gated = Gated(given_scores("answer", [None, 1]), on=given_scores("format", [1, 1]))
    assert WeightedSum({gated: 0.5, given_scores("b", [1, 1]): 0.5})(["a", "b"]) == [None, 1.0]


def test_cheats_of_all_parts_are_collected_once_and_do_not_pay():
    soft = SoftFormat(think=None)
    size, repetition = RightSize(200, 300, unit="characters"), Repetition()
    total = WeightedSum(
        {Gated(ExactAnswer(), on=soft): 0.75, soft: 0.125, size: 0.0625, repetition: 0.0625}
    )
    cases = crafted_cases("sodium chloride", "water", prefill="<answer>")
    cheats = total.cheats(cases[0])
    names = [case.name for case in cheats]
    assert {
        "filler of the right length",
        "filler without end",
        "one phrase without end",
    } <= set(names)
    assert len(names) == len(set(names))
    assert check_rewards(total, cases + cheats)["total"].max() == 1.0


# --- parts that cancel out -------------------------------------------------------------------------------

ROWS = [
    ([1, 0], [0, 1], [0.5, 0.5], True, "one rises as the other falls"),
    ([1, 0], [0, 1], [0.75, 0.25], False, "other weights do not cancel"),
    ([1, 0], [1, 0], [0.5, 0.5], False, "both rise"),
    (
        [1, 1],
        [0, 0],
        [0.5, 0.5],
        False,
        "nothing varies: no spread, but nothing cancels either",
    ),
    ([1, 0], [0.5, 0.5], [0.5, 0.5], False, "one varies"),
    ([0.3, 0.1], [0.1, 0.2], [0.2, 0.4], True, "0.2 * 0.3 + 0.4 * 0.1 is 0.1 but for 1e-17"),
    ([1, 1, 0], [0, 0, 1], [0.5, 0.5], True, "three"),
    ([1, 1, 0], [0, 0, 0.5], [0.5, 0.5], False, "three, and the sum varies"),
    ([1, None, 0], [0, 1, 1], [0.5, 0.5], True, "what cannot be judged is left out"),
    ([1, None], [0, 1], [0.5, 0.5], None, "one that can be judged is no group"),
]


@pytest.mark.parametrize(("a", "b", "weights", "cancelled", "reason"), ROWS)
def test_one_group(a, b, weights, cancelled, reason):
    row = cancelled_groups({"a": a, "b": b}, weights=weights, group_size=len(a)).iloc[0]
    assert (row.step, row.groups, row.cancelled) == (
        0,
        int(cancelled is not None),
        int(bool(cancelled)),
    ), reason
    assert bool(row.example) == bool(cancelled)
    total = WeightedSum(
        [(given_scores("a", a), weights[0]), (given_scores("b", b), 1 - weights[0])]
    )
    if sum(weights) == 1:
        _, metrics, _ = logged(total, ["text"] * len(a), prompts=["p"] * len(a))
        assert metrics.get("frac_cancelled_groups") == (
            None if cancelled is None else float(cancelled)
        ), reason


def test_groups_are_adjacent_equal_prompts():
    a, b = [1, 0, 1, 0, 1, 1], [0, 1, 1, 0, 1, 1]
    total = WeightedSum({given_scores("a", a): 0.5, given_scores("b", b): 0.5})
    _, metrics, extra = logged(total, ["text"] * 6, prompts=["p", "p", "q", "q", "p", "p"])
    assert metrics["frac_cancelled_groups"] == pytest.approx(1 / 3)
    assert "frac_cancelled_groups" not in extra
    messages = [[{"role": "user", "content": c}] for c in "ppqqpp"]
    assert logged(total, ["text"] * 6, prompts=messages)[1] == metrics
    assert "frac_cancelled_groups" not in logged(total, ["text"] * 6)[1]


def test_a_group_of_its_own_prompt_each_is_none():
    assert cancelled_share([[1, 0]], [1, 0], ["p", "q"]) is None


def log(**columns):
    return pd.DataFrame({"step": [1, 1, 1, 1, 2, 2], "group": [0, 0, 1, 1, 0, 0], **columns})


def test_the_completions_log_step_by_step():
    table = cancelled_groups(
        log(
            **{
                "reward/a": [1, 0, 1, 0, 1, 1],
                "reward/b": [0, 1, 1, 0, 0, 0],
                "reward": [0.5, 0.5, 1, 0, 0.5, 0.5],
            }
        )
    )
    assert table.to_dict("records") == [
        {
            "step": 1,
            "groups": 2,
            "cancelled": 1,
            "share": 0.5,
            "example": "a 1, 0; b 0, 1; reward 0.5, 0.5",
        },
        {"step": 2, "groups": 1, "cancelled": 0, "share": 0.0, "example": ""},
    ]


def test_noise_grows_with_the_scale():
    """Equal sums of parts around 1000 differ by 6e-5 in float32."""
    noisy = log(**{"reward/a": [1000, 0] * 3, "reward": [1000, 1000 + 6e-5] * 3})
    assert cancelled_groups(noisy)["share"].tolist() == [1.0, 1.0]
    assert cancelled_share([[1000, 0]], [1000, 1000 + 6e-5], ["p", "p"]) == 1.0
    assert cancelled_share([[1000, 0]], [1000, 1000.01], ["p", "p"]) == 0.0


def test_float32_noise_in_the_log_is_no_spread():
    noisy = log(**{"reward/a": [1, 0] * 3, "reward": [0.2, 0.2 + 6e-8] * 3})
    assert cancelled_groups(noisy)["share"].tolist() == [1.0, 1.0]
    assert cancelled_groups(noisy, tolerance=0)["share"].tolist() == [0.0, 0.0]


def test_completions_without_a_reward_are_left_out_of_the_log():
    nan = math.nan
    table = cancelled_groups(
        log(**{"reward/a": [1, 0, 1, nan, nan, nan], "reward": [1, 1, 1, nan, nan, nan]})
    )
    assert table[["groups", "cancelled"]].to_numpy().tolist() == [[1, 1], [0, 0]]
    assert math.isnan(table["share"][1])


def test_a_part_that_could_not_judge_is_read_from_the_log_as_objects_too():
    objects = pd.Series([None, 1, 1, 0, None, None], dtype=object)
    table = log(**{"reward/a": objects, "reward/b": [1, 0, 1, 1, 1, 0], "reward": [1.0] * 6})
    found = cancelled_groups(table)
    assert found["cancelled"].tolist() == [2, 1]
    assert found["example"][0] == "a nan, 1; b 1, 0; reward 1, 1"


def test_two_completions_of_a_step_that_share_a_group_number_with_another_step_are_apart():
    table = log(**{"reward/a": [1, 0, 1, 1, 1, 1], "reward": [1, 1, 1, 1, 0, 0]})
    assert cancelled_groups(table)["cancelled"].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: cancelled_groups(log(reward=[1] * 6)),
            "needs step, group, reward and reward/<part>",
        ),
        (lambda: cancelled_groups(log(**{"reward/a": [1] * 6})), "needs step, group, reward"),
        (
            lambda: cancelled_groups(
                log(**{"reward/a": [1] * 6, "reward": [1] * 6}), weights=[1]
            ),
            "weights and group",
        ),
        (
            lambda: cancelled_groups({"a": [1, 0]}, weights=[1, 2], group_size=2),
            r"weights=\[1, 2\] for 1 parts",
        ),
        (
            lambda: cancelled_groups({"a": [1, 0, 1]}, weights=[1], group_size=2),
            "group_size=2 for 3",
        ),
        (
            lambda: cancelled_groups({"a": [1, 0], "b": [1]}, weights=[1, 1], group_size=2),
            "lengths",
        ),
        (lambda: cancelled_groups({}, weights=[], group_size=2), "lengths"),
    ],
)
def test_the_probe_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@given(st.lists(st.tuples(*[st.sampled_from([0, 0.25, 0.5, 1])] * 2), min_size=2, max_size=24))
def test_the_log_the_lists_and_the_live_metric_agree(rows):
    rows = rows[: len(rows) // 2 * 2]
    a, b = [x for x, _ in rows], [y for _, y in rows]
    total = [0.5 * x + 0.5 * y for x, y in rows]
    prompts = [row // 2 for row in range(len(rows))]
    by_lists = cancelled_groups({"a": a, "b": b}, weights=[0.5, 0.5], group_size=2)
    table = pd.DataFrame(
        {"step": 0, "group": prompts, "reward/a": a, "reward/b": b, "reward": total}
    )
    assert cancelled_groups(table).equals(by_lists)
    assert cancelled_share([a, b], total, prompts) == pytest.approx(by_lists["share"][0])


def test_a_real_run_shows_it_live_and_in_its_log(tmp_path):
    def early(completions, **columns):
        return [
            float(text < sorted(completions)[len(completions) // 2]) for text in completions
        ]

    def late(completions, **columns):
        return [1 - score for score in early(completions)]

    total = WeightedSum({early: 0.5, late: 0.5})
    paid = replace(task(), rewards=[total], reward_weights=[1.0])
    make(tmp_path / "run", task=paid, steps=2, hooks=[WatchRun(live=None)]).train()
    found = cancelled_groups(grpo_kit.read_completions(tmp_path / "run"))
    metrics = grpo_kit.read_metrics(tmp_path / "run")
    assert found["step"].tolist() == [1, 2]
    assert found["share"].max() > 0
    assert metrics["frac_cancelled_groups"].tolist() == pytest.approx(found["share"].tolist())
    assert (metrics["frac_reward_zero_std"] >= found["share"].to_numpy()).all()


def test_the_log_of_several_reward_functions_too(tmp_path):
    def up(completions, **columns):
        return [float(row % 2) for row in range(len(completions))]

    def down(completions, **columns):
        return [float(1 - row % 2) for row in range(len(completions))]

    paid = replace(task(), rewards=[up, down], reward_weights=[0.5, 0.5])
    make(tmp_path / "run", task=paid, steps=1, reward_weights=[1.0, 1.0]).train()
    row = cancelled_groups(grpo_kit.read_completions(tmp_path / "run")).iloc[0]
    assert (row.groups, row.cancelled) == (2, 2)
    assert row.example.startswith("up 0, 1, 0, 1; down 1, 0, 1, 0; reward 1, 1, 1, 1")

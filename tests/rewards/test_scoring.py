"""One judge: names, range, the weighted total and its rule for None, the same in every place that asks rewards."""

import asyncio
import dataclasses
import functools
import itertools
import math
import threading
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from loop_runs import letters, make
from loop_runs import task as largest_task

import grpo_kit as kit
from grpo_kit.loop.score import advantages
from grpo_kit.record.files import read_completions, read_metrics
from grpo_kit.rewards import (
    ExactAnswer,
    Gated,
    SoftFormat,
    WeightedSum,
    cancelled_groups,
    on_response,
    scoring,
)
from grpo_kit.rewards._parts import range_of, reward_names
from grpo_kit.rewards.scoring import PendingScores, RewardError, score_all, total, totals
from grpo_kit.tasks import from_rows
from grpo_kit.trainer.watch_run import OffScale, WatchRun


def paid_by(*rewards):
    """A task whose completions these rewards judge, with equal weights."""
    weights = [1 / len(rewards)] * len(rewards)
    return dataclasses.replace(largest_task(), rewards=list(rewards), reward_weights=weights)


@pytest.mark.parametrize(
    ("scores", "weights", "expected", "why"),
    [
        ([1.0, 0.5], [0.75, 0.25], 0.875, "the sum"),
        ([None, 1.0], [0.75, 0.25], None, "0.25 would score the first part 0"),
        ([math.nan, 1.0], [0.75, 0.25], None, "tables hold None as NaN"),
        ([None, None], [0.75, 0.25], None, "nobody can judge"),
        ([0.1] * 10, [0.1] * 10, 0.1, "rounding of binary fractions does not show"),
        ([1.0, 1.0], [1.0, 1.0], 2.0, "TRL's default weights do not sum to 1"),
    ],
)
def test_the_total_of_one_completion(scores, weights, expected, why):
    assert total(scores, weights) == expected, why


def by_hand(parts, weights, groups):
    """The rule of totals(), written out row by row."""
    made = []
    for row, group in enumerate(groups):
        members = [r for r, g in enumerate(groups) if g == group]
        applies = [
            k for k in range(len(parts)) if any(parts[k][r] is not None for r in members)
        ]
        mine = [parts[k][row] for k in applies]
        lost = not applies or None in mine
        made.append(
            None if lost else round(sum(weights[k] * parts[k][row] for k in applies), 6)
        )
    return made


def test_every_pattern_of_none_in_two_groups_of_two():
    weights, groups = [0.75, 0.25], ["a", "a", "b", "b"]
    for pattern in itertools.product([None, 0.5], repeat=8):
        parts = [list(pattern[:4]), list(pattern[4:])]
        assert totals(parts, weights, groups) == by_hand(parts, weights, groups)


def named_scale(completions, most, **columns):
    return [min(1.0, len(text) / most) for text in completions]


class Classy:
    def __call__(self, completions, **columns):
        return [1.0] * len(completions)


def test_names_are_trls_and_told_apart():
    from trl.trainer.utils import get_callable_name

    rewards = [
        functools.partial(functools.partial(named_scale), most=3),
        Classy(),
        ExactAnswer(),
        lambda c: c,
    ]
    assert reward_names(rewards) == [get_callable_name(r) for r in rewards]
    with pytest.warns(UserWarning, match="several rewards are named '<lambda>'.*'<lambda>_2'"):
        assert reward_names([lambda c: c, lambda c: c]) == ["<lambda>", "<lambda>_2"]
    with pytest.warns(UserWarning, match="exact_answer_2"):  # the part keeps its name
        sums = WeightedSum({ExactAnswer(): 1.0})
        assert reward_names([ExactAnswer(), sums]) == ["exact_answer_2", "weighted_sum"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shared = ExactAnswer()  # one object in both places is one reward
        assert reward_names([shared, WeightedSum({shared: 1.0})]) == [
            "exact_answer",
            "weighted_sum",
        ]


@pytest.mark.parametrize(
    "score", [math.nan, math.inf, -math.inf, "right", [1.0], 1e16, 10**400, 1j]
)
def test_what_is_no_finite_number_is_refused_by_name(score):
    with pytest.raises(
        RewardError,
        match=r"reward 'odd' gave .* in row 1, completion 'b'; use a finite number.* or None where",
    ):
        scoring.score(lambda completions, **columns: [1.0, score], ["a", "b"], "odd")


@pytest.mark.parametrize(
    "score", [2, -0.5, 1e6, np.float32(3), np.int64(-7), torch.tensor(2.5), True, 0.1]
)
def test_any_finite_number_is_taken(score):
    made = scoring.score(lambda completions, **columns: [score, None], ["a", "b"])
    assert made == [float(score), None] and type(made[0]) is float


def in_points(completions, **columns):
    return [columns.get("scores", [3.0] * len(completions))[i] for i in range(len(completions))]


in_points.range = (-1, 3)


@pytest.mark.parametrize(
    "score, fits", [(3, True), (-1, True), (3 + 1e-7, True), (3.1, False), (-1.1, False)]
)
@pytest.mark.parametrize("reward", [in_points, functools.partial(in_points, unused=1)])
def test_a_score_outside_the_range_that_its_reward_states_is_refused_by_name(
    reward, score, fits
):
    if fits:
        assert scoring.score(reward, ["a"], scores=[score]) == [score]
    else:
        with pytest.raises(
            RewardError,
            match=r"'in_points' gave .* in row 0, .* in \[-1, 3\], the range that it",
        ):
            scoring.score(reward, ["a"], scores=[score])


@pytest.mark.parametrize("stated", [(1, 0), (0, math.inf), 3, "ab", (0, 1, 2), ("0", None)])
def test_a_range_that_is_none_is_refused_before_training(stated, tmp_path):
    reward = functools.partial(in_points)
    reward.range = stated
    with pytest.raises(
        ValueError, match="'in_points' has range=.*two finite numbers with low < high"
    ):
        make(tmp_path / "run", task=paid_by(reward)).train()
    assert not (tmp_path / "run").exists()


def test_on_response_states_a_range_and_keeps_the_one_of_its_function():
    @on_response(range=(-1, 1))
    def shouts(responses, **columns):
        return [1.0 if text.isupper() else -1.0 for text in responses]

    def plain(responses):
        return [2.0] * len(responses)

    plain.range = (0, 2)
    assert range_of(shouts) == (-1.0, 1.0) and range_of(on_response(plain)) == (0.0, 2.0)
    assert scoring.score(shouts, ["B", "b"], prefill=["A", "A"], responses=["x", "y"]) == [
        1.0,
        -1.0,
    ]
    assert range_of(ExactAnswer()) is None


def test_scores_outside_0_and_1_are_said_once_a_reward_and_run(tmp_path, capsys, tiny):
    """A line in training, a warning elsewhere; none where the range is stated."""

    def points(completions, **columns):
        return [2.0 if i else -0.5 for i, _ in enumerate(completions)]

    def stated(completions, **columns):
        return [5.0] * len(completions)

    stated.range = (0, 5)
    make(
        tmp_path / "run", task=paid_by(points, letters, stated), steps=3, hooks=[OffScale()]
    ).train()
    said = [
        line
        for line in capsys.readouterr().out.splitlines()
        if "any finite scale is fine" in line
    ]
    assert len(said) == 1 and said[0].startswith(
        "reward 'points' gave -0.5 (row 0; so far -0.5 to 2): any finite"
    )
    cases = kit.rewards.crafted_cases("8", "9")[:1]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kit.rewards.check_rewards([points, letters, stated], [cases[0], cases[0]])
        rows = [{"question": f"Say {i}:", "answer": str(i)} for i in range(4)]
        own = from_rows(
            "own", rows[:2], rows[2:], reward=[points, letters, stated], max_completion_tokens=4
        )
        kit.evaluate(*tiny, own)
    said = [str(w.message)[:40] for w in caught if "any finite scale" in str(w.message)]
    assert said == ["reward 'points' gave -0.5 (row 0; so far"] * 2, "check_rewards, evaluate"


def sorts(completions, **columns):
    completions.sort()
    return [float(text < "b") for text in completions]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (sorts, "changed the list of completions"),
        (
            lambda completions, **columns: {"a": 1.0, "b": 0.0},
            "returned dict; return a flat list",
        ),
        (lambda completions, **columns: {1.0, 0.5}, "returned set"),
        (lambda completions, **columns: "10", "returned str"),
        (lambda completions, **columns: ["1", "0"], "gave '1' in row 0"),
        (lambda completions, **columns: np.ones((2, 1)), r"returned ndarray of shape \(2, 1\)"),
        (lambda completions, **columns: torch.ones(2, 1), r"returned Tensor of shape \(2, 1\)"),
        (lambda completions, **columns: np.float64(1), "returned float64"),
        (lambda completions, **columns: [np.ones(1), np.ones(1)], "gave array"),
        (lambda completions, **columns: [1.0, 1e300], r"gave 1e\+300 in row 1"),
        (lambda completions, **columns: None, "returned NoneType"),
    ],
)
def test_what_is_no_flat_list_of_scores_is_refused(reward, message):
    for asked in (
        PendingScores(reward, "odd"),
        lambda completions: scoring.score(reward, completions, "odd"),
    ):
        with pytest.raises(RewardError, match=f"reward 'odd' {message}"):
            asked(completions=["b", "a"])


def test_scores_come_back_as_plain_numbers():
    for made in (np.ones(2), torch.ones(2), pd.Series([1.0, 1.0]), (True, np.float32(1))):
        scores = scoring.score(lambda completions, made=made, **columns: made, ["a", "b"])
        assert scores == [1.0, 1.0] and all(type(score) is float for score in scores)


def test_a_reward_cannot_change_what_the_next_one_sees():
    def spoils(completions, words, prompts, **columns):
        for row in words:
            row["all"].clear()
        prompts.reverse()
        return [1.0] * len(completions)

    def counts(completions, words, prompts, **columns):
        kept = prompts == completions and all(len(row["all"]) == 1 for row in words)
        return [float(kept)] * len(completions)

    words, prompts = [{"all": ["x"]}, {"all": ["y"]}], ["a", "b"]
    made = score_all([spoils, counts], ["a", "b"], words=words, prompts=prompts)
    assert made == {"spoils": [1.0, 1.0], "counts": [1.0, 1.0]} and words[0] == {"all": ["x"]}


class Later:
    """Asynchronous, as TRL takes it: a judge behind a network."""

    def __init__(self, scale=1.0):
        self.scale, self.__name__ = scale, "later"

    async def __call__(self, completions, **columns):
        await asyncio.sleep(0.001)
        return [self.scale * score for score in named_scale(completions, 40)]


def test_asynchronous_rewards_count_everywhere(task, tiny, tmp_path):
    """In training, evaluation, readiness, check_rewards and inside a sum; in a notebook's running loop too."""
    later = Later()
    rewards = [later, WeightedSum({later: 1.0})]
    rows = [{"question": f"Say {i}:", "answer": str(i)} for i in range(16)]
    options = dict(reward=rewards, max_completion_tokens=12, strategies={})
    waits = from_rows("waits", rows[:8], rows[8:], **options)
    make(tmp_path / "run", task=waits, steps=1).train()
    table = read_completions(tmp_path / "run")
    assert table["reward/later"].tolist() == pytest.approx(named_scale(table["completion"], 40))

    async def in_a_notebook():
        return kit.evaluate(*tiny, waits), score_all(rewards, ["x" * 20])

    found, asked = asyncio.run(in_a_notebook())
    assert found.rows["reward/later"].tolist() == named_scale(found.rows["completion"], 40)
    assert found.rows["reward"].tolist() == pytest.approx(found.rows["reward/later"].tolist())
    assert asked == {"later": [0.5], "weighted_sum": [0.5]}
    kit.readiness(*tiny, waits, samples=2, group_size=2)


def test_asynchronous_rewards_wait_beside_each_other():
    # broken, hence an error, unless both are on their way
    meeting = threading.Barrier(2, timeout=10)

    def meets(name):
        async def reward(completions, **columns):
            await asyncio.to_thread(meeting.wait)
            return [1.0] * len(completions)

        reward.__name__ = name
        return reward

    assert score_all([meets("one"), meets("other")], ["x"]) == {"one": [1.0], "other": [1.0]}


def test_an_asynchronous_reward_is_held_to_its_contract(tmp_path):
    with pytest.raises(RewardError, match="'later' gave inf in row 0.*finite"):
        make(tmp_path / "a", task=paid_by(Later(math.inf))).train()
    with pytest.raises(RewardError, match="(?s)'later' raised TypeError.*row 0"):
        make(tmp_path / "b", task=paid_by(Later(None))).train()


class Logs:
    def __init__(self, call):
        self.call, self.__name__ = call, "logs"

    def __call__(self, completions, log_extra, log_metric, **columns):
        self.call(completions, log_extra, log_metric)
        return letters(completions)


@pytest.mark.parametrize(
    "name", ["completion", "step", "reward", "advantage", "reward/letters"]
)
def test_a_reward_cannot_log_over_the_records_columns(tmp_path, name):
    reward = Logs(lambda completions, extra, metric: extra(name, ["x"] * len(completions)))
    with pytest.raises(
        RewardError, match=f"'logs' raised ValueError: log_extra.'{name}'.*choose another name"
    ):
        make(tmp_path / "run", task=paid_by(reward)).train()


@pytest.mark.parametrize(
    "name", ["reward", "step", "loss", "entropy", "rewards/logs/mean", "rollout/logprob_gap"]
)
def test_a_reward_cannot_log_over_the_records_numbers(tmp_path, name):
    with pytest.raises(
        RewardError, match=f"'logs' raised ValueError: log_metric.'{name}'.*choose another name"
    ):
        make(
            tmp_path / "run",
            task=paid_by(Logs(lambda completions, extra, metric: metric(name, 1.0))),
        ).train()


def test_what_a_reward_logs_is_checked_and_kept(tmp_path):
    with pytest.raises(
        RewardError, match="log_extra.'note'.* was given 1 values for 8 completions"
    ):
        make(
            tmp_path / "a", task=paid_by(Logs(lambda c, extra, metric: extra("note", ["x"])))
        ).train()
    with pytest.raises(RewardError, match="'logs' raised ValueError: could not convert"):
        make(
            tmp_path / "b", task=paid_by(Logs(lambda c, extra, metric: metric("note", "high")))
        ).train()

    def kept(completions, extra, metric):
        extra("note", ["half a pair: \ud800"] * len(completions))
        metric("note", 0.5)

    make(tmp_path / "c", task=paid_by(Logs(kept)), steps=1).train()
    assert set(read_completions(tmp_path / "c")["note"]) == {"half a pair: \\ud800"}
    assert read_metrics(tmp_path / "c")["note"].tolist() == [0.5]


@pytest.mark.parametrize("score", [math.inf, math.nan, 1e39])
def test_a_reward_without_a_finite_score_stops_training_by_name(score, tmp_path):
    def generous(completions, **columns):
        return [score] * len(completions)

    with pytest.raises(RewardError, match="'generous' gave .* in row 0.*finite"):
        make(tmp_path / "run", task=paid_by(generous)).train()


def test_training_does_not_depend_on_the_scale(tmp_path):
    """GRPO divides by a group's spread: 250 times the letters minus 180 have the advantages of the letters."""

    def scaled(completions, **columns):
        return [250 * score - 180 for score in letters(completions)]

    for reward in (letters, scaled):
        hooks = [WatchRun(live=None)]
        make(tmp_path / reward.__name__, task=paid_by(reward), steps=1, hooks=hooks).train()
    tables = [read_completions(tmp_path / name) for name in ("letters", "scaled")]
    rows = [read_metrics(tmp_path / name) for name in ("letters", "scaled")]
    assert tables[0]["advantage"].abs().max() > 1
    assert tables[1]["advantage"].tolist() == pytest.approx(
        tables[0]["advantage"].tolist(), abs=0.01
    )
    low, high = rows[1]["scale/reward/low"][0], rows[1]["scale/reward/scaled/high"][0]
    ends = tables[1]["reward"].min(), tables[1]["reward"].max()
    assert (low, high) == pytest.approx(ends) and low < -1 < 1 < high
    assert not [name for name in rows[0] if name.startswith("scale/")]
    assert rows[0]["groups/equal_rewards"].tolist() == rows[1]["groups/equal_rewards"].tolist()


# ---- one rule for every caller -----------------------------------------------------------------------------------

WEIGHTS = [0.25, 0.25, 0.25, 0.25]


def sometimes(completions, answer, **columns):
    """Cannot judge a text of an odd sum, nor any to an even answer: that is another reward's kind of question."""
    odd = [sum(map(ord, text)) % 2 for text in completions]
    return [
        None if int(gold) % 2 == 0 or o else 0.5 for gold, o in zip(answer, odd, strict=True)
    ]


def mixed():
    return [
        functools.partial(named_scale, most=40),
        lambda completions, **columns: [float("a" in text) for text in completions],
        lambda completions, **columns: [float("i" in text) for text in completions],
        sometimes,
    ]


NAMES = ["named_scale", "<lambda>", "<lambda>_2", "sometimes"]


@pytest.fixture(scope="module")
def task():
    rows = [
        {"question": f"Say {i} and {'more ' * (i % 3)}:", "answer": str(i)} for i in range(16)
    ]
    return from_rows(
        "mixed",
        rows[:8],
        rows[8:],
        reward=mixed(),
        reward_weights=WEIGHTS,
        max_completion_tokens=12,
        strategies={},
    )


def check_table(table, groups):
    """The columns of a table against the rule by hand; returns how many completions have no total."""
    parts = []
    for name in NAMES:
        column = table[f"reward/{name}"].astype(float)
        parts.append([None if math.isnan(score) else score for score in column])
    expected = by_hand(parts, WEIGHTS, groups)
    got = [None if math.isnan(score) else score for score in table["reward"].astype(float)]
    assert [g is None for g in got] == [e is None for e in expected]
    assert [g for g in got if g is not None] == pytest.approx(
        [e for e in expected if e is not None], abs=1e-6
    )
    return expected.count(None)


pytestmark = pytest.mark.filterwarnings("ignore:several rewards are named")


def test_training(task, tmp_path):
    make(tmp_path / "run", task=task, steps=3).train()
    table = read_completions(tmp_path / "run")
    table["total"] = table["step"].astype(str) + "-" + table["group"].astype(str)
    assert 0 < check_table(table, table["total"].tolist()) < len(table)
    lost = table["reward"].isna()
    assert (table.loc[lost, "advantage"] == 0).all()
    for _, group in table[~lost].groupby("total"):  # those that are left, by hand
        spread = group["reward"].std() if len(group) > 1 else math.nan
        if spread > 1e-6:
            wanted = (group["reward"] - group["reward"].mean()) / (spread + 1e-4)
            assert group["advantage"].tolist() == pytest.approx(wanted.tolist(), abs=1e-3)
    metrics = read_metrics(tmp_path / "run")
    means = table[~lost].groupby("step")["reward"].mean()
    assert metrics["reward"].tolist() == pytest.approx(means.tolist(), abs=1e-6)
    assert {f"reward/{name}" for name in NAMES} <= set(metrics)


def test_none_beside_a_constant_moves_no_advantage():
    """TRL's sum punishes it: 1 + 0.5 beside 1 + nothing."""
    parts = [[1.0] * 6, [0.5, None, 0.5, None, None, None]]
    groups = [0, 0, 0, 0, 1, 1]  # of the second group it judges none: left out for all of it
    made = totals(parts, [0.5, 0.5], groups)
    assert made == [0.75, None, 0.75, None, 0.5, 0.5]
    assert advantages(made, groups) == [0.0] * 6


def test_evaluation_readiness_and_samples(task, tiny, tmp_path):
    torch.manual_seed(0)
    evaluation = kit.evaluate(*tiny, task)
    # a group of one: who cannot judge it is left out
    assert check_table(evaluation.rows, range(8)) == 0
    again = type(evaluation)
    evaluation.save(tmp_path / "e.json")
    pd.testing.assert_frame_equal(again.load(tmp_path / "e.json").rows, evaluation.rows)

    samples = kit.scored_samples(
        *tiny, task, samples=6, temperature=1.0, folder=tmp_path / "samples"
    )
    lost = check_table(
        samples.table.rename(columns={"score": "reward"}), samples.table["prompt"].tolist()
    )
    assert 0 < lost < len(samples.table)
    assert samples._left_out()["without a score"] == lost

    ready = kit.readiness(*tiny, task, rows=task.train, samples=6, group_size=3)
    found = ready.signal_reward().value
    assert 0 < sum(sum(earned.values()) for earned in ready.rewards) < 6 * 8 and 0 <= found <= 1


def test_readiness_counts_a_group_by_those_it_can_judge():
    from grpo_kit.evaluation.readiness import signal_share

    values = [1.0, 1.0, 0.0, None, None]
    groups = list(itertools.combinations(values, 3))
    wanted = sum(len({v for v in group if v is not None}) > 1 for group in groups) / len(groups)
    assert signal_share([2, 1], 3, unjudged=2) == pytest.approx(wanted)


def test_check_rewards_and_shortcuts(task):
    cases = kit.rewards.crafted_cases("8", "9", columns={"answer": "9"})
    with pytest.raises(kit.rewards.RewardCheckError) as error:
        kit.rewards.check_rewards(mixed(), cases)
    table = error.value.table.rename(
        columns={name: f"reward/{name}" for name in NAMES} | {"total": "reward"}
    )
    assert 0 < check_table(table, [0] * len(table)) < len(table)
    earned = kit.tasks.strategy_rewards(
        from_rows("x", task.train, task.held_out, reward=mixed(), reward_weights=WEIGHTS)
    )
    assert all(0 <= value <= 1 for value in earned.values())


def test_sums_and_cancelled_groups():
    first, second = [None, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0]
    summed = WeightedSum(
        [
            (lambda completions, **c: first, 0.5),
            (named_second := (lambda completions, **c: second), 0.5),
        ]
    )
    assert summed(list("abcd")) == [None, 0.5, 0.5, 0.5] and named_second
    table = cancelled_groups({"a": first, "b": second}, weights=[0.5, 0.5], group_size=4)
    assert table["cancelled"].tolist() == [1] and "reward 0.5, 0.5, 0.5" in table["example"][0]


def test_score_all_keeps_the_rewards_apart():
    soft = SoftFormat(think=None)
    made = score_all(
        [Gated(ExactAnswer(), on=soft), soft], ["<answer>5</answer>"], answer=["5"]
    )
    assert made == {"gated_exact_answer": [1.0], "soft_format": [1.0]}


def _one_by_one(completions, **columns):
    return [1 / (text != "bad") for text in completions]


def _by_place(completions, **columns):
    return [1 / (completions[i] != "bad") for i in range(len(completions))]


def _beside_a_column(completions, answer, **columns):
    return [len(text) / int(gold) for gold, text in zip(answer, completions, strict=True)]


def _in_a_loop(completions, **columns):
    longest = max(len(text) for text in completions)
    scores = []
    for text in completions:
        scores.append(longest / (text != "bad"))
    return scores


async def _waited_for(completions, **columns):
    return [1 / (text != "bad") for text in completions]


def _a_judge_that_is_gone(completions, **columns):
    texts = [text.strip() for text in completions]
    raise ConnectionError(f"no judge for {len(texts)} texts")


@pytest.mark.parametrize(
    "reward, where",
    [
        (_one_by_one, "row 2, completion 'bad', the last that it read"),
        (_by_place, "row 2, completion 'bad', the last that it read"),
        (_beside_a_column, "row 2, completion 'bad', the last that it read"),
        (_in_a_loop, "row 2, completion 'bad', the last that it read"),
        (_waited_for, "row 2, completion 'bad', the last that it read"),
        (_a_judge_that_is_gone, "it was not reading a row; the first is row 0, completion 'a'"),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_a_reward_that_raises_is_called_once(reward, where, inside):
    """A second call could cost money: the row is known from what was read."""
    calls = []

    def counted(completions, answer, **columns):
        calls.append(len(completions))
        return reward(completions, answer=answer)

    asked = WeightedSum({counted: 1.0}) if inside else counted
    with pytest.raises(RewardError, match=f"\n{where}$"):
        score_all([asked], ["a", "b", "bad", "c"], answer=["1", "1", "0", "1"])
    assert calls == [4]

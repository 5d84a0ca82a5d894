"""One judge: names, range, the weighted total and its rule for None, the same in every place that asks rewards."""

import functools
import itertools
import math
import warnings

import pandas as pd
import pytest
import torch
from tiny_run import make

import grpo_kit as kit
from grpo_kit.record.files import read_completions, read_metrics
from grpo_kit.rewards import Clipped, ExactAnswer, Gated, SoftFormat, WeightedSum, cancelled_groups
from grpo_kit.rewards.judge import RewardError, ask, ask_all, reward_names, total, totals
from grpo_kit.tasks import from_rows
from grpo_kit.training.trl_internals import without_total


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
        applies = [k for k in range(len(parts)) if any(parts[k][r] is not None for r in members)]
        mine = [parts[k][row] for k in applies]
        lost = not applies or None in mine
        made.append(None if lost else round(sum(weights[k] * parts[k][row] for k in applies), 6))
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
        assert reward_names([shared, WeightedSum({shared: 1.0})]) == ["exact_answer", "weighted_sum"]


@pytest.mark.parametrize("score", [2.0, -0.5, math.nan, math.inf, "right", [1.0]])
def test_one_stated_range(score):
    with pytest.raises(
        RewardError, match=r"reward 'odd' gave .* in row 1, completion 'b'; use a value in \[0, 1\]"
    ):
        ask(lambda completions, **columns: [1.0, score], ["a", "b"], name="odd")


def test_a_reward_out_of_range_stops_training_by_name(tmp_path):
    def generous(completions, **columns):
        return [2.0] * len(completions)

    with pytest.raises(RewardError, match="'generous' gave 2.0 in row 0.*Clipped"):
        make("kit", tmp_path, rewards=generous).train()
    make("kit", tmp_path / "b", rewards=Clipped(generous, high=4), max_steps=1).train()


# ---- one rule for every caller -----------------------------------------------------------------------------------

WEIGHTS = [0.25, 0.25, 0.25, 0.25]


def sometimes(completions, answer, **columns):
    """Cannot judge a text of an odd sum, nor any to an even answer: that is another reward's kind of question."""
    odd = [sum(map(ord, text)) % 2 for text in completions]
    return [None if int(gold) % 2 == 0 or o else 0.5 for gold, o in zip(answer, odd, strict=True)]


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
    rows = [{"question": f"Say {i} and {'more ' * (i % 3)}:", "answer": str(i)} for i in range(16)]
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


def test_training(task, tiny, tmp_path):
    trainer = make(
        "kit", tmp_path, rewards=mixed(), dataset=task.dataset(tiny[1]), reward_weights=WEIGHTS, max_steps=3,
        max_completion_length=12,
    )  # fmt: skip
    trainer.train()
    assert trainer.reward_func_names == NAMES
    table = read_completions(tmp_path)
    table["total"] = table["step"].astype(str) + "-" + table["group"].astype(str)
    assert 0 < check_table(table, table["total"].tolist()) < len(table)
    lost = table["reward"].isna()
    assert (table.loc[lost, "advantage"] == 0).all()
    for _, group in table[~lost].groupby("total"):  # those that are left: TRL's own, by hand
        spread = group["reward"].std() if len(group) > 1 else math.nan
        if spread > 1e-6:
            wanted = (group["reward"] - group["reward"].mean()) / (spread + 1e-4)
            assert group["advantage"].tolist() == pytest.approx(wanted.tolist(), abs=1e-3)
    metrics = read_metrics(tmp_path)
    means = table[~lost].groupby("step")["reward"].mean()
    assert metrics["reward"].tolist() == pytest.approx(means.tolist(), abs=1e-6)
    assert {f"reward/{name}" for name in NAMES} <= set(metrics)


def test_none_beside_a_constant_moves_no_advantage():
    """TRL's sum punishes it: 1 + 0.5 beside 1 + nothing."""
    nan = torch.nan
    parts = torch.tensor([[1.0, 0.5], [1.0, nan], [1.0, 0.5], [1.0, nan], [1.0, nan], [1.0, nan]])
    kept = without_total(parts, 2)
    assert kept.isnan().all(1).tolist() == [False, True, False, True, False, False]
    assert torch.equal(
        kept[4:].nan_to_num(7), parts[4:].nan_to_num(7)
    )  # none of the group: left out for all of it


def test_evaluation_readiness_and_samples(task, tiny, tmp_path):
    torch.manual_seed(0)
    evaluation = kit.evaluate(*tiny, task)
    assert check_table(evaluation.rows, range(8)) == 0  # a group of one: who cannot judge it is left out
    again = type(evaluation)
    evaluation.save(tmp_path / "e.json")
    pd.testing.assert_frame_equal(again.load(tmp_path / "e.json").rows, evaluation.rows)

    samples = kit.sample(*tiny, task, samples=6, temperature=1.0, folder=tmp_path / "samples")
    lost = check_table(samples.table.rename(columns={"score": "reward"}), samples.table["prompt"].tolist())
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
    table = error.value.table.rename(columns={name: f"reward/{name}" for name in NAMES} | {"total": "reward"})
    assert 0 < check_table(table, [0] * len(table)) < len(table)
    earned = kit.tasks.strategy_rewards(
        from_rows("x", task.train, task.held_out, reward=mixed(), reward_weights=WEIGHTS)
    )
    assert all(0 <= value <= 1 for value in earned.values())


def test_sums_and_cancelled_groups():
    first, second = [None, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0]
    summed = WeightedSum(
        [(lambda completions, **c: first, 0.5), (named_second := (lambda completions, **c: second), 0.5)]
    )
    assert summed(list("abcd")) == [None, 0.5, 0.5, 0.5] and named_second
    table = cancelled_groups({"a": first, "b": second}, weights=[0.5, 0.5], group_size=4)
    assert table["cancelled"].tolist() == [1] and "reward 0.5, 0.5, 0.5" in table["example"][0]


def test_ask_all_keeps_the_rewards_apart():
    soft = SoftFormat(think=None)
    made = ask_all([Gated(ExactAnswer(), on=soft), soft], ["<answer>5</answer>"], answer=["5"])
    assert made == {"gated_exact_answer": [1.0], "soft_format": [1.0]}

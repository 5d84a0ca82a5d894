"""Columns of own rows: every name reaches the rewards as it is, or is refused by name before a model is loaded."""

import pytest
from loop_runs import letters
from standard_runs import make

import grpo_kit as kit
from grpo_kit.evaluation.generate_and_score import answer
from grpo_kit.rewards import (
    Case,
    Clipped,
    ExactAnswer,
    Gated,
    SoftFormat,
    WeightedSum,
    check_rewards,
    on_response,
)
from grpo_kit.rewards._parts import check_column_names
from grpo_kit.rewards.scoring import PendingScores, score, score_all
from grpo_kit.tasks import from_rows

FREE = [
    "name", "names", "reward", "rewards", "in_range", "finite", "columns", "step", "group", "advantage", "total", "row",
    "responses", "fn", "fills", "workers", "weights", "tag", "given", "seen", "part", "on", "at", "range", "cases",
    "completion text", "gold", "metrics", "labels", "input_ids", "model", "seed", "folder", "environment", "cls", "key",
]  # fmt: skip
TAKEN = [
    "self", "prompt", "prompts", "prefill", "completion", "completions", "completion_ids", "trainer_state", "log_extra",
    "log_metric", "environments", "image", "images",
]  # fmt: skip
VALUES = ["first", "second"]
SOFT = SoftFormat(think=None)


class Sees:
    """Was this column given, unchanged? A reward that is an object, so that its own `self` is in the way too."""

    def __init__(self, column):
        self.column, self.__name__, self.got = column, "sees", None

    def __call__(self, completions, **columns):
        self.got = columns.get(self.column)
        return [
            float(self.got is not None and value in VALUES) for value in self.got or completions
        ]


def all_kinds(name):
    """Rewards that get the column as functions, objects and parts of others do."""
    seen, deep = Sees(name), [Sees(name) for _ in range(3)]
    function = on_response(
        lambda responses, **columns: [float(v in VALUES) for v in columns.get(name, responses)]
    )
    function.__name__ = "function"
    for number, one in enumerate(deep):
        one.__name__ = f"sees_{number}"
    gated = Gated(deep[0], on=SOFT, at=0.25)
    summed = WeightedSum({deep[1]: 0.5, Clipped(deep[2]): 0.25, ExactAnswer(): 0.25})
    return [seen, gated, summed] + [function] * (name != "responses"), [seen, *deep]


@pytest.mark.parametrize("name", FREE)
def test_a_column_of_any_other_name_reaches_every_reward(name):
    check_column_names([name, "question", "answer"], "rows")
    rewards, asked = all_kinds(name)
    columns = {"answer": ["5", "6"], name: VALUES}
    texts = ["<answer>5</answer>", "<answer>5</answer>"]
    expected = {
        "sees": [1, 1],
        "gated_sees_0": [1, 1],
        "weighted_sum": [1, 0.75],
        "function": [1, 1],
    }
    scores = score_all(rewards, texts, **columns)
    assert scores == {n: expected[n] for n in scores} and len(scores) == len(rewards)
    assert all(one.got == VALUES for one in asked)
    for reward in rewards:
        made = scores[reward.__name__]
        assert (
            score(reward, texts, **columns)
            == PendingScores(reward, "x")(completions=texts, **columns)
            == made
        )
    cases = [
        Case("honest", texts[0], honest=True, columns={"answer": "5", name: VALUES[0]}),
        Case(
            "wrong",
            "<answer>6</answer>",
            tie="always",
            columns={"answer": "5", name: VALUES[0]},
        ),
    ]
    assert len(check_rewards(rewards, cases)) == 2


def test_a_function_of_responses_keeps_its_own():
    reward = on_response(
        lambda responses, **columns: [float(text == "ab") for text in responses]
    )
    assert score(reward, ["b"], prefill=["a"], responses=["other"]) == [1.0]


@pytest.mark.parametrize("name", TAKEN)
def test_a_name_that_no_reward_can_be_given_is_refused_with_another(name, tmp_path, tiny):
    refused = f"has a column {name!r}, but .*call it 'row_{name}'"
    with pytest.raises(ValueError, match=f"task 'x': train {refused}"):
        check_column_names(["answer", name], "task 'x': train")
    rows = [{"question": f"{i}?", "answer": "4", name: "x"} for i in range(4)]
    good = from_rows(
        "x",
        [{"question": "a?", "answer": "4"}],
        [{"question": "b?", "answer": "4"}],
        reward=letters,
    )
    with pytest.raises(ValueError, match=f"rows {refused}"):
        answer(*tiny, good, rows)
    with pytest.raises(ValueError, match=f"train {refused}"):
        from_rows("x", rows, [{"question": "b?", "answer": "4"}], reward=letters)


@pytest.mark.parametrize("name", ["self", "completions"])
def test_the_judge_refuses_what_python_cannot_call(name):
    for reward in (letters, SOFT):
        with pytest.raises(ValueError, match=f"has a column {name!r}"):
            score_all([reward], ["a"], **{name: ["x"]})


def test_a_case_has_its_own_prefill():
    with pytest.raises(ValueError, match="cases has a column 'prefill'"):
        check_rewards(
            letters, [Case("honest", "a", honest=True, columns={"prefill": "<answer>"})]
        )


def test_a_column_whose_name_is_no_text_is_refused():
    with pytest.raises(ValueError, match="rows has a column 0, a int; call it '0'"):
        check_column_names([0], "rows")


def test_all_of_them_at_once_in_training_evaluation_and_samples(tmp_path, tiny):
    names = [name for name in FREE if name != "responses"]
    rows = [
        {"question": f"Say {i}:", "answer": str(i), **dict.fromkeys(FREE, "first")}
        for i in range(16)
    ]
    seen = {name: Sees(name) for name in names}
    for name, one in seen.items():
        one.__name__ = f"sees {name}"
    rewards = [*seen.values(), WeightedSum({letters: 1.0})]
    task = from_rows(
        "own", rows[:8], rows[8:], reward=rewards, max_completion_tokens=6, strategies={}
    )
    make(tmp_path / "run", task=task, steps=1).train()
    assert all(one.got == ["first"] * 8 for one in seen.values())
    table = kit.read_completions(tmp_path / "run")
    assert len(table) == 8 and (table["reward/sees name"] == 1).all(), (
        "a column 'fills' hides no row"
    )
    for one in seen.values():
        one.got = None
    found = kit.evaluate(*tiny, task)
    assert (
        all(one.got == ["first"] * 8 for one in seen.values())
        and found.rows["reward/sees name"].min() == 1
    )
    samples = kit.scored_samples(*tiny, task, samples=2, folder=tmp_path / "samples")
    assert (
        seen["reward"].got == ["first"] * 16 and samples.table["reward/sees reward"].min() == 1
    )

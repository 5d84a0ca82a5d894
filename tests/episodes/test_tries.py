"""Several tries at a question of reasoning-gym: the data set's own scores, and what they earn when."""

import pytest

from grpo_kit.more.episodes.environment import VectorEnv
from grpo_kit.more.episodes.reasoning_gym import Tries
from grpo_kit.tasks import from_reasoning_gym, from_reasoning_gym_tries

AGAIN = "That is not right. Try again."


class Score:
    """Half a point for "near", a whole one for "right", 0.99 for "nearly"; fails on "odd"."""

    tag = "answer"

    def score(self, answer, entry):
        return {"right": 1.0, "nearly": 0.99, "near": 0.5, "odd": None}.get(answer, 0.0)


def played(environment, row, texts):
    world = VectorEnv(environment)
    assert world.reset([row]) == [row["question"]]
    return [tuple(world.step({0: text}, turn)[0]) for turn, text in enumerate(texts, 1)]


@pytest.mark.parametrize(
    "said, wanted, why",
    [
        (["right"], [("Right.", 1.0, True, False)], "at once"),
        (
            ["no", "right"],
            [(AGAIN, 0.0, False, False), ("Right.", 1.0, True, False)],
            "a later try earns as much",
        ),
        (["nearly"], [("Right.", 1.0, True, False)], "0.99 is right, and earns 1"),
        (
            ["near", "near"],
            [(AGAIN, 0.0, False, False)] * 2,
            "a partial score is no end before the last try",
        ),
        (
            ["near", "no", "near"],
            [(AGAIN, 0.0, False, False)] * 2 + [("That is not right.", 0.5, True, False)],
            "the last earns its score, once",
        ),
        (
            ["near", "near", "no"],
            [(AGAIN, 0.0, False, False)] * 2 + [("That is not right.", 0.0, True, False)],
            "only it",
        ),
        (["odd"], [(AGAIN, 0.0, False, True)], "what the scorer fails on is invalid"),
    ],
)
def test_what_tries_earn_by_hand(said, wanted, why):
    row = {"question": "What is it?", "entry": "0:0"}
    texts = [f"<answer>{text}</answer>" for text in said]
    assert played(lambda: Tries(Score(), 3), row, texts) == wanted, why


@pytest.mark.parametrize(
    "text", ["right", "", "<answer>right", "<answer>right</answer><answer>right</answer>"]
)
def test_what_is_no_answer_is_invalid_and_a_try(text):
    row = {"question": "What is it?", "entry": "0:0"}
    told = "Write one answer in <answer> tags."
    found = played(lambda: Tries(Score(), 2), row, [text, text])
    assert found == [(f"{told} Try again.", 0.0, False, True), (told, 0.0, True, True)]


@pytest.mark.parametrize("tries", [0, -1, 1.5, None])
def test_the_number_of_tries_is_checked(tries):
    with pytest.raises(
        ValueError, match=f"tries={tries!r} must be a whole number of at least 1"
    ):
        from_reasoning_gym_tries("leg_counting", tries=tries)


# ---- the real data sets ---------------------------------------------------------------------------------------------


@pytest.fixture
def real():
    pytest.importorskip("reasoning_gym")  # an extra: it compiles


def test_the_scores_are_the_data_sets_own(real):
    task = from_reasoning_gym_tries(
        "basic_arithmetic", tries=2, n_train=10, n_held_out=10, min_digits=2
    )
    once = from_reasoning_gym("basic_arithmetic", n_train=10, n_held_out=10, min_digits=2)
    assert (task.train, task.held_out, task.max_turns) == (once.train, once.held_out, 2)
    row = task.held_out[0]
    near = f"{row['answer']} or so"
    own = once.rewards[0].score(near, row["entry"])
    assert 0 < own < 0.99
    found = played(task.environment, row, [f"<answer>{near}</answer>"] * 2)
    assert [(turn[1], turn[2]) for turn in found] == [(0.0, False), (own, True)]
    assert task.score(task.optimum) == 1.0
    with pytest.raises(ValueError, match="name='leg_count' is no reasoning-gym data set"):
        from_reasoning_gym_tries("leg_count")


@pytest.mark.parametrize("prefill", ["<answer>", "Well:", ""])
def test_two_tries_at_yes_or_no_are_right_without_reading(prefill, real):
    task = from_reasoning_gym_tries(
        "syllogism", tries=2, n_train=60, n_held_out=30, prefill=prefill
    )
    assert {row["answer"] for row in task.train} == {"Yes", "No"}
    assert task.best_constant()[1] == 1.0 == task.score(task.optimum)
    one = from_reasoning_gym_tries(
        "syllogism", tries=1, n_train=60, n_held_out=30, prefill=prefill
    )
    most = max(sum(row["answer"] == a for row in one.held_out) for a in ("Yes", "No")) / 30
    assert one.best_constant()[1] == pytest.approx(most)


def test_answers_with_braces_are_said_as_they_are(real):
    task = from_reasoning_gym_tries("codeio", tries=2, n_train=12, n_held_out=2)
    braced = [row for row in task.train if "{" in row["answer"]]
    assert braced and any("{{" in action for action in task.actions)
    assert (
        task.best_constant([row for row in task.train if row["answer"] in _said(task)][:2])[1]
        == 1.0
    )


def _said(task):
    return [
        a.replace("{{", "{").replace("}}", "}").removesuffix("</answer>") for a in task.actions
    ]


def test_the_question_is_read_once_and_examples_are_answers(real):
    task = from_reasoning_gym_tries("leg_counting", n_train=4, n_held_out=2)
    question = task.train[0]["question"]
    assert task.view.message(question, [], question) == question
    ((asked, turns),) = task.view.examples
    assert turns[0][0] == asked and turns[0][1].startswith("<answer>") and len(turns) == 1
    assert asked not in {row["question"] for row in task.train + task.held_out}
    unanswered = from_reasoning_gym_tries("graph_color", n_train=4, n_held_out=2)
    assert (unanswered.optimum, unanswered.actions, unanswered.view.examples) == (None, (), ())

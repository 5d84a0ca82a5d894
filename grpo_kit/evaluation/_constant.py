"""Constant strategies: the best result without reading the question, and whether a model's result beats it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from grpo_kit._support.display import cut
from grpo_kit.evaluation.intervals import Estimate
from grpo_kit.rewards._parts import required_columns
from grpo_kit.rewards.scoring import RewardError, score_all, totals
from grpo_kit.tasks._right import are_correct
from grpo_kit.tasks.task import strategy_rewards

if TYPE_CHECKING:
    from grpo_kit.evaluation.generate_and_score import Answers
    from grpo_kit.tasks.task import Task

_EMPTY = "always an empty completion"
Constant = tuple[str, float]  # its name, and its accuracy or mean reward


def constant_reward(made: Answers) -> Constant | None:
    """The completion with the highest mean reward when it is given to every row, and that mean reward.

    Candidates: the empty completion, the most frequent and the best paid of the model's own, and the most frequent gold
    if rows have golds. The best of four is picked on the same rows, so its reward is slightly too high, never too low.
    None unless answers are text: a completion that is played or run is right in one place alone.
    """
    task = made.task
    if task.answers_are != "text":
        return None
    known = [
        (reward, text) for reward, text in zip(made.rewards, made.texts, strict=True) if reward is not None
    ]
    texts = {"": None} | {text: None for text, _ in Counter(made.texts).most_common(1)}
    texts |= {text: None for _, text in sorted(known, key=lambda pair: -pair[0])[:1]}
    found = {}
    for text in texts:
        earned = _earned(made, text)
        if earned is not None:
            found[f"always {cut(text, 40)!r}" if text else _EMPTY] = earned
    if task.strategies and not any(
        set(required_columns(r)) & {"prompts", "completion_ids"} for r in task.rewards
    ):
        found |= dict(list(_strategies(task, made.rows).items())[:1])
    return max(found.items(), key=lambda pair: pair[1], default=None)


def own_constant(made: Answers) -> Constant | None:
    """The answer that the model gives to more than half of the rows, and its accuracy if it is given to all rows.

    None if no answer is so frequent, and unless answers are text. This answer may be better than the task's strategies,
    which are built from the train rows alone.
    """
    task = made.task
    if task.answers_are != "text":
        return None
    said = Counter(text.strip() for text in map(task.answer_of, made.texts) if text is not None).most_common(
        1
    )
    if not said or said[0][1] * 2 <= len(made.texts):
        return None
    right = are_correct(task, [said[0][0]] * len(made.rows), made.rows)
    return f"always {cut(said[0][0], 40)!r}", sum(right) / len(right)


def _earned(made: Answers, text: str) -> float | None:
    """Mean reward of this completion over the rows whose rewards can judge it."""
    rows = range(0, len(made.texts), made.samples)
    given = {name: [values[i] for i in rows] for name, values in made._given.items()}
    try:
        parts = score_all(made.task.rewards, [text] * len(rows), **given)
    except RewardError:  # no model wrote this completion here, so its reward is unknown
        return None
    earned = totals(list(parts.values()), made.task.reward_weights, list(rows))
    judged = [one for one in earned if one is not None]
    return sum(judged) / len(judged) if judged else None


def _strategies(task: Task, rows: list[dict]) -> dict[str, float]:
    try:
        return strategy_rewards(task, rows)
    except RewardError:
        return {}


def doing(constant: Constant) -> str:
    """The strategy in words.

    >>> doing(("always 'billing'", 0.45)), doing(("random", 0.1))
    ("answering 'billing' every time", "the strategy 'random'")
    """
    name = constant[0]
    what = name.removeprefix("always ")
    how = "giving" if name == _EMPTY else "answering"
    return f"the strategy {name!r}" if what == name else f"{how} {what} every time"


def compared(result: Estimate, constant: Constant | None) -> str | None:
    """A sentence about a result that does not beat the constant; None if it does, or if no constant is known.

    Better means: the whole 95 % interval lies above the constant. A constant that earns nothing is not compared.

    >>> compared(Estimate(0.467, 0.35, 0.59, 60), ("always 'billing'", 0.45))
    "No better than answering 'billing' every time"
    """
    if constant is None or not constant[1] > 0 or result.low > constant[1]:
        return None
    return f"{'Worse' if result.high < constant[1] else 'No better'} than {doing(constant)}"

"""Constant strategies: the best result without reading the question, and whether a model's result beats it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from grpo_kit._support.display import cut
from grpo_kit.evaluation.intervals import Estimate
from grpo_kit.rewards._parts import required_columns
from grpo_kit.rewards.scoring import RewardError, score_all, totals
from grpo_kit.tasks._right import are_correct, entries
from grpo_kit.tasks.task import strategy_rewards

if TYPE_CHECKING:
    from grpo_kit.evaluation.generate_and_score import Answers
    from grpo_kit.tasks.task import Task

_EMPTY = "always an empty completion"
Constant = tuple[str, float]  # its name, and its accuracy or mean reward


def constant_reward(answers: Answers) -> Constant | None:
    """The completion with the highest mean reward when it is given to every row, and that mean reward.

    Candidates: the empty completion, the most frequent and the best paid of the model's own, and the most frequent gold
    if rows have golds. The best of four is picked on the same rows, so its reward is slightly too high, never too low.
    None unless answers are text: a completion that is played or run is right in one place alone.
    """
    if answers.task.answers_are != "text":
        return None
    texts = ["", Counter(answers.texts).most_common(1)[0][0]]
    pairs = zip(answers.rewards, answers.texts, strict=True)
    judged = [(reward, text) for reward, text in pairs if reward is not None]
    if judged:
        texts.append(max(judged, key=lambda pair: pair[0])[1])
    means = {}
    for text in dict.fromkeys(texts):
        mean = _mean_reward(answers, text)
        if mean is not None:
            name = f"always {cut(text, 40)!r}" if text else _EMPTY
            means[name] = mean
    means |= _best_strategy(answers.task, answers.rows)
    return max(means.items(), key=lambda pair: pair[1], default=None)


def own_constant(answers: Answers) -> Constant | None:
    """The answer that the model gives to more than half of the rows, and its accuracy if it is given to all rows.

    None if no answer is so frequent, and unless answers are text. This answer may be better than the task's strategies,
    which are built from the train rows alone.
    """
    task, rows = answers.task, answers.rows
    if task.answers_are != "text":
        return None
    texts = [task.answer_of(completion) for completion in answers.texts]
    counts = Counter(text.strip() for text in texts if text is not None)
    for text, count in counts.most_common(1):
        if 2 * count > len(texts):
            right = are_correct(task, [text] * len(rows), rows)
            return f"always {cut(text, 40)!r}", sum(right) / len(right)
    return None


def _mean_reward(answers: Answers, text: str) -> float | None:
    """Mean reward of this completion over the rows whose rewards can judge it."""
    n = len(answers.rows)
    columns = entries(answers.columns, range(0, len(answers.texts), answers.samples))
    try:
        parts = score_all(answers.task.rewards, [text] * n, **columns)
    except RewardError:  # no model wrote this completion here, so its reward is unknown
        return None
    rewards = totals(list(parts.values()), answers.task.reward_weights, range(n))
    judged = [reward for reward in rewards if reward is not None]
    return sum(judged) / len(judged) if judged else None


def _best_strategy(task: Task, rows: list[dict]) -> dict[str, float]:
    """Name and mean reward of the best strategy; {} where the rewards cannot judge an answer without a model."""
    if any(
        {"prompts", "completion_ids"} & set(required_columns(reward)) for reward in task.rewards
    ):
        return {}
    try:
        means = strategy_rewards(task, rows)
    except RewardError:
        return {}
    return dict(list(means.items())[:1])


def in_words(constant: Constant) -> str:
    """The strategy in words.

    >>> in_words(("always 'billing'", 0.45)), in_words(("random", 0.1))
    ("answering 'billing' every time", "the strategy 'random'")
    """
    name = constant[0]
    if not name.startswith("always "):
        return f"the strategy {name!r}"
    verb = "giving" if name == _EMPTY else "answering"
    return f"{verb} {name.removeprefix('always ')} every time"


def no_better_than(constant: Constant | None, result: Estimate) -> str | None:
    """A sentence about a result that does not beat the constant; None if it does, or if no constant is known.

    Better means: the whole 95 % interval lies above the constant. A constant that earns nothing is not compared.

    >>> no_better_than(("always 'billing'", 0.45), Estimate(0.467, 0.35, 0.59, 60))
    "No better than answering 'billing' every time"
    """
    if constant is None or not constant[1] > 0 or result.low > constant[1]:
        return None
    verdict = "Worse" if result.high < constant[1] else "No better"
    return f"{verdict} than {in_words(constant)}"

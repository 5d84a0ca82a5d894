"""Which measure reports how good a model is at a task, accuracy or the mean reward; and whether answers are labels.

Accuracy, where every completion is right or wrong. The mean reward, where answers are more or less near to the gold, or
where your own reward judges rows without an answer: nothing is right there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, Literal

from grpo_kit.rewards._parts import Reward, judges_answer, range_of, with_parts
from grpo_kit.rewards.combine import Verdicts
from grpo_kit.rewards.form import SoftFormat
from grpo_kit.rewards.response import last_number
from grpo_kit.rewards.scoring import Scores
from grpo_kit.tasks._right import PaidInFull, is_own

Measure = Literal["accuracy", "reward"]


def has_accuracy(task: Any) -> bool:
    """Has the task right and wrong answers? False if no row has an answer and no reward states its full pay.

    False also for a task whose is_correct is None: TRL's rows, which rewards of any scale judge.

    A reward states full pay by its range; the kit's rewards that judge an answer pay 1.0.

    >>> from grpo_kit.tasks import from_rows, largest
    >>> def short(completions, **columns):
    ...     return [1 / (1 + len(text)) for text in completions]
    >>> rows = [{"question": f"{i}?"} for i in range(5)]
    >>> has_accuracy(largest()), has_accuracy(from_rows("short", rows, reward=short))
    (True, False)
    """
    if not isinstance(task.is_correct, PaidInFull):
        return task.is_correct is not None
    rows = [*task.train, *task.held_out]
    if any(str(row["answer"]).strip() for row in rows):
        return True
    return any(range_of(part) is not None or not is_own(part) for part in _judges(task))


def measure_of(task: Any, verdicts: Verdicts = (), credit: Scores = ()) -> Measure | None:
    """The measure that leads a task's results; None if it depends on scores that do not exist yet.

    "reward": no accuracy, a text reward (Bleu, Rouge, one with `soft = True`), no reward that judges the answer, or
    your own reward, if it paid some completions in part.
    verdicts, credit: of the completions so far, one entry each, from score_in_full.
    """
    if not has_accuracy(task):
        return "reward"
    if not isinstance(task.is_correct, PaidInFull):
        return "accuracy"
    judges = _judges(task)
    if not judges or any(getattr(judge, "soft", False) for judge in judges):
        return "reward"
    if not any(map(is_own, judges)):
        return "accuracy"
    if not verdicts:
        return None
    for full, score in zip(verdicts, credit, strict=True):
        if score is not None and score > 0 and not full:
            return "reward"
    return "accuracy"


def reads_tag(task: Any) -> bool:
    """Must an answer keep a form, so that a completion can have no readable answer?

    False if the task's rewards read the whole completion and neither prompt nor reward names the tag.
    """
    if task.is_correct is None:  # nothing is right or wrong: rows of a TRL script
        return False
    if not isinstance(task.is_correct, PaidInFull) or task.answers_are == "programs":
        return True
    if has_accuracy(task) and not task.answer_rewards:
        return True
    if any(
        getattr(part, "tag", None) or isinstance(part, SoftFormat)
        for part in with_parts(task.rewards)
    ):
        return True
    prompt = [
        task.prefill,
        task.system or "",
        task.train[0]["question"],
        *chain(*task.examples),
    ]
    return any(f"<{task.answer_tag}>" in text for text in prompt)


def labels_of(rows: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """label -> number of its rows, where the rows' answers are labels; empty where they are not.

    Labels come twice or more on average, and are words, or numbers of which there are at most 5: stars, not sums.

    >>> labels_of([{"answer": "spam"}, {"answer": "ham"}, {"answer": "spam"}, {"answer": "spam"}])
    Counter({'spam': 3, 'ham': 1})
    """
    labels = Counter(answer for row in rows if (answer := str(row.get("answer", "")).strip()))
    few_or_words = len(labels) <= 5 or any(last_number(label) != label for label in labels)
    return labels if few_or_words and 2 * len(labels) <= labels.total() else Counter()


def _judges(task: Any) -> list[Reward]:
    """The innermost rewards that judge the answer, among those whose full pay makes it right."""
    judges = filter(judges_answer, with_parts(task.is_correct.judges))
    return [judge for judge in judges if not getattr(judge, "made_of_others", False)]

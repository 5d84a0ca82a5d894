"""What a policy earns that settles for a shortcut."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_kit.tasks.task import Task


def strategy_rewards(task: Task, rows: Sequence[dict] | None = None) -> dict[str, float]:
    """Mean weighted reward, in [0, 1], of every strategy on the rows (default held_out), best first; ties by name.

    A strategy's answer is closed as the prefill opens it; where it has none, the tags stay empty. Accuracy
    (Task.constant_accuracies) says how often a shortcut is right, this how well a soft reward pays for it.
    A reward that cannot judge a row adds nothing to it, as in TRL's sum.
    Raises ValueError if rows is empty, and for a task whose answers do not stand in tags (code).

    >>> from grpo_kit.tasks import largest
    >>> strategy_rewards(largest())["always the last number"] > 0.25  # the format alone
    True
    """
    rows = task.held_out if rows is None else rows
    if not rows:
        raise ValueError("rows is empty; give at least one row")
    if task.read_answer is not None:
        raise ValueError(f"task {task.name!r} has no answer tags to put a strategy's answer in")
    columns = {
        name: [row.get(name) for row in rows] for name in dict.fromkeys(k for row in rows for k in row)
    }
    opening = "" if f"<{task.answer_tag}>" in task.prefill else f"<{task.answer_tag}>"
    means = {}
    for name, strategy in task.strategies.items():
        completions = [f"{opening}{strategy(row) or ''}</{task.answer_tag}>" for row in rows]
        scores = [reward(completions, prefill=task.prefill, **columns) for reward in task.rewards]
        weighted = [w * (s or 0.0) for w, part in zip(task.reward_weights, scores, strict=True) for s in part]
        means[name] = sum(weighted) / len(rows)
    return dict(sorted(means.items(), key=lambda item: (-item[1], item[0])))

"""Your own data as a task: rows and a reward function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from grpo_kit.rewards.response import Reward
from grpo_kit.tasks.task import Strategy, Task, most_frequent_answer

if TYPE_CHECKING:
    from datasets import Dataset


def from_rows(
    name: str,
    train: Iterable[dict] | Dataset,
    held_out: Iterable[dict] | Dataset | None = None,
    *,
    reward: Reward | Sequence[Reward],
    reward_weights: Sequence[float] | None = None,
    question: str = "question",
    answer: str = "answer",
    is_correct: Callable[[str, dict], bool] | None = None,
    strategies: dict[str, Strategy] | None = None,
    system: str | None = None,
    prefill: str = "",
    examples: Sequence[tuple[str, str]] = (),
    max_completion_tokens: int = 256,
    answer_tag: str = "answer",
) -> Task:
    """A task from a list of dicts or a datasets.Dataset, and a reward (or several).

    held_out: rows never trained on; None moves every fifth row of train there.
    question, answer: the columns that hold them; kept, and copied to "question" and "answer" as text.
    reward_weights: default equal. is_correct: by default the same text, ignoring white space at the ends.
    strategies: default "always the most frequent answer". Rows that have no answer column get "".
    Raises ValueError naming the column, the split and the row that do not fit.

    >>> def says_yes(completions, **columns):
    ...     return [float("yes" in text) for text in completions]
    >>> from_rows("yes", [{"question": str(i), "answer": "yes"} for i in range(10)], reward=says_yes)
    Task('yes', train=8, held_out=2)
    """
    rewards = [reward] if callable(reward) else list(reward)
    rows = _rows(name, "train", train, question, answer)
    if held_out is None:
        if len(rows) < 5:
            raise ValueError(f"task {name!r}: train has {len(rows)} rows, too few to split; give held_out")
        # By question, so that one asked twice lands on one side.
        places = {text: place for place, text in enumerate(dict.fromkeys(row["question"] for row in rows))}
        held = [row for row in rows if places[row["question"]] % 5 == 4]
        rows = [row for row in rows if places[row["question"]] % 5 != 4]
    else:
        held = _rows(name, "held_out", held_out, question, answer)
    return Task(
        name=name,
        train=rows,
        held_out=held,
        rewards=rewards,
        reward_weights=list(reward_weights or [1 / max(1, len(rewards))] * len(rewards)),
        is_correct=is_correct or (lambda text, row: text.strip() == row["answer"].strip()),
        strategies=most_frequent_answer(rows) if strategies is None else dict(strategies),
        system=system,
        prefill=prefill,
        examples=tuple(examples),
        max_completion_tokens=max_completion_tokens,
        answer_tag=answer_tag,
    )


def _rows(name: str, split: str, rows: Iterable[dict] | Dataset, question: str, answer: str) -> list[dict]:
    made: list[dict[str, Any]] = []
    for place, row in enumerate(rows):
        if question not in row:
            raise ValueError(
                f"task {name!r}: {split} row {place} has no column question={question!r}; it has {sorted(row)}"
            )
        if answer not in row and answer != "answer":
            raise ValueError(
                f"task {name!r}: {split} row {place} has no column answer={answer!r}; it has {sorted(row)}"
            )
        made.append({**row, "question": row[question], "answer": str(row.get(answer, ""))})
    if not made:
        raise ValueError(f"task {name!r}: {split} is empty; give at least one row")
    return made

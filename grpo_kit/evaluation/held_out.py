"""Held-out accuracy or reward while a run trains: a small fixed set, answered greedily every so many steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from grpo_kit._support.argument_checks import check_task, check_whole
from grpo_kit.evaluation._shown import in_columns
from grpo_kit.evaluation.generate_and_score import answer
from grpo_kit.evaluation.intervals import mean_reward, share
from grpo_kit.tasks._measure import has_accuracy, measure_of, reads_tag
from grpo_kit.tasks.task import Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_FEWEST = 8  # readable answers from which on the share of equal answers is reported


@dataclass(frozen=True)
class HeldOut:
    """The first `rows` held-out rows of a task, for GRPOTrainer(held_out=...).

    every: optimizer steps between two measurements if args.eval_strategy is "no"; else args.eval_steps decides. The
    first is made before step 1, the last after the last step. Decoding is greedy, so it uses no random numbers and
    changes no later step. With 64 rows the 95 % interval is up to 12 points to each side: read a trend, not a point.
    Raises ValueError for sizes below 1 and for more rows than the task holds out.

    >>> GRPOTrainer(..., held_out=HeldOut(task, rows=64, every=8), keep="best")  # doctest: +SKIP
    """

    task: Task
    rows: int = 64
    every: int = 8

    def __post_init__(self) -> None:
        check_task(self.task)
        for name in ("rows", "every"):
            check_whole(name, getattr(self, name))
        if self.rows > len(self.task.held_out):
            raise ValueError(
                f"rows={self.rows}, but task {self.task.name!r} holds out {len(self.task.held_out)}; ask for fewer"
            )

    @property
    def judged_by(self) -> Literal["accuracy", "reward"]:
        """How the best evaluation is chosen: by accuracy, or by mean reward if the task has, or may have, no accuracy.

        A user's own reward may pay in part, which is unknown before it is called; then the mean reward decides.
        """
        return "accuracy" if measure_of(self.task) == "accuracy" else "reward"

    def measure(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
        """The model's scores, each in [0, 1] but the reward, with a 95 % interval (<name>_low, <name>_high).

        accuracy: strict, if the task has right and wrong answers. reward: the mean, if judged_by is "reward".
        constant: accuracy of the best constant strategy, or of the most frequent gold. one_answer: share of the most
        frequent answer among the model's; one_gold: share of the most frequent gold. Each only if it is known.
        """
        answers = answer(model, tokenizer, self.task, self.task.held_out[: self.rows])
        scores = {}
        if has_accuracy(self.task):
            scores |= in_columns({"accuracy": share(sum(answers.right), self.rows)})
        if self.judged_by == "reward":
            rewards = [reward for reward in answers.rewards if reward is not None]
            if rewards:
                scores |= in_columns({"reward": mean_reward(rewards)})
        if self._constant is not None:
            scores["constant"] = max(self._constant, self._one_gold or 0.0)
        if self._one_gold is not None:
            texts = answers.texts
            if reads_tag(self.task):
                texts = map(self.task.answer_of, texts)
            texts = [text.strip().casefold() for text in texts if text is not None]
            if len(texts) >= max(_FEWEST, self.rows / 2):
                scores |= {"one_answer": _commonest(texts), "one_gold": self._one_gold}
        return scores

    @cached_property
    def _one_gold(self) -> float | None:
        """Share of the most frequent gold; None if answers are no text to compare with the rows' own."""
        task = self.task
        if task.answers_are != "text":
            return None
        golds = [str(row["answer"]).strip().casefold() for row in task.held_out[: self.rows]]
        if not all(golds):
            return None
        return _commonest(golds)

    @cached_property
    def _constant(self) -> float | None:
        """Accuracy of the best constant strategy; where each would have to be played it takes long to find."""
        task = self.task
        if hasattr(task, "play") or not task.strategies or self.judged_by == "reward":
            return None
        return task.best_constant(task.held_out[: self.rows])[1]


def _commonest(texts: list[str]) -> float:
    """Share of the most frequent text."""
    return Counter(texts).most_common(1)[0][1] / len(texts)

"""Held-out accuracy or reward while a run trains, and the weights of its best evaluation at the end.

HeldOut is a small fixed set of rows, answered greedily every so many steps. HeldOutHook measures it
and keeps the best.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from grpo_kit._support.argument_checks import check_task, check_whole
from grpo_kit.evaluation._shown import in_columns
from grpo_kit.evaluation.generate_and_score import answer
from grpo_kit.evaluation.intervals import mean_reward, share
from grpo_kit.loop import checkpoint
from grpo_kit.loop.batch import Batch
from grpo_kit.loop.protocols import Hook
from grpo_kit.record._digests import what_is_wrong
from grpo_kit.record.files import KEPT, read_metrics, write_whole
from grpo_kit.tasks._measure import has_accuracy, measure_of, reads_tag
from grpo_kit.tasks.task import Task
from grpo_kit.watch._run_state import HOW_TO_KEEP, better_before

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

    def measure(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> dict[str, float]:
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


class HeldOutHook(Hook):
    """Measures before the first step, every held_out.every steps and after the last; the step's row gets eval/....

    keep: "last", or "best" to end with the weights of the best evaluation, of equal ones the latest. The best step's
    checkpoint stays; the last step's is saved too, and a later train() goes on from that one. kept.json says which
    step's weights were kept.
    Decoding is greedy and draws no random number, so an evaluation moves no later step.
    """

    def __init__(self, held_out: HeldOut, keep: str = "last") -> None:
        self.held_out = held_out
        self.keep = keep
        self._best: tuple[float, int] | None = None
        # Does the model have the best step's weights, not the last one's?
        self._has_best = False

    def begin(self, trainer: Any) -> None:
        """Before the first step; of a run that goes on, what was measured is taken up."""
        if self._has_best:
            trainer.load(trainer.folder / f"checkpoint-{trainer.step}")
            self._has_best = False
        name = f"eval/{self.held_out.judged_by}"
        metrics = read_metrics(trainer.folder).reindex(columns=["step", name]).dropna()
        for step, value in zip(metrics["step"], metrics[name], strict=True):
            self._note(trainer, float(value), int(step))
        self._keep_or_forget_best(trainer)
        # An evaluation that is due may have been cut short.
        if self._is_due(trainer) and trainer.step not in set(metrics["step"]):
            self._measure(trainer, {})
            if f"checkpoint-{trainer.step}" in trainer.kept_checkpoints:
                trainer.save()

    def _keep_or_forget_best(self, trainer: Any) -> None:
        """The best step's checkpoint is there and whole, or is saved now, or a line says that there is none."""
        if self.keep != "best" or self._best is None:
            return
        value, step = self._best
        if step == trainer.step:
            trainer.save()  # the disk may have been full
            return
        path = trainer.folder / f"checkpoint-{step}"
        damage = what_is_wrong(path) if path.exists() else "it is missing"
        if damage is not None:
            print(
                f"The weights of step {step}, the best evaluation so far ({self.held_out.judged_by} {value:.4g}), "
                f"cannot be kept: {path} is damaged ({damage}). The best evaluation from here on will be.",
                flush=True,
            )
            self._best = None
            trainer.kept_checkpoints = set()

    def after_step(self, trainer: Any, row: dict[str, Any], batch: Batch) -> None:
        """Measure where it is due."""
        if self._is_due(trainer):
            self._measure(trainer, row)

    def end(self, trainer: Any, error: BaseException | None) -> None:
        """All steps are done: the best weights, or a sentence where an evaluation before was better."""
        if error is not None or trainer.step < trainer.config.steps:
            return
        self._keep_or_forget_best(trainer)
        if self.keep == "best" and self._best is not None:
            self._end_with_best(trainer, *self._best)
            return
        (trainer.folder / KEPT).unlink(missing_ok=True)
        if sentence := better_before(read_metrics(trainer.folder)):
            print(f"{sentence} {HOW_TO_KEEP}", flush=True)

    def _end_with_best(self, trainer: Any, value: float, step: int) -> None:
        judged_by = self.held_out.judged_by
        print(
            f"The model has the weights of step {step}, the best evaluation ({judged_by} {value:.4g}).",
            flush=True,
        )
        if step != trainer.step:
            trainer.save()  # to go on from
            checkpoint.load_weights(trainer.model, trainer.folder / f"checkpoint-{step}")
            self._has_best = True
        note = {"step": step, "of": trainer.step, "by": judged_by, "value": value}
        write_whole(trainer.folder / KEPT, json.dumps(note).encode())

    def _is_due(self, trainer: Any) -> bool:
        return trainer.step % self.held_out.every == 0 or trainer.step == trainer.config.steps

    def _measure(self, trainer: Any, row: dict[str, Any]) -> None:
        with trainer.guard.at_once():  # the step is done; an evaluation may be cut short
            metrics = self.held_out.measure(trainer.model.eval(), trainer.tokenizer)
        metrics = {f"eval/{name}": value for name, value in metrics.items()}
        trainer.log.write(trainer.step, metrics)
        row |= metrics
        self._note(trainer, metrics[f"eval/{self.held_out.judged_by}"], trainer.step)

    def _note(self, trainer: Any, value: float, step: int) -> None:
        """Of equal evaluations the latest is the best: it was trained longest."""
        if self._best is not None and not value >= self._best[0]:
            return
        self._best = value, step
        if self.keep == "best":  # the loop saves it when the step's row is whole
            trainer.kept_checkpoints = {f"checkpoint-{step}"}

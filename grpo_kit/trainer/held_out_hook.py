"""HeldOutHook: held-out accuracy while a run trains, and the weights of its best evaluation at the end."""

from __future__ import annotations

import json
from typing import Any

from grpo_kit.evaluation.held_out import HeldOut
from grpo_kit.loop import checkpoint
from grpo_kit.loop.protocols import Hook
from grpo_kit.loop.step_batch import Batch
from grpo_kit.record._digests import what_is_wrong
from grpo_kit.record.files import KEPT, read_metrics, write_whole
from grpo_kit.watch._run_state import HOW_TO_KEEP, better_before


class HeldOutHook(Hook):
    """Measures before the first step, every held_out.every steps and after the last; the step's row gets eval/....

    keep: "last", or "best" to end with the weights of the best evaluation, of equal ones the latest. The best step's
    checkpoint stays; the last step's is saved too, and a later train() goes on from that one. kept.json says which
    step's weights were kept.
    Decoding is greedy and draws no random number, so an evaluation moves no later step.
    """

    def __init__(self, held_out: HeldOut, keep: str = "last") -> None:
        self.held_out, self.keep = held_out, keep
        self._best: tuple[float, int] | None = None
        self._has_best = False  # does the model have the best step's weights, not the last one's?

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
        if self._is_due(trainer) and trainer.step not in set(metrics["step"]):  # or it was cut short
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
            self._best, trainer.kept_checkpoints = None, set()

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

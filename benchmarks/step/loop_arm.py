"""The kit's loop as an arm: one step of it, with the engine and the packed update, on the work of the others."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.step.busy import OtherLoad
from benchmarks.step.forcing import ForcedCompletions, _engine_forced
from benchmarks.step.phases import PeakMemory, PhaseClock, Step
from benchmarks.step.tables import KINDS
from grpo_kit.engine.fast import fast
from grpo_kit.loop import Batch, Config, GRPOTrainer
from grpo_kit.loop.grpo_config import StepNumbers
from grpo_kit.loop.hooks import Hook

TINY_RATE = 1e-9


def measure_loop(setup: Any, model: Any, folder: str, say: Callable[[str], None]) -> Step:
    """The step that follows setup.warmup steps. Groups without a signal are skipped, as by the arm kit-skip."""
    work = setup.workload
    rows = [
        {"question": prompt, "number": number, "flat": flat}
        for number, (prompt, flat) in enumerate(zip(work.prompts, work.flat, strict=True))
    ]
    task = SimpleNamespace(
        name="work", train=rows, rewards=[work], reward_weights=[1.0], prefill="",
        max_completion_tokens=work.max_completion, render=lambda tokenizer, rows: [r["question"] for r in rows],
    )  # fmt: skip
    config = Config(
        steps=setup.warmup + 1, prompts_per_step=len(rows), group_size=work.group_size, learning_rate=TINY_RATE,
        warmup=0, optimizer="adamw", seed=work.seed, autocast="bfloat16" if setup.bf16 else "none",
    )  # fmt: skip
    seams, watch = fast(model, config), _Watch(setup.cuda)

    def in_order(
        model: Any, tokenizer: Any, task: Any, _: Any, config: Config, numbers: StepNumbers
    ) -> Batch:
        return seams.sample(model, tokenizer, task, rows, config, numbers)

    trainer = Timed(
        model, task, config, tokenizer=setup.tokenizer, folder=Path(folder) / "run", sample=in_order,
        update=seams.update, hooks=[watch, *seams.hooks],
    )  # fmt: skip
    trainer.clock, trainer.say = watch.clock, say
    for name in ("logprobs", "gradients"):
        phase = "log-probs" if name == "logprobs" else "forward-backward"
        setattr(seams.update, name, _timed(getattr(seams.update, name), watch.clock, phase))
    with _engine_forced(ForcedCompletions(work.completion_ids, work.eos), watch):
        trainer.train()
    return watch.step


def _timed(inner: Callable[..., Any], clock: PhaseClock, phase: str) -> Callable[..., Any]:
    def outer(*args: Any, **kwargs: Any) -> Any:
        with clock.phase(phase):
            return inner(*args, **kwargs)

    return outer


class Timed(GRPOTrainer):
    """The trainer with its phases on a clock."""

    def roll_out(self, numbers: StepNumbers) -> Any:
        """As the trainer's, as decoding."""
        with self.clock.phase("decode"):
            return super().roll_out(numbers)

    def _optimizer_step(self, numbers: StepNumbers) -> float:
        with self.clock.phase("optimizer"):
            return super()._optimizer_step(numbers)


class _Count:
    """No count of the positions that were computed."""

    @contextmanager
    def unwatched(self) -> Any:
        """As it is."""
        yield

    def sampled(self, number: int) -> None:
        """Not kept."""

    def report(self, tokens: Any) -> None:
        """Not kept."""


class _Watch(Hook):
    def __init__(self, cuda: bool) -> None:
        self.clock, self.memory, self.others = PhaseClock(cuda=cuda), PeakMemory(cuda=cuda), OtherLoad()
        self.step, self.count = Step(tokens=dict.fromkeys(KINDS)), _Count()

    def before_step(self, trainer: GRPOTrainer) -> None:
        if trainer.step == trainer.config.steps - 1:
            self.memory.start()
            self.others.start()
            self.clock.start()

    def after_step(self, trainer: GRPOTrainer, row: dict[str, Any], batch: Batch) -> None:
        if trainer.step < trainer.config.steps:
            return
        self.step.seconds, self.step.others = self.clock.stop(), self.others.stop()
        self.step.phases, self.step.memory = dict(self.clock.seconds), self.memory.stop()
        self.step.timeline = self.memory.timeline()
        (rewards,) = batch.parts.values()
        self.step.completion_ids, self.step.rewards = batch.completion_ids, rewards
        self.step.loss, self.step.grad_norm = row["loss"], row["grad_norm"]
        if torch.cuda.is_available():
            torch.cuda.synchronize()

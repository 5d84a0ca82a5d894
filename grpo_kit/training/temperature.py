"""Stage 2 of a step: the temperature, one for the sampler and for whatever scores what was sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from grpo_kit.argument_checks import check_temperature
from grpo_kit.models import base_model
from grpo_kit.training.checks import buffer_steps
from grpo_kit.training.trl_internals import fused_head

Schedule = Callable[[float], float]


class Temperature:
    """Where trl keeps its temperature (sampler, policy's head, reference's head), set together.

    schedule: f(progress) -> temperature > 0, or None for args.temperature throughout. evaluation: the sampler's there,
    None means args.temperature.
    Raises ValueError for a temperature that is not above 0.
    """

    def __init__(self, trainer: Any, schedule: Schedule | None, evaluation: float | None) -> None:
        self.trainer, self.schedule = trainer, schedule
        self.start = self.now = trainer.temperature
        self.evaluation = self.start if evaluation is None else evaluation
        models = [base_model(trainer.model), *([trainer.ref_model] if trainer.ref_model is not None else [])]
        self.heads = [fused_head(model) for model in models]
        for progress in (0.0, 0.5, 1.0):
            check_temperature(schedule(progress) if schedule else self.start, "temperature")
        check_temperature(self.evaluation, "eval_temperature")

    @property
    def asked(self) -> Schedule | float:
        """The schedule, or the constant where there is none."""
        return self.start if self.schedule is None else self.schedule

    def change(self, value: Schedule | float) -> None:
        """From the next rollout buffer on; the evaluation's stays."""
        self.schedule, self.start = (value, self.start) if callable(value) else (None, float(value))
        if not callable(value):
            self.trainer.args.temperature = float(value)

    def at(self, step: int) -> float:
        """A function of the step alone, constant inside a rollout buffer."""
        if self.schedule is None:
            return self.start
        size = buffer_steps(self.trainer.args)
        last = (max(self.trainer.state.max_steps, 1) - 1) // size * size
        progress = step // size * size / last if last else 0.0
        return check_temperature(self.schedule(min(progress, 1.0)), f"temperature({progress:.3f})")

    def set(self, value: float) -> None:
        """Sampler and scorer together: anything else biases the gradient."""
        trainer = self.trainer
        trainer.temperature = self.now = value
        for head in self.heads:
            head.cell_contents = value
        if trainer.use_vllm:
            trainer.vllm_generation.temperature = value
        else:
            trainer.generation_config.temperature = value
            trainer.generation_kwargs["temperature"] = value

    @contextmanager
    def of_evaluation(self) -> Iterator[None]:
        """The evaluation's temperature inside, the one from before afterwards."""
        before = self.trainer.temperature
        self.set(self.evaluation)
        try:
            yield
        finally:
            self.set(before)

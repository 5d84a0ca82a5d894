"""Task, Sampler, Update and Hook: what a run is given, and all that the kit asks of it. Read this first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any, Protocol

from torch import Tensor

from grpo_kit.loop.batch import Batch
from grpo_kit.loop.config import Config, StepNumbers
from grpo_kit.loop.policy_loss import PolicyLoss


class Task(Protocol):
    """Rows, prompts and rewards of one problem, as tasks.Task has them. Who subclasses it has these defaults.

    answers_are: "text", as the row's answer; "programs"; or what this task alone can judge.
    paid_parts: parts of the reward that come from its sampler, not from rewards.
    A task that is not one completion a prompt has four methods more, all or some; the plain one has none:
    seams(model, config) -> Seams: the sampler and the update that train it, in place of engine.fast.fast.
    play(model, tokenizer, rows, asked) -> Answers: how evaluation asks it, in place of complete and score. Its prompts
    are made meanwhile; `render` is not called.
    questions(rows) -> list of text: the first message to the model, in place of each row's question.
    made_of() -> dict: what tells it from another task, in place of prompt and rewards.
    """

    name: str
    train: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    max_completion_tokens: int
    rewards: Sequence[Any] = ()
    reward_weights: Sequence[float] = (1.0,)
    system: str | None = None
    prefill: str = ""
    examples: Sequence[tuple[str, str]] = ()
    answers_are: str = "anything"
    answer_tag: str | None = None
    paid_parts: Sequence[str] = ()
    file: str | None = None

    def best_constant_parts(self) -> dict[str, Any] | None:
        """What the best answer that reads no question earns; None: it is not known."""
        return None


class Sampler(Protocol):
    """Makes the completions of a step, as generate does. A function is one too: it need not have the methods."""

    bits: int = 32  # of its products; see Config.rollout_bits
    # what may hang in it, by the function's code, for the watchdog
    phases: Mapping[CodeType, str] = {}

    def __call__(
        self,
        model: Any,
        tokenizer: Any,
        task: Any,
        rows: Sequence[Any],
        config: Config,
        numbers: StepNumbers,
    ) -> Batch:
        """group_size completions of each row. One that scores them itself fills in parts, rewards and advantages."""
        ...

    def measures(self, batch: Batch, task: Any) -> dict[str, float]:
        """More numbers for the step's line."""
        return {}

    def state(self) -> dict[str, Any] | None:
        """What it keeps from step to step, for a checkpoint: tensors and values that no later call changes, or None."""
        return None

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a state, as a step that is done again begins with the one that it began with."""

    def around(self, fast: Sampler) -> Sampler:
        """The sampler that kit.GRPOTrainer takes, given the one that it would take itself."""
        return self


class Update(Protocol):
    """Log-probabilities and gradients of a batch, as PaddedUpdate has them."""

    def logprobs(self, model: Any, batch: Batch, temperature: float) -> Tensor:
        """(N, T), without gradients: the log-probabilities of the completions' tokens, 0 behind their ends."""
        ...

    def gradients(
        self,
        model: Any,
        batch: Batch,
        loss: PolicyLoss,
        temperature: float,
        backward: Callable[[Tensor], None],
    ) -> float:
        """The update's loss; its gradient is added into each parameter's .grad by `backward`."""
        ...


class Hook:
    """Four methods; a subclass has those it needs. trainer: the GRPOTrainer; a hook changes it by trainer.change().

    A hook that raises KeyboardInterrupt stops the run as the stop button does, and one that raises an error ends it:
    the other hooks have their turn, and the step is done and saved. Of Stopped, or a subclass, train() raises the same
    kind, with the hook's words. end is called on hooks whose begin returned.

    >>> class StopWhenSolved(Hook):
    ...     def after_step(self, trainer, row, batch):
    ...         if row["reward"] > 0.95:
    ...             raise KeyboardInterrupt
    """

    def begin(self, trainer: Any) -> None:
        """train() begins or goes on, after trainer.step steps."""

    def before_step(self, trainer: Any) -> None:
        """The next step is about to sample."""

    def after_step(self, trainer: Any, row: dict[str, Any], batch: Batch) -> None:
        """Step trainer.step is done and written. row: its metrics. batch: its completions, of all processes."""

    def end(self, trainer: Any, error: BaseException | None) -> None:
        """train() ends. error: what ended it early, None where all steps are done."""


def optional(part: Any, method: str, default: Any, *arguments: Any) -> Any:
    """The value of the part's method; the default where it has none, as a function that samples has none."""
    return getattr(part, method)(*arguments) if hasattr(part, method) else default

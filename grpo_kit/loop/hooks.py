"""Hook: what is done around the steps of a run, such as an evaluation, a chart or an early stop."""

from __future__ import annotations

from typing import Any

from grpo_kit.loop.step_batch import Batch


class Hook:
    """Four methods; a subclass has those it needs. trainer: the Loop; a hook changes it by trainer.change().

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

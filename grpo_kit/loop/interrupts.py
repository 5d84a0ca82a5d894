"""The stop button: at once in a rollout or a backward pass, after the step where weights or files change."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(KeyboardInterrupt):
    """train() was stopped by the stop button, Ctrl-C or a control, and has saved what it says.

    Raised so that what comes after training does not take the half-trained model for a finished one: in a notebook it
    ends "Run all", shown as one line; a script ends. step: whole steps done.
    """

    def __init__(self, message: str, step: int = 0) -> None:  # a pickled one is made without it
        super().__init__(message)
        self.step = step

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback."""
        return [
            f"{self} Cells queued below were not run. To go on: trainer.train(). To do without the rest of the steps, "
            "run the cells below."
        ]


class InterruptGuard:
    """Context manager that turns SIGINT into KeyboardInterrupt at a moment when nothing is half done.

    An interrupt waits, but inside `at_once`, where it is raised where it lands. Between `begin_finish_first` and
    `end_finish_first` it waits there too. One that waits is raised by `raise_if_pending`.
    The first one counts: until the guard closes nothing cuts short what it has set in motion. One that is raised where
    Python drops exceptions (in a `__del__`) waits as well.
    patient: it waits wherever it arrives, until somebody looks at `pending`.
    Off the main thread Python delivers no signals, so there it does nothing.
    """

    def __init__(self) -> None:
        self.pending = self.patient = False
        self._waits = False  # is an interrupt to wait?
        self._previous_handler = None

    def __enter__(self) -> InterruptGuard:
        self.pending, self._waits = False, True
        if threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._previous_handler is not None:
            signal.signal(signal.SIGINT, self._previous_handler)
            self._previous_handler = None
        self.pending = self._waits = False

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.pending = True
        if not self._waits:
            self.raise_if_pending()

    def begin_finish_first(self) -> None:
        """From here on an interrupt waits, until `end_finish_first`."""
        self._waits = True

    def end_finish_first(self) -> None:
        """Interrupts are raised at once again, and one that waited is raised now."""
        self._waits = False
        self.raise_if_pending()

    def raise_if_pending(self) -> None:
        """Raise the KeyboardInterrupt that waited, if one did; from then on further ones wait."""
        if self.pending and not self.patient:
            self._waits = True
            raise KeyboardInterrupt

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """A long part (training, an evaluation inside a step) that an interrupt may cut short."""
        waited, self._waits = self._waits, False
        try:
            self.raise_if_pending()
            yield
        finally:
            self._waits = waited

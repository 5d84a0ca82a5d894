"""Several processes end together: what stops one of them stops all, and none waits for one that will not come.

Processes that train one model meet in hundreds of collective operations. One that is interrupted, or raises, between
two of them does not come to the next, where the others wait. So before each of them every process gives a word, over a
group of its own: fine, interrupted, or failed. Who hears that another is not fine leaves what it was about to do and
ends in the same way. An interrupt that arrives inside waits for the end of the operation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from grpo_kit.loop.interrupts import InterruptGuard
from grpo_kit.training.ranks import Ranks

_OPERATIONS = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "broadcast_object_list",
    "barrier", "reduce", "gather", "gather_object", "scatter", "scatter_object_list", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single",
)  # fmt: skip
_FINE, _INTERRUPTED, _FAILED = 0, 1, 2
_LEAVES = 4  # added: train() ends here, whatever the others do


class ProcessFailed(RuntimeError):
    """Another process of the run raised, or is gone; this one ends with it. The message names it, and what it met."""


@dataclass(frozen=True)
class _Word:
    """What one process says where not all are fine."""

    code: int
    step: int  # steps done
    half_done: bool  # its optimizer step was begun and not ended
    level: int  # of the `ending` that it leaves; what it leaves with ends there
    text: str

    @property
    def kind(self) -> int:
        return self.code % _LEAVES


class Together:
    """The ends of one trainer's runs, agreed on by all processes.

    where: () -> (steps done, is an optimizer step half done). guard: holds interrupts back in the meantime.
    half_done: after an end that was agreed on, the processes have not the same weights, and none is worth saving.
    gone: there is nobody left to talk to.
    """

    def __init__(self, ranks: Ranks, guard: InterruptGuard, where: Callable[[], tuple[int, bool]]) -> None:
        self.ranks, self.guard, self._where = ranks, guard, where
        self.half_done = self.gone = False
        self._heard: BaseException | None = None  # raised because of another's word
        self._level = self._ends_at = 0  # of the innermost `ending`; of the one that ends, once it was heard
        self._inside = False
        self._talk: dict[str, Callable[..., Any]] = {}  # torch's own operations
        self._thread = 0

    @contextmanager
    def run(self) -> Iterator[None]:
        """All of train(): who leaves it, in whatever way, says so."""
        if not self.ranks.together:
            yield
            return
        self.half_done = self.gone = False
        self._heard, self._level, self._ends_at = None, 0, 0
        with self.guard, self._a_word_before_each():
            try:
                yield
            except BaseException as error:
                self._leave(error)
                raise
            self._leave(None)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """A part that ends for all in the same way: the steps, or in them a checkpoint.

        Raises on the way out what this process met, or ProcessFailed, or KeyboardInterrupt for what another did.
        Where that is not about this part, but about one around it, `passes` is true.
        """
        if not self.ranks.together:
            yield
            return
        self._level += 1
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            heard, told = self._heard, self.gone or self._heard_before(error)
            if not told:
                self._tell(error)
            elif heard is not None and error is not heard:  # it came while this one was on its way out
                raise heard from error
            raise
        else:
            self._tell(None)
        finally:
            self._level -= 1
            if self._ends_at > self._level:
                self._heard = None

    @property
    def passes(self) -> bool:
        """Is an end that was agreed on still on its way out?"""
        return self.gone or self._heard is not None

    def _heard_before(self, error: BaseException | None) -> bool:
        """Is it what another's word raised here, or did it come of that?"""
        while error is not None and error is not self._heard:
            error = error.__cause__ or error.__context__
        return error is not None

    # ---- words ----------------------------------------------------------------------------------------------------

    def _tell(self, error: BaseException | None) -> None:
        """One word; raises where another's weighs more than this one's."""
        kind = _kind(error)
        self._heard = error  # as far as the others know: it is not told again
        self._raise_for(self._exchange(kind, error), kind)

    def _leave(self, error: BaseException | None) -> None:
        if self.gone:
            return
        kind = _kind(error)
        words = self._exchange(kind + _LEAVES, error)
        self.gone = True
        self._raise_for(words, kind)

    def _before_each(self, operation: int) -> None:
        """The word before an operation; raises where not all are fine."""
        if self.gone:
            raise ProcessFailed(self._gone_in_words())
        self._raise_for(self._exchange(_FINE, None, operation), _FINE)

    def _raise_for(self, words: list[_Word] | None, kind: int) -> None:
        if words is None:
            return
        self._ends_at = min(word.level for word in words if word.code)
        steps = {word.step for word in words}
        self.half_done |= len(steps) > 1 or any(word.half_done for word in words)
        leaving = [word.code >= _LEAVES for word in words]
        self.gone |= any(leaving)
        self.half_done |= any(leaving) and not all(leaving)  # nobody can save alone
        failed = next((i for i, word in enumerate(words) if word.kind == _FAILED), None)
        if failed is None and any(leaving) and not all(leaving):
            failed = leaving.index(True)
        if failed is not None and kind != _FAILED:
            self._heard = ProcessFailed(
                f"process {failed} of {self.ranks.count} failed, and the others end with it: "
                f"{words[failed].text or 'it left train()'}"
            )
            raise self._heard
        if failed is None and kind == _FINE and any(word.kind == _INTERRUPTED for word in words):
            self._heard = KeyboardInterrupt()
            raise self._heard

    def _exchange(self, code: int, error: BaseException | None, operation: int = -1) -> list[_Word] | None:
        """Every process's word; None where all are fine and about to do the same operation."""
        step, half_done = self._where()
        level = 0 if code >= _LEAVES else self._level
        text = "" if error is None else f"{type(error).__name__}: {error}"
        mine, words = torch.tensor([code, operation, -operation]), [None] * self.ranks.count
        with self.guard.held():
            try:
                self._talk["all_reduce"](mine, op=dist.ReduceOp.MAX, group=self.ranks.words)
                worst, highest, lowest = mine.tolist()
                if not worst and highest == -lowest:
                    return None
                if not worst:
                    code, text = _FAILED, "the processes are not at the same place of the step"
                self._talk["all_gather_object"](
                    words, _Word(code, step, half_done, level, text), group=self.ranks.words
                )
            except Exception as lost:
                self.gone = self.half_done = True
                self._heard = ProcessFailed(self._gone_in_words())
                raise self._heard from lost
        return words

    def _gone_in_words(self) -> str:
        return (
            f"of the {self.ranks.count} processes one is gone without a word (killed, or out of memory?), so none can "
            "go on; start them again with train(resume_from_checkpoint=True), which goes on from the last checkpoint"
        )

    @contextmanager
    def _a_word_before_each(self) -> Iterator[None]:
        """torch.distributed's operations, each with its word."""
        there = [name for name in _OPERATIONS if hasattr(dist, name)]
        self._talk = {name: getattr(dist, name) for name in there}
        self._thread = threading.get_ident()
        for number, (name, operation) in enumerate(self._talk.items()):
            setattr(dist, name, self._with_word(operation, number))
        try:
            yield
        finally:
            for name, operation in self._talk.items():
                setattr(dist, name, operation)

    def _with_word(self, operation: Callable[..., Any], number: int) -> Callable[..., Any]:
        @wraps(operation)
        def talk(*args: Any, **kwargs: Any) -> Any:
            if self._inside or threading.get_ident() != self._thread:
                return operation(*args, **kwargs)
            with self.guard.held():  # between the word and the end of the operation nobody may turn back
                self._inside = True
                try:
                    self._before_each(number)
                    return operation(*args, **kwargs)
                finally:
                    self._inside = False

        return talk


def _kind(error: BaseException | None) -> int:
    if error is None:
        return _FINE
    return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else _FAILED

"""Where the seconds of one training step go, and its peak of memory.

The clock is exclusive: at any moment one phase runs, so the phases add up to the step. Time that no phase claims is
"other" (tokenizing, padding, shuffling, logging). A step lasts from its first hook to the end of its logging.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from benchmarks.step.busy import OtherLoad
from benchmarks.step.tokens import TokenCount
from grpo_kit.models._model_facts import base_model

PHASES = ("prefill", "decode", "reward", "log-probs", "forward-backward", "optimizer", "other")


class PhaseClock:
    """Seconds by phase; phases nest, and an inner one takes its time from the outer.

    cuda: wait for the device where a phase begins or ends, else its work would be counted in a later one.
    """

    def __init__(self, *, cuda: bool = False) -> None:
        self._cuda = cuda
        self.start()

    def start(self) -> None:
        """Every phase back to zero."""
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._running = ["other"]
        self._since = self._begin = self._now()

    def enter(self, phase: str) -> None:
        self._charge()
        self._running.append(phase)

    def leave(self) -> None:
        self._charge()
        self._running.pop()

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        self.enter(phase)
        try:
            yield
        finally:
            self.leave()

    def move(self, seconds: float, source: str, target: str) -> None:
        """For an engine that measured a part of the phase itself."""
        self._charge()
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    def stop(self) -> float:
        """Seconds since start(): the sum of the phases."""
        self._charge()
        return self._since - self._begin

    def _charge(self) -> None:
        now = self._now()
        self.seconds[self._running[-1]] += now - self._since
        self._since = now

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


class PeakMemory:
    """Bytes at the highest point between start() and stop(), and over time.

    On CUDA what the allocator gave out ("allocated": weights included) and what it holds ("reserved"). On a CPU the
    process's resident memory above what it was when this was made, before the first step ("above start": weights not
    included). Sampled each 5 ms.
    """

    def __init__(self, *, cuda: bool = False) -> None:
        self._cuda, self._before = cuda, 0
        if not cuda:
            gc.collect()
            _return_free_memory()
            self._before = _resident()

    def start(self) -> None:
        if self._cuda:
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
        self._samples, self._begin = [(0.0, self._now())], time.perf_counter()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, int]:
        self._done.set()
        self._thread.join()
        if self._cuda:
            return {
                "allocated": torch.cuda.max_memory_allocated(),
                "reserved": torch.cuda.max_memory_reserved(),
            }
        return {"above start": max(held for _, held in self._samples)}

    def timeline(self, points: int = 200) -> list[tuple[float, int]]:
        """(seconds since start, bytes), the highest of each of `points` equal stretches."""
        size = -(-len(self._samples) // points)
        stretches = (self._samples[i : i + size] for i in range(0, len(self._samples), size))
        return [(part[0][0], max(held for _, held in part)) for part in stretches]

    def _now(self) -> int:
        return torch.cuda.memory_allocated() if self._cuda else _resident() - self._before

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self._samples.append((time.perf_counter() - self._begin, self._now()))


@dataclass
class Step:
    """One measured step: seconds (whole and by phase), bytes (peak and over time), and the work done.

    engine: what made the completions. tokens: positions computed (see TokenCount). others: share of the cores' time
    that went to other processes meanwhile, None where that is not known.
    """

    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    timeline: list[tuple[float, int]] = field(default_factory=list)
    completion_ids: list[list[int]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    loss: float = 0.0
    grad_norm: float = 0.0
    engine: str = ""
    tokens: dict[str, int | None] = field(default_factory=dict)
    others: float | None = None


class Watch:
    """One measured step of a trainer: its clock, memory, load and tokens. `step` is filled in once it has run.

    A forward pass over more than one new token, inside the rollout, is prefill.
    say: told of each part of the measured step as it ends.
    """

    def __init__(
        self, model: Any, *, cuda: bool, say: Callable[[str], None] = lambda text: None
    ) -> None:
        self.clock, self._memory, self.step = (
            PhaseClock(cuda=cuda),
            PeakMemory(cuda=cuda),
            Step(),
        )
        self.count, self._others = TokenCount(model), OtherLoad()
        self._say, self._measuring, self._prefill = say, False, False
        base = base_model(model)
        base.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        base.register_forward_hook(self._after_forward, always_call=True)

    def measure(self) -> None:
        """The step to be measured begins."""
        self._measuring = True
        self.count.start()
        self._memory.start()
        self._others.start()
        self.clock.start()

    def finish(self, *, loss: float, grad_norm: float) -> None:
        """It has ended."""
        self.step.seconds = self.clock.stop()
        self.step.others = self._others.stop()
        self.step.tokens = self.count.tokens()
        self.step.phases = dict(self.clock.seconds)
        self.step.memory = self._memory.stop()
        self.step.timeline = self._memory.timeline()
        self.step.loss, self.step.grad_norm = loss, grad_norm

    def sampling(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """The function, as decoding."""

        @wraps(inner)
        def outer(*args: Any, **kwargs: Any) -> Any:
            self.count.in_rollout = True
            try:
                with self.clock.phase("decode"):
                    out = inner(*args, **kwargs)
            finally:
                self.count.in_rollout = False
            self.ended("prefill", "decode")
            return out

        return outer

    def timed(self, inner: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """The function, as this phase."""

        @wraps(inner)
        def outer(*args: Any, **kwargs: Any) -> Any:
            with self.clock.phase(phase):
                return inner(*args, **kwargs)

        return outer

    def ended(self, *phases: str) -> None:
        """Say how long they took."""
        if self._measuring:
            self._say(
                ", ".join(f"{phase} {self.clock.seconds[phase]:.2f} s" for phase in phases)
            )

    def _before_forward(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        self._prefill = self.count.in_rollout and ids is not None and ids.size(1) > 1
        if self._prefill:
            self.clock.enter("prefill")

    def _after_forward(self, module: Any, args: tuple, output: Any) -> None:
        if self._prefill:
            self.clock.leave()
            self._prefill = False


def _resident() -> int:
    statm = Path("/proc/self/statm")
    return (
        int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0
    )


def _return_free_memory() -> None:
    """Else memory freed by an earlier arm would hide this one's."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):  # not glibc
        return

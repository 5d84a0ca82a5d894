"""The same completions in every arm, whatever engine writes them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from transformers import LogitsProcessorList

from benchmarks.step.phases import Watch
from benchmarks.step.workload import Workload
from grpo_kit.engine import RolloutEngine
from grpo_kit.engine.rollout import Rollouts


class ForcedCompletions:
    """A logits processor that leaves each row nothing but its next token, so every sampler writes the same.

    ids: R rows of token ids; past its end a row gets eos for ever. Called with (input_ids, scores (R', V), rows):
    rows, long (R',), says which of the R rows these are; None means all of them in order. Each row counts its own
    calls: `reset()` before each rollout.

    >>> forced = ForcedCompletions([[5, 2], [7]], eos=2)
    >>> forced(None, torch.zeros(2, 9)).argmax(-1).tolist(), forced(None, torch.zeros(2, 9)).argmax(-1).tolist()
    ([5, 7], [2, 2])
    """

    def __init__(self, ids: list[list[int]], eos: int) -> None:
        self._width = max(map(len, ids)) + 1
        # (R, T + 1)
        self._ids = torch.tensor([row + [eos] * (self._width - len(row)) for row in ids])
        self.reset()

    def reset(self) -> None:
        """Every row begins again at its first token."""
        self._step = torch.zeros(len(self._ids), dtype=torch.long, device=self._ids.device)
        self._decoded = torch.zeros((), dtype=torch.long, device=self._ids.device)

    @property
    def decoded(self) -> int:
        """Rows of scores since the reset that came out of a decode step, not out of a prompt."""
        return int(self._decoded)

    def __call__(
        self,
        input_ids: torch.Tensor | None,
        scores: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self._ids.device != scores.device:
            moved = (x.to(scores.device) for x in (self._ids, self._step, self._decoded))
            self._ids, self._step, self._decoded = moved
        if rows is None:
            rows = torch.arange(len(self._ids), device=scores.device)
        if len(rows) != len(scores):
            raise ValueError(f"rows: {len(rows)} row numbers for {len(scores)} rows of scores")
        self._decoded += (self._step[rows] > 0).sum()
        token = self._ids[rows, self._step[rows].clamp(max=self._width - 1)][:, None]  # (R', 1)
        self._step[rows] += 1
        return torch.full_like(scores, -math.inf).scatter(1, token, scores.gather(1, token))


@contextmanager
def forced_tokens(model: Any, work: Workload, watch: Watch) -> Iterator[None]:
    """Whoever samples from the model writes work.completion_ids: token by token, by a logits processor."""
    forced = ForcedCompletions(work.completion_ids, work.eos)
    _force_generate(model, forced, watch)
    with _engine_forced(forced, watch):
        yield


def _force_generate(model: Any, forced: ForcedCompletions, watch: Watch) -> None:
    """Into transformers' generate, whose processors take two arguments only."""
    inner = model.generate
    processors = LogitsProcessorList([lambda input_ids, scores: forced(input_ids, scores)])

    @wraps(inner)
    def generate(*args: Any, **kwargs: Any) -> Any:
        forced.reset()
        watch.step.engine = "transformers.generate"
        out = inner(*args, **kwargs, logits_processor=processors)
        watch.count.sampled(forced.decoded)
        return out

    model.generate = generate


@contextmanager
def _engine_forced(forced: ForcedCompletions, watch: Watch) -> Iterator[None]:
    """Into the kit's RolloutEngine, which times its own prefill."""
    inner = RolloutEngine.generate
    fields = [field.name for field in dataclasses.fields(Rollouts)]

    @wraps(inner)
    def generate(self: Any, *args: Any, processors: tuple = (), **kwargs: Any) -> Any:
        forced.reset()
        # An engine that says what it computed is left alone.
        with watch.count.unwatched() if "tokens" in fields else nullcontext():
            rollouts = inner(self, *args, processors=(*processors, forced), **kwargs)
        watch.clock.move(rollouts.seconds["prefill"], "decode", "prefill")
        watch.count.sampled(forced.decoded)
        # an engine may say what it computed
        watch.count.report(getattr(rollouts, "tokens", None))
        watch.step.engine = "RolloutEngine"
        return rollouts

    RolloutEngine.generate = generate
    try:
        yield
    finally:
        RolloutEngine.generate = inner

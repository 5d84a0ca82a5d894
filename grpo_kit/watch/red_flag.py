"""What a red flag says, what it needs to know of the run, and how it is raised. The flags stand in flags.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

# Whether it is there, a bool for each row of the table, and what it saw in a row; None where it cannot be judged.
Sign = tuple[np.ndarray, Callable[[int], str]] | None


@dataclass(frozen=True)
class Flag:
    """A red flag. name; step: since when; saw: what, with numbers; why it matters; first: what to try first."""

    name: str
    step: int
    saw: str
    why: str
    first: str

    def __str__(self) -> str:
        return f"{self.name} since step {self.step}: {self.saw}. {self.why} First try: {self.first}"


@dataclass(frozen=True)
class Setup:
    """What the flags need of a run's config.json; the defaults where there is none.

    weights: of the reward parts by name. best: the highest reward. max_tokens of a completion. age: the highest of a
    rollout, in optimizer steps.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    best: float = 1.0
    max_tokens: int | None = None
    age: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any] | None) -> Setup:
        """From a run's config (config.json, as the trainer writes it)."""
        config = config or {}
        args = config.get("args") or {}
        weights = [float(w) for w in config.get("reward_weights") or ()]
        parts = list(config.get("reward_parts") or ())[: len(weights)]
        passes = (args.get("steps_per_generation") or 1) * (args.get("num_iterations") or 1)
        return cls(
            weights=dict(zip(parts, weights, strict=False)),
            best=sum(w for w in weights if w > 0) or 1.0,
            max_tokens=args.get("max_completion_length"),
            age=max(0, passes // (args.get("gradient_accumulation_steps") or 1) - 1),
        )


def red_flag(
    name: str, *, why: str, first: str, lasted: int = 1
) -> Callable[[Callable[..., Sign]], Callable[..., Flag | None]]:
    """Makes a function that returns a Sign into one that returns the Flag, or None where the sign is nowhere.

    lasted: rows that the sign looks back on; the flag's step is the first of them.
    """

    def raising(find: Callable[..., Sign]) -> Callable[..., Flag | None]:
        @functools.wraps(find)
        def raised(table: pd.DataFrame, *given: Any) -> Flag | None:
            sign = find(table, *given)
            if sign is None or not sign[0].any():
                return None
            at = int(sign[0].argmax())
            return Flag(name, int(table["step"].iloc[max(at - lasted + 1, 0)]), sign[1](at), why, first)

        return raised

    return raising

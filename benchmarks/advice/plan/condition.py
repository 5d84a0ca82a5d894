"""What must be so of the runs, or a row has no verdict: its arms were not in the state that the advice is about."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

import pandas as pd

from grpo_kit.more.lab._arm import last_quarter

_SIGNS = {"<": operator.lt, "<=": operator.le}


@dataclass(frozen=True)
class Condition:
    """The mean of a reward over some steps of an arm, below a bound.

    text: in words. arm: a name in arms.ARMS. column: of the saved curves. first: how many of the first steps; 0: the
    last quarter, as outcomes count it. sign: "<" or "<=", bound. than: an arm whose own mean is subtracted, "": none.

    >>> Condition("is rare", "control", "reward", 2, "<", 0.1).holds(0.05)
    True
    """

    text: str
    arm: str
    column: str
    first: int
    sign: str
    bound: float
    than: str = ""

    def __str__(self) -> str:
        return self.text

    @property
    def arms(self) -> list[str]:
        """Those whose runs it reads."""
        return [self.arm, self.than] if self.than else [self.arm]

    def measured(self, curves: Mapping[str, Mapping[int, pd.DataFrame]]) -> float | None:
        """What is below the bound or not, over the seeds that all its arms have; None where there is none.

        curves: arm -> seed -> one row a step.
        """
        seeds = set.intersection(*(set(curves.get(arm, ())) for arm in self.arms))
        means = [
            fmean(self._mean(curves[arm][seed]) for seed in seeds) for arm in self.arms if seeds
        ]
        return means[0] - sum(means[1:]) if means else None

    def holds(self, value: float) -> bool:
        """Whether what was measured is so."""
        return _SIGNS[self.sign](value, self.bound)

    def _mean(self, curve: pd.DataFrame) -> float:
        # in old runs empty where a rollout was used again
        values = curve[self.column].astype(float).dropna()
        return float(values.head(self.first).mean()) if self.first else last_quarter(values)

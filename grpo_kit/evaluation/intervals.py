"""Intervals and paired tests for measured rates, exact where that is cheap. Arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_kit._support.argument_checks import check_whole
from grpo_kit._support.display import wilson_interval


@dataclass(frozen=True)
class Estimate:
    """A measured mean with its 95 % interval; n is the number of prompts.

    >>> print(Estimate(0.25, 0.19, 0.32, n=128))
    25.0 % [19.0, 32.0] (n = 128)
    """

    value: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.words()} (n = {self.n})"

    def words(self, rate: bool = True, *, change: bool = False) -> str:
        """Value and interval: of a rate in per cent, or points of a change; else, as of rewards, the numbers.

        >>> Estimate(0.684, 0.621, 0.742, n=256).words(change=True), Estimate(2, 1, 4, n=9).words(rate=False)
        ('+68.4 points [62.1, 74.2]', '2.000 [1.000, 4.000]')
        """
        sign = "+" if change else ""
        if not rate:
            return f"{self.value:{sign}.3f} [{self.low:.3f}, {self.high:.3f}]"
        unit = "points" if change else "%"
        value, low, high = 100 * self.value, 100 * self.low, 100 * self.high
        return f"{value:{sign}.1f} {unit} [{low:.1f}, {high:.1f}]"


def share(count: int, n: int) -> Estimate:
    """The share count / n with Wilson's 95 % interval.

    >>> print(share(32, 128))
    25.0 % [18.3, 33.2] (n = 128)
    """
    low, high = wilson_interval(count, n)
    return Estimate(count / n, low, high, n)


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that k of n samples, drawn without replacement, hold one of the c right ones; unbiased.

    Averaged over prompts this is pass@k. (1 - (1 - c/n)^k is biased low.)
    Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    Source: Chen et al., Evaluating Large Language Models Trained on Code, arXiv:2107.03374, eq. 1.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if n < 1 or not 0 <= c <= n:
        raise ValueError(f"n={n!r}, c={c!r}: give n >= 1 samples of which 0..n are right")
    if not 1 <= k <= n:
        raise ValueError(f"k={k!r} must lie in 1..n={n}; draw more samples for a larger k")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def mcnemar_p(fixed: int, broken: int) -> float:
    """Two-sided exact p-value of the paired test that as many rows are fixed as broken.

    fixed: wrong before, right after. broken: right before, wrong after. Unchanged rows carry no evidence.
    Raises ValueError for negative counts.
    Source: McNemar (1947), with the binomial distribution in place of its approximation.

    >>> mcnemar_p(5, 0)
    0.0625
    """
    if fixed < 0 or broken < 0:
        raise ValueError(f"fixed={fixed!r}, broken={broken!r} must be counts of at least 0")
    n = fixed + broken
    tail = sum(math.comb(n, i) for i in range(min(fixed, broken) + 1))
    return min(1.0, 2 * tail / 2**n)


def bootstrap_mean(
    values: Sequence[float],
    *,
    lowest: float = 0.0,
    highest: float = 1.0,
    resamples: int = 4000,
    seed: int = 0,
) -> Estimate:
    """The mean of one value per prompt, with the percentile bootstrap's 95 % interval over prompts.

    values in [lowest, highest]; lowest=-1 for differences. If all values are equal, no resample can differ and the
    bootstrap has no width; the interval is then Wilson's for a rate never, or always, seen, on a scale
    whose unit is the larger end.
    Raises ValueError for no values, one out of range, or resamples < 100.

    >>> bootstrap_mean([0, 0, 0, 0]).high == wilson_interval(0, 4)[1]
    True
    """
    data = np.asarray(values, dtype=float)
    n = len(data)
    if n == 0 or not ((data >= lowest) & (data <= highest)).all():
        raise ValueError(
            f"values has {n} entries; give at least one, each a number in [{lowest:g}, {highest:g}]"
        )
    check_whole("resamples", resamples, 100)
    if (data == data[0]).all():
        room = wilson_interval(0, n)[1] * max(abs(lowest), abs(highest))
        low, high = max(lowest, data[0] - room), min(highest, data[0] + room)
        return Estimate(float(data[0]), float(low), float(high), n)
    rng = np.random.default_rng(seed)
    means = []
    for _ in range(math.ceil(resamples / 100)):  # 100 at a time, to keep memory small
        means += data[rng.integers(0, n, (100, n))].mean(axis=1).tolist()
    low, high = np.quantile(means, [0.025, 0.975])
    return Estimate(float(data.mean()), float(low), float(high), n)


def mean_reward(values: Sequence[float]) -> Estimate:
    """bootstrap_mean of rewards on any scale: [0, 1], extended as far as they lie beyond it.

    >>> mean_reward([10.0, 10.0]).value
    10.0
    """
    return bootstrap_mean(values, lowest=min(0.0, *values), highest=max(1.0, *values))

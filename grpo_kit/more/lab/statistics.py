"""Intervals and tests over seeds: intervals for few seeds, paired differences, correction for many tests.

Seeds and rows are crossed random effects: value = mean + seed + row + residual. The residual shows in the spread of
both the seeds' means and the rows' means, and is counted once, with the seeds. `python -m benchmarks.interval_coverage`
simulates how often the intervals contain the truth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import ndtri, stdtr, stdtrit

from grpo_kit.evaluation.intervals import Estimate, bootstrap_mean, wilson_interval


def over_seeds(values: Sequence[Sequence[float]]) -> Estimate:
    """The mean of values (S seeds, R rows; each in [-1, 1]), with an interval over seeds and rows together.

    Seeds: Student's t on S - 1 degrees of freedom. Rows: the variance of their means over seeds, minus the part from a
    seed's noise on a row. The two half widths are added in quadrature.
    One seed: the percentile bootstrap over rows alone, which does not cover another seed.
    Raises ValueError for no value, or rows of unequal number.
    Source: two-way crossed random effects, Searle, Casella, McCulloch, Variance Components (1992), chapter 4; half
    widths in quadrature: Zou, Donner, Statistics in Medicine 27:1693 (2008).

    >>> over_seeds([[1, 0, 1, 0], [1, 1, 0, 0]]).value
    0.5
    """
    data = np.asarray(values, dtype=float)
    if data.ndim != 2 or not data.size:
        raise ValueError(
            f"values has shape {data.shape}; give one row of equal length for each seed"
        )
    return _estimate(data, lowest=-1.0 if data.min() < 0 else 0.0)


def difference_over_seeds(
    first: Sequence[Sequence[float]],
    second: Sequence[Sequence[float]],
    *,
    null: float = 0.0,
) -> tuple[Estimate, float | None]:
    """second minus first, paired by seed and row, both (S, R) in [0, 1]; and the two-sided p of a difference of null.

    The interval as over_seeds. p: 1 minus the confidence at which the interval just touches null, so that both agree;
    None for one seed.
    Raises ValueError for unlike shapes.
    """
    if np.shape(first) != np.shape(second):
        raise ValueError(
            f"first has shape {np.shape(first)}, second {np.shape(second)}; give the same seeds and rows"
        )
    changes = np.asarray(second, dtype=float) - np.asarray(first, dtype=float)
    estimate = _estimate(changes, lowest=-1.0)
    if len(changes) < 2:
        return estimate, None
    return estimate, _p_of_both(abs(estimate.value - null), *_errors(changes), len(changes))


def paired_scalars(
    first: Sequence[float],
    second: Sequence[float],
    *,
    null: float = 0.0,
) -> tuple[float, float, float, float | None]:
    """(mean, low, high, p) of second minus first, one number a seed: Student's t, 95 %; p: of a difference of null.

    With one seed low and high are infinite and p is None: the spread between seeds is unknown.
    Raises ValueError for unequal numbers or none.
    """
    if len(first) != len(second) or not len(first):
        raise ValueError(
            f"first has {len(first)} numbers, second {len(second)}; give one for each seed, the same"
        )
    changes = np.asarray(second, dtype=float) - np.asarray(first, dtype=float)
    mean, degrees = float(changes.mean()), len(changes) - 1
    if degrees == 0:
        return mean, -math.inf, math.inf, None
    error = _standard_error(changes)
    half = float(stdtrit(degrees, 0.975)) * error
    if error > 0:
        p = float(2 * stdtr(degrees, -abs(mean - null) / error))
    else:
        p = float(mean == null)
    return mean, mean - half, mean + half, p


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down adjustment: each p corrected for the number of tests; None (and NaN) stay None.

    Source: Holm (1979), Scandinavian Journal of Statistics 6:65.

    >>> holm([0.01, 0.04, None, 0.03])
    [0.03, 0.06, None, 0.06]
    """
    tests = sorted(
        (p, i) for i, p in enumerate(p_values) if p is not None and not math.isnan(p)
    )
    adjusted: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for place, (p, i) in enumerate(tests):
        highest = max(highest, min(1.0, p * (len(tests) - place)))
        adjusted[i] = highest
    return adjusted


def _estimate(values: np.ndarray, *, lowest: float) -> Estimate:
    """The interval of over_seeds; values (S, R) in [lowest, 1]."""
    if len(values) < 2:
        return bootstrap_mean(values[0].tolist(), lowest=lowest)
    mean = float(values.mean())
    seed_error, row_error = _errors(values)
    seed_half = float(stdtrit(len(values) - 1, 0.975)) * seed_error
    half = math.hypot(seed_half, float(ndtri(0.975)) * row_error)
    return Estimate(mean, max(lowest, mean - half), min(1.0, mean + half), values.shape[1])


def _errors(values: np.ndarray) -> tuple[float, float]:
    """Standard errors of the mean of values (S, R): of seeds, with the residual, and of rows alone."""
    seeds, rows = values.shape
    by_seed, by_row = values.mean(axis=1), values.mean(axis=0)
    # Nothing varies, and few rows are still few: Wilson's interval.
    if (values == values[0, 0]).all():
        return 0.0, wilson_interval(0, rows)[1] / float(ndtri(0.975))
    if rows < 2:
        return _standard_error(by_seed), 0.0
    residuals = values - by_seed[:, None] - by_row + values.mean()
    noise = float((residuals**2).sum()) / ((seeds - 1) * (rows - 1))
    row_variance = max(float(by_row.var(ddof=1)) - noise / seeds, 0.0)
    return _standard_error(by_seed), math.sqrt(row_variance / rows)


def _standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values)))


def _p_of_both(
    distance: float,
    seed_error: float,
    row_error: float,
    seeds: int,
) -> float:
    """The level at which both half widths in quadrature are the distance; they fall as the level rises."""
    low, high = 0.0, 1.0
    for _ in range(60):
        level = (low + high) / 2
        seed_half = stdtrit(seeds - 1, level / 2) * seed_error
        row_half = ndtri(level / 2) * row_error
        if math.hypot(seed_half, row_half) < distance:
            high = level
        else:
            low = level
    return high

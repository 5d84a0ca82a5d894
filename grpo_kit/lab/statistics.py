"""How sure a result over seeds is: intervals for few seeds, paired differences, correction for many tests."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import ndtri, stdtr, stdtrit

from grpo_kit.evaluation.intervals import Estimate, bootstrap_mean


def over_seeds(values: Sequence[Sequence[float]]) -> Estimate:
    """The mean of values (S seeds, R rows; each in [-1, 1]), sure about seeds and rows together.

    Seeds: Student's t on S - 1 degrees of freedom. Rows: percentile bootstrap of the rows' means over seeds. The two
    half widths are added in quadrature, which counts the noise of a seed on a row twice: never too narrow for that.
    One seed: the rows' interval alone, which says nothing about another seed.
    Raises ValueError for no value, or rows of unequal number.

    >>> over_seeds([[1, 0, 1, 0], [1, 1, 0, 0]]).value
    0.5
    """
    data = np.asarray(values, dtype=float)
    if data.ndim != 2 or not data.size:
        raise ValueError(f"values has shape {data.shape}; give one row of equal length for each seed")
    lowest = -1.0 if data.min() < 0 else 0.0
    return _with_seeds(data, _over_rows(data, lowest=lowest), lowest=lowest)


def difference_over_seeds(
    first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]
) -> tuple[Estimate, float | None]:
    """second minus first, paired by seed and row, both (S, R) in [0, 1]; and the two-sided p of no difference.

    The interval as over_seeds. p: 1 minus the confidence at which it would just touch 0, so that the two agree; None
    for one seed.
    Raises ValueError for unlike shapes.
    """
    one, two = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    if one.shape != two.shape:
        raise ValueError(f"first has shape {one.shape}, second {two.shape}; give the same seeds and rows")
    change = two - one
    by_row = _over_rows(change, lowest=-1.0)
    estimate = _with_seeds(change, by_row, lowest=-1.0)
    if len(change) < 2:
        return estimate, None
    mean = estimate.value
    by_rows = (mean - by_row.low if mean > 0 else by_row.high - mean) / -float(ndtri(0.025))
    return estimate, _p_of_both(abs(mean), _standard_error(change.mean(axis=1)), by_rows, len(change))


def paired_scalars(
    first: Sequence[float], second: Sequence[float]
) -> tuple[float, float, float, float | None]:
    """(mean, low, high, p) of second minus first, one number a seed: Student's t, 95 %.

    With one seed low and high are infinite and p is None: nothing is known about another seed.
    Raises ValueError for unequal numbers or none.
    """
    if len(first) != len(second) or not len(first):
        raise ValueError(
            f"first has {len(first)} numbers, second {len(second)}; give one for each seed, the same"
        )
    change = np.asarray(second, dtype=float) - np.asarray(first, dtype=float)
    mean = float(change.mean())
    if len(change) < 2:
        return mean, -math.inf, math.inf, None
    half = _t_half(change)
    return mean, mean - half, mean + half, _p(mean, _standard_error(change), len(change))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down adjustment: each p corrected for how many were looked at; None (and NaN) stay None.

    Source: Holm (1979), Scandinavian Journal of Statistics 6:65.

    >>> holm([0.01, 0.04, None, 0.03])
    [0.03, 0.06, None, 0.06]
    """
    known = sorted((p, i) for i, p in enumerate(p_values) if p is not None and not math.isnan(p))
    adjusted: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for place, (p, i) in enumerate(known):
        highest = max(highest, min(1.0, p * (len(known) - place)))
        adjusted[i] = highest
    return adjusted


def _over_rows(values: np.ndarray, *, lowest: float) -> Estimate:
    return bootstrap_mean(values.mean(axis=0).tolist(), lowest=lowest)


def _with_seeds(values: np.ndarray, by_row: Estimate, *, lowest: float) -> Estimate:
    """The rows' interval widened by that of the seeds; values (S, R)."""
    mean = float(values.mean())
    spread = _t_half(values.mean(axis=1)) if len(values) > 1 else 0.0
    low, high = math.hypot(mean - by_row.low, spread), math.hypot(by_row.high - mean, spread)
    return Estimate(mean, max(lowest, mean - low), min(1.0, mean + high), values.shape[1])


def _standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0


def _t_half(values: np.ndarray) -> float:
    return float(stdtrit(len(values) - 1, 0.975)) * _standard_error(values)


def _p(mean: float, error: float, seeds: int) -> float:
    if error == 0:
        return 1.0 if mean == 0 else 0.0
    return float(2 * stdtr(seeds - 1, -abs(mean) / error))


def _p_of_both(distance: float, seed_error: float, row_error: float, seeds: int) -> float:
    """The level at which both half widths in quadrature are the distance; they fall as the level rises."""
    low, high = 0.0, 1.0
    for _ in range(60):
        level = (low + high) / 2
        half = math.hypot(stdtrit(seeds - 1, level / 2) * seed_error, ndtri(level / 2) * row_error)
        low, high = (low, level) if half < distance else (level, high)
    return high

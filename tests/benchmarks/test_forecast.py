"""An interval knows nothing of the unit that it is tried on, and the recorded numbers come out again."""

import json

import numpy as np
import pandas as pd
import pytest

from benchmarks.forecast import (
    EIGHT,
    PATH,
    asked,
    judged,
    line,
    neighbours,
    quantile,
    recorded,
    student,
)


def made(arms=12, seeds=20, spread=0.1):
    """Runs whose end is their share right in steps 5 to 8, and noise; two tasks, 20 seeds an arm."""
    rng = np.random.default_rng(0)
    rows = []
    for arm in range(arms):
        for seed in range(seeds):
            right = rng.uniform(0.3, 0.7)
            end = right + rng.normal(0, spread)
            row = {"task": "ab"[arm % 2], "arm": str(arm), "seed": arm * seeds + seed}
            row |= {"before": rng.uniform(0, 0.2), "steps": 20.0, "end": end, "n": 64}
            rows.append(row | {"right_1_to_4": rng.uniform(0, 1), "right_5_to_8": right})
    runs = pd.DataFrame(rows)
    runs["steps"] += rng.integers(0, 2, len(runs))
    return runs


def test_the_recorded_numbers_come_out_again():
    saved = json.loads(PATH.read_text(encoding="utf-8"))
    runs = recorded()
    assert len(runs) == saved["runs"] == 910
    parts = {"unseen tasks": (runs, "task"), "largest, unseen arms": (largest_of(runs), "arm")}
    for split, (some, unit) in parts.items():
        recorded_ways = saved["splits"][split]["ways"]
        again = asked(some, unit, ["ends", "eight"])["ways"]
        for way in ("before", "ends", "eight"):
            for number in ("held", "held_low", "held_high", "width"):
                assert again[way][number] == pytest.approx(recorded_ways[way][number], abs=1e-3)
            held = recorded_ways[way]["held_by_unit"]
            assert again[way]["held_by_unit"] == pytest.approx(held, abs=1e-3)


def largest_of(runs):
    return runs[runs["task"] == "largest"].reset_index(drop=True)


@pytest.mark.parametrize("way", [line, neighbours])
@pytest.mark.parametrize("unit", ["arm", "task"])
def test_an_interval_does_not_know_the_ends_of_its_unit(way, unit):
    runs = made()
    own = (runs[unit] == runs[unit][0]).to_numpy()
    other = runs.assign(end=np.where(own, 1 - runs["end"], runs["end"]))
    for before, after in zip(way(runs, EIGHT, unit), way(other, EIGHT, unit), strict=True):
        assert before[own] == pytest.approx(after[own])
        assert not np.allclose(before[~own], after[~own])


def test_where_the_first_steps_tell_the_end_they_are_found_to():
    """Noise of 0.1 is 0.256 between its tenths; the ends alone, uniform and noise, about 0.4."""
    found = asked(made(), "arm", ["ends", "eight"])["ways"]
    assert found["eight"]["held"] == pytest.approx(0.8, abs=0.05)
    assert found["eight"]["width"] == pytest.approx(0.256, abs=0.03)
    assert found["eight"]["narrower_than_ends"][1] > 0.08


def test_units_count_alike_and_quantiles_count_weights():
    runs = made(arms=2).assign(end=[0.1] * 20 + [0.9] * 20)
    runs = runs.drop(index=range(5, 20)).reset_index(
        drop=True
    )  # arm "0" has 5 runs, "1" has 20
    assert judged(runs, (np.zeros(25), np.full(25, 0.5)), "arm")["held"] == 0.5
    assert quantile(np.array([3.0, 1.0, 2.0]), np.array([1.0, 1.0, 2.0]), 0.5) == 2.0
    assert quantile(np.array([3.0, 1.0, 2.0]), np.array([2.0, 1.0, 1.0]), 0.25) == 1.0


def test_an_interval_over_units_is_students():
    mean, low, high = student(pd.Series([0.0, 0.5, 1.0]))
    # t of 2 degrees of freedom, standard deviation 0.5
    assert (mean, high - mean) == pytest.approx((0.5, 4.302653 * 0.5 / 3**0.5))
    assert mean - low == pytest.approx(high - mean)

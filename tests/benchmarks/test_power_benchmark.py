"""Predictions are tried on runs that the fit has not seen, and a draw finds what the laboratory's interval finds."""

import numpy as np
import pytest

from benchmarks.power import (
    Experiment,
    constants,
    experiments,
    found_by_draws,
    halves,
    rise_tested,
)
from grpo_kit.more.lab.power import chance


def made(seeds, spread, *, name="one", rows=64, seed=0):
    rng = np.random.default_rng(seed)
    change = rng.normal(0, spread, (seeds, 1)) + rng.normal(0, 0.12**0.5, (seeds, rows))
    return Experiment(name, f"{name}, not", change)


def test_the_parts_are_the_variances_that_were_drawn():
    seeds, noise, rows = made(400, 0.1).parts()
    assert seeds == pytest.approx(0.01, rel=0.2) and noise == pytest.approx(0.12, rel=0.05)
    assert rows < 0.001


def test_an_experiment_counts_by_its_seeds():
    """One of 30 seeds outweighs four of 5, whose spread is hardly known."""
    some = [made(31, 0.2), *(made(5, 0.02, seed=s) for s in range(4))]
    spread = constants(some)["spreads"]
    assert spread[2] == spread[4] == round(made(31, 0.2).parts()[0] ** 0.5, 3) > 3 * spread[0]


def test_halves_share_no_run():
    one, other = halves([e for e in experiments() if e.kind == "answer"])
    settings = [{name for e in half for name in (e.arm, e.against)} for half in (one, other)]
    assert not settings[0] & settings[1] and abs(len(one) - len(other)) <= 5


def test_draws_of_half_the_seeds_scatter_like_new_ones():
    """Else what is drawn from few seeds agrees too well: with 8 of 16, by a third."""
    rng = np.random.default_rng(1)
    came = np.mean([found_by_draws(made(16, 0.1, seed=s), 8, 0.1, rng) for s in range(10)])
    assert came == pytest.approx(
        chance(0.1, 8, 64, spreads=[0.1], noise=0.12, rows=0), abs=0.07
    )


def test_steps_are_predicted_from_the_other_half():
    found = {name: {"steps": 10, "of": 20, "signal": 2.0, "signals": 40.0} for name in "abcd"}
    told = rise_tested(found)
    # 40 groups at 2 a step are 20 steps
    assert told["off_by_steps"] == 0 and told["off_by_signal"] == 10

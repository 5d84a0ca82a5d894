"""Red flags of episodes: raised where it goes wrong, silent where it goes well."""

import numpy as np
import pandas as pd
import pytest

from grpo_kit.watch.monitor import red_flags

STEPS = 20


def metrics(**columns):
    base = {"step": np.arange(1, STEPS + 1), "reward": np.linspace(0.2, 0.8, STEPS), "reward_std": 0.3}
    healthy = {
        "episodes/turns": 3.0, "episodes/invalid": np.linspace(0.4, 0.05, STEPS), "episodes/repeated": 0.2,
        "episodes/unfinished": np.linspace(0.95, 0.3, STEPS),
    }  # fmt: skip
    return pd.DataFrame(base | healthy | {f"episodes/{name}": values for name, values in columns.items()})


def late(low, high):
    """Low for twelve steps, then high."""
    return np.r_[np.full(12, low), np.full(STEPS - 12, high)]


CASES = [
    (
        "invalid actions",
        {"invalid": late(0.1, 0.6)},
        "60% of the actions could not be read, where 10% was the best",
    ),
    ("invalid actions", {"invalid": np.full(STEPS, 0.8)}, "80% of the actions"),
    ("invalid actions", {"invalid": late(0.05, 0.45)}, "where 5% was the best"),
    (
        "endless episodes",
        {"unfinished": late(0.3, 1.0)},
        "100% of the episodes ended at the most turns, 30% at first",
    ),
    (
        "lost focus",
        {"repeated": late(0.1, 0.9)},
        "90% of the turns repeat the last one, action and reply, where 10% was the least",
    ),
    ("forking turns", {"reread": np.full(STEPS, 0.9)}, "90% of what later turns read was read before"),
]


@pytest.mark.parametrize("name, columns, saw", CASES)
def test_a_flag_is_raised_once_it_lasts_and_says_what_it_saw(name, columns, saw):
    found = [flag for flag in red_flags(metrics(**columns)) if flag.name == name]
    assert len(found) == 1 and saw.split(",")[0].split("%")[1] in found[0].saw
    one = next(iter(columns.values()))
    assert found[0].step == (1 if one[0] == one[-1] else found[0].step) and found[0].step <= 17


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"invalid": np.r_[np.full(3, 0.1), np.full(2, 0.9), np.full(15, 0.1)]},  # two bad steps
        {"unfinished": np.full(STEPS, 1.0)},  # from the first step on: so it is made
        {"repeated": np.full(STEPS, 0.6)},
        {"forked": np.full(STEPS, 1.0), "reread": np.full(STEPS, 0.05)},  # thoughts that are dropped
    ],
)
def test_what_goes_well_or_was_so_from_the_start_raises_none(columns):
    names = {flag.name for flag in red_flags(metrics(**columns))}
    assert not names & {case[0] for case in CASES}


def test_runs_without_episodes_are_left_alone():
    table = metrics().drop(columns=[f"episodes/{n}" for n in ("turns", "invalid", "repeated", "unfinished")])
    assert not {flag.name for flag in red_flags(table)} & {case[0] for case in CASES}

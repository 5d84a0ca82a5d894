"""The grid that comes with the kit, worked episodes, and what no task of episodes can be made of."""

from dataclasses import replace

import pytest

from grpo_kit.more.episodes import grid, worked
from grpo_kit.more.episodes.grid_world import _SHOWN, _SMALL, Grid


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_small_maps_have_examples_of_their_own_that_are_no_rows(size):
    task = grid(2, 2, size=size, max_turns=8)
    everything = grid(1, 100, size=size, max_turns=8) if size > 3 else task
    assert task.score(task.optimum) == 1.0 and len(task.view.examples) == 3
    pairs = [(row["start"], row["door"]) for row in [*everything.train, *everything.held_out]]
    assert not [pair for pair in pairs if pair in (_SHOWN if size > 3 else _SMALL)]


def test_a_policy_that_ends_nothing_makes_no_example():
    with pytest.raises(ValueError, match="the policy did not end the episode in 100 turns"):
        worked(
            Grid(),
            lambda row, rng: lambda seen: "wait",
            {"size": 3, "start": [0, 0], "door": [2, 2]},
        )


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"train": ["a"]}, "train is a list; give a list of dicts"),
        ({"held_out": {"question": ["a"]}}, "held_out is a dict; give a list of dicts"),
        ({"view": {"chat": True}}, "is a dict; give an episodes.View"),
    ],
)
def test_what_is_no_row_and_no_view_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        replace(grid(2, 2), **changes)

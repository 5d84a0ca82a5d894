"""Advantages of turns, by hand."""

import pytest
import torch

from grpo_kit.more.episodes._turn_advantages import turn_advantages
from grpo_kit.more.episodes.rollout_episodes import Episode, Turn
from grpo_kit.objectives import group_advantages


def episode(*rewards, prompts=None):
    prompts = prompts or [[t] for t in range(len(rewards))]
    return Episode(
        {},
        [
            Turn(p, [], None, "", "", "", r, False, False)
            for p, r in zip(prompts, rewards, strict=True)
        ],
    )


GROUP = [episode(0.0, 1.0), episode(0.0), episode(0.0, 0.0, 0.5), episode(0.0, 0.0)]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_an_episodes_advantage_is_that_of_its_sum_in_every_turn(scale):
    two = [*GROUP, episode(1.0), episode(1.0), episode(0.0), episode(0.0)]
    expected = group_advantages(
        torch.tensor([1.0, 0, 0.5, 0, 1, 1, 0, 0]), 4, scale=scale
    ).tolist()
    found = turn_advantages(two, 4, scale=scale)
    assert [len(line) for line in found] == [2, 1, 3, 2, 1, 1, 1, 1]
    for line, value in zip(found, expected, strict=True):
        assert line == pytest.approx([value] * len(line), abs=1e-6)


@pytest.mark.parametrize("credit", ["episode", "return", "state"])
def test_equal_episodes_have_no_advantage_at_all(credit):
    """Sums of 0.1 differ in their last bits; what is not exactly 0 would be trained on."""
    same = [
        episode(0.1, 0.2, 0.3),
        episode(0.3, 0.2, 0.1),
        episode(0.2, 0.2, 0.2),
        episode(0.3, 0.3),
    ]
    found = turn_advantages(same[:3], 3, credit="episode")
    assert all(a == 0 for line in found for a in line)
    alike = [episode(0.1, 0.2)] * 4
    assert all(a == 0 for line in turn_advantages(alike, 4, credit=credit) for a in line)


def test_returns_are_compared_turn_by_turn():
    """Discount 0.5: returns (0.5, 1), (0,), (0.125, 0.25, 0.5), (0, 0); means 0.15625 and 0.41667 and 0.5."""
    found = turn_advantages(GROUP, 4, credit="return", discount=0.5, scale="none")
    assert found[0] == pytest.approx([0.5 - 0.15625, 1 - 1.25 / 3])
    assert found[1] == pytest.approx([-0.15625])
    assert found[2] == pytest.approx([0.125 - 0.15625, 0.25 - 1.25 / 3, 0.0])
    assert found[3] == pytest.approx([-0.15625, -1.25 / 3])


def test_turns_of_the_same_state_are_compared_with_each_other():
    """GiGPO: the episode's advantage, and the return's among those that stood at the same prompt."""
    a = episode(0.0, 1.0, prompts=[[1], [2]])
    b = episode(0.0, 0.0, prompts=[[1], [2]])
    c = episode(0.0, 0.0, prompts=[[1], [3]])
    found = turn_advantages([a, b, c], 3, credit="state", discount=0.5, scale="none")
    whole = [1 - 1 / 3, -1 / 3, -1 / 3]  # of the rewards' plain sums
    assert found[0] == pytest.approx([whole[0] + 0.5 - 0.5 / 3, whole[0] + 0.5])
    assert found[1] == pytest.approx([whole[1] - 0.5 / 3, whole[1] - 0.5])
    assert found[2] == pytest.approx([whole[2] - 0.5 / 3, whole[2]])  # nobody else stood at [3]


@pytest.mark.parametrize("credit", ["return", "state"])
def test_sums_that_tie_do_not_blow_up_turns_that_differ(credit):
    """Divided by the spread of the sums, which is 0, one turn would weigh a thousand times another group's."""
    group = [episode(0.5, 0.5), episode(0.5, 0.5), episode(0.5, 0.5), episode(0.0, 1.0)]
    found = turn_advantages(group, 4, credit=credit)
    assert max(abs(a) for line in found for a in line) < 2
    assert found[3][1] == pytest.approx(1.5, abs=1e-3) and found[0][0] == 0


def test_a_discount_that_nothing_uses_is_refused():
    with pytest.raises(
        ValueError, match="discount=0.9 is not used by credit='episode'; use credit='return'"
    ):
        turn_advantages(GROUP, 4, discount=0.9)


def test_an_unknown_credit_is_refused():
    with pytest.raises(
        ValueError, match="credit='turns' is not known; use 'episode', 'return' or 'state'"
    ):
        turn_advantages(GROUP, 4, credit="turns")

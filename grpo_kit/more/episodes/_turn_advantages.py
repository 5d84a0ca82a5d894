"""From the rewards of episodes to the advantage of each of their turns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from statistics import fmean

import torch

from grpo_kit._support.argument_checks import check_choice
from grpo_kit.more.episodes.rollout_episodes import Episode
from grpo_kit.objectives import group_advantages

CREDITS = ("episode", "return", "state")
_EPS = 1e-4  # added to a standard deviation before dividing, as in trl
_SAME = 1e-9  # sums of equal rewards may differ in their last bits


def turn_advantages(
    episodes: Sequence[Episode],
    group_size: int,
    *,
    credit: str = "episode",
    discount: float = 1.0,
    scale: str = "group",
) -> list[list[float]]:
    """One list an episode, one number a turn. Episodes of a group (of one row) are adjacent, group_size of them.

    credit: "episode": each turn has the episode's advantage (objectives.group_advantages of the sums of rewards).
    "return": the discounted return from that turn on, minus the mean of its group at that turn, divided by their
    spread; a turn that only one episode reached has none. "state": the episode's advantage plus that of the discounted
    return among the turns of the group with the same prompt; a prompt that occurs once adds nothing.
    scale: the divisor, "group" (the spread of the compared values), "batch" (of all values) or "none", as trl's
    scale_rewards.
    Raises ValueError for an unknown credit, and for a discount below 1 where credit="episode" would not use it.
    Sources: GRPO, arXiv:2402.03300; GiGPO ("state", with weight 1 and its discount), arXiv:2505.10978.
    """
    check_choice("credit", credit, CREDITS)
    if credit == "episode" and discount != 1:
        raise ValueError(
            f"discount={discount!r} is not used by credit='episode'; use credit='return' or 'state'"
        )
    totals = torch.tensor([e.total for e in episodes], dtype=torch.float64)
    groups = totals.view(-1, group_size)
    whole = group_advantages(totals, group_size, scale=scale, eps=_EPS)
    whole = whole.masked_fill((groups.amax(1) - groups.amin(1) < _SAME).repeat_interleave(group_size), 0.0)
    if credit == "episode":
        return [[a] * len(e.turns) for a, e in zip(whole.tolist(), episodes, strict=True)]
    returns = [e.returns(discount) for e in episodes]
    if credit == "return":
        keys = [[(i // group_size, t) for t in range(len(e.turns))] for i, e in enumerate(episodes)]
        return _standardised(returns, keys, scale)
    keys = [[(i // group_size, tuple(turn.prompt_ids)) for turn in e.turns] for i, e in enumerate(episodes)]
    steps = _standardised(returns, keys, scale)
    return [[a + b for b in line] for a, line in zip(whole.tolist(), steps, strict=True)]


def _gathered(
    values: Iterable[Sequence[float]], keys: Iterable[Sequence[Hashable]]
) -> dict[Hashable, list[float]]:
    found = defaultdict(list)
    for line, names in zip(values, keys, strict=True):
        for value, name in zip(line, names, strict=True):
            found[name].append(value)
    return found


def _centred(values: Sequence[Sequence[float]], keys: Sequence[Sequence[Hashable]]) -> list[list[float]]:
    """Each value minus the mean of the values with its key; exactly 0 if they are equal."""
    means = {k: None if max(v) - min(v) < _SAME else fmean(v) for k, v in _gathered(values, keys).items()}
    return [
        [0.0 if means[k] is None else v - means[k] for v, k in zip(line, names, strict=True)]
        for line, names in zip(values, keys, strict=True)
    ]


def _standardised(
    values: Sequence[Sequence[float]], keys: Sequence[Sequence[Hashable]], scale: str
) -> list[list[float]]:
    centred = _centred(values, keys)
    if scale == "none":
        return centred
    gathered = _gathered(values, keys)
    everything = torch.tensor([v for line in values for v in line], dtype=torch.float64)
    spreads = {
        k: (torch.tensor(v, dtype=torch.float64).std() if scale == "group" else everything.std()).item()
        + _EPS
        for k, v in gathered.items()
        if len(v) > 1
    }
    return [
        [v / spreads[k] if k in spreads else 0.0 for v, k in zip(line, names, strict=True)]
        for line, names in zip(centred, keys, strict=True)
    ]

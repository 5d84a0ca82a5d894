"""From what episodes earned to the advantage of each of their turns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from statistics import fmean

import torch

from grpo_kit.episodes.play import Episode
from grpo_kit.objectives import group_advantages

CREDITS = ("episode", "return", "state")
_EPS = 1e-4  # added to a spread that divides, as in trl
_SAME = 1e-9  # sums of equal rewards may differ in their last bits


def turn_advantages(
    episodes: Sequence[Episode],
    group_size: int,
    *,
    credit: str = "episode",
    discount: float = 1.0,
    scale: str = "group",
) -> list[list[float]]:
    """One list an episode, one number a turn. Episodes of a group (one row's) lie side by side, group_size of them.

    credit: "episode": each turn has the episode's advantage (objectives.group_advantages of the sums of rewards).
    "return": the discounted return from that turn on, less the mean of its group at that turn, divided as the
    episode's is. "state": the episode's advantage plus that of the discounted return among the turns of the group whose
    prompt is the same; a prompt that is met once adds nothing.
    scale: what divides, "group", "batch" or "none", as trl's scale_rewards.
    Raises ValueError for a credit that is not known.
    Sources: GRPO, arXiv:2402.03300; GiGPO ("state", with weight 1 and its discount), arXiv:2505.10978.
    """
    if credit not in CREDITS:
        raise ValueError(f"credit={credit!r} is not known; use one of {', '.join(CREDITS)}")
    totals = torch.tensor([_total(e, discount if credit != "episode" else 1.0) for e in episodes]).double()
    groups = totals.view(-1, group_size)
    whole = group_advantages(totals, group_size, scale=scale, eps=_EPS)
    whole = whole.masked_fill((groups.amax(1) - groups.amin(1) < _SAME).repeat_interleave(group_size), 0.0)
    if credit == "episode":
        return [[a] * len(e.turns) for a, e in zip(whole.tolist(), episodes, strict=True)]
    returns = [e.returns(discount) for e in episodes]
    if credit == "return":
        spreads = _spreads(groups, scale).repeat_interleave(group_size).tolist()
        keys = [[(i // group_size, t) for t in range(len(e.turns))] for i, e in enumerate(episodes)]
        centred = _centred(returns, keys)
        return [[a / spread for a in line] for line, spread in zip(centred, spreads, strict=True)]
    keys = [[(i // group_size, tuple(turn.prompt_ids)) for turn in e.turns] for i, e in enumerate(episodes)]
    steps = _standardised(returns, keys, scale)
    return [[a + b for b in line] for a, line in zip(whole.tolist(), steps, strict=True)]


def _total(episode: Episode, discount: float) -> float:
    return episode.returns(discount)[0] if episode.turns else 0.0


def _spreads(groups: torch.Tensor, scale: str) -> torch.Tensor:
    """(B,) what divides the advantages of each group."""
    if scale == "none":
        return torch.ones(len(groups), dtype=groups.dtype)
    return (groups.std(1) if scale == "group" else groups.std().expand(len(groups))) + _EPS


def _gathered(
    values: Iterable[Sequence[float]], keys: Iterable[Sequence[Hashable]]
) -> dict[Hashable, list[float]]:
    found = defaultdict(list)
    for line, names in zip(values, keys, strict=True):
        for value, name in zip(line, names, strict=True):
            found[name].append(value)
    return found


def _centred(values: Sequence[Sequence[float]], keys: Sequence[Sequence[Hashable]]) -> list[list[float]]:
    """Each value less the mean of those with its key; exactly 0 where they are equal."""
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
    everything = torch.tensor([v for line in values for v in line]).double()
    spreads = {
        k: (torch.tensor(v).double().std() if scale == "group" else everything.std()).item() + _EPS
        for k, v in gathered.items()
        if len(v) > 1
    }
    return [
        [v / spreads[k] if k in spreads else 0.0 for v, k in zip(line, names, strict=True)]
        for line, names in zip(centred, keys, strict=True)
    ]

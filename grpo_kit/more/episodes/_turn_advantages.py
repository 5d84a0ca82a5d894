"""From the rewards of episodes to the advantage of each of their turns, and to the metrics of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from statistics import fmean, stdev

import torch

from grpo_kit._support.argument_checks import check_choice
from grpo_kit.engine.tree import common_length
from grpo_kit.loop.step_batch import Batch
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


def _standardised(
    values: Sequence[Sequence[float]], keys: Sequence[Sequence[Hashable]], scale: str
) -> list[list[float]]:
    """Each value minus the mean of the values with its key, over their spread; exactly 0 where those are equal."""
    compared = defaultdict(list)
    for line, names in zip(values, keys, strict=True):
        for value, name in zip(line, names, strict=True):
            compared[name].append(value)
    everything = [value for line in values for value in line]
    means, spreads = {}, {}
    for name, several in compared.items():
        if max(several) - min(several) < _SAME:
            continue
        means[name] = fmean(several)
        spreads[name] = 1.0 if scale == "none" else _spread(several if scale == "group" else everything)
    return [
        [(v - means[k]) / spreads[k] if k in means else 0.0 for v, k in zip(line, names, strict=True)]
        for line, names in zip(values, keys, strict=True)
    ]


def _spread(values: Sequence[float]) -> float:
    return torch.tensor(values, dtype=torch.float64).std().item() + _EPS


# ---- the metrics of a step: each episode counts once, however many turns it took ----------------------------------


def episode_measures(batch: Batch, *, success: float, chat: bool) -> dict[str, float]:
    """reward, reward/<part>, reward_std and frac_reward_zero_std over episodes, and episodes/*.

    episodes/turns: turns an episode. Shares of episodes: episodes/success, whose rewards sum to `success` at least;
    episodes/unfinished, which the turn limit ended. Shares of turns: episodes/invalid, episodes/cut_off. Shares of
    turns behind another: episodes/repeated, the same completion as in the turn before with the same result;
    with chat episodes/forked, whose prompt does not go on from the turn before. With chat episodes/reread: the mean
    share of a later prompt that was read before and is computed anew.
    batch: turns, as EpisodeSample makes them. An episode is known by its group and its number.
    """
    found: dict[tuple[int, int], list[int]] = {}
    for place, key in enumerate(zip(batch.groups, batch.extra["episode"], strict=True)):
        found.setdefault(key, []).append(place)
    totals = [batch.rewards[places[0]] for places in found.values()]
    groups: dict[int, list[float]] = {}
    for (group, _), total in zip(found, totals, strict=True):
        groups.setdefault(group, []).append(total)
    pairs = [pair for places in found.values() for pair in zip(places, places[1:], strict=False)]
    said = list(zip(batch.completions, batch.extra["result"], strict=True))
    made = {
        "reward": fmean(totals),
        **{
            f"reward/{name}": fmean(p[places[0]] for places in found.values())
            for name, p in batch.parts.items()
        },
        "reward_std": fmean(stdev(some) if len(some) > 1 else 0.0 for some in groups.values()),
        "frac_reward_zero_std": fmean(float(max(some) - min(some) < _SAME) for some in groups.values()),
        "episodes/turns": len(batch) / len(found),
        "episodes/success": fmean(float(total >= success) for total in totals),
        "episodes/unfinished": fmean(float(not batch.extra["done"][places[-1]]) for places in found.values()),
        "episodes/invalid": fmean(map(float, batch.extra["invalid"])),
        "episodes/cut_off": fmean(map(float, batch.cut_off)),
        "episodes/repeated": fmean([float(said[a] == said[b]) for a, b in pairs] or [0.0]),
    }
    if chat:
        made["episodes/forked"] = fmean([float(not _goes_on(batch, a, b)) for a, b in pairs] or [0.0])
        made["episodes/reread"] = fmean([_reread(batch, a, b) for a, b in pairs] or [0.0])
    return made


def _goes_on(batch: Batch, turn: int, later: int) -> bool:
    """Does the later prompt begin with the turn's tokens? The last of them may be the end."""
    so_far = [*batch.prompt_ids[turn], *batch.completion_ids[turn][:-1]]
    return batch.prompt_ids[later][: len(so_far)] == so_far


def _reread(batch: Batch, turn: int, later: int) -> float:
    """What the turn had read and the later prompt does not begin with, as a share of that prompt, at most 1."""
    before, prompt = batch.prompt_ids[turn], batch.prompt_ids[later]
    return min(1.0, (len(before) - common_length(before, prompt)) / len(prompt))

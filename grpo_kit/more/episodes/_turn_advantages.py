"""From the rewards of episodes to the advantage of each of their turns, and to the metrics of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from itertools import chain, pairwise
from statistics import fmean, stdev

import torch

from grpo_kit.engine.tree import common_length
from grpo_kit.loop.batch import Batch
from grpo_kit.more.episodes.environment import _check_credit
from grpo_kit.more.episodes.rollout_episodes import Episode
from grpo_kit.objectives import group_advantages

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
    Raises ValueError for an unknown credit, a discount outside (0, 1], and one that it does not use.
    Sources: GRPO, arXiv:2402.03300; GiGPO ("state", with weight 1 and its discount), arXiv:2505.10978.
    """
    _check_credit(credit, discount)
    totals = [episode.total for episode in episodes]
    scaled = group_advantages(
        torch.tensor(totals, dtype=torch.float64), group_size, scale=scale, eps=_EPS
    ).tolist()
    for start in range(0, len(totals), group_size):
        end = start + group_size
        if _are_equal(totals[start:end]):
            scaled[start:end] = [0.0] * group_size
    if credit == "episode":
        return [
            [advantage] * len(episode.turns)
            for advantage, episode in zip(scaled, episodes, strict=True)
        ]
    keys = []
    for index, episode in enumerate(episodes):
        states = range(len(episode.turns))
        if credit == "state":
            states = [tuple(turn.prompt_ids) for turn in episode.turns]
        keys.append([(index // group_size, state) for state in states])
    by_turn = _standardised([episode.returns(discount) for episode in episodes], keys, scale)
    if credit == "return":
        return by_turn
    return [
        [advantage + extra for extra in turns]
        for advantage, turns in zip(scaled, by_turn, strict=True)
    ]


def _standardised(
    values: Sequence[Sequence[float]], keys: Sequence[Sequence[Hashable]], scale: str
) -> list[list[float]]:
    """Each value minus the mean of the values with its key, over their spread; exactly 0 where those are equal."""
    compared = defaultdict(list)
    for row, row_keys in zip(values, keys, strict=True):
        for value, key in zip(row, row_keys, strict=True):
            compared[key].append(value)
    mean_and_divisor = {}
    for key, group in compared.items():
        if _are_equal(group):
            continue
        divisor = 1.0
        if scale == "group":
            divisor = _spread(group)
        elif scale == "batch":
            divisor = _spread(list(chain.from_iterable(values)))
        mean_and_divisor[key] = fmean(group), divisor
    standardised = []
    for row, row_keys in zip(values, keys, strict=True):
        standardised.append([])
        for value, key in zip(row, row_keys, strict=True):
            mean, divisor = mean_and_divisor.get(key, (value, 1.0))
            standardised[-1].append((value - mean) / divisor)
    return standardised


def _are_equal(values: Sequence[float]) -> bool:
    return max(values) - min(values) < _SAME


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
    # the batch's indices of each one's turns
    episodes: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, key in enumerate(zip(batch.groups, batch.extra["episode"], strict=True)):
        episodes[key].append(index)
    first = [turns[0] for turns in episodes.values()]
    totals = [batch.rewards[index] for index in first]
    totals_of: dict[int, list[float]] = defaultdict(list)
    for index, total in zip(first, totals, strict=True):
        totals_of[batch.groups[index]].append(total)
    groups = totals_of.values()
    ends = batch.extra["done"]
    texts = list(zip(batch.completions, batch.extra["result"], strict=True))
    pairs: list[tuple[int, int]] = []  # a turn and the one behind it
    for turns in episodes.values():
        pairs.extend(pairwise(turns))

    def share(condition: Callable[[int, int], float]) -> float:
        return fmean([condition(turn, later) for turn, later in pairs] or [0.0])

    measures = {"reward": fmean(totals)}
    for name, part in batch.parts.items():
        measures[f"reward/{name}"] = fmean(part[index] for index in first)
    measures |= {
        "reward_std": fmean(stdev(group) if len(group) > 1 else 0.0 for group in groups),
        "frac_reward_zero_std": fmean(map(_are_equal, groups)),
        "episodes/turns": len(batch) / len(episodes),
        "episodes/success": fmean(total >= success for total in totals),
        "episodes/unfinished": fmean(not ends[turns[-1]] for turns in episodes.values()),
        "episodes/invalid": fmean(batch.extra["invalid"]),
        "episodes/cut_off": fmean(batch.cut_off),
        "episodes/repeated": share(lambda turn, later: texts[turn] == texts[later]),
    }
    if chat:
        measures["episodes/forked"] = share(
            lambda turn, later: not _extends(batch, turn, later)
        )
        measures["episodes/reread"] = share(lambda turn, later: _reread(batch, turn, later))
    return measures


def _extends(batch: Batch, turn: int, later: int) -> bool:
    """Whether the later prompt begins with the turn's tokens; the last of them may be the end."""
    so_far = [*batch.prompt_ids[turn], *batch.completion_ids[turn][:-1]]
    return batch.prompt_ids[later][: len(so_far)] == so_far


def _reread(batch: Batch, turn: int, later: int) -> float:
    """The share of the later prompt, at most 1, that the turn had read and this prompt does not begin with."""
    before, prompt = batch.prompt_ids[turn], batch.prompt_ids[later]
    return min(1.0, (len(before) - common_length(before, prompt)) / len(prompt))

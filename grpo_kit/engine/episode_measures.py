"""The metrics of a step of episodes: each episode counts once, however many turns it took."""

from __future__ import annotations

from statistics import fmean, stdev

from grpo_kit.loop.step_batch import Batch
from grpo_kit.rollout.tree import common_length

_SAME = 1e-9  # sums of equal rewards may differ in their last bits


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

"""The metrics of a step that its completions and rewards tell; the update adds its own."""

from __future__ import annotations

from statistics import fmean, stdev

from grpo_kit.loop.grpo_config import StepNumbers
from grpo_kit.loop.step_batch import Batch


def measures(batch: Batch, numbers: StepNumbers) -> dict[str, float | None]:
    """One row of metrics: means over the step's completions, None where there is nothing to average.

    reward and reward/<part>: of those that could be judged. reward_std: the mean over groups of their standard
    deviation (ddof=1). frac_reward_zero_std: share of groups without a signal. completion_length: tokens, the end token
    included. completion_cut_off: share that ended by their length.
    """
    groups: dict[int, list[float]] = {}
    for reward, group in zip(batch.rewards, batch.groups, strict=True):
        if reward is not None:
            groups.setdefault(group, []).append(reward)
    spreads = [stdev(rewards) for rewards in groups.values() if len(rewards) > 1]
    entropies = [value for row in batch.entropies or [] for value in row]
    return {
        "progress": numbers.progress,
        "temperature": numbers.temperature,
        "learning_rate": numbers.learning_rate,
        "reward": _mean(batch.rewards),
        "reward_std": _mean(spreads),
        **{f"reward/{name}": _mean(scores) for name, scores in batch.parts.items()},
        "frac_reward_zero_std": _mean([float(len({*rewards}) < 2) for rewards in groups.values()]),
        "completion_length": _mean([len(ids) for ids in batch.completion_ids]),
        "completion_cut_off": _mean([float(cut) for cut in batch.cut_off]),
        **({"entropy": _mean(entropies)} if entropies else {}),
    }


def _mean(values: list) -> float | None:
    there = [value for value in values if value is not None]
    return fmean(there) if there else None

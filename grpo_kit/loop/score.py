"""From completions to rewards, from rewards to advantages; then the metrics and the table that a step leaves behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

import torch

from grpo_kit.loop.batch import Batch
from grpo_kit.loop.config import Config, StepNumbers
from grpo_kit.loop.processes import Processes
from grpo_kit.loop.protocols import Sampler, Task, optional
from grpo_kit.record.files import METRIC_COLUMNS
from grpo_kit.rewards._parts import columns_of, reward_names
from grpo_kit.rewards.scoring import RewardError, score_all, totals

_EPS = 1e-4  # added to a standard deviation that divides, as in TRL


def score(
    batch: Batch, task: Any, weights: Sequence[float], tokenizer: Any
) -> dict[str, float]:
    """Fill in parts and rewards; returns the metrics that rewards reported by log_metric(name, value).

    Each reward is called by keyword with completions, prompts (as rendered), completion_ids, prefill, the columns of
    its rows, log_extra(column, values) and log_metric(name, value). A batch that has its rewards (episodes) stays as
    it is.
    Raises RewardError, naming reward, row and completion, for a reward that fails or breaks its contract.
    """
    if batch.rewards:
        return {}
    row_of_group = dict(zip(batch.groups, batch.rows, strict=True))
    prompts = task.render(tokenizer, list(row_of_group.values()))
    prompt_of_group = dict(zip(row_of_group, prompts, strict=True))
    logs = _RewardLogs(batch, task.rewards)
    columns = {
        **columns_of(batch.rows),
        "prompts": [prompt_of_group[group] for group in batch.groups],
        "completion_ids": batch.completion_ids,
        "prefill": [task.prefill] * len(batch),
        "log_extra": logs.log_extra,
        "log_metric": logs.log_metric,
    }
    batch.parts = score_all(
        task.rewards, batch.completions, reward_names(task.rewards), **columns
    )
    batch.rewards = totals(list(batch.parts.values()), weights, batch.groups)
    return logs.metrics()


def give_advantages(
    batch: Batch, config: Config, everyone: Sequence[float | None] | None = None
) -> None:
    """Fill in advantages: rewards less their group's mean, divided as config.scale says, then weighted by their sign.

    everyone: the rewards that scale="batch" takes the spread of, where there are more than these (several processes).
    A completion without a reward has advantage 0 and enters no mean. A group without a signal has zeros.
    A batch that has its advantages (episodes) keeps them, but for the weights by sign.
    """
    if not batch.advantages:
        batch.advantages = advantages(
            batch.rewards, batch.groups, scale=config.scale, everyone=everyone
        )
    weight_of_sign = {True: config.positive_weight, False: config.negative_weight}
    batch.advantages = [
        advantage * weight_of_sign[advantage > 0] for advantage in batch.advantages
    ]


def advantages(
    rewards: Sequence[float | None],
    groups: Sequence[int],
    *,
    scale: str = "group",
    everyone: Sequence[float | None] | None = None,
) -> list[float]:
    """How much better each completion did than its group: (r - mean) / (std + 1e-4), std with ddof=1.

    scale: whose standard deviation divides: "group", "batch", or "none" for no division (Dr. GRPO). everyone: the
    rewards of the batch, where these are one process's share of it.
    The same as grpo_kit.objectives.group_advantages, for rewards of which some are None: those get 0.
    Sources: DeepSeekMath, arXiv:2402.03300, section 4.1.2; Dr. GRPO, arXiv:2503.20783.

    >>> advantages([1.0, 0.0, None, 0.5, 0.5], [0, 0, 0, 1, 1], scale="none")
    [0.5, -0.5, 0.0, 0.0, 0.0]
    """
    judged = [reward for reward in everyone or rewards if reward is not None]
    std = torch.tensor(judged, dtype=torch.float32).std().item() if len(judged) > 1 else 0.0
    of_all = [0.0] * len(rewards)
    for places in _judged_places(rewards, groups).values():
        group = torch.tensor([rewards[place] for place in places], dtype=torch.float32)
        of_group = torch.zeros_like(group)
        if group.max() > group.min():  # else the rounding of the mean would look like a signal
            of_group = group - group.mean()
        if scale == "group":
            std = group.std().item() if len(group) > 1 else 0.0
        if scale != "none":
            of_group = of_group / (std + _EPS)
        for place, advantage in zip(places, of_group.tolist(), strict=True):
            of_all[place] = advantage
    return of_all


def _judged_places(
    rewards: Sequence[float | None], groups: Sequence[int]
) -> dict[int, list[int]]:
    """The places of each group's completions that have a reward."""
    places: dict[int, list[int]] = {}
    for place, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        if reward is not None:
            places.setdefault(group, []).append(place)
    return places


def with_signal(batch: Batch) -> list[int]:
    """The places of completions whose group has a signal: rewards that differ.

    Of a batch that has its advantages (episodes): any advantage but 0.
    """
    if batch.advantages:
        groups = {
            group for group, value in zip(batch.groups, batch.advantages, strict=True) if value
        }
    else:
        places_of_group = _judged_places(batch.rewards, batch.groups)
        groups = {
            g
            for g, places in places_of_group.items()
            if len({batch.rewards[i] for i in places}) > 1
        }
    return [place for place, group in enumerate(batch.groups) if group in groups]


def first_groups(batches: Sequence[Batch], count: int) -> Batch:
    """The first `count` groups with a signal of several rollouts; filled up with others where there are too few."""
    rollouts = Batch.join(batches)
    groups = [rollouts.groups[place] for place in with_signal(rollouts)] + rollouts.groups
    places = []
    for group in list(dict.fromkeys(groups))[:count]:
        places += [place for place, other in enumerate(rollouts.groups) if other == group]
    return rollouts.select(places)


# ---- what a step leaves behind ----------------------------------------------------------------------------------


def measures(
    batch: Batch, numbers: StepNumbers, sample: Sampler, task: Task
) -> dict[str, float | None]:
    """One row of metrics: means over the step's completions, None where there is nothing to average; the sampler's own.

    reward and reward/<part>: of those that could be judged. reward_std: the mean over groups of their standard
    deviation (ddof=1). frac_reward_zero_std: share of groups without a signal. completion_length: tokens, the end token
    included. completions/max_terminated_length: of those that ended by themselves. completion_cut_off: share that ended
    by their length.
    """
    places_of_group = _judged_places(batch.rewards, batch.groups)
    groups = [[batch.rewards[i] for i in places] for places in places_of_group.values()]
    lengths = [len(ids) for ids in batch.completion_ids]
    ended_lengths = [
        length for length, cut_off in zip(lengths, batch.cut_off, strict=True) if not cut_off
    ]
    metrics = {
        "progress": numbers.progress,
        "temperature": numbers.temperature,
        "learning_rate": numbers.learning_rate,
        "reward": _mean(batch.rewards),
        "reward_std": _mean([stdev(rewards) for rewards in groups if len(rewards) > 1]),
        **{f"reward/{name}": _mean(scores) for name, scores in batch.parts.items()},
        "frac_reward_zero_std": _mean([float(len(set(rewards)) < 2) for rewards in groups]),
        "completion_length": _mean(lengths),
        "completions/max_terminated_length": max(ended_lengths, default=0),
        "completion_cut_off": _mean([float(cut_off) for cut_off in batch.cut_off]),
    }
    entropies = [entropy for row in batch.entropies or [] for entropy in row]
    if entropies:
        metrics["entropy"] = fmean(entropies)
    return metrics | optional(sample, "measures", {}, batch, task)


def completions_table(
    batch: Batch, tokenizer: Any, task: Task, numbers: StepNumbers
) -> dict[str, list[Any]]:
    """The completions as columns, one entry each."""
    prompts = {ids: tokenizer.decode(list(ids)) for ids in set(map(tuple, batch.prompt_ids))}
    answers = [row.get("answer") for row in batch.rows]
    logprobs: list[list[float] | None] = [None] * len(batch)
    if batch.sampler_logprobs is not None:
        logprobs = [[round(logprob, 4) for logprob in row] for row in batch.sampler_logprobs]
    return {
        "group": batch.groups,
        "prompt": [prompts[tuple(ids)] for ids in batch.prompt_ids],
        "prefill": [task.prefill] * len(batch),
        "completion": batch.completions,
        "answer": [None if answer is None else str(answer) for answer in answers],
        "tokens": [
            tokenizer.batch_decode([[token] for token in ids]) for ids in batch.completion_ids
        ],
        "logprobs": logprobs,
        **{f"reward/{name}": scores for name, scores in batch.parts.items()},
        "reward": batch.rewards,
        "advantage": batch.advantages,
        "temperature": [numbers.temperature] * len(batch),
        **{name: values for name, values in batch.extra.items() if len(values) == len(batch)},
    }


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None


def first_rollout(
    rollouts: list[Batch],
    numbers: StepNumbers,
    processes: Processes,
    sample: Sampler,
    task: Task,
) -> dict[str, float]:
    """What a row says where groups were drawn anew: kept for their signal, they would show too good a reward.

    rollout/extra_completions: those of the further rollouts, the cost. num_tokens: of all rollouts of the step.
    """
    first = Batch.join(processes.gather(replace(rollouts[0], old_logprobs=None)))
    metrics = measures(first, numbers, sample, task)
    num_tokens = sum(batch.tokens for batch in rollouts)
    counts = processes.sums({"completions": sum(map(len, rollouts)), "num_tokens": num_tokens})
    metrics["rollout/extra_completions"] = counts["completions"] - len(first)
    return metrics | {"num_tokens": counts["num_tokens"]}


# The record's own numbers, the groups of its own numbers, and the columns of its completions.
_METRICS = {*METRIC_COLUMNS, "changes", "refused"}
_GROUPS = {
    "reward", "rewards", "eval", "rollout", "update", "diversity", "script", "groups", "scale", "episodes", "flags",
    "clip_ratio",
}  # fmt: skip
_COLUMNS = {
    "step", "group", "prompt", "prefill", "completion", "answer", "tokens", "logprobs", "reward", "advantage",
    "temperature",
}  # fmt: skip


class _RewardLogs:
    """log_extra and log_metric of one call of the rewards, for a batch: it has a length and a dict, `extra`.

    Rewards that are sums (they have `names`) report their parts by reward/<part>.
    """

    def __init__(self, batch: Any, rewards: Sequence[Any]) -> None:
        self._batch, self._metrics = batch, {}
        self._parts = {
            f"reward/{name}" for reward in rewards for name in getattr(reward, "names", ())
        }

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """A column of the completions. Raises ValueError for one that the record has."""
        if column not in self._parts and (column in _COLUMNS or column.startswith("reward/")):
            raise ValueError(
                f"log_extra({column!r}, ...): the record has {column!r} itself; choose another name"
            )
        self._batch.extra[column] = list(map(_encodable, values))

    def log_metric(self, name: str, value: Any) -> None:
        """A number of the step; of several the mean. Raises ValueError for one that the record has."""
        if name not in self._parts and (name in _METRICS or name.partition("/")[0] in _GROUPS):
            raise ValueError(
                f"log_metric({name!r}, ...): the record has {name!r} itself; choose another name"
            )
        self._metrics.setdefault(name, []).append(float(value))

    def metrics(self) -> dict[str, float]:
        """The numbers. Raises RewardError for a column that has not one value a completion."""
        for column, values in self._batch.extra.items():
            if len(values) != len(self._batch):
                raise RewardError(
                    f"log_extra({column!r}, ...) was given {len(values)} values for {len(self._batch)} completions; "
                    "give one for each, once a call"
                )
        return {name: fmean(values) for name, values in self._metrics.items()}


def _encodable(value: Any) -> Any:
    """The value; in a text, half a surrogate pair becomes its escape."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    return value

"""What a step leaves behind: the metrics that its completions and rewards tell, and the completions as a table."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

from grpo_kit.loop.config import StepNumbers
from grpo_kit.loop.processes import Processes
from grpo_kit.loop.protocols import Sampler, Task, optional
from grpo_kit.loop.step_batch import Batch


def measures(batch: Batch, numbers: StepNumbers) -> dict[str, float | None]:
    """One row of metrics: means over the step's completions, None where there is nothing to average.

    reward and reward/<part>: of those that could be judged. reward_std: the mean over groups of their standard
    deviation (ddof=1). frac_reward_zero_std: share of groups without a signal. completion_length: tokens, the end token
    included. completions/max_terminated_length: of those that ended by themselves. completion_cut_off: share that ended
    by their length.
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
        "completions/max_terminated_length": max(
            (len(ids) for ids, cut in zip(batch.completion_ids, batch.cut_off, strict=True) if not cut),
            default=0,
        ),
        "completion_cut_off": _mean([float(cut) for cut in batch.cut_off]),
        **({"entropy": _mean(entropies)} if entropies else {}),
    }


def completions_table(batch: Batch, tokenizer: Any, task: Task, numbers: StepNumbers) -> dict[str, list[Any]]:
    """The completions as columns, one entry each."""
    texts = {ids: tokenizer.decode(list(ids)) for ids in {*map(tuple, batch.prompt_ids)}}
    tokens = [tokenizer.batch_decode([[i] for i in ids]) for ids in batch.completion_ids]
    logprobs = batch.sampler_logprobs or [None] * len(batch)
    return {
        "group": batch.groups,
        "prompt": [texts[tuple(ids)] for ids in batch.prompt_ids],
        "prefill": [task.prefill] * len(batch),
        "completion": batch.completions,
        "answer": [None if row.get("answer") is None else str(row["answer"]) for row in batch.rows],
        "tokens": tokens,
        "logprobs": [None if p is None else [round(x, 4) for x in p] for p in logprobs],
        **{f"reward/{name}": scores for name, scores in batch.parts.items()},
        "reward": batch.rewards,
        "advantage": batch.advantages,
        "temperature": [numbers.temperature] * len(batch),
        **{name: values for name, values in batch.extra.items() if len(values) == len(batch)},
    }


def _mean(values: list) -> float | None:
    there = [value for value in values if value is not None]
    return fmean(there) if there else None


def first_rollout(
    kept: list[Batch], numbers: StepNumbers, processes: Processes, sample: Sampler, task: Task
) -> dict[str, float]:
    """What a row says where groups were drawn anew: kept for their signal, they would show too good a reward.

    rollout/extra_completions: those of the further rollouts, the cost. num_tokens: of all rollouts of the step.
    """
    first = Batch.join(processes.gather(replace(kept[0], old_logprobs=None)))
    found = measures(first, numbers) | optional(sample, "measures", {}, first, task)
    made = processes.sums({"all": sum(map(len, kept)), "num_tokens": sum(map(tokens_of, kept))})
    return found | {"rollout/extra_completions": made["all"] - len(first), "num_tokens": made["num_tokens"]}


def tokens_of(batch: Batch) -> int:
    """That went through the model: prompts and completions."""
    return sum(map(len, batch.prompt_ids)) + sum(map(len, batch.completion_ids))

"""PolicyLoss: from log-probabilities to the loss of one update, computed part by part.

An update's completions may be computed in parts of any size: every loss here divides by a number of the whole update
(its completions, or its tokens), so the losses of the parts add up to the update's.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from grpo_kit import objectives
from grpo_kit.loop.config import Config, StepNumbers
from grpo_kit.loop.config_checks import UNCLIPPED
from grpo_kit.loop.step_batch import Batch, padded
from grpo_kit.objectives.group_losses import Options
from grpo_kit.objectives.ratios import importance_ratio


class PolicyLoss:
    """The loss of one update on a batch. loss(places, logprobs, entropies) -> the share of these completions.

    rows, tokens: what the losses divide by: of the batch; the trainer sets those of the whole update, where this batch
    is one process's share of it.

    >>> loss = PolicyLoss(batch, config, numbers)  # doctest: +SKIP
    >>> loss([0, 1], logprobs, entropies).backward()  # doctest: +SKIP
    """

    def __init__(self, batch: Batch, config: Config, numbers: StepNumbers, *, device: Any = None) -> None:
        self.batch, self.config, self.beta = batch, config, numbers.beta
        self.mask = batch.mask(device)  # (N, T)
        if config.mask_truncated_completions:
            self.mask = objectives.overlong_filter(self.mask, torch.tensor(batch.cut_off, device=device))
        self.advantages = torch.tensor(batch.advantages, dtype=torch.float32, device=device)
        weighs = config.importance_sampling_cap is not None and batch.sampler_logprobs is not None
        self.sampled = padded(batch.sampler_logprobs, self.mask.size(1), device) if weighs else None
        self.rows, self.tokens = len(batch), max(int(self.mask.sum()), 1)
        self.logprobs = torch.zeros_like(self.mask, dtype=torch.float32)  # as the update computed them
        self.scored = torch.zeros(len(batch), dtype=torch.bool, device=device)
        self.start_over()

    def start_over(self) -> None:
        """Forget what was measured: the update begins again, for lack of memory."""
        self.sums: dict[str, float] = defaultdict(float)  # of metrics, over tokens

    def needed(self) -> list[int]:
        """The places of completions that may have a gradient; the others need no forward pass.

        A completion with advantage 0 has none, unless there is a KL or an entropy bonus.
        """
        tokens = self.mask.sum(1).tolist()
        all_count = self.beta != 0 or self.config.entropy_bonus != 0
        counts = [
            bool(n) and (all_count or a != 0) for n, a in zip(tokens, self.batch.advantages, strict=True)
        ]
        return [place for place, count in enumerate(counts) if count]

    def __call__(self, places: Sequence[int], logprobs: Tensor, entropies: Tensor) -> Tensor:
        """The share of these completions in the update's loss. logprobs, entropies: (len(places), T), with graph."""
        config, rows = self.config, list(places)
        mask, advantages = self.mask[rows], self.advantages[rows]
        old = logprobs.detach() if self.batch.old_logprobs is None else self.batch.old_logprobs[rows]
        if self.sampled is not None:  # truncated importance sampling: the sampler rounds otherwise
            weight = torch.exp(old - self.sampled[rows]).clamp(max=config.importance_sampling_cap)  # (n, T)
            advantages = advantages[:, None] * weight
        reference = None if self.batch.ref_logprobs is None else self.batch.ref_logprobs[rows]
        by_token = config.loss == "gspo" and config.level == "token"
        function = objectives.gspo_token if by_token else getattr(objectives, config.loss)
        options = {
            "level": config.level, "beta": self.beta, "ref_logprobs": reference, "correct_kl": True,
            "epsilon": config.epsilon, "epsilon_high": config.epsilon_high, "max_ratio": config.epsilon_high,
            "max_completion_tokens": config.max_completion_tokens, "num_rows": self.rows, "num_tokens": self.tokens,
        }  # fmt: skip
        takes = {*inspect.signature(function).parameters, *Options.__annotations__}
        options = {name: value for name, value in options.items() if name in takes} | config.loss_options
        loss = function(logprobs, old, advantages, mask, **options)
        if config.entropy_bonus:
            loss = loss - config.entropy_bonus * objectives.masked_sum(entropies, mask) / self.tokens
        self._measure(rows, logprobs.detach(), entropies.detach(), old, reference, mask, advantages)
        return loss

    def _measure(self, rows, logprobs, entropies, old, reference, mask, advantages) -> None:  # noqa: ANN001
        self.logprobs[rows] = logprobs
        self.scored[rows] = True
        self.sums["tokens"] += mask.sum().item()
        self.sums["entropy"] += objectives.masked_sum(entropies, mask).item()
        config = self.config
        level = "sequence" if config.loss == "gspo" else config.level
        ratio = importance_ratio(logprobs, old, mask, level=level).expand_as(mask)
        epsilon, epsilon_high = config.epsilon, config.epsilon_high
        if config.loss in UNCLIPPED:
            epsilon = epsilon_high = math.inf
        elif config.loss == "cispo":
            epsilon, epsilon_high = math.inf, epsilon_high - 1
        low, high = objectives.clip_fraction(
            ratio, advantages, mask, epsilon=epsilon, epsilon_high=epsilon_high
        )
        self.sums["clip_ratio"] += (low + high).item() * mask.sum().item()
        if reference is not None:
            self.sums["kl"] += objectives.masked_sum(objectives.k3(logprobs, reference), mask).item()

    def measured(self, batch: Batch, fresh: bool) -> dict[str, float]:
        """Sums over the tokens that were computed, to be added up over processes; see means.

        fresh: the weights are those that sampled, so that sampler and update can be compared.
        """
        sums = {name: self.sums[name] for name in ("tokens", "entropy", "clip_ratio", "kl")}
        sums |= {"gap": 0.0, "compared": 0.0, "rows": float(len(batch))}
        sums["skipped"] = float((~self.scored).sum())
        sums["entropies"] = float(batch.entropies is None) * self.sums["tokens"]  # the sampler gave none
        if fresh and batch.sampler_logprobs is not None:
            sampled = padded(batch.sampler_logprobs, self.mask.size(1), self.mask.device)
            inside = (self.mask != 0) & self.scored[:, None]
            sums["gap"] = (self.logprobs - sampled).abs()[inside].sum().item()
            sums["compared"] = float(inside.sum())
        return sums

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Of those sums: clip_ratio; kl, where there is a reference; entropy, where the sampler gave none.

        rollout/logprob_gap: how far sampler and update are apart. update/skipped: share of completions left out.
        """
        tokens = max(sums["tokens"], 1)
        found = {"clip_ratio": sums["clip_ratio"] / tokens, "update/skipped": sums["skipped"] / sums["rows"]}
        if self.beta:
            found["kl"] = sums["kl"] / tokens
        if sums["entropies"]:
            found["entropy"] = sums["entropy"] / sums["entropies"]
        if sums["compared"]:
            found["rollout/logprob_gap"] = sums["gap"] / sums["compared"]
        return found


# ---- the reference of the KL: the weights that a run began with, in the model's own place while they are asked -------


def start_weights(
    trained: Mapping[str, torch.nn.Parameter], beta: float | Callable[[float], float]
) -> dict[str, torch.Tensor] | None:
    """A copy of what is trained, by name. None where beta is 0 throughout: no reference is needed."""
    return {name: p.detach().clone() for name, p in trained.items()} if callable(beta) or beta else None


@contextmanager
def weights_of(
    trained: Mapping[str, torch.nn.Parameter], weights: Mapping[str, torch.Tensor]
) -> Iterator[None]:
    """Inside, the model has these weights: nothing is copied, tensors change places."""
    now = {name: p.data for name, p in trained.items()}
    try:
        for name, p in trained.items():
            p.data = weights[name]
        yield
    finally:
        for name, p in trained.items():
            p.data = now[name]

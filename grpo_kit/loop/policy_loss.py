"""PolicyLoss: from log-probabilities to the loss of one update, computed part by part.

An update's completions may be computed in parts of any size: every loss here divides by a number of the whole update
(its completions, or its tokens), so the losses of the parts add up to the update's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from grpo_kit import objectives
from grpo_kit.loop.batch import Batch, padded
from grpo_kit.loop.config import Config, StepNumbers
from grpo_kit.loop.config_checks import UNCLIPPED
from grpo_kit.objectives.logprobs import importance_ratio

# The arguments of each loss, besides level, beta, ref_logprobs and correct_kl, which all take, and its loss_options.
_CLIP = ("epsilon", "epsilon_high")
_ARGUMENTS = {
    "grpo": (*_CLIP, "num_rows"),
    "dr_grpo": (*_CLIP, "num_rows", "max_completion_tokens"),
    "bnpo": (*_CLIP, "num_tokens"),
    "dapo": (*_CLIP, "num_tokens"),
    "gspo": (*_CLIP, "num_rows"),
    "cispo": ("max_ratio", "num_tokens"),
    "sapo": ("num_rows",),
    "luspo": (*_CLIP, "num_rows"),
    "vespo": ("num_tokens",),
}


class PolicyLoss:
    """The loss of one update on a batch. loss(places, logprobs, entropies) -> the share of these completions.

    rows, tokens: what the losses divide by: of the batch; the trainer sets those of the whole update, where this batch
    is one process's share of it.

    >>> loss = PolicyLoss(batch, config, numbers)  # doctest: +SKIP
    >>> loss([0, 1], logprobs, entropies).backward()  # doctest: +SKIP
    """

    def __init__(
        self, batch: Batch, config: Config, numbers: StepNumbers, *, device: Any = None
    ) -> None:
        self.batch, self.config, self.beta = batch, config, numbers.beta
        self.mask = batch.mask(device)  # (N, T)
        if config.mask_truncated_completions:
            self.mask = objectives.overlong_filter(
                self.mask, torch.tensor(batch.cut_off, device=device)
            )
        self.advantages = torch.tensor(batch.advantages, dtype=torch.float32, device=device)
        self.sampler_logprobs = None  # (N, T), for truncated importance sampling
        if config.importance_sampling_cap is not None and batch.sampler_logprobs is not None:
            self.sampler_logprobs = padded(batch.sampler_logprobs, self.mask.size(1), device)
        self.rows, self.tokens = len(batch), max(int(self.mask.sum()), 1)
        # Log-probabilities as the update computes them.
        self.logprobs = torch.zeros_like(self.mask, dtype=torch.float32)
        self.scored = torch.zeros(len(batch), dtype=torch.bool, device=device)
        self.start_over()

    def start_over(self) -> None:
        """Forget what was measured: the update begins again, for lack of memory."""
        self.sums = defaultdict(float)  # of metrics, over tokens

    def needed(self) -> list[int]:
        """The places of completions that may have a gradient; the others need no forward pass.

        A completion with advantage 0 has none, unless there is a KL or an entropy bonus.
        """
        all_count = self.beta != 0 or self.config.entropy_bonus != 0
        lengths = self.mask.sum(1).tolist()
        rows = enumerate(zip(lengths, self.batch.advantages, strict=True))
        return [
            place for place, (length, advantage) in rows if length and (all_count or advantage)
        ]

    def __call__(self, places: Sequence[int], logprobs: Tensor, entropies: Tensor) -> Tensor:
        """The share of these completions in the update's loss. logprobs, entropies: (len(places), T), with graph."""
        config, rows = self.config, list(places)
        mask, advantages = self.mask[rows], self.advantages[rows]
        old_logprobs = logprobs.detach()
        if self.batch.old_logprobs is not None:
            old_logprobs = self.batch.old_logprobs[rows]
        if self.sampler_logprobs is not None:
            # Truncated importance sampling: the sampler rounds otherwise than the update.
            weight = torch.exp(old_logprobs - self.sampler_logprobs[rows])  # (n, T)
            cap = config.importance_sampling_cap
            advantages = advantages[:, None] * weight.clamp(max=cap)
            self.sums["capped"] += mask[weight > cap].sum().item()
        by_token = config.loss == "gspo" and config.level == "token"
        function = objectives.gspo_token if by_token else getattr(objectives, config.loss)
        loss = function(logprobs, old_logprobs, advantages, mask, **self._options(rows))
        if config.entropy_bonus:
            loss = (
                loss
                - config.entropy_bonus * objectives.masked_sum(entropies, mask) / self.tokens
            )
        with torch.no_grad():
            self._measure(rows, mask, logprobs, entropies, old_logprobs, advantages)
        return loss

    def _options(self, rows: list[int]) -> dict[str, Any]:
        """The keyword arguments of the loss on these rows."""
        config = self.config
        numbers = {
            "epsilon": config.epsilon,
            "epsilon_high": config.epsilon_high,
            "max_ratio": config.epsilon_high,
            "max_completion_tokens": config.max_completion_tokens,
            "num_rows": self.rows,
            "num_tokens": self.tokens,
        }
        options = {name: numbers[name] for name in _ARGUMENTS[config.loss]}
        options |= {"level": config.level, "beta": self.beta, "correct_kl": True}
        if self.batch.ref_logprobs is not None:
            options["ref_logprobs"] = self.batch.ref_logprobs[rows]
        return options | config.loss_options

    def _measure(
        self,
        rows: list[int],
        mask: Tensor,
        logprobs: Tensor,
        entropies: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
    ) -> None:
        """Add these rows to the sums that the metrics are made of."""
        config, sums = self.config, self.sums
        self.logprobs[rows] = logprobs
        self.scored[rows] = True
        tokens = mask.sum().item()
        sums["tokens"] += tokens
        sums["entropy"] += objectives.masked_sum(entropies, mask).item()
        level = "sequence" if config.loss == "gspo" else config.level
        ratio = importance_ratio(logprobs, old_logprobs, mask, level=level).expand_as(mask)
        epsilon, epsilon_high = config.epsilon, config.epsilon_high
        if config.loss in UNCLIPPED:
            epsilon = epsilon_high = math.inf
        elif config.loss == "cispo":
            epsilon, epsilon_high = math.inf, epsilon_high - 1
        low, high = objectives.clip_fraction(
            ratio, advantages, mask, epsilon=epsilon, epsilon_high=epsilon_high
        )
        sums["clip_ratio"] += (low + high).item() * tokens
        if self.batch.ref_logprobs is not None:
            kl = objectives.k3(logprobs, self.batch.ref_logprobs[rows])
            sums["kl"] += objectives.masked_sum(kl, mask).item()

    def measured(self, fresh: bool) -> dict[str, float]:
        """Sums over the tokens that were computed, to be added up over processes; see means.

        fresh: the weights are those that sampled, so that sampler and update can be compared.
        """
        names = ("tokens", "entropy", "clip_ratio", "kl", "capped")
        sums = {name: self.sums[name] for name in names}
        sums |= {"gap": 0.0, "compared": 0.0, "rows": float(len(self.batch))}
        sums["skipped"] = float((~self.scored).sum())
        # A sampler may give no entropies.
        sums["entropies"] = self.sums["tokens"] if self.batch.entropies is None else 0.0
        if fresh and self.batch.sampler_logprobs is not None:
            sampler_logprobs = padded(
                self.batch.sampler_logprobs, self.mask.size(1), self.mask.device
            )
            is_compared = (self.mask != 0) & self.scored[:, None]
            sums["gap"] = (self.logprobs - sampler_logprobs).abs()[is_compared].sum().item()
            sums["compared"] = float(is_compared.sum())
        return sums

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Of those sums: clip_ratio; kl, where there is a reference; entropy, where the sampler gave none.

        rollout/logprob_gap: how far sampler and update are apart. rollout/capped: share of tokens whose weight the
        cap cut, where there is one. update/skipped: share of completions left out.
        """
        tokens = max(sums["tokens"], 1)
        metrics = {
            "clip_ratio": sums["clip_ratio"] / tokens,
            "update/skipped": sums["skipped"] / sums["rows"],
        }
        if self.beta:
            metrics["kl"] = sums["kl"] / tokens
        if sums["entropies"]:
            metrics["entropy"] = sums["entropy"] / sums["entropies"]
        if self.sampler_logprobs is not None:
            metrics["rollout/capped"] = sums["capped"] / tokens
        if sums["compared"]:
            metrics["rollout/logprob_gap"] = sums["gap"] / sums["compared"]
        return metrics


@contextmanager
def weights_of(
    trained: Mapping[str, torch.nn.Parameter], weights: Mapping[str, torch.Tensor]
) -> Iterator[None]:
    """Inside, the model has these weights, such as the reference's: nothing is copied, tensors change places."""
    trained_weights = {name: p.data for name, p in trained.items()}
    try:
        for name, p in trained.items():
            p.data = weights[name]
        yield
    finally:
        for name, p in trained.items():
            p.data = trained_weights[name]

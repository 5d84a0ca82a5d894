"""Importance ratios, of tokens and of completions, and their clipping: what PPO and all of GRPO's relatives share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_kit.objectives.logprobs import masked_mean, require_same_shape


def token_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """rho_t = pi(y_t) / pi_old(y_t), how much likelier each token became since it was sampled. Any shape.

    No gradient goes through old_logprobs: at the first step the present ones may be given for them.
    Raises ValueError for shapes that differ.

    >>> token_ratio(torch.tensor([0.0]), torch.tensor([0.0])).item()
    1.0
    """
    require_same_shape(logprobs=logprobs, old_logprobs=old_logprobs)
    return torch.exp(logprobs - old_logprobs.detach())


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, completion_mask: Tensor) -> Tensor:
    """s_i = (pi(y_i) / pi_old(y_i))^(1/|y_i|), the geometric mean of a completion's token ratios.

    All (R, T). Returns (R, 1). The exact importance weight has no root: the root lowers the variance and adds a bias.
    Source: GSPO, arXiv:2507.18071, eq. 7.

    >>> sequence_ratio(torch.tensor([[4.0, 1.0]]).log(), torch.zeros(1, 2), torch.ones(1, 2)).item()
    2.0
    """
    require_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, completion_mask=completion_mask)
    return torch.exp(masked_mean(logprobs - old_logprobs.detach(), completion_mask, dim=1)).unsqueeze(1)


def importance_ratio(
    logprobs: Tensor, old_logprobs: Tensor, completion_mask: Tensor, *, level: str = "token", **options: Any
) -> Tensor:
    """`token_ratio` (R, T), or at level "sequence" `sequence_ratio` (R, 1). options: Options that it does not need.

    Raises ValueError for shapes that differ, and for another level.
    """
    require_same_shape(logprobs=logprobs, completion_mask=completion_mask)
    if level not in ("token", "sequence"):
        raise ValueError(f"level={level!r} is not known; use 'token' or 'sequence'")
    if level == "token":
        return token_ratio(logprobs, old_logprobs)
    return sequence_ratio(logprobs, old_logprobs, completion_mask)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float | None = None
) -> Tensor:
    """-min(ratio A, clip(ratio, 1 - epsilon, 1 + epsilon_high) A), entry by entry.

    ratio: (R, T), or (R, 1) of whole completions. advantages: (R,), or (R, T) for one a token. An entry has no gradient
    where its ratio has left the range on the side that the advantage pushes it to, and only there.
    """
    advantages = column(advantages, ratio)
    epsilon_high = epsilon if epsilon_high is None else epsilon_high
    return -torch.min(ratio * advantages, ratio.clamp(1 - epsilon, 1 + epsilon_high) * advantages)


def clip_fraction(
    ratio: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The shares (low, high) in [0, 1] of tokens that clipping leaves without a gradient. A diagnostic.

    low: ratio < 1 - epsilon and A < 0; high: ratio > 1 + epsilon_high and A > 0. ratio, completion_mask: (R, T), or
    both of one column for GSPO. advantages: (R,) or (R, T). 0 at the first step on fresh samples; if not, the sampler
    and the trainer disagree (temperature, dropout, precision).

    >>> low, high = clip_fraction(torch.tensor([[0.5, 1.5]]), torch.tensor([1.0]), torch.ones(1, 2))
    >>> low.item(), high.item()
    (0.0, 0.5)
    """
    require_same_shape(ratio=ratio, completion_mask=completion_mask)
    advantages = column(advantages, ratio)
    epsilon_high = epsilon if epsilon_high is None else epsilon_high
    low = (ratio < 1 - epsilon) & (advantages < 0)
    high = (ratio > 1 + epsilon_high) & (advantages > 0)
    return tuple(masked_mean(clipped.to(ratio.dtype), completion_mask) for clipped in (low, high))


def column(advantages: Tensor, ratio: Tensor) -> Tensor:
    """Advantages (R,) as (R, 1), ready to be multiplied with (R, T); (R, T) as they are."""
    if advantages.ndim == 1:
        advantages = advantages.unsqueeze(1)
    require_same_shape(rows=ratio[:, 0], advantages=advantages[:, 0])
    return advantages

"""Policy gradient, from REINFORCE to PPO, and the clipping that GRPO took over."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kit.objectives.logprobs import masked_mean, require_same_shape, sequence_logprobs


def reinforce(
    logprobs: Tensor, rewards: Tensor, completion_mask: Tensor, *, baseline: float | Tensor = 0.0
) -> Tensor:
    """L = -mean_i (R_i - b_i) sum_t log pi(y_it): its gradient is minus that of the expected reward.

    logprobs: (R, T) of completions drawn from this very policy. rewards: (R,). baseline: a number or (R,), anything
    that does not depend on the completion itself: it changes the variance and not the mean. Returns a scalar whose
    value means nothing; only its gradient does.
    Source: Williams (1992), Machine Learning 8:229.

    >>> reinforce(torch.tensor([[-1.0, -2.0]]), torch.tensor([1.0]), torch.ones(1, 2), baseline=0.5).item()
    1.5
    """
    sequences = sequence_logprobs(logprobs, completion_mask)
    require_same_shape(rows=sequences, rewards=rewards)
    return -((rewards - baseline) * sequences).mean()


def rloo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
) -> Tensor:
    """L = -mean_i min(rho_i A_i, clip(rho_i) A_i) with rho_i = pi(y_i) / pi_old(y_i), of the whole completion.

    logprobs, old_logprobs, completion_mask: (R, T). advantages: (R,), from `rloo_advantages`. At old = now the gradient
    is REINFORCE's, and the paper has no more than that; the clipped ratio for reused samples is TRL's. Unclipped it is
    unbiased, whatever old was: the product of the tokens' ratios is the exact weight. For long completions that
    product varies wildly, which is why GSPO takes its root.
    Source: Ahmadian et al., arXiv:2402.14740, section 3.3; trl.RLOOTrainer.

    >>> p, old = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0, -2.0]])
    >>> round(rloo(p, old, torch.tensor([1.0]), torch.ones(1, 2)).item(), 4)  # the ratio is e, clipped to 1.2
    -1.2
    """
    require_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, completion_mask=completion_mask)
    require_same_shape(rows=logprobs[:, 0], advantages=advantages)
    ratio = torch.exp(sequence_logprobs(logprobs - old_logprobs.detach(), completion_mask)).unsqueeze(1)
    return clipped_surrogate(ratio, advantages, epsilon, epsilon_high).mean()


def ppo_policy(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    *,
    epsilon: float = 0.2,
) -> Tensor:
    """L = -mean over tokens of min(rho_t A_t, clip(rho_t, 1 - epsilon, 1 + epsilon) A_t), rho_t = pi / pi_old.

    All (R, T); advantages usually from `gae`. The mean is over all tokens of the batch.
    Once the policy has moved, a ratio corrects for its token and not for the state before it, which the old policy
    sampled. So this is the policy gradient at old = now only.
    Source: Schulman et al., arXiv:1707.06347, eq. 7.

    >>> old, A = torch.zeros(1, 2), torch.tensor([[1.0, -1.0]])
    >>> round(ppo_policy(torch.tensor([[1.5, 1.5]]).log(), old, A, torch.ones(1, 2)).item(), 4)  # (-1.2 + 1.5) / 2
    0.15
    """
    require_same_shape(logprobs=logprobs, advantages=advantages, completion_mask=completion_mask)
    loss = clipped_surrogate(token_ratio(logprobs, old_logprobs), advantages, epsilon)
    return masked_mean(loss, completion_mask)


def ppo_value(
    values: Tensor, old_values: Tensor, returns: Tensor, completion_mask: Tensor, *, epsilon: float = 0.2
) -> Tensor:
    """L = 1/2 mean over tokens of max((V - R)^2, (clip(V, V_old - epsilon, V_old + epsilon) - R)^2).

    All (R, T). returns: the targets, `gae` advantages + old values. A value that has already moved epsilon towards its
    target has no gradient; one that moved away keeps it. epsilon is in units of the value, not a ratio.
    Sources: Schulman et al., arXiv:1707.06347, eq. 9 (squared error); the clip, arXiv:2005.12729, section 3.

    >>> old, R, mask = torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 1)
    >>> round(ppo_value(torch.tensor([[0.5]]), old, R, mask).item(), 4)  # (1 - 0.2)^2 / 2
    0.32
    """
    require_same_shape(values=values, old_values=old_values, returns=returns, completion_mask=completion_mask)
    clipped = old_values + (values - old_values).clamp(-epsilon, epsilon)
    return 0.5 * masked_mean(torch.max((values - returns) ** 2, (clipped - returns) ** 2), completion_mask)


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


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float | None = None
) -> Tensor:
    """-min(ratio A, clip(ratio, 1 - epsilon, 1 + epsilon_high) A), entry by entry.

    ratio: (R, T), or (R, 1) of whole completions. advantages: (R,), or (R, T) for one a token. An entry has no gradient
    where its ratio has left the range on the side that the advantage pushes it to, and only there.
    """
    advantages = column(advantages, ratio)
    high = epsilon if epsilon_high is None else epsilon_high
    return -torch.min(ratio * advantages, ratio.clamp(1 - epsilon, 1 + high) * advantages)


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
    high = epsilon if epsilon_high is None else epsilon_high
    is_low = (ratio < 1 - epsilon) & (advantages < 0)
    is_high = (ratio > 1 + high) & (advantages > 0)
    return tuple(masked_mean(clipped.to(ratio.dtype), completion_mask) for clipped in (is_low, is_high))


def column(advantages: Tensor, like: Tensor) -> Tensor:
    """Advantages (R,) as (R, 1), ready to be multiplied with (R, T); (R, T) as they are."""
    require_same_shape(rows=like[:, 0], advantages=advantages if advantages.ndim == 1 else advantages[:, 0])
    return advantages.unsqueeze(1) if advantages.ndim == 1 else advantages

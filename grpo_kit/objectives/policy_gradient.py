"""Policy gradient, from REINFORCE to PPO. logprobs.py has the clipping, which GRPO took over."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kit.objectives.logprobs import (
    clipped_surrogate,
    masked_mean,
    require_same_shape,
    sequence_logprobs,
    token_ratio,
)


def reinforce(
    logprobs: Tensor,
    rewards: Tensor,
    completion_mask: Tensor,
    *,
    baseline: float | Tensor = 0.0,
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
    require_same_shape(
        logprobs=logprobs, old_logprobs=old_logprobs, completion_mask=completion_mask
    )
    require_same_shape(rows=logprobs[:, 0], advantages=advantages)
    ratio = torch.exp(
        sequence_logprobs(logprobs - old_logprobs.detach(), completion_mask)
    ).unsqueeze(1)
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
    require_same_shape(
        logprobs=logprobs, advantages=advantages, completion_mask=completion_mask
    )
    loss = clipped_surrogate(token_ratio(logprobs, old_logprobs), advantages, epsilon)
    return masked_mean(loss, completion_mask)


def ppo_value(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    completion_mask: Tensor,
    *,
    epsilon: float = 0.2,
) -> Tensor:
    """L = 1/2 mean over tokens of max((V - R)^2, (clip(V, V_old - epsilon, V_old + epsilon) - R)^2).

    All (R, T). returns: the targets, `gae` advantages + old values. A value that has already moved epsilon towards its
    target has no gradient; one that moved away keeps it. epsilon is in units of the value, not a ratio.
    Sources: Schulman et al., arXiv:1707.06347, eq. 9 (squared error); the clip, arXiv:2005.12729, section 3.

    >>> old, R, mask = torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 1)
    >>> round(ppo_value(torch.tensor([[0.5]]), old, R, mask).item(), 4)  # (1 - 0.2)^2 / 2
    0.32
    """
    require_same_shape(
        values=values, old_values=old_values, returns=returns, completion_mask=completion_mask
    )
    clipped = old_values + (values - old_values).clamp(-epsilon, epsilon)
    return 0.5 * masked_mean(
        torch.max((values - returns) ** 2, (clipped - returns) ** 2), completion_mask
    )

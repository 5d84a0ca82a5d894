"""Rewards -> advantages: how much better than expected each completion, or token, did. No gradient flows through."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from grpo_kit.objectives.logprobs import require_same_shape


def group_advantages(
    rewards: Tensor,
    group_size: int,
    *,
    scale: Literal["group", "batch", "none"] = "group",
    eps: float = 1e-4,
) -> Tensor:
    """How much better each completion did than its siblings: A_i = (r_i - mean(r)) / (std(r) + eps).

    rewards: (B*G,), the completions of one prompt adjacent. Returns (B*G,); a group without a signal gives zeros.
    scale: whose std divides: "group" as in GRPO; "batch" the whole batch's, so that a group with little spread is not
    enlarged; "none" as Dr. GRPO, where A_i = (G-1)/G times RLOO's. std has ddof=1 and eps is 1e-4, as in TRL
    (the paper states neither): with ddof=0 and G=2 advantages would be larger by sqrt(2).
    Raises ValueError for a group_size below 2 or no divisor of len(rewards), a NaN reward (TRL leaves such rows out),
    or an unknown scale.
    Sources: DeepSeekMath, arXiv:2402.03300, section 4.1.2; Dr. GRPO, arXiv:2503.20783; batch, arXiv:2508.08221.

    >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), 4, eps=0).tolist()
    [1.5, -0.5, -0.5, -0.5]
    """
    groups = _groups(rewards, group_size)
    centred = groups - groups.mean(1, keepdim=True)
    if scale == "group":
        centred = centred / (groups.std(1, keepdim=True) + eps)
    elif scale == "batch":
        centred = centred / (groups.std() + eps)
    elif scale != "none":
        raise ValueError(f"scale={scale!r} is not known; use 'group', 'batch' or 'none'")
    return centred.flatten()


def rloo_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Leave-one-out: A_i = r_i - mean of the G - 1 other rewards = G/(G-1) (r_i - mean(r)).

    rewards: (B*G,), the completions of one prompt adjacent. Returns (B*G,). A baseline that does not depend on its own
    completion leaves the expected gradient unchanged; the group's mean, which does depend on it, shrinks it by (G-1)/G.
    Raises ValueError for a group_size below 2 or no divisor of len(rewards), or a NaN reward.
    Sources: Kool et al. (2019), Buy 4 REINFORCE Samples; Ahmadian et al., arXiv:2402.14740, section 3.3.

    >>> rloo_advantages(torch.tensor([1.0, 0.0, 0.5]), 3).tolist()
    [0.75, -0.75, 0.0]
    """
    groups = _groups(rewards, group_size)
    baseline = (groups.sum(1, keepdim=True) - groups) / (group_size - 1)
    return (groups - baseline).flatten()


def weigh_advantages(advantages: Tensor, positive: float, negative: float) -> Tensor:
    """Advantages of any shape, those above 0 times `positive`, those below times `negative`.

    For low success rates: (4, 1) makes the few right completions count more, (1, 0) filters the wrong ones out.
    With rewards of 0 and 1, success rate p and scale="none" the positives give the share 1 - p of the expected
    gradient, the negatives p, and both point along the gradient of p. So weights change the length of a prompt's
    expected gradient, not its direction. This holds for losses that add up a completion's tokens (`dr_grpo`,
    `reinforce`), not for those that divide by its length.
    Sources: RAFT and Reinforce-Rej, arXiv:2504.11343 (positives alone); arXiv:2506.01347 (negatives alone).

    >>> weigh_advantages(torch.tensor([1.5, 0.0, -0.5, -1.0]), 2, 0.5).tolist()
    [3.0, 0.0, -0.25, -0.5]
    """
    return torch.where(advantages > 0, advantages * positive, advantages * negative)


def filter_negative_tokens(
    advantages: Tensor, logprobs: Tensor, completion_mask: Tensor, *, keep: float = 0.1
) -> Tensor:
    """Advantages a token: where a completion's is below 0, only its least likely tokens have it, and the others 0.

    Most tokens of a wrong completion are in right ones too; the likely ones are no longer pushed down.
    advantages: (R,). logprobs: (R, T), of the policy that sampled. Returns (R, T), for a loss whose ratio is a token's
    (`gspo_token`, not `gspo`): it divides by whole lengths as before, and a KL counts all tokens.
    keep: share of a completion's tokens, in (0, 1], rounded up, so at least one; of equal ones the earlier.
    Raises ValueError for shapes that differ and for another share.
    Source: negative token filtering, Wu et al., arXiv:2606.17250, by its abstract and a reproduction's notes.

    >>> logprobs, mask = torch.tensor([[-0.1, -3.0, -0.2], [-0.1, -3.0, -0.2]]), torch.ones(2, 3)
    >>> filter_negative_tokens(torch.tensor([1.0, -1.0]), logprobs, mask, keep=1 / 3).tolist()
    [[1.0, 1.0, 1.0], [0.0, -1.0, 0.0]]
    """
    require_same_shape(logprobs=logprobs, completion_mask=completion_mask)
    require_same_shape(rows=logprobs[:, 0], advantages=advantages)
    if not 0 < keep <= 1:
        raise ValueError(f"keep={keep!r} must lie in (0, 1], the share of tokens, such as 0.1")
    is_token = completion_mask != 0
    n_kept = torch.ceil(keep * is_token.sum(1, keepdim=True) - 1e-4)  # 0.1 of 30 is 3
    by_probability = (
        logprobs.detach().masked_fill(~is_token, torch.inf).argsort(dim=1, stable=True)
    )
    is_kept = by_probability.argsort(dim=1) < n_kept
    by_token = advantages.unsqueeze(1)
    return torch.where(is_token & (is_kept | (by_token >= 0)), by_token, 0.0)


def token_rewards(
    rewards: Tensor, kl: Tensor, completion_mask: Tensor, *, beta: float
) -> Tensor:
    """The reward of each token in RLHF: r_t = -beta kl_t, and the completion's reward on its last token.

    rewards: (R,). kl: (R, T), `k1` of each token. Returns (R, T), 0 behind the end, without a gradient; its sum(1) is
    the reward of the whole completion, r - beta sum_t kl_t, that RLOO takes.
    Raises ValueError for other shapes, or a completion without tokens, whose reward would have no place.
    Sources: Ziegler et al., arXiv:1909.08593, eq. 2; InstructGPT, arXiv:2203.02155, eq. 2.

    >>> kl, mask = torch.tensor([[0.5, 0.25, 9.0]]), torch.tensor([[1, 1, 0]])
    >>> token_rewards(torch.tensor([1.0]), kl, mask, beta=0.5).tolist()
    [[-0.25, 0.875, 0.0]]
    """
    require_same_shape(kl=kl, completion_mask=completion_mask)
    require_same_shape(rows=kl[:, 0], rewards=rewards)
    is_token = completion_mask != 0
    if not is_token.any(1).all():
        raise ValueError(
            "completion_mask has a row without tokens, so its reward has no place; leave the row out"
        )
    is_last = is_token & (is_token.cumsum(1) == is_token.sum(1, keepdim=True))
    return torch.where(is_last, rewards.unsqueeze(1), 0.0) - beta * kl.detach().masked_fill(
        ~is_token, 0.0
    )


def gae(
    rewards: Tensor,
    values: Tensor,
    completion_mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> Tensor:
    """Generalised advantage estimation: A_t = sum_l (gamma lam)^l delta_(t+l), delta_t = r_t + gamma V_(t+1) - V_t.

    rewards: (R, T), as from `token_rewards`. values: (R, T), V of the state before token t. completion_mask: (R, T);
    a completion ends behind its last token, where V is 0. Returns (R, T), 0 behind the end, without a gradient.
    A + V is the target of the value function (`ppo_value`). lam=1 is the return minus V: unbiased, noisy; lam=0 the TD
    error: little noise, but biased like V. gamma=1 is usual for language.
    Raises ValueError for shapes that differ.
    Source: Schulman et al., arXiv:1506.02438, eq. 16.

    >>> r, V, mask = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]]), torch.ones(1, 2)
    >>> gae(r, V, mask, lam=1.0).tolist(), gae(r, V, mask, lam=0.0).tolist()
    ([[0.5, 0.5]], [[0.0, 0.5]])
    """
    require_same_shape(values=values, rewards=rewards, completion_mask=completion_mask)
    rewards, values, mask = (
        rewards.detach(),
        values.detach(),
        (completion_mask != 0).to(values.dtype),
    )
    advantages = torch.zeros_like(values)
    next_advantage = next_value = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.size(1))):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = mask[:, t] * (delta + gamma * lam * next_advantage)
        next_value = mask[:, t] * values[:, t]
        advantages[:, t] = next_advantage
    return advantages


def _groups(rewards: Tensor, group_size: int) -> Tensor:
    """Rewards as (B, G)."""
    if group_size < 2 or rewards.ndim != 1 or len(rewards) % group_size:
        raise ValueError(
            f"group_size={group_size!r} must be at least 2 and divide the number of rewards, which are (B*G,); "
            f"rewards has shape {tuple(rewards.shape)}"
        )
    if rewards.isnan().any():
        raise ValueError(
            "rewards holds a NaN, which would spoil its group; leave that completion's group out"
        )
    return rewards.view(-1, group_size)

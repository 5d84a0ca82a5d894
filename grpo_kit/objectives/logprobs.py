"""Log-probabilities of tokens and of completions, and means over them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, ids: Tensor, *, temperature: float = 1.0) -> Tensor:
    """log pi(id) of each token: log softmax(logits / temperature) at the token's place.

    logits: (..., V), those that predicted the token: a causal model's logits[:, t - 1] belong to ids[:, t].
    ids: (...). Returns (...), in nats. temperature: that of the sampling; scoring at another one makes the ratio of
    policies, and so the gradient, wrong.
    Raises ValueError for a temperature that is not above 0, or ids that do not match the logits.

    >>> token_logprobs(torch.tensor([[0.0, 0.0], [0.0, 100.0]]), torch.tensor([0, 1])).exp().tolist()
    [0.5, 1.0]
    """
    # The words of check_temperature (argument_checks.py): the losses are read, and copied, with torch alone.
    if isinstance(temperature, (bool, str)) or not 0 < temperature < float("inf"):
        raise ValueError(
            f"temperature={temperature!r} must be a number above 0, such as 1.0; at 0 (greedy) all samples of a prompt "
            "are alike"
        )
    if logits.shape[:-1] != ids.shape:
        raise ValueError(
            f"ids has shape {tuple(ids.shape)}; logits {tuple(logits.shape)} need one id a position"
        )
    return (
        torch.log_softmax(logits / temperature, dim=-1)
        .gather(-1, ids.unsqueeze(-1))
        .squeeze(-1)
    )


def sequence_logprobs(
    logprobs: Tensor, completion_mask: Tensor, *, average: bool = False
) -> Tensor:
    """log pi(y) of each completion: the sum over its tokens, or with `average` the mean a token.

    logprobs, completion_mask: (R, T). Returns (R,), in nats (a token). The sum is the log-probability; the mean is
    that of the geometric mean of the tokens' probabilities, which ORPO and SimPO use.

    >>> sequence_logprobs(torch.tensor([[-1.0, -2.0, -9.0]]), torch.tensor([[1, 1, 0]]), average=True).item()
    -1.5
    """
    require_same_shape(logprobs=logprobs, completion_mask=completion_mask)
    mean_or_sum = masked_mean if average else masked_sum
    return mean_or_sum(logprobs, completion_mask, dim=1)


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """The sum of `values` where `mask` is not 0, over all or over `dim`. Values elsewhere, NaN too, are left out.

    >>> masked_sum(torch.tensor([[1.0, 3.0], [5.0, 7.0]]), torch.tensor([[1, 1], [1, 0]]), dim=1).tolist()
    [4.0, 5.0]
    """
    require_same_shape(values=values, mask=mask)
    return values.masked_fill(mask == 0, 0.0).sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """The mean of `values` where `mask` is not 0, over all or over `dim`; 0 where the mask is empty.

    >>> masked_mean(torch.tensor([[1.0, 3.0], [5.0, 7.0]]), torch.tensor([[1, 1], [1, 0]]), dim=1).tolist()
    [2.0, 5.0]
    """
    return masked_sum(values, mask, dim) / (mask != 0).sum(dim).clamp(min=1)


def require_same_shape(**tensors: Tensor) -> None:
    """Raises ValueError unless all have the first one's shape: torch would stretch (R,) over (T,) without an error."""
    (first_name, first), *_ = tensors.items()
    for name, tensor in tensors.items():
        if tensor.shape != first.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; it must have that of {first_name}, {tuple(first.shape)}"
            )


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k1 = log pi - log ref: unbiased, either sign, much variance; as a loss it has no gradient in expectation.

    Any shape: tokens, or completions. PPO and RLOO put it into the reward (`token_rewards`), where it is right.
    Source: Schulman, joschu.net/blog/kl-approx.html; in the reward, Ziegler et al., arXiv:1909.08593, eq. 2.

    >>> k1(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])).tolist()
    [0.5, -1.0]
    """
    require_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k2 = (log pi - log ref)^2 / 2: biased, at least 0; as a loss its gradient is the reverse KL's.

    Any shape. d (k2) = (log pi - log ref) d log pi, which is the gradient that k1 has in the reward.
    Source: Schulman, joschu.net/blog/kl-approx.html; the gradient, arXiv:2510.01555.

    >>> k2(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])).tolist()
    [0.125, 0.5]
    """
    return 0.5 * k1(logprobs, ref_logprobs) ** 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k3 = ref/pi - 1 - log(ref/pi): unbiased, at least 0; as a loss its gradient is the forward KL's.

    Any shape. d (k3) = (1 - ref/pi) d log pi. Near the reference it varies far less than k1. Unbiased only if pi can
    draw all that the reference can. The ratio is ref over pi, because samples come from pi: pi over ref is a common
    mistake, and estimates neither KL.
    Source: Schulman, joschu.net/blog/kl-approx.html; in the loss, DeepSeekMath, arXiv:2402.03300, eq. 4.

    >>> round(k3(torch.tensor(0.25).log(), torch.tensor(0.5).log()).item(), 4)  # 2 - 1 - log 2
    0.3069
    """
    log_ratio = -k1(logprobs, ref_logprobs)
    return torch.exp(log_ratio) - 1 - log_ratio


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
    require_same_shape(
        logprobs=logprobs, old_logprobs=old_logprobs, completion_mask=completion_mask
    )
    return torch.exp(
        masked_mean(logprobs - old_logprobs.detach(), completion_mask, dim=1)
    ).unsqueeze(1)


def importance_ratio(
    logprobs: Tensor,
    old_logprobs: Tensor,
    completion_mask: Tensor,
    *,
    level: str = "token",
    **options: Any,
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
    return -torch.min(
        ratio * advantages, ratio.clamp(1 - epsilon, 1 + epsilon_high) * advantages
    )


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
    return tuple(
        masked_mean(clipped.to(ratio.dtype), completion_mask) for clipped in (low, high)
    )


def column(advantages: Tensor, ratio: Tensor) -> Tensor:
    """Advantages (R,) as (R, 1), ready to be multiplied with (R, T); (R, T) as they are."""
    if advantages.ndim == 1:
        advantages = advantages.unsqueeze(1)
    require_same_shape(rows=ratio[:, 0], advantages=advantages[:, 0])
    return advantages

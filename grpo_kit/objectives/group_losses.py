"""GRPO and its relatives, all with the same call. They differ in the ratio, the clip and the divisor.

             ratio      clipped                      divided by
grpo         token      rho A, at 1 +- epsilon       each completion's own length, then R
dr_grpo      token      the same                     R x a constant
bnpo         token      the same                     tokens of the micro-batch
dapo         token      higher above than below      tokens of the whole step
gspo         sequence   s A                          R
cispo        token      rho alone, as a weight       tokens of the whole step

Each body is one row of the table: the ratio, then the loss of each token (with the KL), then the division.

Arguments of all: logprobs (with gradient), old_logprobs, completion_mask: (R, T). advantages: (R,), or (R, T) for one
a token. epsilon, epsilon_high: the ratio is clipped to [1 - epsilon, 1 + epsilon_high]; None is epsilon. Others: see
`Options`. num_rows, num_tokens: R or N of the whole step, where these rows are a part of it, so that the losses of the
parts add up to the step's; None counts these rows. A row without tokens adds 0 and is counted in R. Returns a scalar.
Raises ValueError for shapes that do not fit, or beta without ref_logprobs.
soft_losses.py has three that do not clip: sapo, luspo (clipped, but never divided by a length) and vespo.
At old_logprobs = logprobs every ratio is 1, and only the last column of the table matters. No gradient goes through
old_logprobs.
"""

from __future__ import annotations

from typing import Literal, TypedDict, Unpack

import torch
from torch import Tensor

from grpo_kit.objectives.logprobs import (
    clipped_surrogate,
    column,
    importance_ratio,
    k3,
    masked_mean,
    masked_sum,
    require_same_shape,
    sequence_ratio,
)


class Options(TypedDict, total=False):
    """Keyword arguments of every loss here.

    level: "token", or "sequence" for one ratio a completion, the geometric mean of its tokens' (GSPO's).
    beta: weight of the KL: beta k3 is added to each token's loss before the mean; 0, the default, means no KL.
    ref_logprobs: (R, T), of the reference. correct_kl: k3 times the ratio, for the reverse KL's gradient (see `kl`):
    TRL 1.16's default, use_bias_correction_kl=True, and not in the papers below.
    """

    level: Literal["token", "sequence"]
    beta: float
    ref_logprobs: Tensor | None
    correct_kl: bool


def grpo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    num_rows: int | None = None,
    **options: Unpack[Options],
) -> Tensor:
    """L = mean_i 1/|o_i| sum_t [-min(rho A, clip(rho) A) + beta k3].

    A token of a short completion weighs more than one of a long one. So among right answers short ones gain most, and
    among wrong answers long ones are punished least.
    Source: DeepSeekMath, arXiv:2402.03300, eq. 3; TRL's loss_type="grpo".

    >>> p, A, mask = torch.zeros(2, 2), torch.tensor([1.0, -1.0]), torch.tensor([[1, 1], [1, 0]])
    >>> grpo(p, p, A, mask).item()  # (-1 + 1) / 2
    0.0
    """
    ratio = importance_ratio(logprobs, old_logprobs, completion_mask, **options)
    loss = clipped_surrogate(ratio, advantages, epsilon, epsilon_high) + kl_term(
        ratio, logprobs, **options
    )
    return row_mean(masked_mean(loss, completion_mask, dim=1), num_rows)


def dr_grpo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    *,
    max_completion_tokens: int,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    num_rows: int | None = None,
    **options: Unpack[Options],
) -> Tensor:
    """L = 1/(R L_max) sum_i sum_t [-min(rho A, clip(rho) A) + beta k3]: GRPO without its length bias.

    Use with group_advantages(scale="none"). Then at old = now its expected gradient is the policy gradient, times
    (G-1)/G for the group's mean and 1/L_max. max_completion_tokens: any constant; it only scales the learning rate.
    Source: Dr. GRPO, arXiv:2503.20783, figure 1 and its appendix's code; TRL's loss_type="dr_grpo".

    >>> p, A, mask = torch.zeros(2, 2), torch.tensor([1.0, -1.0]), torch.tensor([[1, 1], [1, 0]])
    >>> dr_grpo(p, p, A, mask, max_completion_tokens=4).item()  # (-2 + 1) / (2 * 4)
    -0.125
    """
    ratio = importance_ratio(logprobs, old_logprobs, completion_mask, **options)
    loss = clipped_surrogate(ratio, advantages, epsilon, epsilon_high) + kl_term(
        ratio, logprobs, **options
    )
    return row_mean(masked_sum(loss, completion_mask, dim=1), num_rows) / max_completion_tokens


def bnpo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    *,
    num_tokens: int | Tensor | None = None,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    **options: Unpack[Options],
) -> Tensor:
    """L = 1/(sum_i |o_i|) sum_i sum_t [-min(rho A, clip(rho) A) + beta k3], the tokens of these rows.

    Every token of a micro-batch weighs the same. Over several, the mean of their losses depends on how the rows were
    cut, which `dapo` and num_tokens repair. With one row a micro-batch it is `grpo`.
    Source: TRL's loss_type="bnpo", where the name stands for this mean alone; the paper of that name, arXiv:2506.02864,
    is about scaling rewards by a Beta distribution, which is not here.

    >>> p, A, mask = torch.zeros(2, 2), torch.tensor([1.0, -1.0]), torch.tensor([[1, 1], [1, 0]])
    >>> round(bnpo(p, p, A, mask).item(), 4)  # (-2 + 1) / 3
    -0.3333
    """
    ratio = importance_ratio(logprobs, old_logprobs, completion_mask, **options)
    loss = clipped_surrogate(ratio, advantages, epsilon, epsilon_high) + kl_term(
        ratio, logprobs, **options
    )
    return token_mean(loss, completion_mask, num_tokens)


def dapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    *,
    num_tokens: int | Tensor | None = None,
    epsilon: float = 0.2,
    epsilon_high: float | None = 0.28,
    **options: Unpack[Options],
) -> Tensor:
    """L = 1/N sum_i sum_t -min(rho A, clip(rho, 1 - epsilon, 1 + epsilon_high) A), N the tokens of the whole step.

    Clip-higher: an unlikely token (say 1 %) may grow by 28 % where GRPO stops it at 20 %, so exploration lives longer.
    num_tokens: N where these rows are a micro-batch, so that their losses add up to the step's; None counts these.
    Long completions weigh more. The rest of DAPO: `overlong_filter`, `rewards.RightSize` (its length reward + 1),
    and Config.dynamic_sampling. The paper has no KL; beta > 0 adds TRL's.
    Source: DAPO, arXiv:2503.14476, eq. 8; TRL's loss_type="dapo", its default, with epsilon_high=epsilon unless set,
    and N = num_items_in_batch, scaled to one optimizer step and to each process.

    >>> p, A, mask = torch.zeros(2, 2), torch.tensor([1.0, -1.0]), torch.tensor([[1, 1], [1, 0]])
    >>> dapo(p, p, A, mask, num_tokens=8).item()  # (-2 + 1) / 8
    -0.125
    """
    ratio = importance_ratio(logprobs, old_logprobs, completion_mask, **options)
    loss = clipped_surrogate(ratio, advantages, epsilon, epsilon_high) + kl_term(
        ratio, logprobs, **options
    )
    return token_mean(loss, completion_mask, num_tokens)


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    *,
    max_ratio: float = 5.0,
    num_tokens: int | Tensor | None = None,
    **options: Unpack[Options],
) -> Tensor:
    """L = -1/N sum_i sum_t sg[min(rho, max_ratio)] A log pi: the ratio is a weight, and no token loses its gradient.

    sg: stop-gradient. Rare tokens ("however", "wait") that PPO's clip would drop after their first step keep teaching.
    max_ratio: the paper's 1 + epsilon_high; TRL's `epsilon_high` is this number itself (5 by ScaleRL). There is no
    lower bound, as in the paper's runs. num_tokens: N, see `dapo`. The value means nothing; the gradient does.
    Source: MiniMax-M1, arXiv:2506.13585, section 3.1; 5, arXiv:2510.13786; TRL's loss_type="cispo".

    >>> p, old = torch.tensor([[1.0, 1.0]], requires_grad=True), torch.tensor([[1.0, -9.0]])
    >>> cispo(p, old, torch.tensor([1.0]), torch.ones(1, 2)).backward(); p.grad.tolist()  # -[1, 5] / 2
    [[-0.5, -2.5]]
    """
    ratio = importance_ratio(logprobs, old_logprobs, completion_mask, **options)
    weight = ratio.clamp(max=max_ratio).detach()
    loss = -weight * column(advantages, ratio) * logprobs + kl_term(ratio, logprobs, **options)
    return token_mean(loss, completion_mask, num_tokens)


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    *,
    epsilon: float = 3e-4,
    epsilon_high: float | None = 4e-4,
    num_rows: int | None = None,
    **options: Unpack[Options],
) -> Tensor:
    """L = -mean_i min(s_i A_i, clip(s_i) A_i), s_i = (pi(o_i) / pi_old(o_i))^(1/|o_i|): whole completions are clipped.

    advantages: (R,). s averages the tokens' log-ratios, so it stays far nearer to 1 than they do: epsilons are a
    thousand times smaller. At old = now the gradient is `grpo`'s, its 1/|o| included.
    Source: GSPO, arXiv:2507.18071, eq. 5; TRL's importance_sampling_level="sequence" with loss_type="grpo", where a KL,
    which the paper does without, is the mean over the completion's tokens.

    >>> p, old = torch.tensor([[4.0, 1.0]]).log(), torch.zeros(1, 2)
    >>> gspo(p, old, torch.tensor([-1.0]), torch.ones(1, 2)).item()  # s = 2, not clipped as A < 0
    2.0
    """
    ratio = sequence_ratio(logprobs, old_logprobs, completion_mask)
    loss = clipped_surrogate(ratio, advantages, epsilon, epsilon_high) + kl_term(
        ratio, logprobs, **options
    )
    return row_mean(masked_mean(loss, completion_mask, dim=1), num_rows)


def gspo_token(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    *,
    epsilon: float = 3e-4,
    epsilon_high: float | None = 4e-4,
    num_rows: int | None = None,
    **options: Unpack[Options],
) -> Tensor:
    """GSPO with s_it = sg[s_i] pi_t / sg[pi_t]: the value is s_i's, the gradient each token's own.

    advantages: (R, T), such as several turns need; with (R,) value and gradient are `gspo`'s.
    Source: GSPO, arXiv:2507.18071, eq. 13 and 14; TRL 1.16 has none.

    >>> p, old = torch.tensor([[4.0, 1.0]]).log(), torch.zeros(1, 2)
    >>> gspo_token(p, old, torch.tensor([[-1.0, 0.0]]), torch.ones(1, 2)).item()  # s = 2 for the first token alone
    1.0
    """
    ratio = sequence_ratio(logprobs, old_logprobs, completion_mask).detach()
    ratio = ratio * torch.exp(logprobs - logprobs.detach())
    loss = clipped_surrogate(ratio, advantages, epsilon, epsilon_high) + kl_term(
        ratio, logprobs, **options
    )
    return row_mean(masked_mean(loss, completion_mask, dim=1), num_rows)


def overlong_filter(completion_mask: Tensor, truncated: Tensor) -> Tensor:
    """The mask with the rows of truncated completions emptied: neither rewarded nor punished, as they never ended.

    completion_mask: (R, T). truncated: bool (R,). Returns (R, T). Advantages are still those of the whole group.
    Source: DAPO, arXiv:2503.14476, section 3.4; TRL's mask_truncated_completions.

    >>> overlong_filter(torch.tensor([[1, 0], [1, 1]]), torch.tensor([False, True])).tolist()
    [[1, 0], [0, 0]]
    """
    require_same_shape(rows=completion_mask[:, 0], truncated=truncated)
    return completion_mask.masked_fill(truncated.unsqueeze(1), 0)


def kl_term(
    ratio: Tensor,
    logprobs: Tensor,
    *,
    level: str = "token",
    beta: float = 0.0,
    ref_logprobs: Tensor | None = None,
    correct_kl: bool = False,
) -> Tensor:
    """beta k3 of each token, (R, T); with correct_kl it is beta rho k3. Any keyword but Options is an error."""
    if beta == 0.0:
        return torch.zeros_like(logprobs)
    if ref_logprobs is None:
        raise ValueError(
            f"beta={beta!r} needs ref_logprobs, those of the reference; or use beta=0"
        )
    kl = k3(logprobs, ref_logprobs)
    return beta * (ratio * kl if correct_kl else kl)


def row_mean(rows: Tensor, num_rows: int | None) -> Tensor:
    """The sum of rows (R,), divided by num_rows or their own number."""
    return rows.sum() / (len(rows) if num_rows is None else num_rows)


def token_mean(
    loss: Tensor, completion_mask: Tensor, num_tokens: int | Tensor | None
) -> Tensor:
    """The sum over tokens, divided by num_tokens or their own number."""
    if num_tokens is None:
        return masked_mean(loss, completion_mask)
    return masked_sum(loss, completion_mask) / num_tokens

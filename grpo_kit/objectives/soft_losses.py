"""Three relatives of GRPO that weigh a completion or a token in another way than by clipping its ratio.

        ratio                      weight                                        divided by
sapo    token or sequence          a sigmoid around 1 in place of the clip       each completion's own length, then R
luspo   sequence (token: allowed)  GRPO's clip                                   R: a long completion weighs more
vespo   product over the tokens    w^k e^(lambda (1 - w)), no gradient in it     tokens of the whole step

Arguments, shapes and errors are those of group_losses.py.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from grpo_kit.objectives.group_losses import Options, kl_term, row_mean, token_mean
from grpo_kit.objectives.logprobs import (
    clipped_surrogate,
    column,
    importance_ratio,
    masked_mean,
    masked_sum,
)

# log(1e-8), 20: bounds of VESPO's log-ratios, as in TRL
_LOWEST, _HIGHEST = -18.420680743952367, 20.0


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    *,
    temperature_pos: float = 1.0,
    temperature_neg: float = 1.05,
    num_rows: int | None = None,
    **options: Unpack[Options],
) -> Tensor:
    """L = -mean_i 1/|o_i| sum_t 4/tau sigmoid(tau (rho - 1)) A: a soft gate, whose gradient fades and never jumps to 0.

    tau is temperature_pos where A > 0, else temperature_neg; a larger one lets the gradient fade sooner. At rho = 1 the
    gradient is `grpo`'s, the value is not: 2 A / tau.
    Source: SAPO, arXiv:2511.20347; TRL's loss_type="sapo".

    >>> p = torch.zeros(1, 1, requires_grad=True)
    >>> sapo(p, torch.zeros(1, 1), torch.tensor([1.0]), torch.ones(1, 1)).backward(); p.grad.item()
    -1.0
    """
    ratio = importance_ratio(logprobs, old_logprobs, completion_mask, **options)
    advantages = column(advantages, ratio).to(ratio.dtype)
    tau = _by_sign(advantages > 0, advantages, temperature_pos, temperature_neg)
    loss = -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages + kl_term(
        ratio, logprobs, **options
    )
    return row_mean(masked_mean(loss, completion_mask, dim=1), num_rows)


def luspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    *,
    epsilon: float = 2e-3,
    epsilon_high: float | None = 2.5e-3,
    num_rows: int | None = None,
    **options: Unpack[Options],
) -> Tensor:
    """L = -mean_i |o_i| min(s_i A_i, clip(s_i) A_i): GSPO times each completion's length.

    level: meant for "sequence", the paper's; at "token" each token has its own ratio and clip.
    Source: LUSPO, arXiv:2602.05261; TRL's loss_type="luspo".

    >>> p, mask = torch.zeros(2, 2), torch.tensor([[1, 1], [1, 0]])
    >>> luspo(p, p, torch.tensor([1.0, -1.0]), mask, level="sequence").item()  # (-2 + 1) / 2
    -0.5
    """
    ratio = importance_ratio(logprobs, old_logprobs, completion_mask, **options)
    loss = clipped_surrogate(ratio, advantages, epsilon, epsilon_high) + kl_term(
        ratio, logprobs, **options
    )
    return row_mean(masked_sum(loss, completion_mask, dim=1), num_rows)


def vespo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
    num_tokens: int | Tensor | None = None,
    **options: Unpack[Options],
) -> Tensor:
    """L = -1/N sum_i phi(w_i) A_i sum_t log pi_t, phi(w) = w^k e^(lambda (1 - w)), w_i = pi(o_i) / pi_old(o_i).

    w is the ratio of the whole completion, no root. phi, through which no gradient flows, is 1 at w = 1 and falls to 0
    on both sides. k_pos and lambda_pos hold for A >= 0. The value means nothing; the gradient does.
    Source: VESPO, arXiv:2602.10693; TRL's loss_type="vespo", whose bounds of the log-ratios are here too.

    >>> p = torch.zeros(1, 2, requires_grad=True)
    >>> vespo(p, torch.zeros(1, 2), torch.tensor([1.0]), torch.ones(1, 2)).backward(); p.grad.tolist()  # phi(1) = 1
    [[-0.5, -0.5]]
    """
    ratio = importance_ratio(logprobs, old_logprobs, completion_mask, **options)
    advantages = column(advantages, ratio).to(ratio.dtype)
    with torch.no_grad():
        log_ratios = (logprobs - old_logprobs).clamp(-_HIGHEST, _HIGHEST)
        log_w = (
            masked_sum(log_ratios, completion_mask, dim=1).unsqueeze(1).clamp(_LOWEST, _HIGHEST)
        )
        k = _by_sign(advantages >= 0, advantages, k_pos, k_neg)
        fall = _by_sign(advantages >= 0, advantages, lambda_pos, lambda_neg).clamp(min=1e-4)
        phi = torch.exp(fall + k * log_w - fall * log_w.exp()).nan_to_num(0.0, 0.0, 0.0)
    loss = -phi * advantages * logprobs + kl_term(ratio, logprobs, **options)
    return token_mean(loss, completion_mask, num_tokens)


def _by_sign(condition: Tensor, advantages: Tensor, yes: float, no: float) -> Tensor:
    """`yes` where the condition holds, else `no`, in the precision of the advantages."""
    return torch.where(condition, advantages.new_tensor(yes), advantages.new_tensor(no))

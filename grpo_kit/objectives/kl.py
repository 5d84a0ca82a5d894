"""The distance to the reference, from samples: three estimators, each with its own gradient.

With d = log pi(y) - log ref(y) and y drawn from pi, the current policy. KL(pi|ref) = E[d] is the reverse KL, as used in
RLHF, KL(ref|pi) the forward one. "As loss": autograd through the estimator, the sample held fixed. "In reward": the
detached estimator as a cost in the score function's gradient. In expectation:

     value                        as loss                  in reward
k1   KL(pi|ref), may be < 0       0: nothing is learned    grad KL(pi|ref): right
k2   E[d^2] / 2, near KL(pi|ref)  grad KL(pi|ref): right   grad E[d^2] / 2 - grad KL(pi|ref)
k3   KL(pi|ref), never < 0        grad KL(ref|pi)          grad KL(pi|ref) - grad KL(ref|pi)

The last two columns add up to the gradient of the first. So k3, the best estimate of the value, has the right gradient
in neither place. Near the reference the two KLs agree to second order: there k3 as a loss (GRPO's paper) pulls like
k2. Where the policy rarely samples what the reference samples often, ref/pi explodes. k3 times pi/pi_old, the ratio
differentiated too, has the reverse KL's gradient, on old samples as well: correct_kl in the group losses, and the
default of TRL 1.16 (use_bias_correction_kl=True, after DeepSeek-V3.2, arXiv:2512.02556).

All this holds if y is one draw: a whole completion with its summed log-probabilities, or one token. Added up over
the tokens of a completion, k2 and k3 as losses give each state's gradient with the states held fixed: the effect of
earlier tokens on the KL of later ones is missing. k1 in the reward has it.
Sources: Schulman, Approximating KL Divergence, joschu.net/blog/kl-approx.html; Tang and Munos, arXiv:2506.09477;
Liu et al., arXiv:2510.01555 (k1 in reward = k2 as loss).
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kit.objectives.logprobs import require_same_shape


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

"""Losses from preferences: pairs (P,) of a chosen and a rejected completion of one prompt, or single labels.

logprobs are of whole completions, prompt left out: sums over tokens (`sequence_logprobs`) for DPO, IPO, hinge and KTO,
means a token (average=True) for ORPO and SimPO. Every loss is the mean over the batch. sigma is the logistic function.

       models            data         reference enters
BT     reward model      pairs        -
DPO    policy, ref       pairs        log-ratio
IPO    policy, ref       pairs        log-ratio
hinge  policy, ref       pairs        log-ratio
KTO    policy, ref       labels       log-ratio, and z0 from other prompts
ORPO   policy            pairs        not at all; an NLL term takes its place
SimPO  policy            pairs        not at all; lengths are averaged out
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from grpo_kit.objectives.logprobs import require_same_shape


def bradley_terry(
    chosen_rewards: Tensor, rejected_rewards: Tensor, *, margin: float | Tensor = 0.0
) -> Tensor:
    """L = -mean log sigma(r_chosen - r_rejected - margin): the reward model's loss.

    chosen_rewards, rejected_rewards: (P,), scores of any size; only differences within a prompt are learned, so scores
    of two models, or two prompts, cannot be compared. margin: how much better, a number or (P,).
    Source: Bradley and Terry (1952); InstructGPT, arXiv:2203.02155, eq. 1; margin, Llama 2, arXiv:2307.09288, eq. 2;
    trl.RewardTrainer.

    >>> round(bradley_terry(torch.tensor([0.0]), torch.tensor([0.0])).item(), 4)  # log 2
    0.6931
    """
    require_same_shape(chosen_rewards=chosen_rewards, rejected_rewards=rejected_rewards)
    return -logsigmoid(chosen_rewards - rejected_rewards - margin).mean()


def implicit_reward(logprobs: Tensor, ref_logprobs: Tensor, *, beta: float = 0.1) -> Tensor:
    """beta (log pi - log ref): the reward for which pi is the best policy, up to a constant of the prompt. Any shape.

    Source: DPO, arXiv:2305.18290, eq. 5.

    >>> implicit_reward(torch.tensor([-1.0]), torch.tensor([-3.0]), beta=0.5).item()
    1.0
    """
    require_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    return beta * (logprobs - ref_logprobs)


def dpo(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    """L = -mean [(1 - e) log sigma(h) + e log sigma(-h)], h = beta [(log pi - log ref)_chosen - (...)_rejected].

    All (P,), sums over tokens. Bradley-Terry on `implicit_reward`: its optimum is pi* = ref exp(r / beta) / Z.
    beta: a small one lets the policy go far from the reference. label_smoothing: e, the share of wrong labels expected
    ("conservative DPO"); with e > 0 the gap stops at h = log((1 - e) / e). TRL 1.16 applies label_smoothing to
    loss_type="robust" and others but not to "sigmoid"; its CPOTrainer has this form, without a reference.
    Source: DPO, arXiv:2305.18290, eq. 7; smoothing, Mitchell (2023), ericmitchell.ai/cdpo.pdf; trl.DPOTrainer.

    >>> round(dpo(*torch.tensor([[-1.0], [-4.0], [-2.0], [-3.0]]), beta=0.5).item(), 4)  # -log sigma(0.5 * 2)
    0.3133
    """
    chosen = implicit_reward(chosen_logprobs, ref_chosen_logprobs, beta=beta)
    rejected = implicit_reward(rejected_logprobs, ref_rejected_logprobs, beta=beta)
    right, wrong = bradley_terry(chosen, rejected), bradley_terry(rejected, chosen)
    return (1 - label_smoothing) * right + label_smoothing * wrong


def ipo(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float = 0.1,
) -> Tensor:
    """L = mean (h - 1 / (2 beta))^2, h = (log pi - log ref)_chosen - (log pi - log ref)_rejected.

    All (P,). The gap has a target, 1 / (2 beta), where DPO's grows for ever on data without noise. beta: the paper's
    tau. The paper has sums over tokens. TRL, as the authors advised, gives means a token (average=True), and then the
    target is in nats a token: pass means to match TRL.
    Source: Azar et al., arXiv:2310.12036, eq. 17; trl.DPOTrainer, loss_type="ipo".

    >>> ipo(*torch.tensor([[-1.0], [-4.0], [-2.0], [-3.0]]), beta=0.5).item()  # (2 - 1)^2
    1.0
    """
    gap = _gap(
        chosen_logprobs, rejected_logprobs, ref_chosen_logprobs, ref_rejected_logprobs, 1.0
    )
    return ((gap - 1 / (2 * beta)) ** 2).mean()


def hinge(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float = 0.1,
) -> Tensor:
    """L = mean max(0, 1 - h), h = beta [(log pi - log ref)_chosen - (...)_rejected], as in `dpo`.

    All (P,), sums over tokens. A pair whose gap is 1 / beta or more moves nothing any more, where DPO goes on.
    Source: SLiC-HF, arXiv:2305.10425, with log-ratios as in arXiv:2309.06657; trl.DPOTrainer, loss_type="hinge".

    >>> hinge(*torch.tensor([[-1.0], [-4.0], [-2.0], [-3.0]]), beta=0.25).item()  # 1 - 0.25 * 2
    0.5
    """
    gap = _gap(
        chosen_logprobs, rejected_logprobs, ref_chosen_logprobs, ref_rejected_logprobs, beta
    )
    return (1 - gap).clamp(min=0).mean()


def _gap(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float
) -> Tensor:
    """How much more the chosen of each pair gained than the rejected, (P,)."""
    chosen = implicit_reward(chosen, ref_chosen, beta=beta)
    rejected = implicit_reward(rejected, ref_rejected, beta=beta)
    require_same_shape(chosen=chosen, rejected=rejected)
    return chosen - rejected


def kto(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    desirable: Tensor,
    reference_point: Tensor | float,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """L = mean_i w_i (1 - sigma(+-beta (log pi - log ref - z0))), + where desirable, - where not.

    logprobs, ref_logprobs: (R,), sums over tokens, unpaired. desirable: bool (R,). reference_point: z0, from
    `kto_reference_point`. Weights: desirable_weight x their number should be 1 to 4/3 times that of the undesirable.
    Where sigma saturates there is no gradient: completions far above or below z0 are treated as noise.
    Source: Ethayarajh et al., arXiv:2402.01306, eq. 7, weights eq. 8; trl.KTOTrainer.

    >>> kto(torch.tensor([0.0]), torch.tensor([0.0]), torch.tensor([True]), 0.0).item()
    0.5
    """
    require_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs, desirable=desirable)
    gain = beta * (logprobs - ref_logprobs - reference_point)
    weight = torch.where(
        desirable, gain.new_tensor(desirable_weight), gain.new_tensor(undesirable_weight)
    )
    return (weight * (1 - torch.sigmoid(torch.where(desirable, gain, -gain)))).mean()


def kto_reference_point(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """z0 = max(0, mean (log pi - log ref)) of completions that answer another prompt of the batch; no gradient.

    logprobs, ref_logprobs: (R,) of y_(i-1) after the prompt x_i: a biased but cheap stand-in for KL(pi|ref). Returns a
    scalar. A gain counts as one only above it.
    Source: Ethayarajh et al., arXiv:2402.01306, section 4.1; trl.KTOTrainer.

    >>> kto_reference_point(torch.tensor([-1.0, -5.0]), torch.tensor([-2.0, -7.0])).item()
    1.5
    """
    require_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    return (logprobs - ref_logprobs).mean().clamp(min=0.0).detach()


def orpo(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    *,
    beta: float = 0.1,
    nll: Tensor | None = None,
) -> Tensor:
    """L = NLL(chosen) - beta mean log sigma(log odds(chosen) - log odds(rejected)), odds = p / (1 - p).

    chosen_logprobs, rejected_logprobs: (P,), means a token: p is the geometric mean of the tokens' probabilities.
    beta: the paper's lambda. nll: the SFT term, a scalar; None is -mean(chosen_logprobs). TRL takes the mean over all
    tokens of the batch's chosen sequences, the prompt's too.
    Source: Hong et al., arXiv:2403.07691, eq. 4, 6 and 7; trl.experimental.orpo.ORPOTrainer.

    >>> p = torch.tensor([0.5]).log()
    >>> round(orpo(p, p, beta=1.0).item(), 4)  # log 2 + log 2
    1.3863
    """
    require_same_shape(chosen_logprobs=chosen_logprobs, rejected_logprobs=rejected_logprobs)
    log_odds = [p - torch.log(-torch.expm1(p)) for p in (chosen_logprobs, rejected_logprobs)]
    nll = -chosen_logprobs.mean() if nll is None else nll
    return nll + beta * bradley_terry(*log_odds)


def simpo(
    chosen_logprobs: Tensor, rejected_logprobs: Tensor, *, beta: float = 2.0, gamma: float = 1.0
) -> Tensor:
    """L = -mean log sigma(beta (log pi_chosen - log pi_rejected) - gamma), log-probabilities as means a token.

    Both (P,), means a token: what decoding ranks by, and no reference. gamma: the margin, in units of beta x nats.
    TRL calls them beta and simpo_gamma; its CPOTrainer adds an NLL term unless cpo_alpha=0.
    Source: Meng et al., arXiv:2405.14734, eq. 6; trl.experimental.cpo.CPOTrainer, loss_type="simpo".

    >>> round(simpo(torch.tensor([-1.0]), torch.tensor([-1.5])).item(), 4)  # -log sigma(2 * 0.5 - 1)
    0.6931
    """
    return bradley_terry(beta * chosen_logprobs, beta * rejected_logprobs, margin=gamma)

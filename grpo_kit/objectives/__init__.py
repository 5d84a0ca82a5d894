"""Every loss in textbook form, for teaching and as the tests' oracle. Pure functions on tensors, only torch.

Shapes: R = B * G completions, those of one prompt adjacent, by T tokens; P preference pairs. Every loss is to be
minimised. Each docstring has the equation, its paper, and where TRL 1.16 differs.

logprobs            of tokens and of completions, and means over them
advantages          rewards -> advantages: a group's mean, leave-one-out, GAE, weights on positives, filtered negatives
ratios              how much likelier tokens and completions became, and the clip
policy_gradient     REINFORCE, RLOO, PPO
group_losses        GRPO and its relatives, all with the same call
soft_losses         three of them without a hard clip, or without a division by length
kl                  k1, k2, k3: estimators of the KL, and which has the right gradient
preference          Bradley-Terry, DPO, IPO, KTO, ORPO, SimPO
"""

from typing import TYPE_CHECKING

from grpo_kit._support.lazy import lazy

if TYPE_CHECKING:
    from grpo_kit.objectives.advantages import (
        filter_negative_tokens,
        gae,
        group_advantages,
        rloo_advantages,
        token_rewards,
        weigh_advantages,
    )
    from grpo_kit.objectives.group_losses import (
        bnpo,
        cispo,
        dapo,
        dr_grpo,
        grpo,
        gspo,
        gspo_token,
        overlong_filter,
    )
    from grpo_kit.objectives.logprobs import (
        clip_fraction,
        k1,
        k2,
        k3,
        masked_mean,
        masked_sum,
        sequence_logprobs,
        sequence_ratio,
        token_logprobs,
        token_ratio,
    )
    from grpo_kit.objectives.policy_gradient import ppo_policy, ppo_value, reinforce, rloo
    from grpo_kit.objectives.preference import (
        bradley_terry,
        dpo,
        hinge,
        implicit_reward,
        ipo,
        kto,
        kto_reference_point,
        orpo,
        simpo,
    )
    from grpo_kit.objectives.soft_losses import luspo, sapo, vespo

__all__ = lazy(__name__)

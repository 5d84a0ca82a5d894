"""PositivesTrainer: what to do where nearly every completion is wrong.

At a success rate p a group of G is all wrong with probability (1 - p)^G: at p = 2 %, G = 8 that is 85 % of the groups,
and they teach nothing. In those left one right completion stands against seven wrong ones.
"""

from __future__ import annotations

from typing import Any

import torch

from grpo_kit.argument_checks import check_number, check_whole
from grpo_kit.objectives import weigh_advantages
from grpo_kit.training.draw_rows import check_can_draw, draw_rows
from grpo_kit.training.trainer import GRPOTrainer
from grpo_kit.training.trl_internals import metrics_set_aside

_EXTRA = "rollout/extra_completions"
_PAD = {"prompt_ids": "left", "prompt_mask": "left"}  # all else with a column a token is padded on the right
_KNOWN = {
    "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch",
    "old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps", "sampling_per_token_entropies",
    "importance_sampling_ratio", "tool_mask",
}  # fmt: skip


class PositivesTrainer(GRPOTrainer):
    """GRPOTrainer that weighs positive against negative advantages and replaces groups that teach nothing.

    positive_weight, negative_weight: factors >= 0 on advantages above and below 0; 1 leaves them. negative_weight=0
    filters negatives out, as rejection sampling does. The loss is divided by the same tokens or rows as before, so a
    completion of weight 0 still counts there: weights change a completion's pull, not the others'.
    resample: rounds >= 0. While the batch has groups without a signal, another batch of prompts is drawn from
    train_dataset (a Dataset), sampled and scored, and its groups with a signal take their place (dynamic sampling).

    Metrics: rollout/extra_completions, those of the further rounds, the cost; num_tokens counts them too. Reward,
    lengths and frac_reward_zero_std are of the first batch alone: rounds end once groups with a signal are found, so a
    mean over all of them would be too high (at a success rate of 3 %, 4 groups of 8 and 3 rounds, by a tenth of it).
    completions.parquet holds every round, `advantage` as it was before the weights.
    Raises ValueError for weights that are not finite or below 0; for resampling with several processes, images, or
    advantages that depend on other groups (scale_rewards="batch", "normalize_then_sum").
    Sources: DAPO, arXiv:2503.14476, section 3.2 (dynamic sampling); RAFT and Reinforce-Rej, arXiv:2504.11343 (positives
    alone); arXiv:2506.01347 finds the reverse, that negatives alone do well and positives narrow the policy.

    >>> PositivesTrainer(model, task, args, positive_weight=4.0, resample=3)  # doctest: +SKIP
    """

    def __init__(
        self,
        *args: Any,
        positive_weight: float = 1.0,
        negative_weight: float = 1.0,
        resample: int = 0,
        **options: Any,
    ) -> None:
        for name, weight in (("positive_weight", positive_weight), ("negative_weight", negative_weight)):
            check_number(name, weight, 0, hint="; 1 changes nothing")
        check_whole("resample", resample, 0, hint=", the rounds of drawing again (0: none)")
        super().__init__(*args, **options)
        self.positive_weight, self.negative_weight, self.resample = positive_weight, negative_weight, resample
        if resample:
            self._refuse_unsupported()

    def own_options(self) -> dict[str, Any]:
        """As they were given; run.json keeps them."""
        names = ("positive_weight", "negative_weight", "resample")
        return {name: getattr(self, name) for name in names}

    def _refuse_unsupported(self) -> None:
        if self.scale_rewards == "batch" or self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                f"resample={self.resample} mixes groups of several batches, but with scale_rewards="
                f"{self.scale_rewards!r} and multi_objective_aggregation={self.multi_objective_aggregation!r} an "
                "advantage depends on its batch; use scale_rewards='group' or 'none', and 'sum_then_normalize'"
            )
        if self.accelerator.num_processes > 1:
            raise ValueError(
                f"resample={self.resample} with {self.accelerator.num_processes} processes, which would stop after "
                "different rounds; start one"
            )
        check_can_draw(self.train_dataset, f"resample={self.resample}")

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return output
        if self.resample:
            output = self._with_signal(inputs, output)
        if (self.positive_weight, self.negative_weight) != (1, 1):
            output["advantages"] = weigh_advantages(
                output["advantages"], self.positive_weight, self.negative_weight
            )
        return output

    def _with_signal(self, inputs: list[dict[str, Any]], output: dict[str, Any]) -> dict[str, Any]:
        size, need = self.num_generations, len(inputs) // self.num_generations
        metrics = self._metrics["train"]
        rounds, chosen = [output], [(0, g) for g in groups_with_signal(output["advantages"], size)]
        with metrics_set_aside(self, keep=("num_tokens",)):  # a row of metrics is about the first batch
            while len(chosen) < need and len(rounds) <= self.resample:
                name = f"resample {self._step} {len(rounds)}"
                rows = draw_rows(self.train_dataset, need, size, seed=self.args.seed, name=name)
                more = super()._generate_and_score_completions(rows)
                chosen += [(len(rounds), g) for g in groups_with_signal(more["advantages"], size)]
                rounds.append(more)
        extra = float((len(rounds) - 1) * len(inputs))
        metrics[_EXTRA] = [sum(metrics[_EXTRA], extra)]  # of the step, which may sample several times
        if len(rounds) == 1:
            return output
        # Too few even so: the first batch's own groups fill up, with their advantages of 0.
        chosen += [(0, g) for g in range(need) if (0, g) not in chosen]
        return join_groups(rounds, chosen[:need], size, pad_id=self._tokenizer.pad_token_id)


def groups_with_signal(advantages: torch.Tensor, group_size: int) -> list[int]:
    """Indices of the groups whose advantages differ; advantages (B*G,), a group's adjacent.

    >>> groups_with_signal(torch.tensor([0.0, 0.0, 1.0, -1.0]), 2)
    [1]
    """
    # Not "other than 0": eight rewards of 0.1 have a mean that is not 0.1 to the last bit; the rest is alike for all.
    groups = advantages.view(-1, group_size)
    return groups.ne(groups[:, :1]).any(1).nonzero().flatten().tolist()


def join_groups(
    batches: list[dict[str, Any]], chosen: list[tuple[int, int]], group_size: int, *, pad_id: int
) -> dict[str, Any]:
    """Whole groups of several scored batches as one batch, padded to one width, its tokens counted anew.

    chosen: (batch, group) of each group, in order.
    Raises ValueError for a batch that holds more than text (images).
    """
    unknown = set().union(*batches) - _KNOWN
    if unknown:
        raise ValueError(f"batches hold {sorted(unknown)}, which cannot be joined; resample text only")
    joined: dict[str, Any] = {}
    for name in batches[0]:
        if name == "num_items_in_batch":
            continue
        parts = [batches[b][name][g * group_size : (g + 1) * group_size] for b, g in chosen]
        if parts[0].ndim == 2:
            fill = pad_id if name in ("prompt_ids", "completion_ids") else 0
            width = max(part.size(1) for part in parts)
            parts = [
                torch.nn.functional.pad(
                    part, (width - part.size(1), 0) if name in _PAD else (0, width - part.size(1)), value=fill
                )
                for part in parts
            ]
        joined[name] = torch.cat(parts)
    mask = joined["completion_mask"]
    joined["num_items_in_batch"] = (mask * joined["tool_mask"] if "tool_mask" in joined else mask).sum()
    return joined

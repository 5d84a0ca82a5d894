"""Are the sampler's weights the trainer's? Asked of every rollout that another engine made, before it is trained on.

Sampler and trainer score the same tokens. With the same weights they differ by rounding, and by about as much as they
did at the first rollout; a weight that a sync did not reach shows as more. The kit's own engine has no second copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from grpo_kit.rollout.compare_logprobs import few
from grpo_kit.training.batch import Batch
from grpo_kit.training.plain_pass import plain_logprobs

# Nats a token, the mean over a rollout. The floor of 16-bit samplers is the red flag "sampler gap"'s.
_FLOOR = {True: 2e-3, False: 0.05}  # by: both in float32
_TIMES_THE_FIRST = 5
_FIRST = 4  # floors that the first rollout may be apart


class SamplerNotInStep(RuntimeError):
    """The sampler's weights are not the trainer's; nothing was trained on what it wrote."""


class InStepCheck:
    """How far a sampler's log-probabilities are from the trainer's, in one train(); first: at its first rollout."""

    def __init__(self, trainer: Any, say: Callable[[str], None]) -> None:
        self.trainer, self.say = trainer, say
        self.first: float | None = None

    def begin(self) -> None:
        """A run begins or goes on."""
        self.first = None
        if self.trainer.use_vllm and not self._exact():
            here = torch.bfloat16 if self.trainer.args.bf16 else next(self.trainer.model.parameters()).dtype
            names = [
                str(dtype).removeprefix("torch.") for dtype in (self.trainer.vllm_generation.dtype, here)
            ]
            self.say(
                f"vLLM samples in {names[0]}, the trainer scores in {names[1]}: about 0.01 nats a token apart by "
                "rounding. rollout/logprob_gap says how far; trl weighs the completions by it."
            )

    def compare(self, batch: Batch) -> float:
        """The mean gap of a rollout, in nats a token. Raises SamplerNotInStep where it is more than rounding."""
        gap = self._gap(batch)
        floor, step = _FLOOR[self._exact()], self.trainer.state.global_step
        most = _FIRST * floor if self.first is None else max(_TIMES_THE_FIRST * self.first, floor)
        if self._cuts_off():
            most += 1.0  # vLLM's are of what was left to choose from: never below the trainer's
        if not gap <= most:
            when = "at the first rollout"
            if self.first is not None:
                when = f"at the rollout after step {step}, {self.first:.2g} at the first"
            raise SamplerNotInStep(
                f"the sampler's weights are not the trainer's: its log-probabilities are {gap:.2g} nats a token away "
                f"{when}, where rounding makes at most {most:.2g}. Nothing was trained on these completions. Use "
                "rollout='kit'; for a server, see that it serves this model in the dtype that it was trained in"
            )
        if self.first is None:
            self.first = gap
        return gap

    def _gap(self, batch: Batch) -> float:
        sampled, mask, scored = batch.sampler_logprobs, batch.loss_mask().bool(), batch.old_logprobs
        if scored is None:
            rows, scored = self._few(batch)
            sampled, mask = sampled[rows], mask[rows]
        apart = (scored - sampled)[mask & ~sampled.isnan()].abs()
        worst = self.trainer.accelerator.gather(apart.mean() if len(apart) else apart.sum()).max()
        return worst.item()  # of all processes: they stop together or not at all

    def _few(self, batch: Batch) -> tuple[list[int], torch.Tensor]:
        """Some rows, and their log-probabilities by the trainer, where trl had no use for them."""
        kept = lambda ids, mask: [row[m.bool()].tolist() for row, m in zip(ids, mask, strict=True)]  # noqa: E731
        prompts = kept(batch.prompt_ids, batch.prompt_mask)
        completions = kept(batch.completion_ids, batch.completion_mask)
        rows = few(list(map(tuple, prompts)), list(map(len, completions)))
        made = plain_logprobs(self.trainer, [prompts[i] for i in rows], [completions[i] for i in rows])
        width = batch.completion_ids.size(1)
        return rows, torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in made])

    def _exact(self) -> bool:
        trainer = self.trainer
        narrow = trainer.args.bf16 or trainer.args.fp16
        return trainer.vllm_generation.dtype == torch.float32 and not narrow

    def _cuts_off(self) -> bool:
        made = self.trainer.vllm_generation
        return made.top_p < 1 or made.top_k > 0 or bool(made.min_p) or made.repetition_penalty != 1

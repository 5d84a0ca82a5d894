"""EngineSample: the completions of a step by the kit's engine, on the weights that are trained; no second copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from grpo_kit.loop.generate import as_batch, generation_config, prompts_of_groups
from grpo_kit.loop.grpo_config import Config, StepNumbers
from grpo_kit.loop.padded_update import autocast
from grpo_kit.loop.step_batch import Batch
from grpo_kit.models.token_lists import end_ids
from grpo_kit.rollout import RolloutEngine


class EngineSample:
    """Called as `generate` is. may_stay(engine, prompt_ids, completion_ids): may keys, values and graphs be kept?

    bits: of the engine's products. Its log-probabilities are those that it sampled by.
    """

    def __init__(
        self, model: Any, may_stay: Callable[[RolloutEngine, list, list], bool], bits: int = 32
    ) -> None:
        self.engine, self.may_stay, self.bits = RolloutEngine(model, bits=bits), may_stay, bits

    def __call__(
        self,
        model: Any,
        tokenizer: Any,
        task: Any,
        rows: Sequence[dict[str, Any]],
        config: Config,
        numbers: StepNumbers,
    ) -> Batch:
        """group_size completions of each row's prompt, with their log-probabilities and entropies."""
        prompts = prompts_of_groups(model, tokenizer, task, rows, config)
        ends, stays = end_ids(model, tokenizer), False
        how = generation_config(tokenizer, ends, config, numbers)
        first = numbers.first * config.group_size
        places = range(first, first + len(prompts))  # a completion's draws do not depend on who makes it
        try:
            with autocast(config, next(model.parameters()).device):
                made = self.engine.generate(prompts, how, seed=int(torch.randint(2**62, ())), rows=places)
            stays = self.may_stay(self.engine, prompts, made.completion_ids)
        finally:
            if not stays:
                self.engine.release()
        return as_batch(
            tokenizer, rows, config.group_size, prompts, made.completion_ids, ends,
            sampler_logprobs=made.policy_logprobs, entropies=made.entropies,
        )  # fmt: skip

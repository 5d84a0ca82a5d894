"""transformers' generate, with each prompt prefilled once per group instead of once per completion."""

from __future__ import annotations

from itertools import groupby

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from grpo_kit.decoding import left_pad, up_to_end


@torch.no_grad()
def generate_shared_prefill(
    model: PreTrainedModel, prompt_ids: list[list[int]], generation_config: GenerationConfig
) -> list[list[int]]:
    """Completion token ids, one list a row, each ending at its first end-of-sequence token if it has one.

    prompt_ids: the completions of one prompt adjacent, as TRL repeats them; groups may differ in size.
    The tokens are those of `model.generate` on the repeated prompts, with the same random state.
    Raises ValueError for an empty prompt.
    """
    if not prompt_ids or not all(prompt_ids):
        raise ValueError("prompt_ids holds an empty prompt; every prompt needs at least one token")
    device = model.device
    groups = [(ids, len(list(same))) for ids, same in groupby(prompt_ids)]
    ids, mask = left_pad([p for p, _ in groups], generation_config.pad_token_id, device)  # (P, T)
    width = ids.size(1)
    repeats = torch.tensor([count for _, count in groups], device=device)

    cache = DynamicCache(config=model.config)
    if width > 1 and len(groups) < len(prompt_ids):
        position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
        model(
            input_ids=ids[:, :-1],
            attention_mask=mask[:, :-1],
            position_ids=position_ids[:, :-1],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache.batch_select_indices(torch.arange(len(groups), device=device).repeat_interleave(repeats))
    ids, mask = ids.repeat_interleave(repeats, 0), mask.repeat_interleave(repeats, 0)  # (P*G, T)
    sequences = model.generate(
        input_ids=ids, attention_mask=mask, past_key_values=cache, generation_config=generation_config
    )
    ends = generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    return [up_to_end(row, ends) for row in sequences[:, width:].tolist()]

"""generate: the completions of a step, plainly, by transformers' generate. It trains any causal model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from grpo_kit._support.argument_checks import template_tokens
from grpo_kit.loop.config import Config, StepNumbers
from grpo_kit.loop.step_batch import Batch
from grpo_kit.models._model_facts import base_model, check_context, context_length
from grpo_kit.models.token_lists import end_ids, generate_rows, up_to_end


def generate(
    model: Any, tokenizer: Any, task: Any, rows: Sequence[dict], config: Config, numbers: StepNumbers
) -> Batch:
    """group_size completions of each row's prompt, at the temperature of the step.

    rows: B of the task's. The model is in evaluation mode: no dropout. Its random
    numbers come from torch's global generator, which the loop seeds, and from numbers.first.
    Raises ValueError for a prompt that leaves no room for a completion.
    """
    prompt_ids = prompts_of_groups(model, tokenizer, task, rows, config)
    completion_ids = complete_prompts(model, tokenizer, prompt_ids, config, numbers)
    ends = end_ids(model, tokenizer)
    return as_batch(tokenizer, rows, config.group_size, prompt_ids, completion_ids, ends)


def complete_prompts(
    model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], config: Config, numbers: StepNumbers
) -> list[list[int]]:
    """The tokens that the model writes behind each prompt, by transformers' generate; the end token included."""
    ends = end_ids(model, tokenizer)
    generation = generation_config(tokenizer, ends, config, numbers)
    # What a checkpoint brings along (Qwen2.5: top_k 20, repetition_penalty 1.1) would fill in what is left open.
    base = base_model(model)
    checkpoints_own, base.generation_config = base.generation_config, GenerationConfig()
    try:
        torch.manual_seed(int(torch.randint(2**62, ())) + numbers.first)
        with torch.no_grad():
            completion_ids = generate_rows(model, prompts, generation)
    finally:
        base.generation_config = checkpoints_own
    return [up_to_end(ids, ends) for ids in completion_ids]


def generation_config(
    tokenizer: Any, ends: Sequence[int], config: Config, numbers: StepNumbers
) -> GenerationConfig:
    """How a step samples: the model's distribution at the step's temperature, and nothing that a checkpoint adds."""
    pad = tokenizer.pad_token_id
    if pad is None:
        pad = ends[0] if ends else 0
    return GenerationConfig(
        max_new_tokens=config.max_completion_tokens,
        do_sample=True,
        temperature=numbers.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p or None,
        repetition_penalty=config.repetition_penalty,
        eos_token_id=list(ends),
        pad_token_id=pad,
    )


def as_batch(
    tokenizer: Any,
    rows: Sequence[dict[str, Any]],
    group_size: int,
    prompt_ids: list[list[int]],
    completion_ids: list[list[int]],
    ends: Sequence[int],
    **columns: Any,
) -> Batch:
    """The Batch of completions that are known by their tokens. columns: other fields of Batch."""
    hidden_ids = template_tokens(tokenizer, ends)
    visible_ids = [[token for token in ids if token not in hidden_ids] for ids in completion_ids]
    return Batch(
        rows=[row for row in rows for _ in range(group_size)],
        groups=[group for group in range(len(rows)) for _ in range(group_size)],
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        completions=tokenizer.batch_decode(visible_ids, skip_special_tokens=False),
        cut_off=[not ids or ids[-1] not in ends for ids in completion_ids],
        **columns,
    )


def render(
    model: Any, tokenizer: Any, task: Any, rows: Sequence[dict[str, Any]], max_completion_tokens: int
) -> list[list[int]]:
    """The tokens of each row's prompt. Raises ValueError for one without room for a completion."""
    prompts = tokenizer(task.render(tokenizer, rows))["input_ids"]
    limit, mend = context_length(model), "drop the row or lower max_completion_tokens"
    for row, ids in zip(rows, prompts, strict=True):
        prompt_name = f"the prompt of {row['question']!r:.200}"
        if not ids:
            raise ValueError(f"{prompt_name} has no tokens; give it at least one")
        check_context(limit, len(ids), max_completion_tokens, where=prompt_name, mend=mend)
    return [list(ids) for ids in prompts]


def prompts_of_groups(
    model: Any, tokenizer: Any, task: Any, rows: Sequence[dict[str, Any]], config: Config
) -> list[list[int]]:
    """(B * G) prompts: each row's, once for each completion of its group. Raises ValueError as render does."""
    prompts = render(model, tokenizer, task, rows, config.max_completion_tokens)
    return [ids for ids in prompts for _ in range(config.group_size)]

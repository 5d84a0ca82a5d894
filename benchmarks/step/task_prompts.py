"""Work with a task's own prompts, all of which begin with the same system text and worked example."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from benchmarks.step.workload import Shape, Workload, finished, plain_words, word_completions
from grpo_kit import preset
from grpo_kit.models._model_facts import base_model
from grpo_kit.tasks import countdown


def main_job(
    model: Any, tokenizer: PreTrainedTokenizerBase, name: str, shape: Shape, seed: int
) -> Workload:
    """A step of what notebook 05 trains with the profile of that name, before training.

    The prompts are drawn from the task's training rows. The completions are what `model`, where it is, samples at the
    profile's temperature: with transformers' own generate, so that no change of the kit changes the work.
    """
    cfg = preset(name)
    draw = random.Random(seed)
    task = cfg.make_task()
    prompts = task.render(tokenizer, draw.sample(task.train, shape.prompts))
    ids = [tokenizer(text).input_ids for text in prompts]
    completions = sampled(model, tokenizer, ids, shape, cfg.temperature, seed)
    tokens = f"sampled from the weights at temperature {cfg.temperature:g}, then forced"
    return finished(tokenizer, shape, seed, prompts, ids, completions, draw, tokens)


def think(tokenizer: PreTrainedTokenizerBase, shape: Shape, seed: int) -> Workload:
    """Countdown's prompts with thoughts, and completions of words as long as thoughts are."""
    draw = random.Random(seed)
    task = countdown(n_train=64, n_held_out=1, numbers=(3, 4), think=True)
    prompts = task.render(tokenizer, draw.sample(task.train, shape.prompts))
    ids = [tokenizer(text).input_ids for text in prompts]
    completions = word_completions(tokenizer, shape, seed, plain_words(tokenizer, draw), draw)
    return finished(tokenizer, shape, seed, prompts, ids, completions, draw)


@torch.no_grad()
def sampled(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: list[list[int]],
    shape: Shape,
    temperature: float,
    seed: int,
) -> list[list[int]]:
    """group_size completions of each prompt, ending in eos unless cut off at max_completion."""
    torch.manual_seed(seed)
    eos = tokenizer.eos_token_id
    width = max(map(len, prompt_ids))
    rows = [ids for ids in prompt_ids for _ in range(shape.group_size)]
    device = base_model(model).get_input_embeddings().weight.device
    padded = torch.tensor([[eos] * (width - len(ids)) + ids for ids in rows], device=device)
    mask = torch.tensor(
        [[0] * (width - len(ids)) + [1] * len(ids) for ids in rows], device=device
    )
    how = GenerationConfig(
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=shape.max_completion,
        eos_token_id=eos,
        pad_token_id=eos,
    )
    out = model.eval().generate(input_ids=padded, attention_mask=mask, generation_config=how)
    written = out[:, width:].tolist()
    return [ids[: ids.index(eos) + 1] if eos in ids else ids for ids in written]

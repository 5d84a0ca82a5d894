"""Let a model complete prompts, greedily or sampled, and leave it exactly as it was.

Simplifications: one device; a prompt asked for several samples is computed once for each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from transformers import GenerationConfig

from grpo_kit.models import base_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Completion(NamedTuple):
    """text without special tokens; tokens written, the end included; cut_off at the limit?"""

    text: str
    tokens: int
    cut_off: bool


def complete(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    samples: int = 1,
    temperature: float = 0.0,
    batch_size: int = 32,
    seed: int = 0,
) -> list[Completion]:
    """The model's completions of rendered prompts, `samples` adjacent ones for each: B prompts give B * samples.

    temperature: 0 decodes greedily; above 0 samples from the model's whole distribution (no top-k, no top-p, no
    penalty, whatever the checkpoint asks for). Prompts are tokenized and completions ended as in TRL.
    Runs in evaluation mode; the model's modes and settings and the random state are as before afterwards.
    Raises ValueError naming the argument for sizes below 1, a negative temperature, several greedy samples, and
    a prompt that leaves no room in the model's context.

    >>> complete(model, tokenizer, [prompt], max_new_tokens=8, samples=8, temperature=1.0)  # doctest: +SKIP
    """
    sizes = {"samples": samples, "max_new_tokens": max_new_tokens, "batch_size": batch_size}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}={value!r} must be at least 1")
    if not temperature >= 0:
        raise ValueError(f"temperature={temperature!r} must be 0 (greedy) or above")
    if temperature == 0 and samples > 1:
        raise ValueError(
            f"temperature=0 makes samples={samples} alike; use a temperature above 0, such as 1.0"
        )
    if not prompts:
        return []
    ids = tokenizer(list(prompts))["input_ids"]  # with the default special tokens
    _check_room(model, ids, max_new_tokens)
    ids = [prompt for prompt in ids for _ in range(samples)]  # (B * samples)
    how = (
        {"do_sample": True, "temperature": float(temperature), "top_k": 0}
        if temperature
        else {"do_sample": False}
    )
    ends = _end_ids(model, tokenizer)
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        eos_token_id=ends,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends[0],
        disable_compile=True,
        **how,
    )
    made: dict[int, Completion] = {}
    order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))  # alike lengths together: little padding
    with _as_it_was(model, seed):
        for first in range(0, len(order), batch_size):
            batch = order[first : first + batch_size]
            for i, tokens in zip(batch, _generate(model, [ids[i] for i in batch], config), strict=True):
                written = up_to_end(tokens, ends)
                text = tokenizer.decode(written, skip_special_tokens=True)
                made[i] = Completion(text, len(written), written[-1] not in ends)
    return [made[i] for i in range(len(ids))]


def left_pad(
    prompts: Sequence[Sequence[int]], pad: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, both long (B, T), padded in front to the longest prompt.

    >>> left_pad([[5, 6], [7]], 0, torch.device("cpu"))[0].tolist()
    [[5, 6], [0, 7]]
    """
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    return ids, mask


def up_to_end(tokens: list[int], ends: Collection[int]) -> list[int]:
    """The tokens up to the first that ends a completion, itself included; all of them if none does.

    >>> up_to_end([5, 2, 2], {2})
    [5, 2]
    """
    length = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:length]


def _generate(model: PreTrainedModel, prompts: list[list[int]], config: GenerationConfig) -> list[list[int]]:
    """The new tokens of one batch, padded at the end."""
    # Padded here and not by the tokenizer, whose padding side then needs no setting.
    ids, mask = left_pad(prompts, config.pad_token_id, next(model.parameters()).device)
    made = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    return made[:, ids.size(1) :].tolist()


def _end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token that ends a completion: the tokenizer's and all that the model declares."""
    declared = base_model(model).generation_config.eos_token_id
    declared = [] if declared is None else [declared] if isinstance(declared, int) else list(declared)
    return list(dict.fromkeys([tokenizer.eos_token_id, *declared]))


@contextmanager
def _as_it_was(model: PreTrainedModel, seed: int) -> Iterator[None]:
    """Evaluation mode, plain decoding and a seed inside; modes, settings and random state put back."""
    base = base_model(model)
    modes = [(module, module.training) for module in model.modules()]
    settings = base.generation_config
    device = next(model.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(seed)
        model.eval()
        # Else what a checkpoint brings along (Qwen2.5: top_k 20, repetition_penalty 1.1) fills what we leave open.
        base.generation_config = GenerationConfig()
        try:
            yield
        finally:
            base.generation_config = settings
            for module, training in modes:
                module.training = training


def _check_room(model: PreTrainedModel, ids: Sequence[Sequence[int]], limit: int) -> None:
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for place, prompt in enumerate(ids):
        if context and len(prompt) + limit > context:
            raise ValueError(
                f"prompts[{place}] has {len(prompt)} tokens, which with max_new_tokens={limit} exceeds the model's "
                f"context of {context}; drop it or lower max_new_tokens"
            )

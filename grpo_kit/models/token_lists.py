"""Lists of token ids: padded in front for a forward, cut behind the token that ends a completion."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from grpo_kit.models.model_facts import base_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token that ends a completion: the tokenizer's and all that the model declares."""
    declared = base_model(model).generation_config.eos_token_id
    declared = [] if declared is None else [declared] if isinstance(declared, int) else list(declared)
    return [end for end in dict.fromkeys([tokenizer.eos_token_id, *declared]) if end is not None]


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
    """The tokens up to and including the first that ends a completion; all of them if none does.

    >>> up_to_end([5, 2, 2], {2})
    [5, 2]
    """
    length = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:length]

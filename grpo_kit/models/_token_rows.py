"""Rows of a head that no token of the tokenizer stands behind: never sampled, no probability.

Heads are made longer than vocabularies, for the shapes of matrix products: Qwen2.5 has 151,936 rows and 151,665 tokens.
Nothing trains the others down, and an update that takes probability from tokens gives some of it to them. Here the
head itself gives them a logit of -1e30, for sampling, log-probabilities, reference, entropy and evaluation alike, in
generate and in every forward pass. What reads the head's weights directly asks token_rows(). Only rows behind the last
token count. Behind a head that caps its logits (Gemma 2) a closed row has the negative cap.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from grpo_kit.models._model_facts import base_model

_NEVER = -1e30  # -inf would make an entropy NaN, and so would a number that a low temperature makes -inf


def close_rows(model: Any, tokenizer: Any) -> int:
    """Close the head's rows behind the tokenizer's last token; the number of rows that stay open.

    May be called again, with a tokenizer that has more tokens too.

    >>> close_rows(model, tokenizer)  # of Qwen2.5  # doctest: +SKIP
    151665
    """
    head = base_model(model).get_output_embeddings()
    rows = getattr(getattr(head, "weight", None), "shape", [0])[0]
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or not rows:
        return rows
    tokens = min(rows, 1 + max(len(tokenizer) - 1, *tokenizer.added_tokens_decoder, 0))
    if tokens < rows and not hasattr(head, "token_rows"):
        head.register_forward_hook(no_probability)
    if tokens < rows or hasattr(head, "token_rows"):
        head.token_rows = tokens
    return tokens


def token_rows(model: Any) -> int:
    """The rows of the model's head that are open: all, unless close_rows has closed some."""
    head = base_model(model).get_output_embeddings()
    return getattr(head, "token_rows", head.weight.size(0))


def no_probability(head: torch.nn.Module, inputs: Any, logits: torch.Tensor) -> None:
    """The hook on a head. Nothing is recorded: a probability of 0 has a gradient of 0 anyway."""
    with torch.no_grad():
        logits[..., head.token_rows :] = max(_NEVER, torch.finfo(logits.dtype).min)

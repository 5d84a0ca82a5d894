"""How many tokens a model reads at once, and the check that a prompt and its completion fit."""

from __future__ import annotations

import math
from typing import Any


def context_length(model: Any) -> float:
    """The most tokens of a prompt and its completion together; math.inf if the model has no config that names them.

    >>> context_length(load_policy("tiny-random", quiet=True)[0])  # doctest: +SKIP
    1024
    """
    config = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(config, "max_position_embeddings", None) or math.inf


def check_context(
    context: float,
    prompt_tokens: int,
    max_completion_tokens: int,
    *,
    where: str,
    mend: str,
    length: str = "max_completion_tokens",
) -> None:
    """Raises ValueError for a prompt of so many tokens that its completion may pass the end of the context.

    context: from context_length. where: the prompt's name in the message, such as "prompts[3]". mend: the remedy.
    length: the caller's name for max_completion_tokens.

    >>> check_context(1024, 1000, 24, where="prompts[3]", mend="drop it")  # 1024 tokens fit
    """
    if prompt_tokens + max_completion_tokens > context:
        raise ValueError(
            f"{where} has {prompt_tokens} tokens; with {length}={max_completion_tokens} that is "
            f"{prompt_tokens + max_completion_tokens}, which exceeds the model's context of {context}: {mend}"
        )

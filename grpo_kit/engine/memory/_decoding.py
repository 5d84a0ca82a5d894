"""The memory of a rollout, and how many sequences to decode at once: from a model's config and the free memory."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from transformers import PretrainedConfig

from grpo_kit.engine.memory._activations import USED_OF_FREE, has_sizes
from grpo_kit.models._model_facts import base_model

# Most rows of a batch. CPU: SmolLM2-135M on 2 cores, where 32 took a fifth longer and 128 and 256 were not clearly
# faster. A card is bound by launches, so more rows cost little: an estimate, not measured.
MOST_ROWS = {"cpu": 64, "cuda": 256}
# Rows and prompt tokens for which the engine allocates memory on a card; fewer are padded.
_CARD_ROWS = (256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2)
_CARD_TOKENS = 64
UNKNOWN_ROWS = 64  # for models of unknown size
# Bytes of a float32 pass over the logits, of what the sampler keeps of each logit, and of what it takes besides where
# something narrows the distribution. Counted on the pretend card (tests/pretend_card), as is a prompt's token.
_PASS, _SAMPLED = 4, 4
_NARROWED = {"top_k": 8, "min_p": 9, "repetition_penalty": 18, "top_p": 25}
_PREFILL_TOKENS = 16_384  # that the engine computes at once


def decode_bytes(
    config: PretrainedConfig,
    itemsize: int,
    *,
    rows: int,
    prompts: int,
    prompt_tokens: int,
    completion_tokens: int,
    narrowed_by: Collection[str] = tuple(_NARROWED),
) -> dict[str, float]:
    """Bytes of `rows` sequences behind `prompts` prompts (each computed once), by kind.

    "keys and values": of all prompt and completion tokens. "logits and sampling": the larger of one decode step's and
    the prompts' forward pass, with its own keys and values. itemsize: bytes of a number in the model's dtype.
    narrowed_by: of _NARROWED, what makes the sampled distribution another than softmax(logits / temperature).

    >>> from transformers import LlamaConfig
    >>> smol = LlamaConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
    ...                    num_attention_heads=9, num_key_value_heads=3)
    >>> found = decode_bytes(smol, 4, rows=64, prompts=64, prompt_tokens=96, completion_tokens=12)
    >>> {name: round(value / 2**20) for name, value in found.items()}  # MiB, whatever narrows
    {'keys and values': 304, 'logits and sampling': 435}
    """
    config = config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    key_value = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * itemsize
    tokens = prompts * prompt_tokens
    sampled = _SAMPLED + max((_NARROWED[name] for name in narrowed_by), default=0)
    logits = rows * (2 * itemsize + max(itemsize, _PASS) + sampled) + prompts * itemsize
    prefill = (3 * config.intermediate_size + 4 * config.hidden_size + 2 * head_dim) * itemsize + key_value
    at_once = min(tokens, max(_PREFILL_TOKENS, prompt_tokens))
    return {
        "keys and values": float((tokens + rows * completion_tokens) * key_value),
        "logits and sampling": float(max(logits * config.vocab_size, prefill * at_once)),
    }


def rows_at_once(
    model: Any, free_bytes: float, *, prompt_tokens: int, completion_tokens: int, samples: int = 1
) -> int:
    """Sequences to decode at once, in 1..MOST_ROWS of the device: as many as fit in nine tenths of the free memory.

    On a card the number is one that the engine need not pad.
    prompt_tokens: of the longest prompt. samples: completions a prompt, which share its keys and values if all of
    them are in one batch. Models whose config does not name their sizes get UNKNOWN_ROWS.
    """
    base = base_model(model)
    if not has_sizes(base.config):
        return UNKNOWN_ROWS

    card = base.device.type == "cuda"
    if card:
        prompt_tokens = math.ceil(prompt_tokens / _CARD_TOKENS) * _CARD_TOKENS

    def fits(rows: int) -> bool:
        sizes = decode_bytes(
            base.config,
            base.dtype.itemsize,
            rows=rows,
            prompts=math.ceil(rows / samples),
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
        )
        return sum(sizes.values()) <= USED_OF_FREE * free_bytes

    most = MOST_ROWS.get(base.device.type, UNKNOWN_ROWS)
    sizes = _CARD_ROWS if card else range(most, 1, -1)
    return next(filter(fits, sizes), 1)

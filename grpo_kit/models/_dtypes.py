"""How transformers loads weights: in the requested dtype, or one that the card can hold and compute in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from grpo_kit._support.cuda import has_bf16
from grpo_kit.models._adapters import Tuning

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FLOAT32_TRAINING = 16  # bytes a weight in float32, with its gradient and AdamW's moments
_SHARE_OF_CARD = 0.5  # share of the card that they may fill; the rest is for activations, keys and values


@contextmanager
def float32_by_default() -> Iterator[None]:
    """Inside, torch's default dtype is float32, so that weights are drawn alike; afterwards it is restored."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)  # transformers leaves another one where it is interrupted


def resolve_dtype(dtype: str | torch.dtype | None, tuning: Tuning) -> torch.dtype | None:
    """The dtype for load_policy; None if it depends on the model's size, which from_pretrained then settles.

    Raises ValueError for an unknown dtype.
    """
    if dtype is None:
        if not has_bf16():
            return torch.float32
        return None if tuning == "full" else torch.bfloat16
    resolved = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if resolved not in _DTYPES.values():
        raise ValueError(f"dtype={dtype!r} is not known; use one of {', '.join(_DTYPES)}")
    return resolved


def from_pretrained(source: Path | str, kwargs: dict[str, Any]) -> PreTrainedModel:
    """transformers' from_pretrained, with a dtype by size if resolve_dtype left it open."""
    config = AutoConfig.from_pretrained(source)
    if kwargs["dtype"] is None:
        kwargs = {**kwargs, "dtype": dtype_that_fits(config)}
    if getattr(config, "attn_logit_softcapping", None):  # transformers 5.17 picks SDPA, which leaves it out
        kwargs = {**kwargs, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(source, **kwargs)


def dtype_that_fits(config: Any) -> torch.dtype:
    """float32 if training in it leaves the card room for the rest; else bfloat16, and prints a line with the reason."""
    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(config).num_parameters()
    training_gib = weights * _FLOAT32_TRAINING / 2**30
    card_gib = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / 2**30
    if training_gib <= _SHARE_OF_CARD * card_gib:
        return torch.float32
    print(
        f"bfloat16 weights: in float32 they would take {training_gib:.3g} GiB with gradients and moments, of this "
        f"card's {card_gib:.3g}. Config(optimizer=None) takes 'adamw-8bit-split', which keeps what bfloat16 rounds "
        "away; any other loses most of each small update. Or load with dtype='float32'."
    )
    return torch.bfloat16

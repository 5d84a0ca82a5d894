"""The head of a model as its own forward pass has it, over hidden states that are known already.

Some models scale logits behind their head, or cap them (Granite, Gemma 2). No name in transformers stands for that part
of a forward pass alone, so the whole is called with a decoder that returns the hidden states at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from grpo_kit.models.layer_kinds import is_tested


class _Known:
    """A decoder's output of which only the hidden states are there."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, place: int | slice) -> Any:
        return (self.last_hidden_state,)[place]


def head_of(base: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """f(hidden (S, H)) -> logits (S, V). Where the model adds nothing behind its head, that is the head."""
    if is_tested(base):
        return base.get_output_embeddings()
    decoder = base.get_decoder()

    def logits(hidden: Tensor) -> Tensor:
        before = vars(decoder).get("forward")
        decoder.forward = lambda *args, **kwargs: _Known(hidden[None])
        try:
            return base(inputs_embeds=hidden[None], use_cache=False).logits[0]
        finally:
            del decoder.forward
            if before is not None:
                decoder.forward = before

    return logits

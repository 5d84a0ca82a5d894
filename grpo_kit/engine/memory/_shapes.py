"""Sizes of models that a plan can name, without a network, and their numbers of parameters."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers")
_SIZES += ("num_attention_heads", "num_key_value_heads")
# vocabulary, are embedding and head one matrix?, _SIZES. Qwen2.5: its technical report, arXiv:2412.15115, and the
# published config.json files, where 0.5B to 3B are tied and the others not, which also have a longer vocabulary.
_SHAPES: dict[str, tuple[type[PretrainedConfig], int, bool, tuple[int, ...]]] = {
    "Qwen/Qwen2.5-0.5B-Instruct": (Qwen2Config, 151936, True, (896, 4864, 24, 14, 2)),
    "Qwen/Qwen2.5-1.5B-Instruct": (Qwen2Config, 151936, True, (1536, 8960, 28, 12, 2)),
    "Qwen/Qwen2.5-3B-Instruct": (Qwen2Config, 151936, True, (2048, 11008, 36, 16, 2)),
    "Qwen/Qwen2.5-7B-Instruct": (Qwen2Config, 152064, False, (3584, 18944, 28, 28, 4)),
    "Qwen/Qwen2.5-14B-Instruct": (Qwen2Config, 152064, False, (5120, 13824, 48, 40, 8)),
    "Qwen/Qwen2.5-32B-Instruct": (Qwen2Config, 152064, False, (5120, 27648, 64, 40, 8)),
    "Qwen/Qwen2.5-72B-Instruct": (Qwen2Config, 152064, False, (8192, 29568, 80, 64, 8)),
    "smollm2-135m-instruct": (LlamaConfig, 49152, True, (576, 1536, 30, 9, 3)),
    "tiny-random": (LlamaConfig, 49152, True, (32, 64, 2, 4, 2)),
}


class Counts(NamedTuple):
    """Parameters: of linear layers without the head; embedding and head; biases and norms; adapters on the first."""

    linear: int
    ends: int
    norms: int
    adapters: int

    @property
    def all(self) -> int:
        """Parameters of the model without adapters."""
        return self.linear + self.ends + self.norms


def config_of(name: str) -> PretrainedConfig:
    """The config of a model by name: from the list here, else from the hub's cache or the hub.

    Raises ValueError if it cannot be found.
    """
    if name in _SHAPES:
        kind, vocabulary, tied, sizes = _SHAPES[name]
        return kind(vocab_size=vocabulary, tie_word_embeddings=tied, **dict(zip(_SIZES, sizes, strict=True)))
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model={name!r}: its config could not be had ({type(error).__name__}); give config=, or one of "
            f"{', '.join(_SHAPES)}"
        ) from error


def count(config: PretrainedConfig, rank: int) -> Counts:
    """Parameters of a model of that config, with adapters of that rank on its linear layers; nothing is allocated."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    linear = sum(layer.weight.numel() for layer in layers)
    ends = sum({id(p): p.numel() for m in (head, embedding) for p in m.parameters()}.values())
    adapters = sum(rank * (layer.in_features + layer.out_features) for layer in layers)
    norms = model.num_parameters() - linear - ends
    return Counts(linear, ends, norms, adapters)


@functools.cache
def counted(name: str, rank: int) -> Counts:
    """count() of a model by name, once."""
    return count(config_of(name), rank)

"""What a loaded model is: its name, its kind, its weights and the hardware that it runs on."""

from __future__ import annotations

import inspect
import platform
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

EMBEDDED, TINY = "smollm2-135m-instruct", "tiny-random"  # names that the kit alone knows
# Types that engine and update are tested with; any other is compared with its own forward pass at its first use.
MODEL_TYPES = ("llama", "qwen2", "qwen3")
# Before transformers 5.23 activation checkpointing had another name, before 5.24 a model's cache.
# Checkpointing, as the argument, and inside the names of a model's property and methods.
CHECKPOINTING = (
    "activation_checkpointing"
    if hasattr(PreTrainedModel, "is_activation_checkpointing")
    else "gradient_checkpointing"
)


def base_model(model: Any) -> PreTrainedModel:
    """The transformers model, with its adapters: the model inside a peft model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def has_adapters(model: Any) -> bool:
    """Is it a peft model? Where nobody has imported peft, which takes a second, it cannot be one."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def model_name(model: Any) -> str:
    """The name by which load_policy loads it: a name, or its folder or file; else its type."""
    config = base_model(model).config
    return str(getattr(config, "name_or_path", None) or config.model_type)


def few_weights(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Up to 64 numbers of each tensor, in one: two models differ in nearly all, and an update moves nearly all."""
    few = [p.detach().flatten()[:: max(p.numel() // 64, 1)][:64] for p in tensors]
    return torch.cat([weights.float() for weights in few])


def weights_digest(tensors: Iterable[torch.Tensor]) -> str:
    """16 hexadecimal digits of few_weights."""
    return sha256(few_weights(tensors).cpu().numpy().tobytes()).hexdigest()[:16]


def has_dropout(model: torch.nn.Module) -> bool:
    """Does a forward pass in training mode draw random numbers? (LoRA dropout, attention dropout)"""
    attention = getattr(base_model(model).config, "attention_dropout", 0.0)
    return bool(attention) or any(isinstance(m, torch.nn.Dropout) and m.p for m in model.modules())


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Inside, no dropout; afterwards each module has its mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def hardware() -> str:
    """The card, or the CPU's model, its vector instructions and the threads torch uses."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else processor()


def processor() -> str:
    """The CPU's model, its vector instructions and the threads torch uses."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")
    flags = next((line for line in lines if line.startswith("flags")), "")
    vector = "AVX-512" if "avx512f" in flags else "AVX2" if "avx2" in flags else platform.machine()
    return f"{name} ({vector}), {torch.get_num_threads()} thread(s)"


def is_checkpointing(model: Any) -> bool:
    """Are activations recomputed in the backward pass?"""
    return getattr(model, f"is_{CHECKPOINTING}")


def cache_name(forward: Any) -> str:
    """The argument of a model's or decoder's forward, and field of its output, that is the cache."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"

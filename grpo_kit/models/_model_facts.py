"""What a loaded model is: its name, its kind, its weights, the tokens it reads and writes, and its hardware."""

from __future__ import annotations

import inspect
import math
import platform
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
)
from transformers.utils import logging

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


def _without_bars(factory: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    if kwargs.get("desc") in ("Loading weights", "Writing model shards"):
        factory = logging.EmptyTqdm
    return _bar_before(factory, args, kwargs) if _bar_before else factory(*args, **kwargs)


# A saved notebook would keep a widget for each reading or writing of weights. Downloads and transformers < 5.5 do.
_bar_before = (
    logging.set_tqdm_hook(_without_bars) if hasattr(logging, "set_tqdm_hook") else None
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


def few_weights(tensors: Iterable[Tensor]) -> Tensor:
    """Up to 64 numbers of each tensor, in one: two models differ in nearly all, and an update moves nearly all."""
    samples = [p.detach().flatten()[:: max(p.numel() // 64, 1)][:64].float() for p in tensors]
    return torch.cat(samples)


def weights_digest(tensors: Iterable[Tensor]) -> str:
    """16 hexadecimal digits of few_weights."""
    return sha256(few_weights(tensors).cpu().numpy().tobytes()).hexdigest()[:16]


def has_dropout(model: nn.Module) -> bool:
    """Does a forward pass in training mode draw random numbers? (LoRA dropout, attention dropout)"""
    attention = getattr(base_model(model).config, "attention_dropout", 0.0)
    return bool(attention) or any(isinstance(m, nn.Dropout) and m.p for m in model.modules())


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
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
    name = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        "CPU",
    )
    flags = next((line for line in lines if line.startswith("flags")), "")
    vector = platform.machine()
    if "avx512f" in flags:
        vector = "AVX-512"
    elif "avx2" in flags:
        vector = "AVX2"
    return f"{name} ({vector}), {torch.get_num_threads()} thread(s)"


def is_checkpointing(model: Any) -> bool:
    """Are activations recomputed in the backward pass?"""
    return getattr(model, f"is_{CHECKPOINTING}")


def cache_name(forward: Any) -> str:
    """The argument of a model's or decoder's forward, and field of its output, that is the cache."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


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


# ---- rows of a head that no token of the tokenizer stands behind: never sampled, no probability -------------------
# Heads are made longer than vocabularies, for the shapes of matrix products: Qwen2.5 has 151,936 rows and 151,665
# tokens. Nothing trains the others down, and an update that takes probability from tokens gives some of it to them.
# Here the head itself gives them a logit of -1e30, for sampling, log-probabilities, reference, entropy and evaluation
# alike, in generate and in every forward pass. What reads the head's weights directly asks token_rows(). Only rows
# behind the last token count. Behind a head that caps its logits (Gemma 2) a closed row has the negative cap.

# -inf would make an entropy NaN, and so would a number that a low temperature makes -inf
_NEVER = -1e30


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


def no_probability(head: nn.Module, inputs: Any, logits: Tensor) -> None:
    """The hook on a head. Nothing is recorded: a probability of 0 has a gradient of 0 anyway."""
    with torch.no_grad():
        logits[..., head.token_rows :] = max(_NEVER, torch.finfo(logits.dtype).min)


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token that ends a completion: the tokenizer's and all that the model declares."""
    declared = base_model(model).generation_config.eos_token_id
    if not isinstance(declared, list | tuple):
        declared = [declared]
    return [
        end for end in dict.fromkeys([tokenizer.eos_token_id, *declared]) if end is not None
    ]


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


def config_of(name: str) -> PretrainedConfig:
    """The config of a model by name: from the list here, else from the hub's cache or the hub.

    Raises ValueError if it cannot be found.
    """
    if name in _SHAPES:
        kind, vocabulary, tied, sizes = _SHAPES[name]
        return kind(
            vocab_size=vocabulary,
            tie_word_embeddings=tied,
            **dict(zip(_SIZES, sizes, strict=True)),
        )
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model={name!r}: its config could not be had ({type(error).__name__}); give config=, or one of "
            f"{', '.join(_SHAPES)}"
        ) from error

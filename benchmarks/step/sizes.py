"""How much work each size is, and the model it is done with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.step.workload import word_tokenizer


@dataclass(frozen=True)
class Size:
    """prompt_tokens (low, high), mean and maximum completion in tokens; tuned: TRL's fastest (micro-batch,
    checkpointing), None to measure it first."""

    model: str
    prompts: int
    group_size: int
    prompt_tokens: tuple[int, int]
    mean_completion: float
    max_completion: int
    rounds: int
    tuned: tuple[int, bool] | None


SIZES = {
    "smoke": Size("tiny-random", 2, 4, (8, 24), 5, 8, 1, (8, False)),
    "cpu": Size("smollm2-135m-instruct", 4, 8, (128, 384), 38, 64, 1, (2, False)),
    "gpu": Size("Qwen/Qwen2.5-1.5B-Instruct", 8, 8, (128, 384), 300, 512, 5, None),
}


def random_weights(tuning: str, dtype: str) -> tuple[Any, Any]:
    """Qwen2.5-1.5B's shapes on the CPU and a tokenizer of made-up words: nothing is downloaded."""
    model = Qwen2ForCausalLM._from_config(qwen_config(), dtype=getattr(torch, dtype))
    if tuning == "lora":
        lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
    return model, word_tokenizer(model.config.vocab_size)


def qwen_config() -> Qwen2Config:
    """Qwen2.5-1.5B's config.json, with the special tokens of `word_tokenizer`."""
    return Qwen2Config(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )

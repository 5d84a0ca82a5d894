"""How much work each size and workload is, and the model it is done with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.step.workload import Shape, word_tokenizer
from grpo_kit import preset

WORKLOADS = ("main-job", "realistic", "long", "longest", "think")


@dataclass(frozen=True)
class Size:
    """profile: whose task, prompts a step, group and lengths `main-job` has; rounds: measurements of each arm.

    tuned: TRL's fastest (micro-batch, checkpointing) by workload; where there is none it is measured first.
    """

    model: str
    profile: str
    rounds: int
    tuned: dict[str, tuple[int, bool]]
    realistic: Shape
    long: Shape
    longest: Shape
    think: Shape

    def shape(self, workload: str) -> Shape:
        """Raises ValueError for a workload that is not known."""
        if workload not in WORKLOADS:
            raise ValueError(
                f"workload={workload!r} is not known; use one of {', '.join(WORKLOADS)}"
            )
        if workload != "main-job":
            return getattr(self, workload)
        cfg = preset(self.profile)
        return Shape(
            cfg.prompts_per_step,
            cfg.group_size,
            None,
            None,
            cfg.make_task().max_completion_tokens,
        )


SIZES = {
    "smoke": Size(
        model="tiny-random",
        profile="smoke",
        rounds=1,
        tuned=dict.fromkeys(WORKLOADS, (8, False)),
        realistic=Shape(2, 4, (8, 24), 5, 8),
        long=Shape(2, 4, (16, 16), None, 8),
        longest=Shape(1, 4, (16, 16), None, 16),
        think=Shape(2, 4, None, 5, 8),
    ),
    "cpu": Size(
        model="smollm2-135m-instruct",
        profile="cpu",
        rounds=1,
        tuned={
            **dict.fromkeys(("realistic", "long", "longest", "think"), (2, False)),
            "main-job": (8, False),
        },
        realistic=Shape(4, 8, (128, 384), 38, 64),
        # Fewer rows than elsewhere: TRL computes 768 positions for each, 8 rows take it minutes on two cores.
        long=Shape(2, 4, (256, 256), None, 512),
        longest=Shape(1, 4, (256, 256), None, 2048),
        think=Shape(2, 8, None, 300, 512),
    ),
    "gpu": Size(
        model="Qwen/Qwen2.5-1.5B-Instruct",
        profile="gpu24",
        rounds=5,
        tuned={},
        realistic=Shape(8, 8, (128, 384), 300, 512),
        long=Shape(8, 8, (256, 256), None, 512),
        longest=Shape(4, 8, (256, 256), None, 2048),
        think=Shape(8, 8, None, 300, 512),
    ),
}


def random_weights(
    tuning: str, dtype: str, config: Qwen2Config | None = None
) -> tuple[Any, Any]:
    """Random weights on the CPU and a tokenizer of made-up words: nothing is downloaded. config: `qwen_config()`."""
    # drawing 1.5B numbers on a CPU takes a minute
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2ForCausalLM._from_config(
            config or qwen_config(), dtype=getattr(torch, dtype)
        )
    model.to("cpu")
    if tuning == "lora":
        lora = LoraConfig(
            r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
        )
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


def tiny_config() -> Qwen2Config:
    """The same architecture so small that `smoke` takes seconds; 512 words, of which `plain_words` wants 256."""
    config = qwen_config()
    config.update(
        {
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
        }
        | {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    )
    return config

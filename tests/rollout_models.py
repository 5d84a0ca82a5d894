"""Tiny random models of every supported family, and an independent reference for what the engine returns."""

from contextlib import contextmanager

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
}
VOCABULARY = 500  # no multiple of the sampler's block


def tiny_model(family="llama", *, lora=False, **overrides):
    """Weights large enough that greedy decoding varies; biases and norms random, so that dropping one shows."""
    config_class, model_class, extra = FAMILIES[family]
    settings = dict(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = model_class(config_class(**{**settings, **extra, **overrides}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.mul_(6)
    if lora:
        model = get_peft_model(
            model,
            LoraConfig(
                r=4, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.5
            ),
        )
    return model.eval()


def ragged_prompts(lengths=(9, 3, 14, 1), groups=(3, 1, 4, 2), seed=0):
    """Prompts of several lengths in groups of several sizes, the completions of one prompt adjacent."""
    g = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(3, VOCABULARY, (n,), generator=g).tolist() for n in lengths]
    return [p for p, count in zip(prompts, groups, strict=True) for _ in range(count)]


def config(**overrides):
    base = dict(
        max_new_tokens=12,
        do_sample=False,
        top_k=0,
        top_p=1.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return GenerationConfig(**{**base, **overrides})


@torch.no_grad()
def generate(model, prompts, settings, **kwargs):
    """transformers' generate on the padded batch, completions cut behind their first stop id."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    rows = model.generate(
        input_ids=ids, attention_mask=mask, generation_config=settings, **kwargs
    )
    ends = settings.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    cut = []
    for row in rows[:, width:].tolist():
        stop = next((i for i, token in enumerate(row) if token in ends), len(row) - 1)
        cut.append(row[: stop + 1])
    return cut


@torch.no_grad()
def plain_logits(model, prompt, completion):
    """float32 (T, V): the logits that each completion token was drawn from, by one plain forward without a cache."""
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0].float()
    return logits[len(prompt) - 1 : -1]


@contextmanager
def modules_called(model):
    """Inside, the engine may not read the model as plain functions, because of a hook."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    hook = base.model.norm.register_forward_hook(lambda module, inputs, output: None)
    try:
        yield
    finally:
        hook.remove()

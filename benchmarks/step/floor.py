"""The least time a step could take on this device: its peaks, measured in the same run, and what the work needs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.step.workload import Workload
from grpo_kit.models import base_model

FORMULAS = {
    "prefill": "2 x parameters x prompt tokens, each prompt once / peak FLOP/s",
    "decode": "the larger of (weight bytes x longest completion + KV bytes read) / bandwidth and"
    " 2 x parameters x completion tokens / peak FLOP/s",
    "forward-backward": "6 x (body parameters x packed tokens + head parameters x completion tokens) / peak FLOP/s,"
    " 4 x for frozen weights (LoRA); packed tokens: each prompt once and its completions",
    "left out": "attention scores, optimizer, sampling, launches: the floor is below what can be reached",
}


def device_peaks(cuda: bool, dtype: torch.dtype) -> dict[str, float]:
    """FLOP/s of a large matrix product in dtype and bytes/s of a large copy or sum, the best of five each."""
    device = "cuda" if cuda else "cpu"
    n, size = (8192, 2**30) if cuda else (2048, 2**28)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    copy = 2 * size / _best(cuda, lambda: target.copy_(source))
    read = size / _best(cuda, lambda: source.sum())
    return {"FLOP/s": 2 * n**3 / _best(cuda, lambda: a @ b), "bytes/s": max(copy, read)}


def floor(model: Any, work: Workload, peaks: dict[str, float], *, skip: bool) -> dict[str, float]:
    """Seconds of prefill, decode and forward-backward by FORMULAS, and their sum as "step".

    skip: groups without advantage are left out of forward and backward.
    """
    base = base_model(model)
    config = base.config.get_text_config()
    own = [p for n, p in model.named_parameters() if "lora_" not in n]
    head = base.get_output_embeddings().weight
    embedding = base.get_input_embeddings().weight
    body = sum(p.numel() for p in own) - embedding.numel() - (0 if head is embedding else head.numel())
    parameters = body + head.numel()
    passes = 6 if all(p.requires_grad for p in own) else 4

    lengths = [len(ids) for ids in work.completion_ids]
    prompts = [len(ids) for ids in work.prompt_ids]
    groups = [sum(lengths[i : i + work.group_size]) for i in range(0, len(lengths), work.group_size)]
    kv_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_token = 2 * config.num_hidden_layers * config.num_key_value_heads * kv_width * head.element_size()
    kv_read = kv_token * sum(
        prompts[r // work.group_size] * n + n * (n - 1) // 2 for r, n in enumerate(lengths)
    )
    weight_bytes = parameters * head.element_size()
    trained = [(p, g) for p, g, flat in zip(prompts, groups, work.flat, strict=True) if not (skip and flat)]

    rate = peaks["FLOP/s"]
    memory_bound = (weight_bytes * max(lengths) + kv_read) / peaks["bytes/s"]
    seconds = {
        "prefill": 2 * parameters * sum(prompts) / rate,
        "decode": max(memory_bound, 2 * parameters * sum(lengths) / rate),
        "forward-backward": passes
        * (body * sum(p + g for p, g in trained) + head.numel() * sum(g for _, g in trained))
        / rate,
    }
    return seconds | {"step": sum(seconds.values())}


def _best(cuda: bool, work: Callable[[], Any], tries: int = 5) -> float:
    wait = torch.cuda.synchronize if cuda else lambda: None
    times = []
    for _ in range(tries + 1):  # the first warms up
        wait()
        begin = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - begin)
    return min(times[1:])

"""Milliseconds a token on a card: the engine beside transformers' generate, Qwen2.5-1.5B's shapes, and its kernels.

    python -m benchmarks.card.decode OUT.json

Random bfloat16 weights, full and with LoRA (float32, as a run has it), prompts of 256 tokens, under a cap of 22.5 GiB.
"ms a token": seconds of 288 new tokens less those of 32, by 256, the second of two calls each. "kernels": torch's
profiler over 40 tokens of 64 rows: name, calls, microseconds on the card.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import GenerationConfig

from benchmarks.result import command_line
from benchmarks.step.floor import device_peaks
from benchmarks.step.sizes import random_weights
from grpo_kit.rollout import RolloutEngine

CAP_GIB, ROWS = 22.5, ((8, 8), (1, 1), (8, 32))


def capped_card() -> str:
    """The card's name; from now on this process gets CAP_GIB of its memory."""
    card = torch.cuda.get_device_properties(0)
    torch.cuda.set_per_process_memory_fraction(min(1.0, CAP_GIB * 2**30 / card.total_memory))
    return card.name


def prompts(count: int, group: int) -> list[list[int]]:
    """count prompts of 256 random tokens, each group times."""
    draw = torch.Generator().manual_seed(0)
    made = [torch.randint(20, 150_000, (256,), generator=draw).tolist() for _ in range(count)]
    return [ids for ids in made for _ in range(group)]


def sampling(tokens: int, **more: int) -> GenerationConfig:
    """Never ends early."""
    return GenerationConfig(
        max_new_tokens=tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        eos_token_id=[],
        pad_token_id=0,
        **more,
    )


def seconds(work: Any) -> float:
    """Of the second of two calls, the card's work included."""
    for _ in range(2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(tuning: str) -> dict[str, Any]:
    """One kind of model."""
    torch.manual_seed(0)
    model = random_weights(tuning, "bfloat16")[0].cuda().eval()
    engine, row = RolloutEngine(model), {}
    for count, group in ROWS:
        rows = prompts(count, group)
        short, long = (
            seconds(lambda tokens=tokens, rows=rows: engine.generate(rows, sampling(tokens), seed=1))
            for tokens in (32, 288)
        )
        row[f"{count}x{group}"] = {
            "ms a token": 1e3 * (long - short) / 256,
            "tokens/s": count * group * 256 / (long - short),
        }
        print(tuning, count, group, row[f"{count}x{group}"], flush=True)
    row["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        engine.generate(prompts(8, 8), sampling(40), seed=2)
        torch.cuda.synchronize()
    kernels = sorted(
        (event for event in found.key_averages() if event.self_device_time_total),
        key=lambda event: -event.self_device_time_total,
    )
    row["kernels"] = [
        (event.key[:90], event.count, round(event.self_device_time_total)) for event in kernels[:40]
    ]
    row["kernel calls"] = sum(event.count for event in kernels)
    ids = torch.tensor(prompts(8, 8), device="cuda")
    plain = sampling(48, min_new_tokens=48)
    with torch.no_grad():
        took = seconds(
            lambda: model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=plain
            )
        )
    row["generate 64 rows, ms a token"] = 1e3 * took / 48
    print(row["generate 64 rows, ms a token"], flush=True)
    return row


def main() -> None:
    """Measure both kinds, save."""
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    result = {
        "device": capped_card(),
        "torch": torch.__version__,
        "peaks": device_peaks(True, torch.bfloat16),
    }
    for kind in ("full", "lora"):
        result[kind] = measure(kind)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Milliseconds a token on a card: the engine beside transformers' generate, Qwen2.5-1.5B's shapes, and its kernels.

    python -m benchmarks.card.decode OUT.json

Random weights in bfloat16 (float32 on a card without it), full and with LoRA (float32, as a run has it), prompts of 256
tokens, under a cap of 22.5 GiB. "ms a token": seconds of 288 new tokens less those of 32, by 256, the second of two
calls each. "kernels": torch's profiler over 40 tokens of 64 rows: name, calls, microseconds on the card. --small: tiny
shapes, to see that it runs.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import GenerationConfig

from benchmarks.card.counts import in_four_bits
from benchmarks.result import command_line
from benchmarks.step.floor import device_peaks
from benchmarks.step.sizes import qwen_config, random_weights, tiny_config
from grpo_kit._support.cuda import has_bf16
from grpo_kit.engine import RolloutEngine
from grpo_kit.models._adapters import add_adapters

CAP_GIB, ROWS = 22.5, ((8, 8), (1, 1), (1, 8), (8, 32))
TOKENS = (32, 288)  # written in the two calls whose difference is timed


def capped_card() -> str:
    """The card's name; from now on this process gets CAP_GIB of its memory."""
    card = torch.cuda.get_device_properties(0)
    torch.cuda.set_per_process_memory_fraction(min(1.0, CAP_GIB * 2**30 / card.total_memory))
    return card.name


def prompts(count: int, group: int, vocabulary: int) -> list[list[int]]:
    """count prompts of 256 random tokens, each group times."""
    draw = torch.Generator().manual_seed(0)
    made = [
        torch.randint(20, vocabulary, (256,), generator=draw).tolist() for _ in range(count)
    ]
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


def measure(tuning: str, *, small: bool = False) -> dict[str, Any]:
    """One kind of model. small: of tiny shapes, some tokens."""
    torch.manual_seed(0)
    dtype, config = (
        "bfloat16" if has_bf16() else "float32",
        tiny_config() if small else qwen_config(),
    )
    model = random_weights("full" if tuning == "qlora" else tuning, dtype, config)[0]
    if tuning == "qlora":
        model = add_adapters(in_four_bits(model), tuning, {}, 0)
    model = model.cuda().eval()
    engine, row = RolloutEngine(model), {"dtype": dtype}
    begin, end = (4, 12) if small else TOKENS
    for count, group in ROWS:
        rows = prompts(count, group, config.vocab_size)
        short, long = (
            seconds(
                lambda tokens=tokens, rows=rows: engine.generate(rows, sampling(tokens), seed=1)
            )
            for tokens in (begin, end)
        )
        row[f"{count}x{group}"] = {
            "ms a token": 1e3 * (long - short) / (end - begin),
            "tokens/s": count * group * (end - begin) / (long - short),
        }
        print(tuning, count, group, row[f"{count}x{group}"], flush=True)
    row["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
    ids = torch.tensor(prompts(8, 8, config.vocab_size), device="cuda")
    plain = sampling(48, min_new_tokens=48)
    with torch.no_grad():
        took = seconds(
            lambda: model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=plain
            )
        )
    row["generate 64 rows, ms a token"] = 1e3 * took / 48
    print(row["generate 64 rows, ms a token"], flush=True)
    return row | kernels(engine, prompts(8, 8, config.vocab_size))


def kernels(engine: RolloutEngine, rows: list[list[int]]) -> dict[str, Any]:
    """What ran on the card in 40 tokens, the longest in sum first; why not, where nothing can be profiled."""
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            engine.generate(rows, sampling(40), seed=2)
            torch.cuda.synchronize()
    except (AssertionError, RuntimeError) as error:
        return {"kernels": [], "not profiled": str(error)}
    events = [event for event in found.key_averages() if event.self_device_time_total]
    events.sort(key=lambda event: -event.self_device_time_total)
    named = [
        (event.key[:90], event.count, round(event.self_device_time_total))
        for event in events[:40]
    ]
    return {"kernels": named, "kernel calls": sum(event.count for event in events)}


def main() -> None:
    """Measure these kinds, save after each."""
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--small", action="store_true", help="tiny shapes, to see that it runs")
    parser.add_argument(
        "--kinds", nargs="+", choices=("full", "lora", "qlora"), default=("full", "lora")
    )
    asked = parser.parse_args()
    out, dtype = asked.out, torch.bfloat16 if has_bf16() else torch.float16
    result = {"device": capped_card(), "torch": torch.__version__}
    result |= {} if asked.small else {"peaks": device_peaks(True, dtype)}
    for kind in asked.kinds:
        result[kind] = measure(kind, small=asked.small)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

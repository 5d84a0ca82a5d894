"""The least time a step could take on this device: its peaks, measured in the same run, and what the work needs.

Tokens are those of a trie over all rows of the step: what several rows begin with is computed, and read, once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.step.workload import Workload
from grpo_kit.models._model_facts import base_model

try:
    from grpo_kit.models._precision import in_huge_pages
except ImportError:  # an older kit, of --before
    in_huge_pages = list

FORMULAS = {
    "tokens": "each distinct prefix of the step's rows once, whoever shares it",
    "prefill": "2 x (body parameters x distinct prompt tokens + head parameters x distinct prompts) / peak FLOP/s",
    "decode": "the larger of (weight bytes x (longest completion - 1) + bytes of distinct keys and values read in each"
    " step) / bandwidth and 2 x parameters x distinct completion tokens but each row's last / peak FLOP/s",
    "forward-backward": "6 x (body parameters x distinct tokens but each row's last + head parameters x those that are"
    " scored) / peak FLOP/s, 4 x for frozen weights (LoRA)",
    "attention": "beside these: 4 x layers x query width x keys attended / peak FLOP/s, 3 x that in the update; in"
    " decode that which is above its memory time",
    "left out": "optimizer, sampling, launches: the floor is below what can be reached",
}


@dataclass(frozen=True)
class Needed:
    """The least positions of a step.

    prefill: in prompts; starts: distinct prompts; decode: behind them; update: forward positions; head: of those the
    scored ones. steps: decode steps. reads: keys read, summed over decode steps, each distinct one once a step.
    *_keys: keys attended, summed over those positions.
    """

    prefill: int
    starts: int
    decode: int
    update: int
    head: int
    steps: int
    reads: int
    prefill_keys: int
    decode_keys: int
    update_keys: int


def needed(work: Workload, *, skip: bool = False) -> Needed:
    """Count them in a trie of the rows, where a row's last token, behind which nothing is asked, has no place.

    skip: groups without advantage are left out of the update.
    """
    every = list(range(len(work.completion_ids)))
    lengths = [len(ids) for ids in work.completion_ids]
    prompts = [len(work.prompt_ids[r // work.group_size]) for r in every]
    trie, paths = _trie([row[:-1] for row in work.rows])
    in_prompt = {node for r in every for node in paths[r][: prompts[r]]}
    behind = [node for node in range(len(trie)) if node not in in_prompt]

    # Step t computes each row's t-th token, t = 1 .. length - 1, and reads what is before it and itself.
    first, end = [max(lengths)] * len(trie), [0] * len(trie)  # the steps that read each node
    for r in every:
        for place, node in enumerate(paths[r]):
            first[node] = min(first[node], max(1, place - prompts[r] + 1))
            end[node] = max(end[node], lengths[r])
    reads = sum(stop - start for start, stop in zip(first, end, strict=True))

    kept = [r for r in every if not (skip and work.flat[r // work.group_size])]
    update = {node for r in kept for node in paths[r]}
    scored = {node for r in kept for node in paths[r][prompts[r] - 1 :]}
    return Needed(
        prefill=len(in_prompt),
        starts=len({paths[r][prompts[r] - 1] for r in every}),
        decode=len(behind),
        update=len(update),
        head=len(scored),
        steps=max(lengths) - 1,
        reads=reads,
        prefill_keys=sum(trie[node] for node in in_prompt),
        decode_keys=sum(trie[node] for node in behind),
        update_keys=sum(trie[node] for node in update),
    )


def _trie(rows: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Depth of each node, a row's first token 1; and the nodes of each row, first token first.

    >>> _trie([[5, 6], [5, 7]])
    ([1, 2, 2], [[0, 1], [0, 2]])
    """
    nodes: dict[tuple[int, int], int] = {}  # (node before, token) -> node
    depths: list[int] = []
    paths: list[list[int]] = []
    for row in rows:
        path, before = [], -1
        for depth, token in enumerate(row, start=1):
            before = nodes.setdefault((before, token), len(nodes))
            if before == len(depths):
                depths.append(depth)
            path.append(before)
        paths.append(path)
    return depths, paths


def device_peaks(cuda: bool, dtype: torch.dtype) -> dict[str, float]:
    """FLOP/s of a large matrix product in dtype and bytes/s of a large copy or sum, the best of five each.

    A CPU's bytes lie as a policy's weights do, in pages of 2 MB; "bytes/s, small pages": as torch's own tensors do.
    """
    device = "cuda" if cuda else "cpu"
    n, size = (8192, 2**30) if cuda else (2048, 2**28)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    pair = [torch.ones(size // 4, device=device) for _ in range(2)]
    peaks = {"FLOP/s": 2 * n**3 / _best(cuda, lambda: a @ b)}
    if cuda:
        return peaks | {"bytes/s": _bandwidth(cuda, *pair)}
    small, large = _bandwidth(cuda, *pair), _bandwidth(cuda, *in_huge_pages(pair))
    return peaks | {"bytes/s": max(small, large), "bytes/s, small pages": small}


def _bandwidth(cuda: bool, source: torch.Tensor, target: torch.Tensor) -> float:
    copy = 2 * source.nbytes / _best(cuda, lambda: target.copy_(source))
    return max(copy, source.nbytes / _best(cuda, source.sum))


def floor(
    model: Any, work: Workload, peaks: dict[str, float], *, skip: bool, attention: bool = False
) -> dict[str, float]:
    """Seconds of prefill, decode and forward-backward by FORMULAS, and their sum as "step".

    skip: groups without advantage are left out of forward and backward. attention: with its arithmetic.
    """
    base = base_model(model)
    config = base.config.get_text_config()
    own = [p for n, p in model.named_parameters() if "lora_" not in n]
    head = base.get_output_embeddings().weight
    embedding = base.get_input_embeddings().weight
    body = (
        sum(p.numel() for p in own)
        - embedding.numel()
        - (0 if head is embedding else head.numel())
    )
    passes = 6 if all(p.requires_grad for p in own) else 4
    width = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    kv_token = (
        2 * config.num_hidden_layers * config.num_key_value_heads * width * head.element_size()
    )
    key = 4 * config.num_hidden_layers * config.num_attention_heads * width * attention  # FLOP

    least, rate = needed(work, skip=skip), peaks["FLOP/s"]
    weight_bytes = (body + head.numel()) * head.element_size()
    memory_bound = (weight_bytes * least.steps + kv_token * least.reads) / peaks["bytes/s"]
    decode = 2 * (body + head.numel()) * least.decode + key * least.decode_keys
    prefill = (
        2 * (body * least.prefill + head.numel() * least.starts) + key * least.prefill_keys
    )
    update = (
        passes * (body * least.update + head.numel() * least.head) + 3 * key * least.update_keys
    )
    seconds = {
        "prefill": prefill / rate,
        "decode": max(memory_bound, decode / rate),
        "forward-backward": update / rate,
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

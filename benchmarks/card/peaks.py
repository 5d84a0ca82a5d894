"""Cards by their data sheets, what a step needs by the counts of the pretend card, and seconds from both.

A phase is bytes over bandwidth, FLOPs over the peak, and launches times their cost. Written for expect.py.
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass, replace
from functools import cache
from typing import Any

from benchmarks.result import RESULTS
from grpo_kit.models._model_facts import config_of

MODEL = "Qwen/Qwen2.5-1.5B-Instruct"
COUNTS = "card_counts.json"


@dataclass(frozen=True)
class Peaks:
    """A card by its data sheet: bytes and FLOP a second (dense, 16 bits with float32 sums; float32), GiB as torch
    says; bf16: does it compute in bfloat16?"""

    name: str
    gib: float
    bandwidth: float
    flops16: float
    flops32: float
    source: str
    bf16: bool = True


CARDS = (
    Peaks("RTX 4090", 23.99, 1.008e12, 165e12, 82.6e12, "NVIDIA Ada GPU architecture, v2.01"),
    Peaks(
        "RTX 3090", 23.69, 0.936e12, 71e12, 35.6e12, "NVIDIA Ampere GA102 GPU architecture, v2"
    ),
    Peaks("A10G", 22.06, 0.600e12, 70e12, 31.2e12, "AWS EC2 G5, NVIDIA A10G"),
    Peaks("L4", 22.05, 0.300e12, 121e12, 30.3e12, "NVIDIA L4 data sheet"),
    Peaks("T4", 14.75, 0.320e12, 65e12, 8.1e12, "NVIDIA T4 data sheet", bf16=False),
)
H200 = Peaks("H200", 22.5, 4.8e12, 989.5e12, 67e12, "NVIDIA H200 data sheet; capped")


@cache
def results(name: str) -> dict[str, Any]:
    """A file of benchmarks/results."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


@cache
def layers() -> int:
    """Of the model."""
    return config_of(MODEL).num_hidden_layers


@dataclass(frozen=True)
class Work:
    """What a part of a step needs; flops32: those in float32."""

    launches: float = 0.0
    flops: float = 0.0
    product_bytes: float = 0.0
    other_bytes: float = 0.0
    flops32: float = 0.0

    def __add__(self, more: Work) -> Work:
        return Work(*(a + b for a, b in zip(astuple(self), astuple(more), strict=True)))

    def __mul__(self, by: float) -> Work:
        return Work(*(by * value for value in astuple(self)))

    __rmul__ = __mul__


@cache
def counted(kind: str, name: str, *parts: str) -> Work:
    """What card_counts.json has of one model, its layers counted as often as the model has them."""
    work = Work()
    for part in parts or ("layer", "vocabulary", "rest"):
        found = Work(*results(COUNTS)[kind][name][part].values())
        if in_float32(kind, part):
            found = replace(found, flops=0.0, flops32=found.flops)
        work += (layers() if part == "layer" else 1) * found
    return work


def in_float32(kind: str, part: str) -> bool:
    """Are these products in float32? Without autocast all are, but for those of 4-bit weights."""
    return kind == "LoRA float32" or (kind == "QLoRA float32" and part == "vocabulary")


@cache
def between(
    kind: str, name: str, at: tuple[int, int], x: float, *parts: str
) -> tuple[Work, Work]:
    """(what does not depend on x, what x adds), by counts at two places."""
    low, high = (counted(kind, f"{name} {place}", *parts) for place in at)
    slope = (high + -1.0 * low) * (1 / (at[1] - at[0]))
    return low + -at[0] * slope, x * slope


@cache
def decoded(kind: str, width: int, rows: int, *, fused: bool = True) -> Work:
    """One token of all rows that attends so many columns. The weights are read once; the rest grows with the rows."""
    counts = results(COUNTS)
    way = (
        "fused"
        if fused and f"decode fused {counts['widths'][0]}" in counts[kind]
        else "modules"
    )
    work = sum(between(kind, f"decode {way}", tuple(counts["widths"]), width), Work())
    once = Work(work.launches, product_bytes=weight_bytes(kind))
    return rows / counts["rows"] * (work + -1 * once) + once


@cache
def weight_bytes(kind: str) -> float:
    """Of all linear layers and the head, as a decoded token reads them."""
    config = config_of(MODEL)
    head_dim = config.hidden_size // config.num_attention_heads
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    linear = (
        2 * config.hidden_size * (queries + keys)
        + 3 * config.hidden_size * config.intermediate_size
    )
    a_weight = (
        0.5 + 1 / 64 if kind.startswith("QLoRA") else 4.0 if kind == "LoRA float32" else 2.0
    )
    of_head = 4.0 if "float32" in kind else 2.0
    return layers() * linear * a_weight + config.vocab_size * config.hidden_size * of_head


def updated(kind: str, tokens: float, chunks: int, checkpointed: int, keys: float) -> Work:
    """The update of so many packed tokens in so many chunks, each token seeing so many keys."""
    lengths = tuple(results(COUNTS)["lengths"])
    once, grown = between(kind, "update", lengths, tokens)
    again = between(kind, "forward", lengths, tokens, "layer")
    share = checkpointed / layers()
    attended = 4.0 * layers() * config_of(MODEL).hidden_size * keys * tokens * (3.5 + share)
    attention = Work(flops32=attended) if in_float32(kind, "layer") else Work(flops=attended)
    return chunks * (once + share * again[0]) + grown + share * again[1] + attention


def prefilled(kind: str, tokens: float) -> Work:
    """All prompts, each once, in one pass; the head is asked behind the last token of each only."""
    lengths = tuple(results(COUNTS)["lengths"])
    return sum(between(kind, "forward", lengths, tokens, "layer", "rest"), Work())


@dataclass(frozen=True)
class Costs:
    """What the H200 run says: shares of the data sheet's bandwidth and FLOPs, seconds of a launch in a graph and of one
    from Python outside it, and of a step's rest (tokenizer, rewards, files)."""

    bandwidth: float
    flops: float
    graph: float
    eager: float
    other: float

    def card(self, work: Work, peaks: Peaks) -> float:
        """Seconds of the card's own work. A product takes the longer of its bytes and its FLOPs."""
        products = work.flops / (self.flops * peaks.flops16) + work.flops32 / (
            self.flops * peaks.flops32
        )
        bandwidth = self.bandwidth * peaks.bandwidth
        return max(products, work.product_bytes / bandwidth) + work.other_bytes / bandwidth

    def token(self, work: Work, peaks: Peaks) -> float:
        """Seconds of a decoded token: in a graph each launch adds to the card's time."""
        return self.card(work, peaks) + work.launches * self.graph

    def phase(self, work: Work, peaks: Peaks) -> float:
        """Seconds of any other phase: of the host's launches and the card's work the longer."""
        return max(self.card(work, peaks), work.launches * self.eager)

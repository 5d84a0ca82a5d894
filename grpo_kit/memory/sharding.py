"""What one of several cards keeps of weights, gradients and optimizer states, by how they are sharded.

N cards, P parameters of the model, T of them trained, c bytes of a number that the card computes with (2 in 16 bits).
The parts and what divides them are those of the ZeRO paper, arXiv:1910.02054, section 3 (2, 2 and K = 12 bytes a
parameter); what is there besides was read in the sources of deepspeed 0.19.8, accelerate 1.15, torch 2.13 and trl 1.16:

| bytes a card | ddp (the kit's) | zero2 | zero3 | fsdp (FSDP2) |
|---|---|---|---|---|
| weights, at all times | w P | c P | c P / N | 4 T / N, w of the frozen ones / N |
| while a layer runs | - | - | c x at most 1.05e9: stage3_max_live_parameters and one prefetch | c x (head + 3 layers) |
| while completions are made | - | - | c P (sparing: as above) | as above |
| gradients | w T | c T / N | c T / N, at all times | 4 T / N, but c T until the last micro-batch (sparing: not) |
| gradient buckets | 64 MiB, or the largest tensor | c x 5e8 | c x 5e8, at all times | c x (two layers, or the head) |
| optimizer | as on one card | 12 T / N | 12 T / N | 8 T / N |
| while it steps | as on one card | 4 T / N | 4 x at most 1e9 of T / N | 4 T / N |
| reference model | w P | c P | c P / N | w P / N; 2 c P while it scores |

- ddp: each process has all weights and steps all of them, so the optimizer that keeps what bfloat16 rounds away stays.
- Where anything is divided the optimizer is torch's AdamW (8): the kit's are made for whole weights and refused there.
- DeepSpeed keeps a float32 master (4) beside 16-bit weights, and AdamW's moments on that. While it steps, gradients are
  float32: all at once in stage 2, 1e9 at a time (sub_group_size) in 3.
- FSDP2: accelerate turns trained weights into float32 (fsdp2_prepare_model), so bits that bfloat16 would round away are
  kept without the kit's optimizer. A layer is gathered into one buffer and copied into its tensors while the next one's
  buffer fills: three layers. The head stays gathered (accelerate's tail unit). transformers defers the reduction to the
  last micro-batch (no_sync), so every card holds the gradients of all weights; `sync_each_batch` reduces each time.
- trl gathers all weights in ZeRO-3 to sample (ds3_gather_for_generation), and puts its reference model into one unit of
  FSDP2 (prepare_fsdp), which is gathered whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from grpo_kit.memory.shapes import Counts
from grpo_kit.optim.choose import OPTIMIZERS

SHARDINGS = {
    "ddp": "all of it on every card",
    "zero2": "DeepSpeed: gradients and optimizer states divided",
    "zero3": "DeepSpeed: weights, gradients and optimizer states divided",
    "fsdp": "FSDP2: weights, gradients and optimizer states divided",
}
DIVIDES_WEIGHTS = ("zero3", "fsdp")

_DDP_BUCKET = 64 * 2**20  # bytes: grpo_kit.training.ranks
_ZERO_BUCKET = 5e8  # numbers: reduce_bucket_size
LIVE, _PREFETCH, _SUB_GROUP = (
    1e9,
    5e7,
    1e9,
)  # numbers: stage3_max_live_parameters, _prefetch_bucket_size, sub_group_size
_MASTER, _FLOAT, _ADAMW = 4, 4, OPTIMIZERS["adamw"].state_bytes  # of a number: bytes


@dataclass(frozen=True)
class States:
    """Bytes on one card by part, beside activations.

    always: at all times. sampling, scoring, backward: besides, while completions are made, while the reference model
    scores (empty where it needs nothing more) and in the backward pass. gradients: of all trained weights, the most
    that a backward pass ends with. stepping: only while the optimizer steps.
    """

    always: dict[str, float]
    gradients: float
    stepping: float
    backward: dict[str, float] = field(default_factory=dict)
    sampling: dict[str, float] = field(default_factory=dict)
    scoring: dict[str, float] = field(default_factory=dict)
    averaging: dict[str, float] = field(default_factory=dict)


def average_bytes(counts: Counts, itemsize: int, *, full: bool) -> float:
    """Of the buffer in which the kit averages gradients of several processes, once a step."""
    trained = (counts.all if full else counts.adapters) * itemsize
    largest = counts.matrix * itemsize if full else 0  # a tensor larger than a bucket travels alone
    return float(min(trained, max(_DDP_BUCKET, largest)))


def zero_states(
    stage: int,
    counts: Counts,
    cards: int,
    compute: int,
    *,
    full: bool,
    reference: bool,
    sparing: bool,
) -> States:
    """DeepSpeed's ZeRO of stage 2 or 3, as accelerate's configuration leaves it."""
    trained = counts.all if full else counts.adapters
    weights = counts.all + (0 if full else counts.adapters)
    third = stage == 3
    always = {
        "weights": compute * weights / (cards if third else 1),
        "reference model": compute * counts.all / (cards if third else 1) if reference else 0.0,
        "optimizer": (_MASTER + _ADAMW) * trained / cards,
    }
    gradients, bucket = compute * trained / cards, {"communication": compute * _ZERO_BUCKET}
    if not third:
        return States(always, gradients, _FLOAT * trained / cards, bucket)
    live = {"gathered weights": compute * min(weights, LIVE + _PREFETCH)}
    whole = {"gathered weights": compute * float(weights)}
    always |= bucket | {"gradients": gradients}
    stepping = _FLOAT * min(trained / cards, _SUB_GROUP)
    return States(always, 0.0, stepping, live, live if sparing else whole, live if reference else {})


def fsdp_states(
    counts: Counts,
    layers: int,
    cards: int,
    itemsize: int,
    compute: int,
    *,
    full: bool,
    reference: bool,
    accumulates: bool,
    sparing: bool,
) -> States:
    """FSDP2 as accelerate prepares it. itemsize: of a frozen weight. accumulates: more than one micro-batch a step."""
    trained = counts.all if full else counts.adapters
    layer = compute * (counts.linear + counts.norms) / layers
    head = compute * float(counts.matrix)
    embedding = 2 * head if counts.ends > counts.matrix else 0.0  # a unit of its own: its buffer and its copy
    gathered = {"gathered weights": head + max(3 * layer, embedding)}
    frozen = 0 if full else itemsize * counts.all
    always = {
        "weights": (_FLOAT * trained + frozen) / cards,
        "reference model": itemsize * counts.all / cards if reference else 0.0,
        "optimizer": _ADAMW * trained / cards,
    }
    gradients = _FLOAT * trained / cards
    if accumulates and not sparing:
        gradients = max(gradients, compute * float(trained))
    buckets = {"communication": max(2 * layer, head) if full else compute * 2 * trained / layers}
    scoring = {"gathered weights": 2 * compute * float(counts.all)} if reference else {}
    return States(always, gradients, _FLOAT * trained / cards, gathered | buckets, gathered, scoring)

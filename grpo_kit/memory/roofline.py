"""The least seconds that a step could take on a card or several: its data sheet's peaks, and what the work needs.

Floors, not expectations: nothing reaches its peaks. Left out: optimizer, sampling, launches, waiting for the slowest
card, and whatever of an exchange does not hide behind arithmetic. transformers' own generate is bound by launches: Qwen
publishes 25 ms a token on an A100 for 1.5B, 16 times the floor there. P parameters, N cards, c bytes of a number:

| part | floor |
|---|---|
| prefill | 2 P x prompt tokens / FLOP/s |
| decode | the larger of (weights + keys and values read each token) / bandwidth and 2 P x completion tokens / FLOP/s |
| update | 6 P (LoRA 4 P) x tokens / FLOP/s, 2 P more for layers that are computed again; the head only where scored |
| reference | 2 P x tokens / FLOP/s, where beta > 0 |
| exchange | bytes that each card sends / its link, (N - 1) / N of: |

ddp 2 x gradients, once; zero2 gradients a micro-batch and weights once; zero3 and fsdp weights twice a micro-batch,
gradients once a micro-batch (fsdp, unless sparing: once), and the weights to sample: zero3 once, or what is above
stage3_max_live_parameters for every token (sparing); fsdp its layers for every token. Exchanges of one part hide
behind its arithmetic where they are the shorter; ddp's comes after it. Rings, as in arXiv:1910.02054, section 7.
"""

from __future__ import annotations

from typing import NamedTuple

from grpo_kit.memory.plan_table import MemoryPlan
from grpo_kit.memory.request import Request
from grpo_kit.memory.sharding import LIVE


class Card(NamedTuple):
    """One card by its data sheet. gb: as sold. tflops: of dense matrix products, in the dtype that its profile
    computes in, 10**12 a second. memory, link: 10**9 bytes a second; link one way, to the other cards. profile: whose
    dtype it uses.
    """

    gb: float
    tflops: float
    memory: float
    link: float
    profile: str = "gpu24"


# T4: float32, which profile t4 computes in. PCIe 4.0 x16: 32 one way; NVLink of an H100 SXM: 900 both ways.
CARDS = {
    "T4": Card(16, 8.1, 320, 16, "t4"),
    "L4": Card(24, 121, 300, 32),
    "RTX 4090": Card(24, 165, 1008, 32),
    "A100 80GB": Card(80, 312, 2039, 300),
    "H100 80GB": Card(80, 989, 3350, 450),
}


def step_floor(request: Request, plan: MemoryPlan, card: Card) -> dict[str, float]:
    """Seconds by part: rollout, update, and exchange, the time in them that nothing hides; "step" is their sum."""
    cfg, counts, cards = request.cfg, request.counts, request.gpus
    rows, prompts, length = request.rows, request.prompts, request.completion_tokens
    rate, memory, link = card.tflops * 1e12, card.memory * 1e9, card.link * 1e9
    c, share = request.compute, (cards - 1) / cards
    model, body = counts.linear + counts.norms + counts.matrix, counts.linear + counts.norms

    prompt_tokens = prompts * request.prompt_tokens
    prefill = 2 * (body * prompt_tokens + counts.matrix * prompts) / rate
    key_value = plan.parts["rollout"]["keys and values"] / (prompt_tokens + rows * length)  # bytes a token
    read = prompt_tokens + rows * (length - 1) / 2  # keys and values of a decode step, on average
    weights = request.decode_weights
    decode = max((length - 1) * (weights + key_value * read) / memory, 2 * model * rows * (length - 1) / rate)

    passes = 6 if request.full else 4
    again = 2 * body * plan.checkpointed_layers / plan.layers
    scored = rows * length
    update = (passes * (body * request.tokens + counts.matrix * scored) + again * request.tokens) / rate
    if cfg.beta > 0:
        update += 2 * (body * request.tokens + counts.matrix * scored) / rate

    micro_batches = rows // request.micro_batch if request.trls_own else 1
    gradients = c * (counts.all if request.full else counts.adapters)
    to_sample, in_update, after = 0.0, 0.0, 0.0
    if request.sharding == "ddp":
        itemsize = request.itemsize if request.full else 4
        after = 2 * itemsize * (counts.all if request.full else counts.adapters)
    elif request.sharding == "zero2":
        in_update, after = gradients * micro_batches, c * (counts.all if request.full else counts.adapters)
    elif request.sharding == "zero3":
        to_sample = length * c * max(0.0, counts.all - LIVE) if request.sparing else c * counts.all
        in_update = micro_batches * (2 * c * counts.all + gradients)
    else:
        to_sample = length * c * body
        in_update = micro_batches * 2 * c * counts.all
        in_update += gradients * (micro_batches if request.sparing else 1)
    to_sample, in_update, after = (share * bytes_ / link for bytes_ in (to_sample, in_update, after))
    shown = max(0.0, to_sample - decode) + max(0.0, in_update - update) + after
    if request.sharding == "zero3" and not request.sparing:  # all of it before the first token
        shown += min(to_sample, decode)
    seconds = {"rollout": prefill + decode, "update": update, "exchange": shown}
    return seconds | {"step": sum(seconds.values())}

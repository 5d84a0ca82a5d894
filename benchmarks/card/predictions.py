"""What each part of benchmarks.card.program should take, by the model of docs/what_to_expect.md, before it runs.

The model's counts are Qwen2.5-1.5B's. For the half as large one a layer has the same launches; its products' bytes and
FLOPs go by its weights, the rest by its width. Loading, compiling and the first graphs are in no model: they are added
as FIRST and LATER say.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.card.expect import H200_WIDTH, PROMPT_TOKENS, costs, expected, width_of
from benchmarks.card.peaks import (
    CARDS,
    H200,
    MODEL,
    Peaks,
    Work,
    between,
    counted,
    decoded,
    results,
)
from grpo_kit.models._model_facts import config_of
from grpo_kit.more.memory._request import counted as parameters
from grpo_kit.more.memory.plan import plan_memory
from grpo_kit.trainer.presets import preset

SMALL = "Qwen/Qwen2.5-0.5B-Instruct"
ROWS = (1, 8, 64)
# seconds of loading and warming up: the first part dequantises the weights, too
FIRST, LATER = 120.0, 30.0
PROMPTS, GROUP, AT_ONCE = 8, 8, 256
GSM8K = {
    "steps": 60,
    "limit": 400,
    "mean": 150,
    "held out": 660,
}  # mean: tokens of a completion, before training
COUNTDOWN = {"steps": 30, "limit": 128, "mean": 50, "held out": 256}
PARTS = ("layer", "vocabulary", "rest")
STEP_LENGTH = 512


def peaks_of(name: str, gib: float, measured: dict[str, float] | None) -> Peaks:
    """The card by its data sheet where it is known, else by its own large product and copy, with the H200's shares."""
    for card in (*CARDS, H200):
        if card.name in name:
            return replace(card, gib=min(gib, H200.gib))  # the program caps its memory
    if measured is None:
        raise ValueError(f"card={name!r} is in no table, and its peaks were not measured")
    bandwidth, flops = (
        measured["bytes/s"] / costs().bandwidth,
        measured["FLOP/s"] / costs().flops,
    )
    return Peaks(name, min(gib, H200.gib), bandwidth, flops, flops / 2, "measured on the card")


def of_small(work: Work, part: str) -> Work:
    """What one of PARTS of the 1.5B needs, brought to the 0.5B's sizes."""
    large, small = config_of(MODEL), config_of(SMALL)
    width = small.hidden_size / large.hidden_size
    if part == "rest":
        return work
    if part == "vocabulary":
        return replace(work, flops=width * work.flops, product_bytes=width * work.product_bytes)
    depth = small.num_hidden_layers / large.num_hidden_layers
    weights = parameters(SMALL, 16).linear / parameters(MODEL, 16).linear
    return Work(
        depth * work.launches,
        weights * work.flops,
        weights * work.product_bytes,
        depth * width * work.other_bytes,
    )


def small_token(kind: str, width: int, rows: int) -> Work:
    """One decoded token of all rows; see peaks.decoded."""
    name, widths = "decode fused", tuple(results("card_counts.json")["widths"])
    work = sum(
        (of_small(sum(between(kind, name, widths, width, p), Work()), p) for p in PARTS), Work()
    )
    of_weights = parameters(SMALL, 16)
    once = Work(work.launches, product_bytes=2.0 * (of_weights.linear + of_weights.ends))
    return rows / results("card_counts.json")["rows"] * (work + -1 * once) + once


def small_pass(kind: str, name: str, tokens: float, parts: tuple[str, ...] = PARTS) -> Work:
    """A forward pass or an update of so many tokens, in one chunk."""
    lengths = tuple(results("card_counts.json")["lengths"])
    return sum(
        (of_small(sum(between(kind, name, lengths, tokens, p), Work()), p) for p in parts),
        Work(),
    )


def generation(kind: str, peaks: Peaks, prompts: int, rows: int, limit: int) -> float:
    """Seconds until the longest of the rows has `limit` tokens."""
    cost = costs()
    prefill = cost.phase(
        small_pass(kind, "forward", prompts * PROMPT_TOKENS, ("layer", "rest")), peaks
    )
    steps = (small_token(kind, width_of(step, limit), rows) for step in range(1, limit))
    return prefill + sum(cost.token(work, peaks) for work in steps)


def learning(kind: str, peaks: Peaks, what: dict[str, int], first: bool) -> dict[str, Any]:
    """Seconds of a run of card/learn.py, by its parts, and the memory plan's peak."""
    cost, rows = costs(), PROMPTS * GROUP
    tokens = PROMPTS * PROMPT_TOKENS + rows * what["mean"]
    optimizer = sum(
        (of_small(counted(kind, "optimizer", part), part) for part in PARTS), Work()
    )
    update = cost.phase(small_pass(kind, "update", tokens), peaks) + cost.phase(
        optimizer, peaks
    )
    step = generation(kind, peaks, PROMPTS, rows, what["limit"]) + update + cost.other
    batches = -(-what["held out"] // AT_ONCE)
    evaluation = batches * generation(kind, peaks, AT_ONCE, AT_ONCE, what["limit"])
    plan = plan_memory(
        preset("gpu24", model=SMALL, tuning=kind.lower()), 24, prompt_tokens=PROMPT_TOKENS,
        completion_tokens=what["limit"],
    )  # fmt: skip
    return {
        "s a step": step,
        "s an evaluation": evaluation,
        "peak GiB": plan.peak_gib,
        "seconds": (FIRST if first else LATER) + 2 * evaluation + what["steps"] * step,
    }


def tokens_and_steps(peaks: Peaks) -> dict[str, Any]:
    """Milliseconds a token of 1, 8 and 64 rows, and seconds a step of 64 x 512: Qwen2.5-1.5B's shapes."""
    found: dict[str, Any] = {}
    for kind in ("full", "LoRA", "QLoRA"):
        for rows in ROWS:
            work = decoded(kind, H200_WIDTH, rows)
            found[f"ms a token of {rows} rows, {kind}"] = 1e3 * costs().token(work, peaks)
    for kind in ("full", "LoRA"):
        found[f"s a step of 64 x {STEP_LENGTH}, {kind}"] = expected(
            kind, peaks, STEP_LENGTH
        ).get("step")
    return found


def predicted(peaks: Peaks) -> dict[str, dict[str, Any]]:
    """Of each part of the program, by its name."""
    known = results("before_training_qwen2.5-coder-0.5b-instruct-float32.json")["rows"][
        "gsm8k, the kit's task"
    ]
    runs = {"gsm8k seed 0": learning("full", peaks, GSM8K, first=True)}
    for name in ("gsm8k null seed 0", "gsm8k seed 1", "gsm8k seed 2"):
        runs[name] = learning("full", peaks, GSM8K, first=False)
    for run in runs.values():
        run["before"] = known["interval"]
    runs["gsm8k null seed 0"]["change"] = "its interval holds 0"
    runs["countdown full"] = learning("full", peaks, COUNTDOWN, first=False)
    runs["countdown lora"] = learning("LoRA", peaks, COUNTDOWN, first=False)
    for name, after in (("full", [0.805, 0.934]), ("lora", [0.65, 0.77])):
        runs[f"countdown {name}"] |= {"before": [0.451, 0.572], "after": after}
    found = tokens_and_steps(peaks)
    seconds = {name: value for name, value in found.items() if "QLoRA" not in name}
    four_bits = {name: value for name, value in found.items() if "QLoRA" in name}
    return runs | {"seconds": seconds, "seconds QLoRA": four_bits, "tests": {"failed": 0}}

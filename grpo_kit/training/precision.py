"""bfloat16 on a CPU: never by itself, obeyed where it was asked for. float16: where its scaled loss does no harm."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

_CPUINFO = Path("/proc/cpuinfo")
_OFF = (
    "args.bf16 is now False: trl turns it on where nobody says anything, and on a CPU the kit computes in float32. For "
    "bfloat16 set args.bf16_on_cpu = True."
)
# SmolLM2-135M, forward and backward; gradients: python -m benchmarks.bf16_gradient
_SPEED = {
    "amx_bf16": "with AMX an update was 1.2 to 1.5 times as fast as in float32",
    "avx512_bf16": "without AMX, but with AVX-512's bfloat16, an update was 1.3 times as fast as in float32",
    None: "this CPU has no instructions for it, so expect it to be slower than float32",
}
_OBEYED = (
    "bf16 on a CPU: {}; the gradient on completions sampled before training had a cosine of 0.999 with float64's. "
    "Whether runs learn the same was not measured."
)


def bf16_instructions(cpuinfo: Path = _CPUINFO) -> str | None:
    """The CPU's flag for bfloat16 products: "amx_bf16" (Intel's tiles), else "avx512_bf16", else None.

    None too where the system does not tell its flags.
    """
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = {flag for line in lines if line.startswith("flags") for flag in line.split()}
    return next((name for name in ("amx_bf16", "avx512_bf16") if name in flags), None)


def settle_precision(args: Any, *, quiet: bool) -> None:
    """On a CPU turns args.bf16 off unless somebody asked for it, and says either in one line; a card's stays.

    trl turns bf16 on where nobody says anything, and afterwards GRPOConfig(use_cpu=True) and
    GRPOConfig(use_cpu=True, bf16=True) are alike. Asked for is what has `args.bf16_on_cpu = True`, which
    Profile.grpo_config(bf16=True) sets, and what ACCELERATE_MIXED_PRECISION=bf16 says.
    Raises ValueError for fp16=True on a CPU, where accelerate computes in float32 without a word.
    """
    if args.device.type == "cpu" and args.fp16:
        raise ValueError("fp16=True needs a CUDA card; on a CPU leave it out, for float32")
    if args.device.type != "cpu" or not args.bf16:
        return
    asked = getattr(args, "bf16_on_cpu", False) or os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16"
    if not asked:
        args.bf16, args.mixed_precision = False, "no"
    if quiet:
        return
    print(_OBEYED.format(_SPEED[bf16_instructions()]) if asked else _OFF, flush=True)


def check_trained_for_fp16(args: Any, model: torch.nn.Module) -> None:
    """Raises ValueError under fp16=True for trained weights that are not float32.

    float16 is autocast's there, and the loss is scaled so that small gradients do not become 0. What was scaled up must
    be scaled down and added to the weights in float32: torch refuses to unscale float16 gradients after the first
    rollout, and whoever has bfloat16 needs no scaling.
    """
    narrow = {p.dtype for p in model.parameters() if p.requires_grad} - {torch.float32}
    if args.fp16 and narrow:
        found = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in narrow))
        raise ValueError(
            f"fp16=True trains float32 weights only, these are {found}: load with dtype='float32', or with "
            "tuning='lora', whose adapters are float32 over weights of any dtype"
        )

"""bfloat16 on a CPU: never by itself, obeyed where it was asked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

_CPUINFO = Path("/proc/cpuinfo")
_OFF = (
    "args.bf16 is now False: trl turns it on where nobody says anything, and on a CPU the kit computes in float32. For "
    "bfloat16 set args.bf16_on_cpu = True."
)
# python -m benchmarks.bf16_gradient; SmolLM2-135M, the cpu profile's task
_OBEYED = (
    "bf16 on a CPU {}: an update was measured {} as fast as in float32, its gradient on real completions at a cosine of "
    "0.9995 with float64's. Whether runs learn the same was not measured."
)
_WITH_AMX, _WITHOUT = ("with AMX", "1.2 to 1.5 times"), ("without AMX", "X times")


def has_amx(cpuinfo: Path = _CPUINFO) -> bool:
    """Has this CPU tiles for bfloat16 products (Intel's AMX)? False where the system does not tell its flags."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return any("amx_bf16" in line.split() for line in lines if line.startswith("flags"))


def settle_precision(args: Any, *, quiet: bool) -> None:
    """On a CPU turns args.bf16 off unless somebody asked for it, and says either in one line; a card's stays.

    trl turns bf16 on where nobody says anything, and afterwards GRPOConfig(use_cpu=True) and
    GRPOConfig(use_cpu=True, bf16=True) are alike. Asked for is what has `args.bf16_on_cpu = True`, which
    Profile.grpo_config(bf16=True) sets, and what ACCELERATE_MIXED_PRECISION=bf16 says.
    """
    if args.device.type != "cpu" or not args.bf16:
        return
    asked = getattr(args, "bf16_on_cpu", False) or os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16"
    if not asked:
        args.bf16, args.mixed_precision = False, "no"
    if quiet:
        return
    print(_OBEYED.format(*_WITH_AMX if has_amx() else _WITHOUT) if asked else _OFF, flush=True)

"""What is asked of a CUDA card before anything lies on it: bfloat16 of its own, memory that stays whole, trust."""

from __future__ import annotations

import os
import sys

import torch

# The names under which torch takes the allocator's settings from the environment.
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"


def has_bf16() -> bool:
    """Does the current card compute in bfloat16 by itself? False without a card.

    Cards before Ampere (T4, V100, RTX 20) emulate it, slower than float32; torch by default calls that supported.
    """
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def may_fail(device: torch.device) -> bool:
    """Could a fast part meet hardware there that it was never run on? Then a plain one takes its place when it fails.

    On a CPU every part was tested: what raises there is heard.
    """
    return device.type == "cuda"


def use_expandable_segments() -> str | None:
    """Let torch's allocator grow its segments, so that holes between tensors do not make a card look full.

    Before anything lies on the card, on Linux; whoever set one of ALLOCATOR_SETTINGS, to anything, is obeyed.
    Returns one line that says it where this call turned it on, else None.
    """
    if not sys.platform.startswith("linux") or not torch.cuda.is_available() or torch.cuda.memory_reserved():
        return None
    if any(name in os.environ for name in ALLOCATOR_SETTINGS):
        return None
    # Torch may have read the environment when it was imported, so it is told by its own function.
    torch._C._accelerator_setAllocatorSettings(_EXPANDABLE)
    # For processes that this one starts, and for vLLM, which looks under this name only and steps aside for it.
    os.environ[ALLOCATOR_SETTINGS[0]] = _EXPANDABLE
    return (
        f"{ALLOCATOR_SETTINGS[0]}={_EXPANDABLE}, against fragmentation of the card's memory; a value that you set "
        "yourself is kept"
    )

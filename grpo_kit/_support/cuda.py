"""Checks of a CUDA card before it is used: native bfloat16, unfragmented memory, parts that may fail on it."""

from __future__ import annotations

import os
import platform
import sys

import torch

# The environment variables from which torch takes the allocator's settings.
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"


def has_bf16() -> bool:
    """Does the current card compute in bfloat16 by itself? False without a card.

    Cards before Ampere (T4, V100, RTX 20) emulate it, slower than float32; torch by default reports them as supported.
    """
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def own_device() -> torch.device:
    """The current card; of several processes (torchrun, LOCAL_RANK) each takes its own. The CPU without a card."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def peak_gib() -> float:
    """The most memory so far, in GiB: what torch reserved on the card; without one, of this process, libraries too.

    Windows does not say it without a card: nan.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved() / 2**30
    try:
        import resource
    except ImportError:
        return float("nan")
    unit = 2**10 if sys.platform == "linux" else 1  # bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def may_fail(device: torch.device) -> bool:
    """Could a fast part run on hardware where it was never tested? Its plain replacement is then used if it fails.

    On a CPU every part was tested, so its errors are raised.
    """
    return device.type == "cuda"


def use_expandable_segments() -> str | None:
    """Let torch's allocator grow its segments, so that holes between tensors do not make a card look full.

    Call it before anything is on the card, on Linux. A value of one of ALLOCATOR_SETTINGS set by the user is kept.
    Returns one line for the log if this call turned it on, else None.
    """
    if (
        not sys.platform.startswith("linux")
        or not torch.cuda.is_available()
        or torch.cuda.memory_reserved()
    ):
        return None
    if any(name in os.environ for name in ALLOCATOR_SETTINGS):
        return None
    # Torch may have read the environment when it was imported, so its own function sets the value too.
    set_allocator = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if set_allocator is None:  # torch 2.8
        set_allocator = torch.cuda.memory._set_allocator_settings
    set_allocator(_EXPANDABLE)
    # For child processes, and for vLLM, which reads this name only and then keeps its own setting.
    os.environ[ALLOCATOR_SETTINGS[0]] = _EXPANDABLE
    return (
        f"{ALLOCATOR_SETTINGS[0]}={_EXPANDABLE}, against fragmentation of the card's memory; a value that you set "
        "yourself is kept"
    )


def stay_on_the_card() -> str | None:
    """Limit torch to the card's own memory, on Windows and WSL: their drivers go on in system memory, very slowly.

    Beyond the limit torch raises OutOfMemoryError, with which engine and update deal. A limit that somebody set is
    kept. Returns one line for the log if this call set one, else None.
    """
    spills = sys.platform == "win32" or "microsoft" in platform.release().lower()
    if (
        not spills
        or not torch.cuda.is_available()
        or torch.cuda.get_per_process_memory_fraction() < 1
    ):
        return None
    free, total = torch.cuda.mem_get_info()
    # The driver takes some memory besides.
    share = round((free + torch.cuda.memory_reserved()) / total - 0.02, 2)
    torch.cuda.set_per_process_memory_fraction(share)
    return (
        f"torch may take {share:.0%} of the card's memory: beyond what is free, drivers of Windows and WSL go on in "
        "system memory, very slowly; torch.cuda.set_per_process_memory_fraction before this sets another limit"
    )

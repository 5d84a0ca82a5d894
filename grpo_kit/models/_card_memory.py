"""What is asked of a card's memory before a model lies on it: nothing of it in system memory."""

from __future__ import annotations

import platform
import sys

import torch


def stay_on_the_card() -> str | None:
    """Limit torch to the card's own memory, on Windows and WSL: their drivers go on in system memory, very slowly.

    Beyond the limit torch raises OutOfMemoryError, with which engine and update deal. A limit that somebody set is
    kept. Returns one line for the log if this call set one, else None.
    """
    spills = sys.platform == "win32" or "microsoft" in platform.release().lower()
    if not spills or not torch.cuda.is_available() or torch.cuda.get_per_process_memory_fraction() < 1:
        return None
    free, total = torch.cuda.mem_get_info()
    share = round((free + torch.cuda.memory_reserved()) / total - 0.02, 2)  # the driver takes some besides
    torch.cuda.set_per_process_memory_fraction(share)
    return (
        f"torch may take {share:.0%} of the card's memory: beyond what is free, drivers of Windows and WSL go on in "
        "system memory, very slowly; torch.cuda.set_per_process_memory_fraction before this sets another limit"
    )

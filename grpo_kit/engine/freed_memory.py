"""On a CPU, what a step frees stays with the process for the next step.

glibc hands large blocks back to the system as they are freed, and every step gets gigabytes anew, page by page, each
page cleared by the kernel. Cards, other C libraries, and a glibc that somebody has set up, are left alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from grpo_kit.memory.free import glibc

# mallopt's parameters (malloc.h). Afterwards: where glibc's own adjusting ends once large blocks have been freed.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_WHILE_TRAINING = ((_TRIM_THRESHOLD, -1), (_MMAP_MAX, 0))
_AFTER = ((_MMAP_MAX, 65536), (_MMAP_THRESHOLD, 32 * 2**20), (_TRIM_THRESHOLD, 64 * 2**20))


@contextmanager
def kept_for_the_next_step(device: torch.device) -> Iterator[None]:
    """While inside, freed memory is kept; afterwards it goes back to the system."""
    set_up = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    libc = glibc() if device.type == "cpu" and not set_up else None
    if libc is None:
        yield
        return
    for parameter, value in _WHILE_TRAINING:
        libc.mallopt(parameter, value)
    try:
        yield
    finally:
        for parameter, value in _AFTER:
            libc.mallopt(parameter, value)
        libc.malloc_trim(0)

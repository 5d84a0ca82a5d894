"""On a CPU, what a step frees stays with the process for the next step.

glibc hands large blocks back to the system as they are freed, and every step gets gigabytes anew, page by page, each
page cleared by the kernel. Other C libraries and cards are left alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# mallopt's parameters (malloc.h), and what glibc's own adjusting ends at once large blocks have been freed.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_WHILE_TRAINING = ((_TRIM_THRESHOLD, -1), (_MMAP_MAX, 0))
_AFTER = ((_MMAP_MAX, 65536), (_MMAP_THRESHOLD, 32 * 2**20), (_TRIM_THRESHOLD, 64 * 2**20))


@contextmanager
def kept_for_the_next_step(device: torch.device) -> Iterator[None]:
    """While inside, freed memory is kept; afterwards it goes back to the system, as usual."""
    libc = _glibc() if device.type == "cpu" else None
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


def _glibc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:  # another system, another C library
        return None
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None

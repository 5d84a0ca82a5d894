"""How many bytes this process can still allocate: by a card's cap, a container's limit, and malloc's reserve.

And when to try a larger size again after memory ran out.
"""

from __future__ import annotations

import ctypes
import functools
import math
from contextlib import suppress
from pathlib import Path

import psutil
import torch

_CGROUPS, _MINE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Files of a control group: its limit, its use, and the page cache in it that can be reclaimed.
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


def free_bytes(device: torch.device) -> int:
    """Bytes that torch can still allocate. On CUDA: under its memory fraction, with releasable cache. Else: the memory
    that system and container have left, with the C library's reserve for this process."""
    if device.type != "cuda":
        return int(min(psutil.virtual_memory().available, container_bytes())) + kept_by_malloc()
    card = _index(device)
    free, total = torch.cuda.mem_get_info(card)
    capped = int(total * torch.cuda.get_per_process_memory_fraction(card)) - torch.cuda.memory_reserved(card)
    return max(0, min(free, capped)) + releasable_bytes(device)


def _index(device: torch.device) -> int:
    """ "cuda" is the current card: not all of torch's functions take it without a number."""
    return torch.cuda.current_device() if device.index is None else device.index


def releasable_bytes(device: torch.device) -> int:
    """Bytes of a card that torch caches and could release: not in use, no hole, and not held by a CUDA graph.

    A hole is free memory beside a tensor in one segment. A larger tensor cannot use it, and it returns to the card
    only with expandable segments (PYTORCH_CUDA_ALLOC_CONF). Memory of CUDA graphs is not available to others.
    """
    if torch.cuda.get_allocator_backend() != "native":  # its segments cannot be read
        return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    index, releasable = _index(device), 0
    for segment in torch.cuda.memory_snapshot():
        if segment["device"] != index or tuple(segment["segment_pool_id"]) != (0, 0):
            continue
        unused = [block["size"] for block in segment["blocks"] if block["state"] == "inactive"]
        if segment["is_expandable"] or len(unused) == len(segment["blocks"]):
            releasable += sum(unused)
    return releasable


def container_bytes() -> float:
    """Memory left by the control groups of this process (Docker, Kubernetes, Slurm); infinite without a limit.

    The system's own figure ignores them, and a process over such a limit is killed.
    """
    free = math.inf
    memberships = _MINE.read_text().splitlines() if _MINE.exists() else []
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            root, names = _CGROUPS / "memory", _V1
        elif controllers == "":
            root, names = _CGROUPS, _V2
        else:
            continue
        group = root / path.strip("/")
        while group.is_relative_to(root):
            # In a container the path may be the host's: missing files are skipped.
            with suppress(OSError, ValueError):
                free = min(free, max(0, _free_in_group(group, *names)))
            group = group.parent
    return free


def _free_in_group(group: Path, limit: str, usage: str, cache: str) -> int:
    """Raises ValueError where the file of the limit says "max"."""
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int((group / limit).read_text()) - int((group / usage).read_text()) + int(stat.get(cache, 0))


def kept_by_malloc() -> int:
    """Freed bytes that still belong to this process, which the system counts as used; 0 if unknown."""
    libc = glibc()
    if libc is None or not hasattr(libc, "mallinfo2"):
        return 0
    libc.mallinfo2.restype = _Mallinfo
    info, memory = libc.mallinfo2(), psutil.Process().memory_info()
    # Some free pages were returned. The reserve cannot exceed resident pages that are not in use. (Python's own
    # pages are among those, 0.2 GB or so.)
    resident = memory.rss - memory.shared - info.in_use - info.mapped
    return max(0, min(info.free, resident))


@functools.cache
def glibc() -> ctypes.CDLL | None:
    """The C library, if it is glibc."""
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:  # another system, another C library
        return None
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None


class _Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _NAMES = ("arena", "_2", "_3", "_4", "mapped", "_6", "_7", "in_use", "free", "_10")
    _fields_ = [(name, ctypes.c_size_t) for name in _NAMES]


# ---- when to try a larger size again -------------------------------------------------------------------------------

_FIRST_WAIT = 8


class Backoff:
    """Counts successes with a smaller size, and decides when to try a larger one: after 8 times, then 16 more, 32, ...

    One bad moment does not slow a whole run down, and a size that never fits is tried ever more rarely.

    >>> backoff = Backoff()
    >>> [n for n in range(1, 60) if backoff.again()]
    [8, 24, 56]
    """

    def __init__(self) -> None:
        self._wait, self._successes = _FIRST_WAIT, 0

    def failed(self) -> None:
        """Memory ran out: restart the count."""
        self._successes = 0

    def again(self) -> bool:
        """Count one more success; is it time for a larger size?"""
        self._successes += 1
        if self._successes < self._wait:
            return False
        self._wait, self._successes = 2 * self._wait, 0
        return True

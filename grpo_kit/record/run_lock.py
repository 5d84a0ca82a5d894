"""Lets one run at a time train into a folder, and tells other processes whether one does.

runs/<name>/.going   locked while its process trains there; the lock of a killed process goes with it
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from grpo_kit.record.files import RunFolderError

GOING = ".going"


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Locks the folder for this process. Raises RunFolderError if another process trains into it."""
    lock = FileLock(folder / GOING)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise RunFolderError(
            f"{folder} is being trained into by another process; wait for it, or stop it"
        ) from None
    try:
        yield
    finally:
        (folder / GOING).unlink(missing_ok=True)
        lock.release()


def is_locked(folder: Path) -> bool | None:
    """Does a process of this machine train into the folder? False after it was killed, None after it ended."""
    if not (folder / GOING).exists():
        return None
    try:
        with FileLock(folder / GOING).acquire(timeout=0):
            return False
    except Timeout:
        return True

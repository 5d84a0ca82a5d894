"""Lets one run at a time train into a folder, and tells other processes whether one does: the one way to know it.

runs/<name>/.going   locked while its process trains there; the lock of a killed process goes with it
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from grpo_kit.record.files import RunFolderError

GOING = ".going"
_PATIENCE = 1.0  # seconds: whoever asks is_locked holds the lock for a moment


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Locks the folder for this process, once or several times. Raises RunFolderError if another one trains into it."""
    lock = FileLock(folder.resolve() / GOING, is_singleton=True)
    try:
        lock.acquire(timeout=_PATIENCE, poll_interval=0.05)
    except Timeout:
        raise RunFolderError(
            f"{folder} is being trained into by another process; wait for it, or stop it"
        ) from None
    try:
        yield
    finally:
        if lock.lock_counter == 1:
            (folder / GOING).unlink(missing_ok=True)
        lock.release()


def is_locked(folder: Path) -> bool | None:
    """Does a process of this machine train into the folder? False after it was killed, None after it ended."""
    if not (folder / GOING).exists():
        return None
    try:
        with FileLock(folder.resolve() / GOING, is_singleton=False).acquire(timeout=0):
            return False
    except Timeout:
        return True

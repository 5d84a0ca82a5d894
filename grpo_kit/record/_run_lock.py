"""Lets one run at a time train into a folder, and tells other processes whether one does: the one way to know it.

runs/<name>/.going   locked while its process trains there; the lock of a killed process goes with it
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from grpo_kit.record.files import RunFolderError

GOING = ".going"
MARK = b"A process trains here, or was killed.\n"  # an empty file is a lock's that begins or looks
_PATIENCE = 1.0  # seconds: whoever asks is_locked holds the lock for a moment


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Locks the folder for this process, once or several times.

    Raises RunFolderError if another one trains into it, and where it cannot be written.
    """
    lock = FileLock(folder.resolve() / GOING, is_singleton=True)
    try:
        lock.acquire(timeout=_PATIENCE, poll_interval=0.05)
    except Timeout:
        is_locked(folder)  # puts back its mark
        raise RunFolderError(f"{folder} is being trained into by another process; wait, or stop it") from None
    except OSError as error:
        raise RunFolderError(
            f"{folder} cannot be written ({error.strerror}); make it writable, or free space. What is in memory stays"
        ) from error
    try:
        if lock.lock_counter == 1:
            with suppress(OSError):  # a full disk: the lock holds without its mark
                (folder / GOING).write_bytes(MARK)
        yield
    finally:
        if lock.lock_counter == 1:
            with suppress(OSError):  # a folder that has become read-only
                (folder / GOING).unlink(missing_ok=True)
        lock.release()


def is_locked(folder: Path) -> bool | None:
    """Does a process of this machine train into it? False after it was killed (Windows: None), None after it ended."""
    path = folder.resolve() / GOING
    try:
        file = open(path, "rb")
    except OSError:
        return None
    with file:
        try:
            has_mark = file.read() == MARK
            with FileLock(path, is_singleton=False).acquire(timeout=0):
                if not has_mark or not os.fstat(file.fileno()).st_nlink:
                    return None  # it begins in this moment, or has ended in it
                path.write_bytes(MARK)  # which the lock may have emptied
                return False
        except FileNotFoundError:  # of filelock: the file went in this moment
            return None
        except (Timeout, PermissionError):
            with suppress(OSError), open(path, "r+b") as locked:
                locked.write(MARK)  # which filelock before 4 has emptied
            return True

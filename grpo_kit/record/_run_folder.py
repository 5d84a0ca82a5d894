"""A run's folder: the path that a user gave, checked, and the lock that lets one run at a time train into it.

path_of is the one place that reads a path that a user gave. run_path makes a run folder's path absolute, whatever
changes the working directory later, and refuses a name that no run could be written to before anything is loaded.

runs/<name>/.going   locked while its process trains there; the lock of a killed process goes with it
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

_LONGEST = 255  # bytes of one name, on every file system that matters
_NOT_A_DISK = ("proc", "sys", "dev")


class RunFolderError(ValueError):
    """The run folder cannot be used as requested; the message names what would do."""

    def _render_traceback_(self) -> list[str]:
        """IPython shows this instead of a traceback: the message alone."""
        return [f"{type(self).__name__}: {self}"]


def path_of(path: Any, argument: str = "folder") -> Path:
    """The path that a user gave, `~` expanded. Every argument that takes a path goes through here.

    argument: its name in messages. Raises RunFolderError (a ValueError) for what is no path, and for the home of a
    user that this machine does not know: `~nobody/model` would otherwise lie in the working folder.

    >>> path_of("~/models") == Path.home() / "models"
    True
    """
    label = f"{argument}={path!r:.100}"
    if not isinstance(path, str | os.PathLike) or isinstance(os.fspath(path), bytes):
        raise RunFolderError(f"{label} must be a text or a path, such as 'runs/demo'.")
    expanded = Path(os.path.expanduser(path))
    if str(expanded).startswith("~") and not expanded.exists():
        raise RunFolderError(
            f"{label} begins with ~, and there is no such home folder; write the whole path."
        )
    return expanded


def run_path(folder: Any, argument: str = "folder") -> Path:
    """The folder as an absolute path, without ".." where that leads to the same; symbolic links stay as they are.

    argument: its name in messages. Raises RunFolderError (a ValueError) for what is no name of a folder, the root, the
    home folder, the system's own /proc, /sys and /dev, and a name that is too long or no text in UTF-8.

    >>> run_path("notebooks/../runs/demo") == Path.cwd() / "runs" / "demo"
    True
    """
    label = f"{argument}={folder!r:.100}"
    path = path_of(folder, argument).absolute()
    text = os.fspath(folder)
    if "\0" in text:
        raise RunFolderError(f"{label} is no name: it has a null character; name a folder.")
    if not text.strip():
        raise RunFolderError(f"{label} is blank; name a folder.")
    try:
        parts = [part.encode() for part in Path(text).parts]
    except UnicodeEncodeError as error:
        raise RunFolderError(
            f"{label} is no text in UTF-8, which its files would have to name; rename it."
        ) from error
    if max(map(len, parts), default=0) > _LONGEST:
        raise RunFolderError(
            f"{label}... is too long: a folder's name has at most {_LONGEST} bytes; shorten it."
        )
    real = path.resolve()
    if real in (Path(real.anchor), Path(os.path.expanduser("~")).resolve()):
        raise RunFolderError(
            f"{label} is {real}, where other things lie; name a folder of its own, such as 'runs/demo'."
        )
    # not on Windows, where a folder C:\dev is a usual one
    if os.name == "posix" and real.parts[1] in _NOT_A_DISK and real.parts[2:3] != ("shm",):
        raise RunFolderError(
            f"{label}: nothing can be written to /{real.parts[1]}; name another."
        )
    plain = Path(os.path.normpath(path))
    return plain if plain.resolve() == real else path


GOING = ".going"
# an empty file is a lock's that begins or looks
MARK = b"A process trains here, or was killed.\n"
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
        raise RunFolderError(
            f"{folder} is being trained into by another process; wait, or stop it"
        ) from None
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

"""run_path: the one place that makes a run folder's path absolute, whatever changes the working directory later.

A name that no run could be written to is refused before anything is loaded.
"""

import os
from pathlib import Path
from typing import Any

from grpo_kit.record.lines import RunFolderError

_LONGEST = 255  # bytes of one name, on every file system that matters
_NOT_A_DISK = ("proc", "sys", "dev")


def run_path(folder: Any, argument: str = "folder") -> Path:
    """The folder as an absolute path, `~` expanded; symbolic links stay as they are.

    argument: its name in messages. Raises RunFolderError (a ValueError) for what is no name of a folder, the root, the
    home folder, the system's own /proc, /sys and /dev, and a name that is too long or no text in UTF-8.

    >>> run_path("runs/demo") == Path.cwd() / "runs" / "demo"
    True
    """
    given = f"{argument}={folder!r:.100}"
    if not isinstance(folder, str | os.PathLike) or isinstance(os.fspath(folder), bytes):
        raise RunFolderError(f"{given} must be a text or a path, such as 'runs/demo'.")
    text = os.fspath(folder)
    if not text.strip() or "\0" in text:
        raise RunFolderError(
            f"{given} is {'no name: it has a null character' if text.strip() else 'blank'}; name a folder."
        )
    try:
        parts = [part.encode() for part in Path(text).parts]
    except UnicodeEncodeError as error:
        raise RunFolderError(
            f"{given} is no text in UTF-8, which its files would have to name; rename it."
        ) from error
    if max(map(len, parts), default=0) > _LONGEST:
        raise RunFolderError(
            f"{given}... is too long: a folder's name has at most {_LONGEST} bytes; shorten it."
        )
    try:
        path = Path(text).expanduser().absolute()
    except RuntimeError as error:  # no home folder
        raise RunFolderError(f"{given}: {error}; write the whole path.") from error
    real = path.resolve()
    if real in (Path(real.anchor), Path(os.path.expanduser("~")).resolve()):
        raise RunFolderError(
            f"{given} is {real}, where other things lie; name a folder of its own, such as 'runs/demo'."
        )
    if os.name == "posix" and real.parts[1] in _NOT_A_DISK and real.parts[2:3] != ("shm",):
        raise RunFolderError(f"{given}: nothing can be written to /{real.parts[1]}; name another.")
    return path

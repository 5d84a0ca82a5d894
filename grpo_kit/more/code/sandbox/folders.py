"""The program's folder: measures its contents, and empties it whatever was left. Links are never followed."""

from __future__ import annotations

import os
import stat

_MAX_DEPTH = 32  # folders within folders; a deeper tree counts as over the limit


def over_limit(top: str, max_bytes: int, max_entries: int) -> bool:
    """Whether the tree under `top` has more bytes or entries than allowed, or hides them.

    Stops counting at the limit. A running program may change the tree meanwhile: vanished files are not counted, and
    a folder that cannot be listed counts as over the limit.
    """
    total = entries = 0
    waiting = [(top, 0)]
    while waiting:
        path, depth = waiting.pop()
        try:
            with os.scandir(path) as found:
                for entry in found:
                    entries += 1
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    total += status.st_blocks * 512
                    if total > max_bytes or entries > max_entries or depth > _MAX_DEPTH:
                        return True
                    if stat.S_ISDIR(status.st_mode):
                        waiting.append((entry.path, depth + 1))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:  # no permission to list, or a path that is too long
            return True
    return False


def empty(top: str) -> None:
    """Remove everything in the folder `top`; the programs that wrote there must be gone.

    Folders within are moved up before their turn, so neither depth nor the length of a path matters.
    """
    os.chmod(top, 0o700)
    moved = 0
    while names := os.listdir(top):
        for name in names:
            path = os.path.join(top, name)
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                os.unlink(path)
                continue
            os.chmod(path, 0o700)
            for inner in os.listdir(path):
                inner_path = os.path.join(path, inner)
                if stat.S_ISDIR(os.lstat(inner_path).st_mode):
                    os.chmod(inner_path, 0o700)  # a folder without write permission cannot be moved
                    while os.path.lexists(target := os.path.join(top, f"moved{moved}")):
                        moved += 1
                    os.rename(inner_path, target)
                else:
                    os.unlink(inner_path)
            os.rmdir(path)

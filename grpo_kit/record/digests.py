"""Which checkpoints of a run are whole, and what is wrong with the others.

A checkpoint's digests.json holds the size and the SHA-256 of each of its files, and is written last.

A disk, a copy or a sync client can cut or change a file long after it was written, and a library then ends in an error
of its own (safetensors), or trains on without it (an optimizer.pt that is gone).

Measured for a checkpoint of 0.5 GB, on one core: 0.5 s to write the digests, 0.5 s to compare them; sizes below 1 ms.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path

from grpo_kit.record.lines import RunFolderError
from grpo_kit.record.run_path import path_of

DIGESTS = "digests.json"
_EDITED = {"README.md"}  # people edit it, and no run goes on from it


def write_digests(checkpoint: Path) -> None:
    """Keep the size and digest of every file of a checkpoint in it. Each is read once, in pieces."""
    names = sorted(
        path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()
    )
    kept = {
        name: [(checkpoint / name).stat().st_size, _sha256(checkpoint / name)]
        for name in names
        if name not in {DIGESTS, *_EDITED}
    }
    text = json.dumps({"algorithm": "sha256", "files": kept}, indent=1) + "\n"
    (checkpoint / DIGESTS).write_text(text, encoding="utf-8")


def what_is_wrong(checkpoint: str | Path, *, digests: bool = True) -> str | None:
    """Which file of a checkpoint is damaged, and how; None where it is whole.

    digests: False compares sizes alone. One without digests was not written to its end: they are its last file.

    >>> what_is_wrong("runs/full/checkpoint-4")  # doctest: +SKIP
    'model.safetensors is cut: 1,000 of 2,000 bytes are there'
    """
    folder = path_of(checkpoint, "checkpoint")
    if not (folder / DIGESTS).exists():
        return "it was not written to its end" if folder.is_dir() else "it is not there"
    try:
        files = json.loads((folder / DIGESTS).read_text(encoding="utf-8"))["files"].items()
        kept = [(folder / name, int(size), str(digest)) for name, (size, digest) in files]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{DIGESTS} cannot be read"
    sizes = (_wrong_size(path, path.relative_to(folder).as_posix(), size) for path, size, _ in kept)
    if wrong := next(filter(None, sizes), None):
        return wrong
    for path, size, digest in kept if digests else ():
        try:
            same = _known_sha256(str(path), size, path.stat().st_mtime_ns) == digest
        except OSError as error:
            return f"{path.name} cannot be read ({error.strerror})"
        if not same:
            return f"{path.relative_to(folder).as_posix()} holds other bytes than were written"
    return None


def last_whole(folder: Path) -> Path:
    """The newest checkpoint whose files are as they were written; one that is passed over is named.

    Raises RunFolderError where none is whole.
    """
    passed = []
    for path in reversed(checkpoints(folder)):
        if (wrong := what_is_wrong(path)) is None:
            for line in passed:
                print(f"{line}. Going on from {path}.", flush=True)
            return path
        passed.append(f"{path} is damaged and is passed over: {wrong}")
    named = f" ({'; '.join(passed)})" if passed else ""
    raise RunFolderError(
        f"folder={str(folder)!r} holds no whole checkpoint to go on from{named}; begin under another name"
    )


def newest_whole(folder: str | Path, *, digests: bool = True) -> Path | None:
    """The newest checkpoint whose files are as they were written; None where there is none.

    digests: False compares the sizes of its files alone, which takes no time.
    """
    return next((p for p in reversed(checkpoints(folder)) if what_is_wrong(p, digests=digests) is None), None)


def checkpoints(folder: str | Path) -> list[Path]:
    """The folders checkpoint-<step>, whole or not, lowest step first."""
    found = [p for p in path_of(folder).glob("checkpoint-*") if p.name[11:].isdecimal() and p.is_dir()]
    return sorted(found, key=lambda path: int(path.name[11:]))


def _wrong_size(path: Path, name: str, size: int) -> str | None:
    if not path.is_file():
        return f"{name} is missing"
    there = path.stat().st_size
    if there < size:
        return f"{name} is cut: {there:,} of {size:,} bytes are there"
    return f"{name} has {there:,} bytes, and {size:,} were written" if there > size else None


def _sha256(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@functools.lru_cache(maxsize=4096)
def _known_sha256(path: str, size: int, changed: int) -> str:
    """A file that was read in this process is not read again until its size or its time changes."""
    return _sha256(path)

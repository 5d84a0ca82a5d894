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
import os
from pathlib import Path

from grpo_kit.record._lines import RUN, RUN_ID, RunFolderError, read_json, reading, run_id
from grpo_kit.record.run_path import path_of

DIGESTS = "digests.json"
REPORT = "export.json"  # an export's own report, which holds the digests of its files
_EDITED = {"README.md"}  # people edit it, and no run goes on from it


def write_digests(checkpoint: Path, run: str | None = None) -> None:
    """Keep the size and digest of every file of a checkpoint in it, and the run's id. Each is read once, in pieces."""
    names = sorted(
        path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()
    )
    kept = {
        name: [(checkpoint / name).stat().st_size, file_digest(checkpoint / name)]
        for name in names
        if name not in {DIGESTS, *_EDITED}
    }
    text = json.dumps({"algorithm": "sha256", RUN_ID: run, "files": kept}, indent=1) + "\n"
    (checkpoint / DIGESTS).write_text(text, encoding="utf-8")


def what_is_wrong(checkpoint: str | Path, *, digests: bool = True) -> str | None:
    """Which file of a checkpoint or an export is damaged, and how, or that it is another run's; None where it is whole.

    digests: False compares sizes alone. One without digests was not written to its end: they are its last file.

    >>> what_is_wrong("runs/full/checkpoint-4")  # doctest: +SKIP
    'model.safetensors is cut: 1,000 of 2,000 bytes are there'
    """
    folder = path_of(checkpoint, "checkpoint")
    if not (folder / DIGESTS).exists():
        if (folder / REPORT).exists():
            return _otherwise_than_exported(folder)
        return "it was not written to its end" if folder.is_dir() else "it is not there"
    try:
        written = read_json(folder / DIGESTS)
        with reading(folder / DIGESTS):
            kept = [(name, int(size), str(digest)) for name, (size, digest) in written["files"].items()]
    except RunFolderError:
        return f"{DIGESTS} cannot be read"
    sizes = (_wrong_size(folder / name, name, size) for name, size, _ in kept)
    if wrong := next(filter(None, sizes), None):
        return wrong
    for name, _, digest in kept if digests else ():
        try:
            if file_digest(folder / name) != digest:
                return f"{name} holds other bytes than were written"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    if run_id(folder.parent) not in (None, written.get(RUN_ID)):
        return f"it is of another run than the {RUN} beside it"
    return None


def _otherwise_than_exported(folder: Path) -> str | None:
    wrong = []
    with reading(folder / REPORT):
        for name, digest in read_json(folder / REPORT)["files"].items():
            if not (path := folder / name).is_file():
                wrong.append(f"{name} is gone")
            elif file_digest(path) != digest:
                wrong.append(f"{name} is another")
    return ", ".join(wrong) or None


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


def file_digest(path: str | os.PathLike) -> str:
    """The SHA-256 of a file, in hexadecimal digits. One that was read in this process is not read again until its size
    or its time changes. Raises OSError.
    """
    stat = os.stat(path)
    return _known_sha256(str(path), stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=4096)
def _known_sha256(path: str, size: int, changed: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

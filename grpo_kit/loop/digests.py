"""What is wrong with a checkpoint: digests.json holds the size and the SHA-256 of each of its files, written last.

A disk, a copy or a sync client can cut or change a file long after it was written, and a library then ends in an error
of its own (safetensors), or trains on without it (an optimizer.pt that is gone).

Measured for a checkpoint of 0.5 GB: 0.5 s to write the digests and 0.5 s to compare them, on one core; sizes alone
take less than a millisecond.
"""

from __future__ import annotations

import functools
import hashlib
import json
import zipfile
from pathlib import Path

DIGESTS, STATE = "digests.json", "trainer_state.json"  # transformers writes the state after everything else
_WEIGHTS = ("*.safetensors", "*.bin", "global_step*", "pytorch_model_fsdp*")
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

    digests: False compares sizes alone. Of a checkpoint without digests (one from before there were any, or from
    another trainer) it checks what can be seen: weights, a state that can be read, and no file that was cut.

    >>> what_is_wrong("runs/full/checkpoint-4")  # doctest: +SKIP
    'model.safetensors is cut: 1,000 of 2,000 bytes are there'
    """
    folder = Path(checkpoint)
    if not (folder / DIGESTS).exists():
        return _seen(folder)
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


def _wrong_size(path: Path, name: str, size: int) -> str | None:
    if not path.is_file():
        return f"{name} is missing"
    there = path.stat().st_size
    if there < size:
        return f"{name} is cut: {there:,} of {size:,} bytes are there"
    return f"{name} has {there:,} bytes, and {size:,} were written" if there > size else None


def _seen(folder: Path) -> str | None:
    try:
        json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"it was not written to its end: {STATE} cannot be read"
    if not any(next(folder.glob(pattern), None) for pattern in _WEIGHTS):
        return "it was not written to its end: it has no weights"
    try:
        for index in folder.glob("*.index.json"):
            for name in set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()):
                if not (folder / name).is_file():
                    return f"{name} is missing"
        for path in sorted(folder.glob("*.safetensors")):
            if wrong := _wrong_size(path, path.name, _safetensors_size(path)):
                return wrong
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "the header or the index of its weights cannot be read"
    for path in sorted(p for pattern in ("*.pt", "*.pth", "*.bin") for p in folder.glob(pattern)):
        with path.open("rb") as file:
            begins = file.read(2)
        if b"PK".startswith(begins) and not zipfile.is_zipfile(path):  # what torch.save writes is a zip
            return f"{path.name} is cut"
    return None


def _safetensors_size(path: Path) -> int:
    """Bytes that the file should have by its own header: 8 for the header's length, the header, the tensors."""
    there = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if there < 8 + length:  # cut in the header, which alone tells the rest
            return 8 + max(length, 1)
        header = json.loads(file.read(length))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return 8 + length + max(ends, default=0)


def _sha256(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@functools.lru_cache(maxsize=4096)
def _known_sha256(path: str, size: int, changed: int) -> str:
    """A file that was read in this process is not read again until its size or its time changes."""
    return _sha256(path)

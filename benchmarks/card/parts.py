"""A model's file in parts of at most 30 MB, which may arrive one after another, in any order, and put together again.

    python -m benchmarks.card.parts FILE FOLDER     # cuts FILE into FOLDER, and prints its sum
    python -m benchmarks.card.parts FOLDER          # what of it is there

A part's name says its place, how many there are, and the beginning of its SHA-256: model.gguf.03-of-17.5f2c19d0a4be.
So a part that is still being written, or was damaged, is known as such without any list.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.result import command_line

MOST_BYTES = 30_000_000
QWEN = (
    # Qwen2.5-Coder-0.5B-Instruct, Q4_K_M
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
)
_NAME = re.compile(r"(?P<file>.+)\.(?P<place>\d+)-of-(?P<count>\d+)\.(?P<sum>[0-9a-f]{12})")
_DIGITS = 12  # of a part's sum in its name


class NotWhole(ValueError):
    """The parts do not make the file; says which are missing or damaged, or that its sum is another."""


@dataclass
class Parts:
    """What lies in a folder. whole: place -> path of the parts that are what their names say, from 1 on."""

    file: str = ""
    count: int = 0
    whole: dict[int, Path] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)

    @property
    def missing(self) -> list[int]:
        """Places of which no whole part is there."""
        return [place for place in range(1, self.count + 1) if place not in self.whole]

    @property
    def said(self) -> str:
        """What is there, in a line."""
        if not self.count:
            return "no part has arrived"
        said = f"{len(self.whole)} of {self.count} parts of {self.file} are whole"
        if self.missing:
            said += f"; missing: {', '.join(map(str, self.missing))}"
        if self.damaged:
            said += f"; still arriving, or damaged: {', '.join(self.damaged)}"
        return said


def cut(source: Path, folder: Path, size: int = MOST_BYTES) -> str:
    """Write the file's parts into the folder; returns the file's SHA-256."""
    folder.mkdir(parents=True, exist_ok=True)
    count, of_all = max(1, -(-source.stat().st_size // size)), hashlib.sha256()
    with source.open("rb") as file:
        for place in range(1, count + 1):
            block = file.read(size)
            of_all.update(block)
            digits = hashlib.sha256(block).hexdigest()[:_DIGITS]
            name = f"{source.name}.{place:0{len(str(count))}}-of-{count}.{digits}"
            (folder / name).write_bytes(block)
    return of_all.hexdigest()


def look(folder: Path, known: dict[str, float] | None = None) -> Parts:
    """What lies there now. known: names that were whole at an earlier look, with their bytes; they are not read again.

    Raises ValueError where parts of two files, or of two ways of cutting one, lie beside each other.
    """
    found, known = Parts(), {} if known is None else known
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if not (name := _NAME.fullmatch(path.name)):
            continue
        file, count = name["file"], int(name["count"])
        if found.count and (file, count) != (found.file, found.count):
            raise ValueError(
                f"parts={str(folder)!r} holds parts of {found.file} in {found.count} and of {file} in {count}; "
                "give each a folder of its own"
            )
        found.file, found.count = file, count
        size = path.stat().st_size
        if known.get(path.name) != size:
            if hashlib.sha256(path.read_bytes()).hexdigest()[:_DIGITS] != name["sum"]:
                found.damaged.append(path.name)
                continue
            known[path.name] = size
        found.whole[int(name["place"])] = path
    return found


def assemble(parts: Parts, target: Path, expected: str) -> Path:
    """The file, put together at the target, which lies there whole or not at all. expected: its SHA-256.

    Raises NotWhole where parts are missing, or the sum is another.
    """
    if not parts.count or parts.missing:
        raise NotWhole(parts.said)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished, of_all = target.with_name(target.name + ".unfinished"), hashlib.sha256()
    with unfinished.open("wb") as file:
        for place in range(1, parts.count + 1):
            block = parts.whole[place].read_bytes()
            of_all.update(block)
            file.write(block)
    if of_all.hexdigest() != expected:
        unfinished.unlink()
        raise NotWhole(
            f"all {parts.count} parts of {parts.file} are whole, but their SHA-256 is {of_all.hexdigest()}, and "
            f"{expected} was asked for: it is another file, or its sum must be given"
        )
    os.replace(unfinished, target)
    return target


def main() -> None:
    """Cut a file, or say what lies in a folder."""
    parser = command_line(__doc__)
    parser.add_argument("source", type=Path, help="a file to cut, or a folder to look into")
    parser.add_argument("folder", type=Path, nargs="?", help="where the parts go")
    asked = parser.parse_args()
    if asked.folder is None:
        print(look(asked.source).said)
    elif not asked.source.is_file():
        parser.error(f"{str(asked.source)!r} is no file")
    else:
        print(cut(asked.source, asked.folder), look(asked.folder).said, sep="\n")


if __name__ == "__main__":
    main()

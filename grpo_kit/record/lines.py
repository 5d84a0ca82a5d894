"""Appends whole lines to a file, even if the disk is full or the stop button is pressed.

A line of a table ends with a checksum of itself, so that a byte which a disk changed later is seen, and where.
"""

import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

METRICS_LINES, COMPLETIONS_LINES = "metrics.jsonl", "completions.jsonl"
RESUMED = "resumed_from"  # the key of a line that takes lines of later steps back
CHECKSUM = "line_crc32"  # the last key of a line: zlib.crc32 of the line as it is without it


class LineFile:
    """Appends lines to a file. Lines that cannot be written wait in memory, in order, and no half line stays.

    A half line that a crash left at the end is cut off before the first write.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting: list[bytes] = []
        self._size: int | None = None  # length of its whole lines; None: unknown

    def write(self) -> None:
        """Write the waiting lines. Raises OSError, and keeps the lines."""
        if not self.waiting:
            return
        with open(self.path, "ab", buffering=0) as file:
            if self._size is None:
                self._size = self.path.read_bytes().rfind(b"\n") + 1  # of whole lines
            if file.seek(0, os.SEEK_END) > self._size:
                file.truncate(self._size)
            data = b"".join(self.waiting)
            size = self._size + len(data)
            try:
                while data:  # a nearly full disk accepts a part of a line, then refuses the rest
                    data = data[file.write(data) :]
            except BaseException:  # also the stop button: the lines still wait, so no half line may stay
                file.truncate(self._size)
                raise
            self._size = size
        self.waiting.clear()


class RunFolderError(ValueError):
    """The run folder cannot be used as requested; the message names what would do."""

    def _render_traceback_(self) -> list[str]:
        """IPython shows this instead of a traceback: the message alone."""
        return [f"{type(self).__name__}: {self}"]


def plain(value: object) -> object:
    """A JSON value: scalars of torch and numpy as Python numbers, NaN as None."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and value != value else value


def as_line(values: Mapping[str, Any]) -> bytes:
    """A line of a table, with its checksum. NaN becomes None."""
    text = json.dumps({key: plain(value) for key, value in values.items()}, default=str).encode()
    return b'%b, "%b": %d}\n' % (text[:-1], CHECKSUM.encode(), zlib.crc32(text))


def _values_of(line: bytes) -> dict[str, Any]:
    found = json.loads(line)
    if found.pop(CHECKSUM, None) not in (None, zlib.crc32(line.rpartition(b', "')[0] + b"}")):
        raise ValueError(f"other bytes than were written (without its {CHECKSUM} it is taken as it stands)")
    return found  # an older kit wrote none


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """The lines that count, in order: those of steps that were done again are left out, and a line cut short.

    Raises RunFolderError for a line that cannot be read, or is not what was written, by its number.
    """
    data = path.read_bytes() if path.exists() else b""
    kept: list[dict[str, Any]] = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
        try:
            found = _values_of(line)
            if RESUMED in found:
                kept = [one for one in kept if one["step"] <= found[RESUMED]]
            else:
                int(found["step"])
                kept.append(found)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RunFolderError(
                f"{path}, line {number} cannot be read ({error}): {line[:60].decode(errors='replace')!r}. Mend the "
                "line or delete it."
            ) from error
    return iter(kept)


def step_of_torn_line(path: Path) -> int | None:
    """The step of a line at the end that was cut short; None where the last line is whole or does not tell."""
    data = path.read_bytes() if path.exists() else b""
    found = re.match(rb'{"step": (\d+),', data[data.rfind(b"\n") + 1 :])
    return int(found[1]) if found else None


def last_step(path: Path) -> int:
    """The step of the last whole line; 0 where there is none, or it takes others back."""
    lines = path.read_bytes().rpartition(b"\n")[0].rsplit(b"\n", 1) if path.exists() else [b""]
    found = re.match(rb'{"step": (\d+),', lines[-1])
    return int(found[1]) if found else 0

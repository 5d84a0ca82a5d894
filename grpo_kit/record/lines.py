"""Appends whole lines to a file, even if the disk is full or the stop button is pressed."""

import os
from pathlib import Path


class LineFile:
    """Appends lines to a file. Lines that cannot be written wait in memory, in order, and no half line stays.

    A half line that a crash left at the end is cut off before the first write.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting: list[bytes] = []
        self._size: int | None = None  # length of its whole lines; None: unknown

    def write(self, first: bytes = b"") -> None:
        """Write the waiting lines, after the line `first` if the file is empty. Raises OSError, and keeps the lines."""
        if not self.waiting:
            return
        with open(self.path, "ab", buffering=0) as file:
            if self._size is None:
                self._size = whole_lines(self.path)
            if file.seek(0, os.SEEK_END) > self._size:
                file.truncate(self._size)
            data = b"".join([first] * (self._size == 0) + self.waiting)
            size = self._size + len(data)
            try:
                while data:  # a nearly full disk accepts a part of a line, then refuses the rest
                    data = data[file.write(data) :]
            except BaseException:  # also the stop button: the lines still wait, so no half line may stay
                file.truncate(self._size)
                raise
            self._size = size
        self.waiting.clear()

    def forget_size(self) -> None:
        """Call this after the file was rewritten by other means."""
        self._size = None


def whole_lines(path: Path) -> int:
    """Bytes of the file up to the end of its last whole line."""
    return path.read_bytes().rfind(b"\n") + 1

"""Appends whole lines to a file, even if the disk is full or the stop button is pressed; and reads JSON back.

A line of a table ends with a checksum of itself, so that a byte which a disk changed later is seen, and where. The
first line that a process writes has the run's id too, so that a table of another run is seen.
`read_json` holds the one rule for what is read, `reading` the one for what is raised.
"""

import json
import os
import re
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from grpo_kit.record._run_folder import RunFolderError, path_of

RUN = "run.json"  # a run's settings: no library writes a file of this name
METRICS_LINES, COMPLETIONS_LINES = "metrics.jsonl", "completions.jsonl"
RESUMED = "resumed_from"  # the key of a line that takes lines of later steps back
# of run.json, of a checkpoint, and of the first line of a table that a process writes
RUN_ID = "run_id"
CHECKSUM = "line_crc32"  # the last key of a line: zlib.crc32 of the line as it is without it
# bytes of one JSON text, and lists and objects inside one another
_LARGEST, _DEEPEST = 2**28, 200


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
            end = file.seek(0, os.SEEK_END)
            if self._size is not None and end < self._size:
                self._warn_of_cut(end)
                self._size = None
            if self._size is None:
                self._size = self.path.read_bytes().rfind(b"\n") + 1  # of whole lines
            if end > self._size:
                file.truncate(self._size)
            data = b"".join(self.waiting)
            size = self._size + len(data)
            try:
                # a nearly full disk accepts a part of a line, then refuses the rest
                while data:
                    data = data[file.write(data) :]
            except BaseException:
                # also the stop button: the lines still wait, so no half line may stay
                file.truncate(self._size)
                raise
            self._size = size
        self.waiting.clear()

    def _warn_of_cut(self, size: int) -> None:
        warnings.warn(
            f"{self.path} has {size:,} bytes, and {self._size:,} were written: somebody else cut or deleted it, and "
            "those lines are lost. Later lines are written.",
            RuntimeWarning,
            stacklevel=6,
        )

    def torn_step(self) -> int | None:
        """The step of a line at the end that was cut short; None where the last line is whole or does not tell."""
        return _step_in(_bytes_of(self.path).rpartition(b"\n")[2])


def write_lines(files: Iterable[LineFile], subject: Path, advice: str, *, warns: bool) -> bool:
    """Write the waiting lines of these files; True if nothing waits any more, False where the disk fails.

    warns: of a disk that fails, in words that name the subject and end in the advice.
    """
    try:
        for file in files:
            file.write()
    except OSError as error:
        if warns:
            warnings.warn(
                f"{subject} cannot be written ({error}). {advice}", RuntimeWarning, stacklevel=4
            )
        return False
    return True


def plain(value: object) -> object:
    """A JSON value: scalars of torch and numpy as Python numbers, NaN as None."""
    if hasattr(value, "item"):
        value = value.item()
    is_nan = isinstance(value, float) and value != value
    return None if is_nan else value


def as_line(values: Mapping[str, Any]) -> bytes:
    """A line of a table, with its checksum. NaN becomes None."""
    text = json.dumps(
        {key: plain(value) for key, value in values.items()}, default=str
    ).encode()
    return b'%b, "%b": %d}\n' % (text[:-1], CHECKSUM.encode(), zlib.crc32(text))


@contextmanager
def reading(path: str | Path, advice: str = "Mend it or move it away.") -> Iterator[None]:
    """Whatever ends the reading of a file, a library's error about its bytes too, becomes a RunFolderError naming it.

    A ValueError that names the file passes, and FileNotFoundError.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, ValueError):
            if str(path) in str(error):
                raise
            reason = str(error)
        raise RunFolderError(f"{path} cannot be read ({reason:.500}). {advice}") from error


def read_json(
    path: str | Path, kind: type = dict, names: Mapping[str, Any] | None = None
) -> Any:
    """What a JSON file holds, a `kind`. Raises RunFolderError, naming the file; also later, for a name that it lacks.

    names: what the values of these are, where they are there. A text of more than 256 MiB or 200 levels is refused;
    half a surrogate pair, which no file takes, becomes U+FFFD.
    """
    path = path_of(path)

    class Known(dict):
        def __missing__(self, name: str) -> Any:
            raise RunFolderError(
                f"{path} cannot be read (it has no {name!r}). Mend it or move it away."
            )

    with reading(path):
        if (size := os.path.getsize(path)) > _LARGEST:
            raise ValueError(f"it has {size:,} bytes, and {_LARGEST:,} are read at most")
        value = _value_of(path.read_bytes(), Known)
        if not isinstance(value, kind):
            raise ValueError(f"it holds a {type(value).__name__}, no {kind.__name__}")
        for name, kind_of_value in (names or {}).items():
            if name in value and not isinstance(value[name], kind_of_value):
                raise ValueError(f"{name!r} is {value[name]!r:.80}")
    return value


def _value_of(text: bytes, hook: type[dict] | None = None) -> Any:
    try:
        value = json.loads(text, object_hook=hook)
        if b"\\ud" in text or b"\\uD" in text:  # surrogates: pairs, or a half
            pairs = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass")
            value = json.loads(pairs.decode("utf-16", "replace"), object_hook=hook)
        has_many = text.count(b"[") + text.count(b"{") > _DEEPEST
        if not has_many or not _is_deeper(value, _DEEPEST):
            return value
    except RecursionError:
        pass
    raise ValueError(f"more than {_DEEPEST} lists and objects lie inside one another")


def _is_deeper(value: Any, levels: int) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if levels < 0 or not isinstance(value, list):
        return levels < 0
    return any(_is_deeper(item, levels - 1) for item in value)


def run_id(folder: Path) -> str | None:
    """The id that was drawn when the run was opened; None for a run of an older kit, and where run.json tells none."""
    with suppress(OSError, RunFolderError):
        return read_json(folder / RUN).get(RUN_ID)
    return None


def lines_of(
    path: Path, waiting: Sequence[bytes] = (), *, taken_back: bool = False
) -> Iterator[dict[str, Any]]:
    """The lines that count, in order: those of steps that were done again are left out, and a line cut short.

    waiting: lines to be appended. taken_back: instead the lines that do not count, of steps that were not done since.
    Raises RunFolderError for a table of another run, and by its number for a line that cannot be read, or is not what
    was written.
    """
    current: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    for line in _all_lines(path, waiting):
        if RESUMED not in line:
            current.append(line)
            continue
        repeated = [earlier for earlier in current if earlier["step"] > line[RESUMED]]
        current = [earlier for earlier in current if earlier["step"] <= line[RESUMED]]
        left_out = _without_steps_of(repeated, left_out) + repeated
    return iter(_without_steps_of(current, left_out) if taken_back else current)


def _without_steps_of(later: list[dict], lines: list[dict]) -> list[dict]:
    """The lines of other steps than the later ones."""
    steps = {line["step"] for line in later}
    return [line for line in lines if line["step"] not in steps]


def _all_lines(path: Path, waiting: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    with reading(path):
        data = _bytes_of(path)
    whole_lines = data[: data.rfind(b"\n") + 1].splitlines()
    expected_id = run_id(path.parent)
    for number, line in enumerate([*whole_lines, *waiting], 1):
        start = line[:60].decode(errors="replace")
        with reading(
            f"{path}, line {number}", f"It begins: {start!r}. Mend the line or delete it."
        ):
            values = _value_of(line)
            checksum = zlib.crc32(line.rpartition(b', "')[0] + b"}")
            if values.pop(CHECKSUM, checksum) != checksum:
                raise ValueError(
                    f"other bytes than were written (without its {CHECKSUM} it is taken as it stands)"
                )
            key = RESUMED if RESUMED in values else "step"
            values[key] = int(values[key])
        line_id = values.pop(RUN_ID, expected_id)
        if expected_id not in (None, line_id):
            raise RunFolderError(
                f"{path} is of another run than the {RUN} beside it; put back its own, or move one of the two away"
            )
        yield values


def last_step(path: Path) -> int:
    """The step of the last whole line; 0 where there is none, or it takes others back."""
    whole_lines = _bytes_of(path).rpartition(b"\n")[0]
    return _step_in(whole_lines.rpartition(b"\n")[2]) or 0


def _step_in(line: bytes) -> int | None:
    """The step that a line begins with."""
    match = re.match(rb'{"step": (\d+),', line)
    return int(match[1]) if match else None


def _bytes_of(path: Path) -> bytes:
    """What is in a file; nothing where there is none."""
    return path.read_bytes() if path.exists() else b""

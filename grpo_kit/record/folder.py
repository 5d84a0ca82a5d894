"""A run's record on disk, readable by another process while training goes on.

    runs/<name>/config.json            what was asked for
                metrics.csv            one row a step, header fixed by the first row
                completions.parquet/   a parquet data set: one part file for each write

A row and a part are there whole or not at all. While the disk is full both wait in memory.
"""

import csv
import io
import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_kit.record.files import (
    METRIC_COLUMNS,
    PART_NAME,
    TEXT_COLUMNS,
    RunFolderError,
    holds_run,
    next_run_folder,
    write_whole,
)

_INTEGERS = ("step", "group")


class RunFolder:
    """Writes metrics and completions of one run. Make it with `RunFolder.open`.

    >>> run = RunFolder.open("runs/demo", config={"reward_parts": ["exact"]})
    >>> run.write_step({"step": 1, "reward": 0.25, "reward/exact": 0.25})
    >>> read_metrics("runs/demo").reward.tolist()
    [0.25]
    """

    def __init__(self, path: Path, columns: Sequence[str], session: int) -> None:
        self.path = path
        self.columns = tuple(columns)
        self._session = session  # how often this folder was opened: a resumed run repeats steps
        self._parts = 0
        self._lines: list[bytes] = []  # not yet on disk
        self._tables: list[tuple[str, pa.Table]] = []  # file name and content, not yet on disk
        self._good_size: int | None = None  # set while a half row may be at the end of metrics.csv
        self._disk_failing = False

    @classmethod
    def open(cls, path: str | Path, *, config: dict, resume: bool = False) -> "RunFolder":
        """Start a run in `path`, or with `resume` go on with the one that is there.

        config: saved as config.json; its "reward_parts" (list of names) become columns reward/<name>.
            A resumed run keeps config.json; where its config differs, that goes to config-resumed-<n>.json.
        Raises RunFolderError if `path` holds a run already and not `resume`, or cannot be written.
        """
        path = Path(path)
        parts = list(config.get("reward_parts") or ())
        if len(set(parts)) != len(parts):
            raise RunFolderError(f"config['reward_parts']={parts} names a part twice; rename one of them.")
        if path.exists() and not path.is_dir():
            raise RunFolderError(f"path={str(path)!r} is a file; name a folder.")
        if holds_run(path) and not resume:
            free = next_run_folder(path.parent, path.name)
            raise RunFolderError(
                f"path={str(path)!r} already holds a run, and no run is overwritten. The next free name is "
                f"{str(free)!r}; or go on with the run that is there (resume)."
            )
        try:
            (path / "completions.parquet").mkdir(parents=True, exist_ok=True)
            for left_over in [*path.glob(".*.tmp"), *path.glob("completions.parquet/.*.tmp")]:
                left_over.unlink()
            _save_config(path, config)
            columns = _header(path / "metrics.csv") or _columns(parts)
        except OSError as error:
            raise RunFolderError(
                f"path={str(path)!r} cannot be written: {error}. Free some space or name another folder."
            ) from error
        sessions = [
            int(m[1]) for p in path.glob("completions.parquet/*") if (m := PART_NAME.fullmatch(p.name))
        ]
        return cls(path, columns, max(sessions, default=0) + 1)

    def write_step(self, metrics: dict[str, float | None]) -> None:
        """Append one row to metrics.csv. None and NaN become empty cells, unknown keys JSON in `extra`.

        Never raises because of the disk: what cannot be written is kept and tried again at the next write.
        Raises ValueError for a missing step and for a value that is not a number in a named column.
        """
        if metrics.get("step") is None:
            raise ValueError(f"metrics has no 'step' (keys: {sorted(metrics)}); give the optimizer step.")
        cells = [_cell(name, metrics.get(name)) for name in self.columns[:-1]]
        extra = {name: _plain(value) for name, value in metrics.items() if name not in self.columns[:-1]}
        self._lines.append(_csv_line([*cells, json.dumps(extra, default=str) if extra else ""]))
        self.flush()

    def write_completions(self, table: dict[str, list]) -> None:
        """Add one part file to completions.parquet/: columns of equal length, `step` among them.

        Never raises because of the disk, like write_step. An empty table writes nothing.
        Raises ValueError for a missing `step` or columns of unequal length.
        """
        lengths = {name: len(values) for name, values in table.items()}
        if len(set(lengths.values())) > 1 or "step" not in table:
            raise ValueError(f"table has columns of lengths {lengths}; give all the same length, and `step`.")
        if lengths["step"]:
            self._tables.append((f"part-{self._session:03d}-{self._parts:06d}.parquet", _to_arrow(table)))
            self._parts += 1
            self.flush()

    def flush(self) -> bool:
        """Write what waits in memory; True if nothing waits any more. Warns once each time the disk fails."""
        error = None
        for write in (self._write_lines, self._write_tables):
            try:
                write()
            except OSError as caught:
                error = caught
        if error is not None and not self._disk_failing:
            warnings.warn(
                f"{self.path} cannot be written ({error}). Training goes on; the rows are kept in memory and "
                "tried again at the next step. Free some space.",
                RuntimeWarning,
                stacklevel=3,
            )
        self._disk_failing = error is not None
        return error is None

    def _write_lines(self) -> None:
        if not self._lines:
            return
        with open(self.path / "metrics.csv", "ab", buffering=0) as file:
            if self._good_size is not None:
                file.truncate(self._good_size)
                self._good_size = None
            size = file.seek(0, os.SEEK_END)
            data = b"".join([_csv_line(self.columns)] * (size == 0) + self._lines)
            try:
                while data:  # a nearly full disk takes a part of the row, then refuses the rest
                    data = data[file.write(data) :]
            except BaseException:  # also the stop button: the rows stay in memory, so no half row may stay
                self._good_size = size
                file.truncate(size)
                self._good_size = None
                raise
        self._lines.clear()

    def _write_tables(self) -> None:
        folder = self.path / "completions.parquet"
        while self._tables:
            name, table = self._tables[0]
            buffer = io.BytesIO()
            pq.write_table(table, buffer)
            folder.mkdir(exist_ok=True)
            write_whole(folder / name, buffer.getvalue())
            self._tables.pop(0)


def _columns(parts: Sequence[str]) -> list[str]:
    after = METRIC_COLUMNS.index("reward_std") + 1
    return [*METRIC_COLUMNS[:after], *(f"reward/{name}" for name in parts), *METRIC_COLUMNS[after:], "extra"]


def _header(path: Path) -> list[str] | None:
    """The columns of a metrics.csv that is there already; a row cut short by a crash is removed."""
    if not path.exists():
        return None
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
    return next(csv.reader([data[:whole].decode("utf-8").split("\n")[0]])) if whole else None


def _save_config(path: Path, config: dict) -> None:
    text = json.dumps(config, indent=2, default=str) + "\n"
    target = path / "config.json"
    number = 0
    while target.exists():
        if target.read_text(encoding="utf-8") == text:
            return
        number += 1
        target = path / f"config-resumed-{number}.json"
    write_whole(target, text.encode("utf-8"))


def _plain(value: object) -> object:
    """A JSON value: scalars of torch and numpy as Python numbers, NaN as None."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and value != value else value


def _cell(name: str, value: object) -> str:
    value = _plain(value)
    if value is None:
        return ""
    if not isinstance(value, (int, float)):
        raise ValueError(f"metrics[{name!r}]={value!r} is not a number; give a number or None.")
    return repr(int(value) if isinstance(value, bool) else value)


def _csv_line(cells: Sequence[str]) -> bytes:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue().encode("utf-8")


def _to_arrow(table: dict[str, list]) -> pa.Table:
    """Types go by column name: a part whose rewards are all None must not differ in type from the others."""
    columns = {}
    for name, values in table.items():
        values = [_plain(value) for value in values]
        if name in _INTEGERS:
            columns[name] = pa.array(values, pa.int64())
        elif name in TEXT_COLUMNS:
            columns[name] = pa.array(values, pa.string())
        elif name.startswith("reward") or all(v is None or isinstance(v, (int, float)) for v in values):
            columns[name] = pa.array(values, pa.float64())
        else:
            columns[name] = pa.array([None if v is None else str(v) for v in values], pa.string())
    return pa.table(columns)

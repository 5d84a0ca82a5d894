"""A run's record on disk, readable by another process while training goes on.

    runs/<name>/run.json               the requested settings
                metrics.csv            one row a step, header fixed by the first row
                completions.parquet/   a parquet data set: one part file for each write, all of one schema
                redone/                the same files, and checkpoints, of steps that a resumed run repeated

Each row and each part is complete or absent. While the disk is full both wait in memory.
"""

import csv
import io
import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from grpo_kit.record.files import (
    METRIC_COLUMNS,
    PART_NAME,
    REDONE,
    RUN,
    RunFolderError,
    holds_run,
    next_run_folder,
    parts_of,
    read_part,
    run_file,
    write_whole,
)
from grpo_kit.record.lines import LineFile, whole_lines
from grpo_kit.record.parquet_parts import as_parquet, joined, plain, schema_of, to_arrow


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
        self._file = LineFile(path / "metrics.csv")
        self._lines = self._file.waiting  # not yet on disk
        self._steps = set(self._rows())  # with a row, on disk or waiting
        self._replaces = False  # a waiting row replaces one on disk
        self._tables: list[tuple[str, pa.Table]] = []  # file name and content, not yet on disk
        self._schema: pa.Schema | None = None  # of every part on disk
        self._alike = True  # False: some parts have an older schema
        self._disk_failing = False

    @classmethod
    def open(cls, path: str | Path, *, config: dict, resume: bool = False) -> "RunFolder":
        """Start a run in `path`, or with `resume` continue the one that is there.

        config: saved as run.json; its "reward_parts" (list of names) become columns reward/<name>.
            A resumed run keeps run.json; a different config is written to config-resumed-<n>.json.
        Raises RunFolderError if `path` holds a run already and not `resume`, or cannot be written; then no new file
        stays there, and the name is free.
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
        made = not path.exists()
        try:
            (path / "completions.parquet").mkdir(parents=True, exist_ok=True)
            for left_over in [*path.glob(".*.tmp"), *path.glob("completions.parquet/.*.tmp")]:
                left_over.unlink()
            _save_config(path, config)
            columns = _header(path / "metrics.csv") or _columns(parts)
        except OSError as error:
            if not resume:  # without it a full disk would block the name
                _remove_if_empty(path / "completions.parquet", *[path] * made)
            raise RunFolderError(
                f"path={str(path)!r} cannot be written: {error}. Free some space or name another folder."
            ) from error
        files = [*path.glob("completions.parquet/*"), *path.glob(f"{REDONE}/completions.parquet/*")]
        sessions = [int(m[1]) for p in files if (m := PART_NAME.fullmatch(p.name))]
        run = cls(path, columns, max(sessions, default=0) + 1)
        for part in parts_of(path):
            schema = schema_of(part)
            run._alike &= run._schema in (None, schema)
            run._schema = joined(run._schema, schema)
        return run

    def go_on_from(self, step: int) -> bool:
        """The run continues after `step`; later steps will be repeated. Returns whether there are any.

        Their rows of metrics.csv, completions and checkpoints move to redone/. Nothing is deleted.
        Raises RunFolderError if they cannot be moved.
        """
        path, aside = self.path, self.path / REDONE
        rows = self._rows()
        later = [line for number, line in rows.items() if number > step]
        parts = [p for p in parts_of(path) if max(read_part(p, ["step"])["step"].to_pylist()) > step]
        saved = [p for p in path.glob("checkpoint-*") if _step_in_name(p) > step]
        try:
            if later or parts or saved:
                (aside / "completions.parquet").mkdir(parents=True, exist_ok=True)
            if later:
                moved = LineFile(aside / "metrics.csv")
                moved.waiting += later
                moved.write(_csv_line(self.columns))
                self._write_anew({number: line for number, line in rows.items() if number <= step})
            for part in parts:
                os.replace(part, aside / "completions.parquet" / part.name)
            for checkpoint in saved:
                number = 1
                while (target := aside / (checkpoint.name + f".{number}" * (number > 1))).exists():
                    number += 1
                os.replace(checkpoint, target)
        except OSError as error:
            raise RunFolderError(f"{aside} cannot be written: {error}. Free some space.") from error
        self._steps = {number for number in rows if number <= step}
        return bool(later or parts or saved)

    def write_step(self, metrics: dict[str, float | None]) -> None:
        """Add one row to metrics.csv; it replaces an existing row of the same step.

        None and NaN become empty cells, unknown keys JSON in `extra`.

        Never raises because of the disk: a row that cannot be written is kept and written with the next one.
        Raises ValueError for a missing step and for a value that is not a number in a named column.
        """
        if metrics.get("step") is None:
            raise ValueError(f"metrics has no 'step' (keys: {sorted(metrics)}); give the optimizer step.")
        cells = [_cell(name, metrics.get(name)) for name in self.columns[:-1]]
        extra = {name: plain(value) for name, value in metrics.items() if name not in self.columns[:-1]}
        self._lines.append(_csv_line([*cells, json.dumps(extra, default=str) if extra else ""]))
        self._replaces |= int(metrics["step"]) in self._steps
        self._steps.add(int(metrics["step"]))
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
            self._tables.append((f"part-{self._session:03d}-{self._parts:06d}.parquet", to_arrow(table)))
            self._parts += 1
            self.flush()

    def flush(self) -> bool:
        """Write everything that waits in memory; True if nothing waits any more. Warns once per failure of the disk."""
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
        if self._replaces and self._lines:
            self._write_anew(self._rows() | {self._step_in(line): line for line in self._lines})
            self._lines.clear()
        self._file.write(_csv_line(self.columns))
        self._replaces = False

    def _write_anew(self, rows: dict[int, bytes]) -> None:
        write_whole(self.path / "metrics.csv", b"".join([_csv_line(self.columns), *rows.values()]))
        self._file.forget_size()

    def _rows(self) -> dict[int, bytes]:
        """Step -> its line on disk, the last one if it has several."""
        path = self.path / "metrics.csv"
        if not path.exists():
            return {}
        lines = path.read_bytes()[: whole_lines(path)].splitlines(keepends=True)[1:]
        return {self._step_in(line): line for line in lines}

    def _step_in(self, line: bytes) -> int:
        try:
            return int(line.split(b",")[self.columns.index("step")])
        except (ValueError, IndexError) as error:
            raise RunFolderError(
                f"{self.path / 'metrics.csv'} has the row {line.decode(errors='replace').strip()!r}, which names no "
                "step. Mend the line or delete it."
            ) from error

    def _write_tables(self) -> None:
        folder = self.path / "completions.parquet"
        while self._tables:
            name, table = self._tables[0]
            folder.mkdir(exist_ok=True)
            schema = joined(self._schema, table.schema)
            self._alike &= self._schema in (None, schema)
            self._schema = schema
            if not self._alike:  # pandas.read_parquet expects all parts to be like the first
                for part in parts_of(self.path):
                    if schema_of(part) != schema:
                        write_whole(part, as_parquet(read_part(part), schema))
                self._alike = True
            write_whole(folder / name, as_parquet(table, schema))
            self._tables.pop(0)


def _step_in_name(checkpoint: Path) -> int:
    number = checkpoint.name.removeprefix("checkpoint-")
    return int(number) if number.isdecimal() else -1


def _remove_if_empty(*folders: Path) -> None:
    for folder in folders:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _columns(parts: Sequence[str]) -> list[str]:
    after = METRIC_COLUMNS.index("reward_std") + 1
    return [*METRIC_COLUMNS[:after], *(f"reward/{name}" for name in parts), *METRIC_COLUMNS[after:], "extra"]


def _header(path: Path) -> list[str] | None:
    """The columns of an existing metrics.csv; a row cut short by a crash is removed."""
    if not path.exists():
        return None
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
    return next(csv.reader([data[:whole].decode("utf-8").split("\n")[0]])) if whole else None


def _save_config(path: Path, config: dict) -> None:
    text = json.dumps(config, indent=2, default=str) + "\n"
    target = path / RUN
    if not target.exists() and (old := run_file(path)) is not None:  # from an older run
        write_whole(target, old.read_bytes())
    number = 0
    while target.exists():
        if target.read_text(encoding="utf-8") == text:
            return
        number += 1
        target = path / f"config-resumed-{number}.json"
    write_whole(target, text.encode("utf-8"))


def _cell(name: str, value: object) -> str:
    value = plain(value)
    if value is None:
        return ""
    if not isinstance(value, (int, float)):
        raise ValueError(f"metrics[{name!r}]={value!r} is not a number; give a number or None.")
    return repr(int(value) if isinstance(value, bool) else value)


def _csv_line(cells: Sequence[str]) -> bytes:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue().encode("utf-8")

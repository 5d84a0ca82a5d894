"""The files of a run by name: whether there is a run, which name is free, and its tables read back."""

import csv
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from grpo_kit.record.lines import COMPLETIONS_LINES, METRICS_LINES, RunFolderError, lines_of

METRIC_COLUMNS: tuple[str, ...] = (
    "step", "progress", "seconds", "temperature", "learning_rate", "loss", "grad_norm", "reward",
    "reward_std", "frac_reward_zero_std", "entropy", "kl", "clip_ratio", "completion_length",
    "completion_cut_off", "num_tokens", "step_seconds",
)  # fmt: skip
"""Columns of every metrics.csv; the reward parts follow `reward_std`, a JSON column `extra` comes last."""

TEXT_COLUMNS = ("prompt", "prefill", "completion")
PART_NAME = re.compile(r"part-(\d+)-(\d+)\.parquet")
KEPT = "kept.json"  # names the step whose weights a run with keep="best" ended with
RUN = "run.json"  # a run's settings: no library writes a file of this name
_ONCE = "config.json"  # its place in older runs, and the file of save_pretrained for a model
COMMAND = "command.json"  # what `grpo-kit train` was asked: the run's task, preset, numbers and options
REDONE = "redone"  # in a run's folder: files of steps that a resumed run repeated


def holds_run(path: str | Path) -> bool:
    """Whether `path` holds files of a run: run.json, metrics.csv, completions, a checkpoint; or a config.json."""
    names = (RUN, _ONCE, "metrics.csv", METRICS_LINES, "completions.parquet/*", "checkpoint-*")
    return any(next(Path(path).glob(name), None) for name in names)


def has_metrics(folder: str | Path) -> bool:
    """Does the folder hold a run's metrics, of either kind?"""
    return any((Path(folder) / name).is_file() for name in ("metrics.csv", METRICS_LINES))


def steps_done(folder: str | Path) -> int:
    """The last step that the folder has metrics of; 0 where it has none."""
    return int(read_metrics(folder)["step"].max()) if has_metrics(folder) else 0


def run_file(folder: str | Path) -> Path | None:
    """The file with a run's settings: run.json, of an older run config.json unless a model's was written over it."""
    path, old = Path(folder) / RUN, Path(folder) / _ONCE
    if path.is_file():
        return path
    try:
        settings = json.loads(old.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    of_a_model = {"transformers_version", "model_type", "architectures"}
    return old if isinstance(settings, dict) and not of_a_model & settings.keys() else None


def run_settings(folder: str | Path) -> dict[str, Any] | None:
    """The requested settings of a run, as RunLog.open keeps them; None if the folder has none."""
    path = run_file(folder)
    return None if path is None else json.loads(path.read_text(encoding="utf-8"))


def arguments_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a run by the names that transformers and trl have for them, from its run.json.

    >>> arguments_of({"config": {"steps": 32, "temperature": 1.0}})["max_steps"]
    32
    """
    if "config" not in settings:
        return settings.get("args") or {}
    config = settings["config"]
    names = {
        "max_steps": "steps",
        "max_completion_length": "max_completion_tokens",
        "num_iterations": "iterations",
        "steps_per_generation": "minibatches",
    }
    found = config | {name: config.get(own) for name, own in names.items()}
    schedule = "as it says" if isinstance(config.get("learning_rate"), str) else "constant after a warmup"
    return found | {"lr_scheduler_type": schedule, "fp16": config.get("autocast") == "float16"}


def next_run_folder(root: str | Path, name: str) -> Path:
    """The first of root/name, root/name-2, root/name-3, ... that does not exist or is an empty folder."""
    number = 1
    while True:
        path = Path(root) / (name if number == 1 else f"{name}-{number}")
        if not path.exists() or (path.is_dir() and not any(path.iterdir())):
            return path
        number += 1


def write_whole(target: Path, data: bytes) -> None:
    """Write under a hidden name, then rename: a reader finds the whole file or none; a second writer does no harm."""
    hidden = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        hidden.write_bytes(data)
        os.replace(hidden, target)
    except OSError:
        hidden.unlink(missing_ok=True)
        raise


def cached_json(path: str | Path, make: Callable[[], Any]) -> Any:
    """The contents of the JSON file; without it, the result of make(), written first. An interrupt leaves no file.

    The result is read from the file in both cases: keys are texts, tuples are lists.
    """
    path = Path(path)
    if not path.exists():
        write_whole(path, json.dumps(make()).encode())
    return json.loads(path.read_text(encoding="utf-8"))


def settings_folder(root: str | Path, name: str, *settings: Any) -> Path:
    """The folder root/name_<digest of the settings>, made if missing: the same settings find it again.

    For results that are made once and kept, with cached_json for each file. A setting counts by its str():
    use numbers, texts, lists and profiles, whose str() shows all their contents. Code is not in the digest.

    >>> settings_folder("runs", "sweep_cpu", [1e-5, 2e-5], 4)  # doctest: +SKIP
    PosixPath('runs/sweep_cpu_bf4593')
    """
    digest = hashlib.sha1("".join(map(str, settings)).encode()).hexdigest()[:6]
    folder = Path(root) / f"{name}_{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def read_metrics(folder: str | Path) -> pd.DataFrame:
    """A run's metrics as numbers, one row a step in order; the last row of a step written twice.

    Safe while the run writes: an incomplete row is left out. Keys in `extra` become columns.
    Raises RunFolderError if there is no such folder, and for an unreadable row, naming its line; a folder without
    rows gives an empty table.
    """
    if (_existing(folder) / METRICS_LINES).exists():
        return _steps_of_lines(Path(folder) / METRICS_LINES)
    path = _existing(folder) / "metrics.csv"
    data = path.read_bytes() if path.exists() else b""
    text = data[: data.rfind(b"\n") + 1].decode("utf-8")
    if not text:
        return pd.DataFrame(columns=list(METRIC_COLUMNS), dtype=float)
    try:
        header, *rows = csv.reader(io.StringIO(text))
    except csv.Error as error:
        raise RunFolderError(f"{path} cannot be read ({error}). Mend it or move it away.") from error
    numbers, extras = [], []
    for line, cells in enumerate(rows, 2):
        try:
            row = dict(zip(header, cells, strict=True))
            extras.append(json.loads(row.pop("extra", "") or "{}"))
            numbers.append(
                {name: float(cell or "nan") for name, cell in row.items()} | {"step": int(row["step"])}
            )
        except (ValueError, KeyError) as error:
            raise RunFolderError(
                f"{path}, line {line} cannot be read ({len(cells)} cells where the header has {len(header)}; "
                f"{error}). Mend the line or delete it."
            ) from error
    table = pd.DataFrame(numbers, columns=[name for name in header if name != "extra"])
    extra = pd.DataFrame(extras)
    table = table.join(extra.drop(columns=[name for name in extra if name in table]))
    return table.drop_duplicates("step", keep="last").sort_values("step", ignore_index=True)


def read_completions(folder: str | Path) -> pd.DataFrame:
    """All completions in the order they were written; if a resumed run repeated a step, the later ones.

    Raises RunFolderError if there is no such folder, and for a file among the parts that is no part; a run without
    completions gives an empty table.
    """
    if (_existing(folder) / COMPLETIONS_LINES).exists():
        table = pd.DataFrame(lines_of(Path(folder) / COMPLETIONS_LINES))
        return _as_numbers(table, lambda name: name == "reward" or name.startswith("reward/"))
    frames: list[pd.DataFrame] = []
    for path in parts_of(_existing(folder)):
        frames.append(read_part(path).to_pandas().assign(_session=int(PART_NAME.fullmatch(path.name)[1])))
    if not frames:
        return pd.DataFrame(columns=["step", *TEXT_COLUMNS, "reward", "advantage", "group", "temperature"])
    table = pd.concat(frames, ignore_index=True)
    last = table.groupby("step")["_session"].transform("max")
    table = table[table["_session"] == last].drop(columns="_session")
    return table.sort_values("step", kind="stable", ignore_index=True)


def _steps_of_lines(path: Path) -> pd.DataFrame:
    """The rows of metrics.jsonl, lines of one step joined, in the order of columns that metrics.csv has."""
    steps: dict[int, dict[str, Any]] = {}
    for line in lines_of(path):
        steps.setdefault(int(line["step"]), {}).update(line)
    rows = [
        {name: v for name, v in steps[step].items() if name not in ("changes", "refused")}
        for step in sorted(steps)
    ]
    named = dict.fromkeys(name for row in rows for name in row)
    after = METRIC_COLUMNS.index("reward_std") + 1
    parts = [name for name in named if name.startswith("reward/")]
    columns = dict.fromkeys([*METRIC_COLUMNS[:after], *parts, *METRIC_COLUMNS[after:], *named])
    return _as_numbers(
        pd.DataFrame(rows, columns=list(columns)), lambda name: name in METRIC_COLUMNS[1:] or name in parts
    )


def _as_numbers(table: pd.DataFrame, wanted: Callable[[str], bool]) -> pd.DataFrame:
    """The table with these columns as float, None as NaN: a column of which all are None has no type of its own."""
    return table.astype({name: float for name in table if wanted(name)})


def parts_of(folder: Path) -> list[Path]:
    """The part files of a run's completions, in order. Raises RunFolderError for a .parquet file that is no part."""
    found = sorted(p for p in folder.glob("completions.parquet/*.parquet") if not p.name.startswith("."))
    for path in found:
        if not PART_NAME.fullmatch(path.name):
            raise RunFolderError(f"{path} is not a part that a run wrote; move it out of that folder.")
    return found


def read_part(path: Path, columns: list[str] | None = None) -> pa.Table:
    """A part file's table. Raises RunFolderError, naming the file, for one that is no parquet or has no `step`."""
    try:
        table = pq.ParquetFile(path).read(columns)
    except (pa.ArrowException, OSError) as error:
        raise RunFolderError(f"{path} cannot be read ({error}); move it out of that folder.") from error
    if "step" not in table.column_names:
        raise RunFolderError(f"{path} has no column 'step': no run wrote it; move it out of that folder.")
    return table


def _existing(folder: str | Path) -> Path:
    if not Path(folder).is_dir():
        raise RunFolderError(f"folder={str(folder)!r} does not exist; give a run's folder, like 'runs/full'.")
    return Path(folder)

"""The files of a run by name: whether there is a run, which name is free, and its tables read back.

And results that are made once and kept, files where a user asks for them, and files of the kit's repository that are
not installed with it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pandas as pd

from grpo_kit._support.argument_checks import check_text
from grpo_kit.record._lines import (
    COMPLETIONS_LINES,
    METRICS_LINES,
    RUN,
    RunFolderError,
    lines_of,
    read_json,
    reading,
)  # fmt: skip
from grpo_kit.record._run_folder import path_of, run_path

METRIC_COLUMNS: tuple[str, ...] = (
    "step", "progress", "seconds", "temperature", "learning_rate", "loss", "grad_norm", "reward",
    "reward_std", "frac_reward_zero_std", "entropy", "kl", "clip_ratio", "completion_length",
    "completion_cut_off", "num_tokens", "step_seconds",
)  # fmt: skip
"""The first columns of every run's metrics; the reward parts follow `reward_std`."""

# of runs recorded before there were lines: benchmarks/results, tests/fixtures
_TABLE = "metrics.csv"
KEPT = "kept.json"  # names the step whose weights a run with keep="best" ended with
REDONE = "redone"  # in a run's folder: files of steps that a resumed run repeated
_KINDS = {
    **dict.fromkeys(("config", "reward_ranges", "task", "data", "notes"), dict | None),
    **dict.fromkeys(("reward_parts", "reward_weights", "answer_parts"), list | None),
    **dict.fromkeys(("model", "optimizer", "device", "command"), str | None),
    **dict.fromkeys(("parameters", "trainable_parameters"), int),
}  # of what run.json holds
# Fields of a Config as run folders of before have them, and as they are called today.
RENAMED = {
    "resample": "dynamic_sampling",
    "sampler_weight_cap": "importance_sampling_cap",
    "mask_cut_off": "mask_truncated_completions",
}


def holds_run(path: str | Path) -> bool:
    """Whether `path` holds files of a run: run.json, metrics, a checkpoint; or a config.json, a model's."""
    names = (RUN, "config.json", _TABLE, METRICS_LINES, "checkpoint-*")
    return any(next(path_of(path).glob(name), None) for name in names)


def has_metrics(folder: str | Path) -> bool:
    """Does the folder hold a run's metrics?"""
    return any((path_of(folder) / name).is_file() for name in (METRICS_LINES, _TABLE))


def steps_done(folder: str | Path) -> int:
    """The last step that the folder has metrics of; 0 where it has none."""
    if not has_metrics(folder):
        return 0
    return int(max(read_metrics(folder)["step"], default=0))


def run_settings(folder: str | Path) -> dict[str, Any] | None:
    """The requested settings of a run, as RunLog.open keeps them; None if the folder has none.

    Raises RunFolderError for a file that holds something else, and where a name is read that it lacks.
    """
    path = path_of(folder) / RUN
    if not path.is_file():
        return None
    settings = read_json(path, names=_KINDS)
    rename_fields(settings.get("config") or {})
    return settings


def rename_fields(values: dict[str, Any]) -> None:
    """Give a Config's fields, as a run folder of before has them, the names of today; in place."""
    for former, name in RENAMED.items():
        if former in values:
            values[name] = values.pop(former)


def next_run_folder(root: str | Path, name: str) -> Path:
    """The first of root/name, root/name-2, root/name-3, ... that does not exist or is an empty folder."""
    check_text("name", name)
    path_of(root, "root")
    parts = Path(name).parts
    if not parts or ".." in parts or Path(name).is_absolute():
        raise RunFolderError(
            f"name={name!r} leads out of root={str(root)!r}; give a folder's name, or the whole path as folder="
        )
    run_path(os.path.join(root, name), "name")
    return next(
        p
        for p in numbered(root, name)
        if not p.exists() or (p.is_dir() and not any(p.iterdir()))
    )


def numbered(root: str | Path, name: str) -> Iterator[Path]:
    """root/name, root/name-2, root/name-3, ..., without end."""
    first = path_of(root, "root") / name
    yield first
    for number in count(2):
        yield first.with_name(f"{first.name}-{number}")


def write_whole(target: Path, data: bytes) -> None:
    """Write under a hidden name, then rename: a reader finds the whole file or none; a second writer does no harm."""
    hidden = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        hidden.write_bytes(data)
        os.replace(hidden, target)
    except OSError:
        hidden.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Ask the disk to keep a file or a folder's names. Raises OSError where the disk fails or is full.

    Some file systems refuse that of a folder, and Windows of what is open for reading: those go on without.
    """
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno in (errno.EIO, errno.ENOSPC, getattr(errno, "EDQUOT", None)):
            raise


def read_metrics(folder: str | Path) -> pd.DataFrame:
    """A run's metrics as numbers, one row a step in order; lines of one step joined, those done again left out.

    Safe while the run writes: an incomplete line is left out.
    Raises RunFolderError if there is no such folder, and for an unreadable line, naming it; a folder without lines
    gives an empty table.
    """
    lines = _existing(folder) / METRICS_LINES
    table = _existing(folder) / _TABLE
    if table.exists() and not lines.exists():
        with reading(table):
            return _recorded(table)
    steps: dict[int, dict[str, Any]] = {}
    for line in lines_of(lines):
        steps.setdefault(line["step"], {}).update(line)
    if not steps:
        return pd.DataFrame(columns=list(METRIC_COLUMNS), dtype=float)
    rows = [steps[step] for step in sorted(steps)]
    names = dict.fromkeys(
        name for row in rows for name in row if name not in ("changes", "refused")
    )
    parts = [name for name in names if name.startswith("reward/")]
    after = METRIC_COLUMNS.index("reward_std") + 1
    columns = dict.fromkeys([*METRIC_COLUMNS[:after], *parts, *METRIC_COLUMNS[after:], *names])
    with reading(lines):
        return _as_numbers(
            pd.DataFrame(rows, columns=list(columns)), {*METRIC_COLUMNS[1:], *parts}
        )


def read_completions(folder: str | Path) -> pd.DataFrame:
    """All completions in the order they were written; if a resumed run repeated a step, the later ones.

    Raises RunFolderError if there is no such folder; a run without completions gives an empty table.
    """
    path = _existing(folder) / COMPLETIONS_LINES
    lines = list(lines_of(path))
    if not lines:
        names = "step prompt prefill completion reward advantage group temperature"
        return pd.DataFrame(columns=names.split())
    with reading(path):
        table = pd.DataFrame(lines)
        return _as_numbers(table, table.filter(regex="^reward(/|$)"))


def _recorded(path: Path) -> pd.DataFrame:
    """A table of numbers, whose column `extra` holds more of them as JSON."""
    table = pd.read_csv(path, dtype=str)
    extra = pd.DataFrame()
    if "extra" in table:
        extra = pd.DataFrame([json.loads(text) for text in table.pop("extra").fillna("{}")])
    table = table.astype(float).astype({"step": int})
    table = table.join(extra[[name for name in extra if name not in table]])
    return table.drop_duplicates("step", keep="last").sort_values("step", ignore_index=True)


def _as_numbers(table: pd.DataFrame, names: Iterable[str]) -> pd.DataFrame:
    """The table with these columns as float, None as NaN: a column of which all are None has no type of its own."""
    return table.astype(dict.fromkeys(names, float))


def _existing(folder: str | Path) -> Path:
    path = run_path(folder)
    if not path.is_dir():
        raise RunFolderError(
            f"folder={str(folder)!r} does not exist; give a run's folder, like 'runs/full'."
        )
    return path


CONTROL = "control"
ACTIONS = ("pause", "go on", "stop", "save")


def read_changes(folder: str | Path) -> list[dict[str, Any]]:
    """The changes of a run: {"step": the first step trained with it, "change": {name: value}, "was": {...}}.

    A refused change has "refused" in place of "change", and "why". A line cut short is left out.
    """
    entries = []
    path = path_of(folder) / METRICS_LINES
    with reading(path):
        for row in lines_of(path):
            if changes := row.get("changes"):
                change = {name: after for name, (_, after) in changes.items()}
                before = {name: was for name, (was, _) in changes.items()}
                entries.append({"step": row["step"], "change": change, "was": before})
            if refusal := row.get("refused"):
                entries.append(
                    {
                        "step": row["step"] + 1,
                        "refused": refusal["change"],
                        "why": refusal["why"],
                    }
                )
    return entries


def cached_json(path: str | Path, make: Callable[[], Any]) -> Any:
    """The contents of the JSON file; without it, the result of make(), written first. An interrupt leaves no file.

    The result is read from the file in both cases: keys are texts, tuples are lists. Raises RunFolderError for a file
    that cannot be read.
    """
    path = path_of(path)
    if not path.exists():
        write_whole(path, json.dumps(make()).encode())
    return read_json(path, object)


def settings_folder(root: str | Path, name: str, *settings: Any) -> Path:
    """The folder root/name_<digest of the settings>, made if missing: the same settings find it again.

    For results that are made once and kept, with cached_json for each file. A setting counts by its str():
    use numbers, texts, lists and configs, whose str() shows all their contents. Code is not in the digest.

    >>> settings_folder("runs", "sweep_cpu", [1e-5, 2e-5], 4)  # doctest: +SKIP
    PosixPath('runs/sweep_cpu_bf4593')
    """
    digest = hashlib.sha1("".join(map(str, settings)).encode()).hexdigest()[:6]
    folder = path_of(root, "root") / f"{name}_{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_where_asked(path: str | os.PathLike, data: bytes) -> Path:
    """Write a file where a user asked for it, into a folder that is made if it is not there; returns its path."""
    target = path_of(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, data)
    return target


_AROUND_THE_KIT = Path(__file__).resolve().parents[2]


def in_repository(path: str) -> Path:
    """A file or folder of the repository from which the kit was installed in place, or in which a notebook runs.

    path: as in `"benchmarks/results/advice"`.
    Raises FileNotFoundError if there is no repository: the kit is installed as a copy, and the notebook lies alone.

    >>> in_repository("benchmarks/nothing")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    FileNotFoundError: 'benchmarks/nothing' lies in the kit's repository, which is neither around ...
    """
    folder = Path.cwd()
    for root in (_AROUND_THE_KIT, folder, folder.parent):
        if (root / "grpo_kit").is_dir() and (root / path).exists():
            return root / path
    raise FileNotFoundError(
        f"{path!r} lies in the kit's repository, which is neither around the installed kit nor around {str(folder)!r}; "
        "clone it and open this notebook there. Cells that do not read it run without"
    )

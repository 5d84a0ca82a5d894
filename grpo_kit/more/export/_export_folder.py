"""The folder of an export: hidden until complete, then under its name, with its files' digests in the report."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path
from typing import Any

import psutil

from grpo_kit.more.export._template import ExportError
from grpo_kit.record._digests import REPORT, what_is_wrong
from grpo_kit.record._lines import read_json
from grpo_kit.record.files import RunFolderError, sync

CARD = "README.md"
_MARK = "-exporting-"


def part_folder(target: Path, what: str, n_bytes: int) -> Path:
    """A hidden folder beside the target, on a disk with room for n_bytes. Removes leftovers of killed exports.

    what: will be written, as the line on it says.
    Raises ExportError.
    """
    part = target.with_name(f".{target.name}{_MARK}{platform.node()}-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for other_part in target.parent.glob(f".{target.name}{_MARK}*"):
            if not _is_worked_on(other_part):
                shutil.rmtree(other_part, ignore_errors=True)
        free = shutil.disk_usage(target.parent).free
        if free < n_bytes:
            raise ExportError(
                f"folder={str(target)!r} needs {n_bytes / 1e9:.1f} GB of disk and {free / 1e9:.1f} GB are free; make "
                "room, or store fewer bits"
            )
        part.mkdir()
    except OSError as error:
        raise ExportError(
            f"folder={str(target)!r} cannot be made ({error}); give one that can be written"
        ) from error
    print(f"export: writing {what}, at most {n_bytes / 1e6:,.0f} MB", flush=True)
    return part


def size_of(part: Path) -> int:
    """Bytes of all files below. Says it on a line."""
    files = files_of(part)
    size = sum(path.stat().st_size for path in files)
    print(f"export: wrote {len(files)} files, {size / 1e6:,.0f} MB", flush=True)
    return size


def finish(part: Path, target: Path) -> None:
    """Rename the complete export once all of it is on the disk. Raises OSError and then leaves part in place."""
    for path in [*files_of(part), part]:
        sync(path)
    if target.is_dir() and not target.is_symlink():
        target.rmdir()
    part.rename(target)


def files_of(folder: Path) -> list[Path]:
    """All files below the folder, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def is_unfinished(folder: Path) -> bool:
    """Is this an export in progress, or the leftover of a killed one?"""
    return folder.name.startswith(".") and _MARK in folder.name


def read_report(folder: Path) -> dict[str, Any] | None:
    """export.json; None in a folder without one.

    Raises ExportError if it cannot be read, and if a file is missing or differs from the proved one.
    """
    path = folder / REPORT
    if not path.is_file():
        return None
    try:
        report = read_json(path, names={"files": dict, "objections": list, "sampling": dict})
        damage = what_is_wrong(folder)
    except RunFolderError as error:
        raise ExportError(f"{error} Or export the model again") from error
    if damage:
        raise ExportError(
            f"{folder} is not what was exported: {damage}; copy it again, or export again"
        )
    return report


def _is_worked_on(part: Path) -> bool:
    """True unless its process was on this machine and has ended."""
    machine, _, pid = part.name.rpartition(_MARK)[2].rpartition("-")
    if machine != platform.node():
        return True
    return pid.isdigit() and int(pid) != os.getpid() and psutil.pid_exists(int(pid))

"""The folder of an export: hidden until complete, then under its name, with its files' digests in the report."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from pathlib import Path
from typing import Any

import psutil

from grpo_kit.exports.template import ExportError
from grpo_kit.record.files import sync

REPORT = "export.json"  # the export's own report
CARD = "README.md"
_MARK = "-exporting-"
# People edit these in their folder, and the proof does not depend on them.
_OPEN = {CARD, REPORT, "Modelfile", "generation_config.json"}


def part_folder(target: Path, needed: int) -> Path:
    """A hidden folder beside the target, on a disk with room for so many bytes. Removes leftovers of killed exports.

    Raises ExportError.
    """
    part = target.with_name(f".{target.name}{_MARK}{platform.node()}-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for left in target.parent.glob(f".{target.name}{_MARK}*"):
            if not _is_worked_on(left):
                shutil.rmtree(left, ignore_errors=True)
        free = shutil.disk_usage(target.parent).free
        if free < needed:
            raise ExportError(
                f"folder={str(target)!r} needs {needed / 1e9:.1f} GB of disk and {free / 1e9:.1f} GB are free; make "
                "room, or store fewer bits"
            )
        part.mkdir()
    except OSError as error:
        raise ExportError(
            f"folder={str(target)!r} cannot be made ({error}); give one that can be written"
        ) from error
    return part


def finish(part: Path, target: Path) -> None:
    """Rename the complete export once all of it is on the disk. Raises OSError and then leaves part in place."""
    for path in [*(p for p in part.rglob("*") if p.is_file()), part]:
        sync(path)
    if target.is_dir() and not target.is_symlink():
        target.rmdir()
    part.rename(target)


def is_unfinished(folder: Path) -> bool:
    """Is this an export in progress, or the leftover of a killed one?"""
    return folder.name.startswith(".") and _MARK in folder.name


def digests(folder: Path) -> dict[str, str]:
    """sha256 of each file except those that people edit: the card, the Modelfile and the sampling."""
    found = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if name not in _OPEN:
            with path.open("rb") as file:
                found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def read_report(folder: Path) -> dict[str, Any] | None:
    """export.json; None in a folder without one. Raises ExportError if it cannot be read."""
    path = folder / REPORT
    if not path.is_file():
        return None
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        assert isinstance(report["files"], dict)
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise ExportError(f"{path} cannot be read ({error!r}); export the model again") from error
    return report


def check_unchanged(folder: Path, report: dict[str, Any]) -> None:
    """Raises ExportError if a file is missing or differs from the proved one."""
    found = digests(folder)
    wrong = [
        f"{name} is {'another' if name in found else 'gone'}"
        for name, digest in report["files"].items()
        if found.get(name) != digest
    ]
    if wrong:
        raise ExportError(
            f"{folder} is not what was exported: {', '.join(wrong)}; copy it again, or export again. (kit.load_policy "
            "loads what lies there, and does not look)"
        )


def _is_worked_on(left: Path) -> bool:
    """True unless its process was on this machine and has ended."""
    machine, _, pid = left.name.rpartition(_MARK)[2].rpartition("-")
    if machine != platform.node() or not pid.isdigit() or int(pid) == os.getpid():
        return machine != platform.node()
    return psutil.pid_exists(int(pid))

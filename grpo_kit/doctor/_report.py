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
    shown = [(row.name, _shown(row.value), row.note) for row in section.rows]
    wide = [max((len(one[i]) for one in shown), default=0) for i in (0, 1)]
    lines = [f"  {name:<{wide[0]}}  {value:<{wide[1]}}  {note}".rstrip() for name, value, note in shown]
    return scrubbed("\n".join([section.title, *lines]))


def line_of(check: Check, width: int) -> str:
    """A check as one line; width: of the longest part's name.

    >>> line_of(Check("rollout", "ok", "48 tokens", 1.25), 8)
    '  rollout   ok        1.2 s  48 tokens'
    """
    # An exception's message may have many lines; the first names the error.
    said = next((line.strip() for line in check.said.splitlines() if line.strip()), "")
    return scrubbed(f"  {check.part:<{width}}  {check.outcome:<7} {check.seconds:5.1f} s  {said}".rstrip())


def as_data(sections: Sequence[Section], checks: Sequence[Check], to_do: Sequence[str]) -> dict[str, Any]:
    """The report as plain values for JSON: sections by title, rows by name."""
    found = {s.title: {r.name: {"value": r.value, "note": r.note} for r in s.rows} for s in sections}
    return _scrubbed_all({**found, "Self-check": [asdict(c) for c in checks], "What to do": list(to_do)})


def scrubbed(text: str) -> str:
    """text without names of persons and machines: the home folder is ~, tokens, users and hosts are starred out.

    >>> scrubbed("401 for hf_abcdefghijklmnop at https://me:secret@hub.example")
    '401 for *** at https://***@hub.example'
    """
    text = re.sub(r"\bhf_\w{8,}", "***", text)
    text = re.sub(r"(?<=://)[^/\s@]+@", "***@", text)
    for secret in filter(None, map(os.environ.get, ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY"))):
        text = text.replace(secret, "***")
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


def _scrubbed_all(value: Any) -> Any:
    if isinstance(value, str):
        return scrubbed(value)
    if isinstance(value, dict):
        return {key: _scrubbed_all(one) for key, one in value.items()}
    return [_scrubbed_all(one) for one in value] if isinstance(value, list) else value


def _shown(value: Value) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    return f"{value:.1f}" if isinstance(value, float) else str(value)

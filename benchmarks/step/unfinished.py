"""Measurements of a command that has not ended yet: saved after each, found again by the same command."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Unfinished:
    """Measurements in `path`, by name; each with the code state that it was made with.

    same: what has to be equal for a measurement to count, such as work, weights, seed and hardware. A file made
    otherwise is begun anew.

    >>> kept = Unfinished(folder / ".x.json", {"seed": 0})  # doctest: +SKIP
    >>> kept.add("1 kit", {"seconds": 2.0}, code={"files": "ab"})  # doctest: +SKIP
    >>> kept.get("1 kit", code={"files": "ab"})  # doctest: +SKIP
    {'seconds': 2.0}
    """

    def __init__(self, path: Path, same: dict[str, Any]) -> None:
        self.path, self._same = path, json.loads(json.dumps(same))
        self._found: dict[str, dict[str, Any]] = {}
        if path.exists():
            saved = json.loads(path.read_text())
            other = [key for key in self._same if saved["same"].get(key) != self._same[key]]
            if other:
                print(f"{path}: made with other {', '.join(other)}; begun anew")
            else:
                self._found = saved["measurements"]

    def get(self, name: str, code: dict[str, Any]) -> dict[str, Any] | None:
        """The measurement, None where there is none or another code state made it."""
        found = self._found.get(name)
        if found is None or found["code"]["files"] != code["files"]:
            return None
        return found["what"]

    def add(self, name: str, what: dict[str, Any], code: dict[str, Any]) -> None:
        """Keep it, in the file too, which is never half written."""
        self._found[name] = {"code": code, "what": what}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".new")
        beside.write_text(json.dumps({"same": self._same, "measurements": self._found}))
        os.replace(beside, self.path)

    def done(self) -> None:
        """The result is saved elsewhere: forget them."""
        self.path.unlink(missing_ok=True)

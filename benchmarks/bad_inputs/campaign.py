"""Runs the cases of cases.txt, each by itself, and says what became of it."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bad_inputs.world import temporary, world

FINE = ("refused", "right")


@dataclass(frozen=True)
class Case:
    """code: an expression. words: that a message must have, in any order and case; (): the value must be true."""

    door: str
    code: str
    words: tuple[str, ...]


def cases() -> list[Case]:
    """Every case of cases.txt, in its order."""
    found, door = [], ""
    for line in Path(__file__).with_name("cases.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("[") and line.endswith("]") and "=>" not in line:
            door = line[1:-1]
        elif line and not line.startswith("#"):
            code, _, wanted = line.rpartition("=>")
            words = tuple(word.strip() for word in wanted.split(";"))
            found.append(Case(door, code.strip(), () if words == ("True",) else words))
    return found


def campaign(chosen: Sequence[Case], *, said: bool = False) -> list[dict]:
    """What became of each case. said: print those that are not fine."""
    with temporary() as folder, contextlib.chdir(folder):
        names, found = world(Path(folder)), []
        for case in chosen:
            outcome, message = tried(case, names)
            found.append(
                {
                    "door": case.door,
                    "case": case.code,
                    "outcome": outcome,
                    "message": message[:300],
                }
            )
            if said and outcome not in FINE:
                print(f"{outcome:8} {case.code}\n         {message[:300]}", flush=True)
    return found


def tried(case: Case, names: dict) -> tuple[str, str]:
    """(outcome, what was said) of one case."""
    with (
        warnings.catch_warnings(record=True) as heard,
        contextlib.redirect_stdout(io.StringIO()) as out,
    ):
        warnings.simplefilter("always")
        try:
            value = eval(case.code, {**names, "heard": heard, "out": out})
        except ValueError as error:
            text = str(error)
            missing = [word for word in case.words if word.lower() not in text.lower()]
            if not case.words:
                return "unclear", f"refused: {text}"
            return ("unclear", f"without {missing}: {text}") if missing else ("refused", text)
        except (Exception, SystemExit) as error:
            return "raw", f"{type(error).__name__}: {error}"
    if case.words:
        return "silent", f"gave {value!r:.200}"
    return ("right", "") if value else ("silent", f"gave {value!r:.200}")

"""Requests of a person to a running training, through its folder: from a widget, notebook, terminal or web page.

    runs/<name>/control/<any name>.json   one request a file: {"change": {"learning_rate": 1e-5}} or {"do": "pause"}
                metrics.jsonl             the outcome of each change, in the line of its first step

The trainer reads requests between two steps, in the order of their names, and deletes them.
"""

from __future__ import annotations

import json
import math
import os
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_kit.argument_checks import COLDEST, FASTEST, HOTTEST, LARGEST_REWARD, is_number, is_whole
from grpo_kit.record.files import RunFolderError, holds_run, write_whole
from grpo_kit.record.lines import METRICS_LINES, lines_of, read_json, reading
from grpo_kit.schedules import schedule_from

CONTROL = "control"
ACTIONS = ("pause", "go on", "stop", "save")


def _or_schedule(least: float, most: float = math.inf, *, moves: bool = False) -> Callable[[Any], bool]:
    """moves: 0 does not fit as a number, but as an end of a schedule."""

    def check(value: Any) -> bool:
        if callable(value) or isinstance(value, str):
            value = schedule_from(_in_a_file(value))  # raises for what is none
            return all(is_number(at) and least <= at <= most for at in map(value, (0.0, 0.5, 1.0)))
        return is_number(value) and least <= value <= most and not (moves and value == 0)

    return check


def _weights(value: Any) -> bool:
    numbers = isinstance(value, (list, tuple)) and bool(value) and all(map(is_number, value))
    return numbers and max(map(abs, value)) <= LARGEST_REWARD


def _above_0(value: Any) -> bool:
    return is_number(value) and value > 0


def _at_least_0(value: Any) -> bool:
    return is_number(value) and value >= 0


_NUMBER = (_at_least_0, "a number, at least 0")
_COUNT = (lambda value: is_whole(value, 1), "a whole number of at least 1")
CHANGEABLE: dict[str, tuple[Callable[[Any], bool], str]] = {
    "steps": _COUNT,
    "temperature": (
        _or_schedule(COLDEST, HOTTEST),
        f"a number above 0, from {COLDEST} to {HOTTEST}, or a schedule",
    ),
    "epsilon": (lambda value: _at_least_0(value) and value <= 1, "a number, at least 0 and at most 1"),
    "epsilon_high": _NUMBER,
    "beta": (_or_schedule(0), "a number, at least 0, or a schedule"),
    "entropy_bonus": _NUMBER,
    "positive_weight": _NUMBER,
    "negative_weight": _NUMBER,
    "sampler_weight_cap": (lambda value: value is None or _above_0(value), "a number above 0, or None"),
    "reward_weights": (_weights, "a list of numbers, one a reward"),
    "learning_rate": (
        _or_schedule(0, FASTEST, moves=True),
        f"a number above 0 and at most {FASTEST}, or a schedule",
    ),
    "max_grad_norm": (_above_0, "a number above 0"),
    "save_steps": (lambda value: is_whole(value, 0), "a whole number of at least 0"),
    "save_total_limit": _COUNT,
}
"""What may change while a run trains: name -> (is this value one, what it must be)."""


def check_change(name: str, value: Any) -> None:
    """Raises ValueError for a name that no run can change, or an invalid value."""
    if name not in CHANGEABLE:
        raise ValueError(
            f"{name}={value!r} cannot be changed while a run goes on; what can: {', '.join(CHANGEABLE)}. For another "
            f"{name} make a new trainer, with a new folder"
        )
    fits, words = CHANGEABLE[name]
    try:
        fine, why = fits(value), ""
    except ValueError as error:
        fine, why = False, f": {error}"
    if not fine:
        raise ValueError(f"{name}={value!r} must be {words}{why}")


def _in_a_file(value: Any) -> Any:
    """The value in JSON: a schedule as its text. Raises ValueError for a function that has none."""
    if callable(value):
        schedule_from(repr(value))
    return repr(value) if callable(value) else value


class Control:
    """Sends requests to a running trainer, which handles them between two steps. Made by `control`.

    metrics.jsonl in the run's folder records both accepted and refused changes; see read_changes.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def change(self, **values: Any) -> None:
        """New values from the next step on: see GRPOTrainer.change.

        Raises ValueError for an unknown name, an invalid value, and a schedule that is not the kit's: a file
        can hold no other.
        """
        for name, value in values.items():
            check_change(name, value)
        self._ask({"change": {name: _in_a_file(value) for name, value in values.items()}})

    def pause(self) -> None:
        """Wait after this step, with the model in memory, until go_on() or stop()."""
        self._ask({"do": "pause"})

    def go_on(self) -> None:
        """Continue after a pause."""
        self._ask({"do": "go on"})

    def stop(self) -> None:
        """End after this step and save, like the stop button."""
        self._ask({"do": "stop"})

    def save(self) -> None:
        """Save a checkpoint after this step."""
        self._ask({"do": "save"})

    def _ask(self, request: Mapping[str, Any]) -> None:
        target = self.folder / CONTROL / f"{time.time_ns():020d}-{uuid.uuid4().hex[:6]}.json"
        target.parent.mkdir(exist_ok=True)
        write_whole(target, json.dumps(request).encode())


def control(folder: str | Path) -> Control:
    """Steer a running training from any process: change(...), pause(), go_on(), stop(), save().

    Raises RunFolderError (a ValueError) if the folder holds no run.

    >>> control("runs/full").change(learning_rate=5e-6)  # doctest: +SKIP
    """
    if not holds_run(folder):
        raise RunFolderError(f"folder={str(folder)!r} holds no run; give a run's folder, like 'runs/full'.")
    return Control(folder)


def take_requests(folder: str | Path) -> list[dict[str, Any]]:
    """Reads and deletes the waiting requests, oldest first. A file that is not complete yet waits for the next call.

    Its JSON may be anything that a person wrote by hand; the caller checks it.
    """
    found = []
    for path in sorted((Path(folder) / CONTROL).glob("[!.]*.json")):
        with suppress(OSError):
            try:
                request = read_json(path, object)
            except RunFolderError as error:
                if type(error.__cause__) is not ValueError:
                    continue
                request = str(error)  # too large or too deep: it will never be complete
            os.remove(path)
            found.append(request)
    return found


def read_changes(folder: str | Path) -> list[dict[str, Any]]:
    """The changes of a run: {"step": the first step trained with it, "change": {name: value}, "was": {...}}.

    A refused change has "refused" in place of "change", and "why". A line cut short is left out.
    """
    found, path = [], Path(folder) / METRICS_LINES
    with reading(path):
        for row in lines_of(path):
            if changed := row.get("changes"):
                now, was = ({name: values[place] for name, values in changed.items()} for place in (1, 0))
                found.append({"step": row["step"], "change": now, "was": was})
            if refused := row.get("refused"):
                found.append({"step": row["step"] + 1, "refused": refused["change"], "why": refused["why"]})
    return found

"""Records a slow environment once and plays it again without it: actions, results and how long each step took."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from grpo_kit.more.episodes.environment import Environment, row_key
from grpo_kit.record._run_folder import path_of


def recorded(make: Callable[[], Environment], path: str | Path) -> Callable[[], Environment]:
    """Environments like those of `make` that add every reset and step to the file, a JSON object a line.

    Play with it (evaluate, readiness, a short training), then train on RecordedEnv(path). Several processes may record.

    >>> task = replace(task, environment=recorded(Phone, "phone.jsonl"))  # doctest: +SKIP
    """
    path, lock = path_of(path), threading.Lock()
    _drop_half_a_line(path)

    def note(**line: Any) -> None:
        with lock, path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")

    class Recorded:
        """Plays and records."""

        def __init__(self) -> None:
            self.inner = make()

        def reset(self, row: Mapping[str, Any]) -> str:
            started = time.perf_counter()
            observation = self.inner.reset(row)
            self.row, self.said = row_key(row), []
            note(
                row=self.row,
                said=[],
                observation=observation,
                seconds=time.perf_counter() - started,
            )
            return observation

        def step(self, text: str) -> tuple[str, float, bool]:
            started = time.perf_counter()
            result = self.inner.step(text)
            self.said.append(text.strip())
            try:
                observation, reward, done = result
                self.last = {
                    "row": self.row,
                    "said": self.said,
                    "observation": str(observation),
                    "reward": float(reward),
                    "done": bool(done),
                    "invalid": self.invalid,
                    "seconds": time.perf_counter() - started,
                }
            except (TypeError, ValueError):
                return result  # breaks the contract; the player raises the error
            note(**self.last)
            return result

        def settle(self) -> float:
            if not hasattr(self.inner, "settle"):
                return 0.0
            reward = float(self.inner.settle())
            note(**self.last, settled=reward)
            return reward

        @property
        def invalid(self) -> bool:
            return bool(getattr(self.inner, "invalid", False))

        @invalid.setter
        def invalid(self, value: bool) -> None:
            self.inner.invalid = value

    return Recorded


class RecordedEnv:
    """Plays a recording: give RecordedEnv(path) to a task as its environment.

    unknown: the observation for an action that was never recorded at that point; the action is invalid, earns nothing
    and leaves the episode unchanged. latency: seconds that every step waits, "recorded" for the recorded time, 0 none.
    Raises FileNotFoundError for no file; ValueError for a line that `recorded` did not write, and for a row that was
    never begun.

    >>> mock = RecordedEnv("phone.jsonl")  # doctest: +SKIP
    >>> task = replace(task, environment=mock)  # doctest: +SKIP
    """

    def __init__(
        self, path: str | Path, *, unknown: str = "Nothing happens.", latency: float | str = 0.0
    ) -> None:
        if latency != "recorded" and not (isinstance(latency, (int, float)) and latency >= 0):
            raise ValueError(
                f"latency={latency!r} must be seconds of at least 0, or 'recorded'"
            )
        self.path, self.unknown, self.latency = path_of(path), unknown, latency
        self.known: dict[tuple[str, tuple[str, ...]], dict[str, Any]] = {}
        # behind the last newline: half a line
        *lines, _ = self.path.read_text(encoding="utf-8").split("\n")
        for number, line in enumerate(lines, start=1):
            try:
                entry = json.loads(line)
                self.known[entry["row"], tuple(entry["said"])] = entry
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{self.path}, line {number}: no step that was recorded: {line[:80]!r}"
                ) from error
        self.asked = 0  # steps so far
        self._missing: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self._lock = threading.Lock()

    def __call__(self) -> Environment:
        """A new environment."""
        return _Played(self)

    def missing(self) -> pd.DataFrame:
        """Steps that were never recorded, most often first: row, said (the episode's actions), times."""
        rows = [
            (row, " | ".join(actions), times)
            for (row, actions), times in self._missing.most_common()
        ]
        return pd.DataFrame(rows, columns=["row", "said", "times"])

    def report(self) -> str:
        """The share of unrecorded steps in one sentence.

        >>> RecordedEnv("phone.jsonl").report()  # doctest: +SKIP
        '12 of 640 steps (1.9 %) asked for what was never recorded; missing() lists them.'
        """
        unknown = sum(self._missing.values())
        share = f"{unknown} of {self.asked} steps ({100 * unknown / max(self.asked, 1):.1f} %)"
        hint = "; missing() lists them" if unknown else ""
        return f"{share} asked for what was never recorded{hint}."

    def look_up(self, row: str, actions: tuple[str, ...]) -> dict[str, Any] | None:
        """The recorded step, after its latency. If it was not recorded: None, and the step is counted."""
        entry = self.known.get((row, actions))
        with self._lock:
            self.asked += 1
            if entry is None:
                self._missing[row, actions] += 1
        if self.latency != "recorded":
            time.sleep(self.latency)
        elif entry is not None:
            time.sleep(entry["seconds"])
        return entry


class _Played:
    """One environment of a RecordedEnv."""

    def __init__(self, recording: RecordedEnv) -> None:
        self.recording, self.invalid = recording, False

    def reset(self, row: Mapping[str, Any]) -> str:
        self.row, self.actions, self.invalid, self.settled = row_key(row), (), False, 0.0
        entry = self.recording.known.get((self.row, ()))
        if entry is None:
            raise ValueError(
                f"{self.recording.path} has no episode of this row; record it first: {self.row:.200}"
            )
        return entry["observation"]

    def step(self, text: str) -> tuple[str, float, bool]:
        actions = (*self.actions, text.strip())
        entry = self.recording.look_up(self.row, actions)
        if entry is None:
            self.invalid = True
            return self.recording.unknown, 0.0, False
        self.actions, self.invalid = actions, entry["invalid"]
        self.settled = entry.get("settled", 0.0)
        return entry["observation"], entry["reward"], entry["done"]

    def settle(self) -> float:
        return self.settled


def _drop_half_a_line(path: Path) -> None:
    """Removes the half line of a killed recording, behind which nothing could be read."""
    if path.is_file():
        whole_lines, newline, half_line = path.read_bytes().rpartition(b"\n")
        if half_line:
            path.write_bytes(whole_lines + newline)

"""Displays of a run that refresh themselves while another kernel trains it; their own kernel stays free."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from grpo_kit.record._run_folder import is_locked

_LOOK = 2.0  # seconds between two checks of the files
_SHARE = 0.1  # of the kernel's time that refreshing may take
_FILES = ("metrics.jsonl", "flags.jsonl", "completions.jsonl")
_TASKS: set[asyncio.Task] = set()  # asyncio itself keeps no reference
_ALONE: dict[tuple[str, Path], Follower] = {}


def signature(folder: str | Path) -> tuple:
    """Changes whenever the run writes: names, sizes and times of its files."""
    files = []
    for name in _FILES:
        path = Path(folder) / name
        with suppress(OSError):  # not there, or moved away at this moment
            status = path.stat()
            files.append((name, status.st_size, status.st_mtime_ns))
    return tuple(files)


class Follower:
    """Calls show() each time a run's files have changed, until the run has ended or stop() is called.

    A task of the event loop in which the kernel runs cells: it waits while a cell runs, needs no thread, and takes at
    most a tenth of the time. An error in show() while a file is being written leads to another try. Outside
    a kernel there is no such loop, and it does nothing. `on_end` is called when it stops by itself.
    """

    def __init__(
        self,
        folder: str | Path,
        show: Callable[[], None],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder = Path(folder)
        self._show = show
        self._on_end = on_end
        self._context = contextvars.copy_context()  # of the cell: later output belongs under it
        self._run: object | None = None
        self._signature = signature(folder)  # before the first display: later writes are news
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None

    def start(self, kind: str) -> bool:
        """Begin to check the files. Stops an earlier one of this kind at the same folder, so a rerun cell leaves none
        behind. From any thread. False if there is no event loop.
        """
        if self._loop is None:
            return False
        key = kind, self.folder.resolve()
        earlier = _ALONE.get(key, self)
        if earlier is not self:
            earlier.stop()
        _ALONE[key] = self
        if self._run is None:
            self._run = run = object()
            self._loop.call_soon_threadsafe(self._begin, run, context=self._context)
        return True

    def stop(self) -> None:
        """Stop checking. From any thread."""
        self._run = None

    def _begin(self, run: object) -> None:
        task = self._loop.create_task(self._follow(run))
        _TASKS.add(task)
        task.add_done_callback(_TASKS.discard)

    async def _follow(self, run: object) -> None:
        pause = _LOOK
        while True:
            await asyncio.sleep(pause)
            if self._run is not run:
                return
            start = time.perf_counter()
            is_going = bool(is_locked(self.folder))
            current = signature(self.folder)
            if current != self._signature:
                try:
                    self._show()
                    self._signature = current
                except (ValueError, OSError):  # an incomplete or moved file: next time
                    is_going = True
            pause = max(_LOOK, (time.perf_counter() - start) / _SHARE)
            if not is_going:
                self._run = None
                self._on_end()
                return

"""Is anything else at work on the cores that are measured on? Two threads beside other load are 10 to 30 times slower.

Read from Linux's /proc/stat; elsewhere None: not known.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

STAT = Path("/proc/stat")
MOST = 0.05  # share of the cores' time from which a measurement is marked
_PATIENCE = 60.0  # seconds


class OtherLoad:
    """Share in [0, 1] of this process's cores' time that went to others, from start() to stop().

    Others: every process but this one and its children that have ended, niced ones too, and time that the machine
    below a virtual one took. Counted in ticks of 10 ms: of a few tenths of a second it says little.
    """

    def start(self) -> None:
        self._begin = time.perf_counter(), _busy(), _own()

    def stop(self) -> float | None:
        began, busy, own = self._begin
        if busy is None:
            return None
        seconds = (time.perf_counter() - began) * len(_cores())
        return min(1.0, max(0.0, (_busy() - busy) - (_own() - own)) / seconds)


def load_before(seconds: float = 1.0) -> float | None:
    """The share that others take while this process sleeps."""
    other = OtherLoad()
    other.start()
    time.sleep(seconds)
    return other.stop()


def wait_until_quiet(patience: float = _PATIENCE) -> float | None:
    """The share that others take, as soon as it is below MOST or once patience (seconds) has run out."""
    end = time.perf_counter() + patience
    while True:
        share = load_before()
        if share is None or share <= MOST or time.perf_counter() > end:
            return share


def is_busy(*shares: float | None) -> bool:
    """Is any of the shares above MOST?"""
    return any(share is not None and share > MOST for share in shares)


def _cores() -> set[int]:
    return os.sched_getaffinity(0)


def _busy() -> float | None:
    """Seconds that the cores have worked since the machine started; None where nobody says so."""
    if not STAT.exists():
        return None
    wanted = {f"cpu{core}" for core in _cores()}
    lines = (line.split() for line in STAT.read_text().splitlines())
    # user, nice, system, idle, iowait, irq, softirq, steal; what guests took is in user already
    ticks = [list(map(int, line[1:9])) for line in lines if line and line[0] in wanted]
    return sum(sum(line) - line[3] - line[4] for line in ticks) / os.sysconf("SC_CLK_TCK")


def _own() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system

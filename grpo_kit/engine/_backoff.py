"""When to try a larger size again after memory ran out."""

from __future__ import annotations

_FIRST_WAIT = 8


class Backoff:
    """Counts successes with a smaller size, and decides when to try a larger one: after 8 times, then 16 more, 32, ...

    One bad moment does not slow a whole run down, and a size that never fits is tried ever more rarely.

    >>> backoff = Backoff()
    >>> [n for n in range(1, 60) if backoff.again()]
    [8, 24, 56]
    """

    def __init__(self) -> None:
        self._wait, self._well = _FIRST_WAIT, 0

    def failed(self) -> None:
        """Memory ran out: restart the count."""
        self._well = 0

    def again(self) -> bool:
        """Count one more success; is it time for a larger size?"""
        self._well += 1
        if self._well < self._wait:
            return False
        self._wait, self._well = 2 * self._wait, 0
        return True

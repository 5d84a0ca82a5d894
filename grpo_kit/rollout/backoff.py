"""When to try again what memory did not hold."""

from __future__ import annotations

_FIRST_WAIT = 8


class Backoff:
    """Counts what went well with less, and says when to try more: after 8 times, then after 16 more, 32 more, ...

    One bad moment does not slow a whole run down, and what never fits is tried ever more rarely.

    >>> backoff = Backoff()
    >>> [n for n in range(1, 60) if backoff.again()]
    [8, 24, 56]
    """

    def __init__(self) -> None:
        self._wait, self._well = _FIRST_WAIT, 0

    def failed(self) -> None:
        """Memory ran out: the count begins anew."""
        self._well = 0

    def again(self) -> bool:
        """Less went well once more; is it time for more?"""
        self._well += 1
        if self._well < self._wait:
            return False
        self._wait, self._well = 2 * self._wait, 0
        return True

"""A pair of whole numbers, fewest and most, as tasks that draw their questions take it."""

from __future__ import annotations

from typing import Any

from grpo_kit._support.argument_checks import is_whole


def check_range(name: str, value: Any, least: int, most: int) -> tuple[int, int]:
    """The pair. Raises ValueError, naming the argument, unless it is two whole numbers, (fewest, most), in the range.

    >>> check_range("numbers", 3, 2, 90)
    Traceback (most recent call last):
    ValueError: numbers=3 must be (fewest, most) with 2 <= fewest <= most <= 90, such as (3, 3)
    """
    pair = value if isinstance(value, tuple | list) and len(value) == 2 else (None, None)
    if not all(is_whole(n, least) for n in pair) or not pair[0] <= pair[1] <= most:
        given = f", such as ({value}, {value})" if is_whole(value, least) and value <= most else ""
        raise ValueError(
            f"{name}={value!r} must be (fewest, most) with {least} <= fewest <= most <= {most}{given}"
        )
    return int(pair[0]), int(pair[1])

"""Watching a run: red flags, diversity, the live chart, completions to read; colours and figures of every picture."""

from typing import TYPE_CHECKING

from grpo_kit._support.lazy import lazy

if TYPE_CHECKING:
    from grpo_kit._support.display import (
        BASE,
        COLOURS,
        CONSTANT,
        RED,
        TUNED,
        colours_of,
        cut,
        diagram,
        new_figure,
    )
    from grpo_kit.watch.monitor import read_flags

__all__ = lazy(__name__)

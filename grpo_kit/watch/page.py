"""Outputs around the live chart: progress line, red flags, three completions; each with its own height."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from grpo_kit.display import BADGE, escape
from grpo_kit.watch.conversations import picks_of
from grpo_kit.watch.flags import Flag
from grpo_kit.watch.svg import WIDTH

_ONE_LINE = "height:1.5em;white-space:nowrap;overflow:hidden;text-overflow:ellipsis"


def badge(text: str) -> str:
    """Highlighted text in front of a sentence, as HTML."""
    return f'<span style="{BADGE}">{escape(text)}</span> '


def line_page(step: int, total: int, said: Sequence[str], measured: Sequence[str]) -> str:
    """A bar and two lines: the step and present work (HTML), and the last step's measures (text)."""
    bar = f'<progress value="{step}" max="{total}" style="width:100%;height:1em"></progress>'
    lines = " · ".join(said), escape(" · ".join(measured))
    page = "".join(f'<div style="{_ONE_LINE}">{line}</div>' for line in lines)
    return f'<div style="line-height:1.5;max-width:{WIDTH // 2}px">{bar}{page}</div>'


def flags_page(flags: Sequence[Flag], *, scrolls: bool) -> str:
    """Two lines that scroll, the newest on top; or as many lines as needed, in order."""
    told = [f"<div>{badge(f'red flag {n}')}{escape(flag, 600)}</div>" for n, flag in enumerate(flags, 1)]
    room = "overflow:auto;height" if scrolls else "min-height"
    told = told[::-1] if scrolls else told
    return f'<div style="line-height:1.4;{room}:2.9em">{"".join(told) or "No red flag."}</div>'


def completions_page(table: pd.DataFrame | None, *, scrolls: bool) -> tuple[str, str]:
    """Best, median and worst of the last step, as text and as HTML; whole episodes if there are any.

    scrolls: in a box of fifteen lines, so that the page does not move; else as many lines as needed.
    """
    if table is None or not len(table):
        plain = page = "The best, the median and the worst completion of the last step come here."
    else:
        plain, page = picks_of(table)
    room = "overflow:auto;height" if scrolls else "min-height"
    return plain, f'<div style="{room}:15em">{page}</div>'

"""Outputs around the live chart: progress line, red flags, three completions; each with its own height."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import pandas as pd

from grpo_kit.display import BADGE, duration, escape
from grpo_kit.watch.conversations import picks_of
from grpo_kit.watch.flags import Flag
from grpo_kit.watch.held_out_words import held_out_words
from grpo_kit.watch.svg import WIDTH

_ONE_LINE = "height:1.5em;white-space:nowrap;overflow:hidden;text-overflow:ellipsis"


def measures(rows: Mapping[int, Mapping]) -> list[str]:
    """The last step's measures, a few words each; and the latest held-out accuracy or reward.

    >>> measures({1: {"step": 1, "reward": 0.5, "completion_length": 11.2}})
    ['reward 0.50', 'length 11']
    """
    row = rows[max(rows)] if rows else {}
    parts = [(name, name.removeprefix("reward/")) for name in row if name.startswith("reward/")]
    after = [("completion_length", "length"), ("completion_cut_off", "cut off"), ("entropy", "entropy")]
    words = []
    for name, label in [("reward", "reward"), *parts, *after]:
        value = row.get(name)
        if value is None or value != value:
            continue
        spread = row.get("reward_std")
        if name == "reward" and spread is not None and spread == spread:
            words.append(f"reward {value:.2f} ± {spread:.2f}")
        elif name == "completion_length":
            words.append(f"{label} {value:.0f}")
        else:
            words.append(f"{label} {value:{'.0%' if name == 'completion_cut_off' else '.2f'}}")
    held_out = [said for row in rows.values() if (said := held_out_words(row)) is not None]
    words[1:1] = held_out[-1:]
    return words


def step_line(rows: Mapping[int, Mapping], step: int, total: int) -> str:
    """A step in one line, as a run prints it and as whoever follows the run reads it.

    >>> step_line({1: {"step": 1, "reward": 0.5, "seconds": 65.0}}, 1, 2)
    'step 1/2  reward 0.50  1 min 5 s left'
    """
    so_far = {n: row for n, row in rows.items() if n <= step}
    known = {n: {k: v for k, v in row.items() if not k.startswith("eval/")} for n, row in so_far.items()}
    left = f"{duration(seconds_left(so_far, total))} left"
    left = left if step < total else f"{duration(trained(so_far))} in all"
    return "  ".join([f"step {step}/{total}", *measures(known), left])


def trained(rows: Mapping[int, Mapping]) -> float:
    """Seconds of training so far: the last row's, which leaves pauses out."""
    return rows[max(rows)].get("seconds") or 0.0 if rows else 0.0


def seconds_left(rows: Mapping[int, Mapping], total: int) -> float:
    """By the last steps' seconds; one that took ten times as long as usual is no estimate for the rest."""
    ends = [0.0, *(row.get("seconds") or 0.0 for _, row in sorted(rows.items()) if row["step"] > 0)][-21:]
    lasted = [after - before for before, after in zip(ends, ends[1:], strict=False)]
    if not lasted:
        return 0.0
    usual = statistics.median(lasted)
    return statistics.mean(s for s in lasted if s <= 10 * usual) * max(0, total - max(rows))


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

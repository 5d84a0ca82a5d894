"""The drawing of a run as SVG text: reward, accuracy, parts, six or eight small panels, red flags and changes.

A pure function of what the runs have shown, without matplotlib, quick enough to be drawn at every step, and at most
about 25 KB for a run of any length. Lengths are half pixels: whole numbers, hence short, and fine enough for a smooth
line. It has no ground. In a page that is drawn anew (told=False) its words have the page's colour; as a file or PNG a
grey that can be read on white and on dark.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from grpo_kit._support.display import COLOURS, GREY, RED, cut
from grpo_kit.watch._curves import EPISODES, part_names, range_of_rows, scale_columns, window_of
from grpo_kit.watch._held_out_words import ACCURACY, no_better, value_of
from grpo_kit.watch._run_state import RunState
from grpo_kit.watch._svg_axes import AXIS, HELD_OUT, INK, LETTER, ROW, TITLE, Axes, Columns, dashes

WIDTH, HEIGHT = 1920, 1048  # half pixels: of one run without a name and with one line of words below
_LEFT, _GAP, _RIGHT = 76, 96, 24
# Heights: of the runs' names, of the row of main panels, of a row of small ones, of a line below.
_NAMES, _MAIN, _SMALL, _LINE = 40, 500, 240, 34
_WITH_ACCURACY = 800, 228, 600  # widths of reward, held-out accuracy and parts
_LETTERS = int((WIDTH - _LEFT - _RIGHT) / LETTER)  # of a line
_POINTS, _FEW = 600, 60  # in all lines of the main panels together; in a line of a small one
_MARKS = 20  # most changes of a run that are marked, the last ones
_SHARES = ("completion_cut_off", "frac_reward_zero_std")
_WORDS = {
    "completion_length": "completion length, tokens",
    "completion_cut_off": "share cut off",
    "frac_reward_zero_std": "groups without a signal",
    "entropy": "entropy, nats a token",
    "kl": "KL to the reference",
    "grad_norm": "gradient norm",
    "temperature": "temperature",
    "learning_rate": "learning rate",
}


def draw_svg(runs: Mapping[str, RunState], *, last_step: int = 0, told: bool = True) -> str:
    """The drawing of runs by their names, 960 pixels wide; a single run may have the name "".

    x reaches `last_step`, or further if a run does. Up to 20 steps a line goes through the values. From 21 steps on
    pale dots are values, the highest and lowest among them, and the line is their moving mean. Points with bars are
    held-out accuracy with its 95 % interval, on an axis of its own. Red flags are numbered lines at their first step,
    changes dotted lines with a letter.
    told: every flag and change has a line below. Otherwise one line of fixed height has the last changes.

    >>> draw_svg({"": RunState({1: {"step": 1, "reward": 0.5}})}, last_step=2).startswith("<svg")
    True
    """
    names = part_names(chain.from_iterable(row for run in runs.values() for row in run.rows.values()))
    tables = {label: _columns(run, names) for label, run in runs.items()}
    alone = len(runs) == 1
    parts = [name for name in names if any(np.isfinite(table[name]).any() for table in tables.values())]
    page = _Page(tables, max([last_step, 1, *(run.step for run in runs.values())]), _marks(runs))
    top = _NAMES * any(runs)
    drawn = [_run_names(runs)] if top else []

    parts_title = "episodes" if EPISODES.keys() & set(names) else "reward parts"
    main: list[tuple[list[str], str, list[tuple[str, str]]]] = [
        (["reward"], _reward_title(tables), []),
        (parts, parts_title, _part_keys(parts, alone)),
    ]
    widths = [_width(2), _width(2)]
    if any(np.isfinite(table[ACCURACY]).any() for table in tables.values()):
        worse = _no_better_than_constant(runs)
        keys = [("", "no better than a constant")] if worse else []
        main.insert(1, ([ACCURACY], "accuracy" if worse else "held-out accuracy", keys))
        widths = [*_WITH_ACCURACY]
    legends = [_legend(keys, width) for (_, _, keys), width in zip(main, widths, strict=True)]
    above = TITLE + ROW * max(rows for _, rows in legends) + 20
    most = max(20, _POINTS // (len(runs) * (4 + 2 * len(parts))))
    x = _LEFT
    for (some, title, _), (legend, _), width in zip(main, legends, widths, strict=True):
        axes = page.axes(some, x, top, width, _MAIN, above)
        lines = page.lines(axes, some, most, names_marks=some == ["reward"])
        drawn.append(f"<g>{axes.frame(title, legend)}{lines}</g>")
        x += width + _GAP

    small = _small_panels(tables)
    columns = len(small) // 2
    for place, some in enumerate(small):
        x = _LEFT + (place % columns) * (_width(columns) + _GAP)
        y = top + _MAIN + _SMALL * (place // columns)
        axes = page.axes(some, x, y, _width(columns), _SMALL, TITLE)
        several = len(some) > 1  # then the legend is the title
        legend = _legend(_part_keys(some, alone), WIDTH)[0] if several else ""
        frame = axes.frame("" if several else _WORDS[some[0]], legend)
        drawn.append(f"<g>{frame}{page.lines(axes, some, _FEW)}</g>")

    at = top + _MAIN + 2 * _SMALL
    below = _told(runs) if told else [(_last_changes(runs), INK)]
    for n, (line, colour) in enumerate(below, 1):
        drawn.append(f'<text x="{_LEFT}" y="{at + _LINE * n}" fill="{colour}">{html.escape(line)}</text>')
    height, ink = at + _LINE * max(1, len(below)) + 34, f' color="{GREY}"' * told
    # JupyterLab shows it as an <img> of its own width: in pixels, it would be cut off where the page is narrower.
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="100%" '
        f'style="display:block;max-width:{WIDTH // 2}px;height:auto" '
        f'font-family="sans-serif" font-size="22" fill="{INK}"{ink}>{"".join(drawn)}</svg>'
    )


def _columns(run: RunState, parts: Sequence[str]) -> Columns:
    rows = [run.rows[step] for step in sorted(run.rows)]
    ends = chain.from_iterable(map(scale_columns, ("reward", *parts)))
    names = ("step", "reward", "reward_std", *HELD_OUT, *parts, *ends, *_WORDS)
    return {name: np.array([row.get(name) for row in rows], dtype=float) for name in names}  # None: NaN


def _width(columns: int) -> int:
    return (WIDTH - _LEFT - _RIGHT - _GAP * (columns - 1)) // columns


def _small_panels(tables: Mapping[str, Columns]) -> list[list[str]]:
    """The measures of each small panel: six panels, or eight if a run has a KL."""
    kl = any(np.isfinite(table["kl"]).any() for table in tables.values())
    shares = [[name] for name in _SHARES] if kl else [[*_SHARES]]
    others = [["entropy"], *[["kl"]] * kl, ["grad_norm"], ["temperature"], ["learning_rate"]]
    return [["completion_length"], *shares, *others]


class _Page:
    """The runs on their common scale of steps, and what is marked on it: (marks, colour, dash, above the panel?)."""

    def __init__(self, tables: Mapping[str, Columns], end: int, marks: Sequence[tuple]) -> None:
        self.tables, self.end, self.marks = tables, end, marks

    def axes(self, names: Sequence[str], x: int, y: int, width: int, height: int, above: int) -> Axes:
        """A panel for these measures. height: with its words, of which so much is above the lines."""
        return Axes(x, y, above, width, height - above - AXIS, self.end, self._scale(names))

    def lines(self, axes: Axes, names: Sequence[str], most: int, *, names_marks: bool = False) -> str:
        """The runs' lines of these measures, of at most so many points each, and the marks."""
        alone = len(self.tables) == 1
        drawn = [axes.marks(*marks, named=names_marks) for marks in self.marks if marks[0]]
        for r, table in enumerate(self.tables.values()):
            if names == [ACCURACY]:
                drawn.append(axes.accuracy(table, INK if alone else COLOURS[r % len(COLOURS)]))
                continue
            for n, name in enumerate(names):
                colour = COLOURS[(n if alone else r) % len(COLOURS)]
                drawn.append(axes.line(table, name, colour, n, most))
        return "".join(drawn)

    def _scale(self, names: Sequence[str]) -> tuple[float, float]:
        """Lowest and highest value: of rewards and shares their range, of other measures from 0 to the highest."""
        if names == [ACCURACY]:
            return 0.0, 1.0
        if not names or names[0].startswith(("reward", "episodes/")) or names[0] in _SHARES:
            return range_of_rows(names, *self.tables.values())
        values = np.concatenate([[0.0], *(table[name] for table in self.tables.values() for name in names)])
        values = values[np.isfinite(values)]
        return float(values.min()), float(values.max()) or 1.0


def _reward_title(tables: Mapping[str, Columns]) -> str:
    """Explains the band, and the lines if they are moving means."""
    rewards = [table["reward"][np.isfinite(table["reward"])] for table in tables.values()]
    window = max(map(window_of, rewards), default=1)
    return f"reward (band: ± reward_std{f'; lines: means of {window} steps' * (window > 1)})"


def _no_better_than_constant(runs: Mapping[str, RunState]) -> bool:
    """Is a single run's last held-out accuracy no better than the best constant strategy's?"""
    measured = [
        row for run in runs.values() for row in run.rows.values() if value_of(row, ACCURACY) is not None
    ]
    return len(runs) == 1 and no_better(max(measured, key=lambda row: row["step"]))


def _part_keys(names: Sequence[str], alone: bool) -> list[tuple[str, str]]:
    """Line and name of several measures in one panel; among several runs a colour is a run's."""
    words = EPISODES | _WORDS
    colours = [COLOURS[n % len(COLOURS)] if alone else INK for n in range(len(names))]
    named = [words.get(name, name.removeprefix("reward/")) for name in names]
    return [(_key(colour, n), name) for n, (colour, name) in enumerate(zip(colours, named, strict=True))]


def _key(colour: str, dash: int = 0) -> str:
    return f'<path stroke="{colour}" stroke-width="4"{dashes(dash)} d="M0-7h36"/>'


def _run_names(runs: Mapping[str, RunState]) -> str:
    """In one line above the panels; of several runs with their colours."""
    ends = [label if len(label) <= 60 else f"…{label[-59:]}" for label in runs]  # a path differs at its end
    keys = [(_key(COLOURS[r % len(COLOURS)]) if len(runs) > 1 else "", label) for r, label in enumerate(ends)]
    return f'<g transform="translate({_LEFT} 14)">{_legend(keys, WIDTH - _LEFT, 60)[0]}</g>'


def _legend(entries: Sequence[tuple[str, str]], width: int, most: int = 30) -> tuple[str, int]:
    """Keys with their names of at most so many letters, in as many rows as needed, at most 3; the number of rows."""
    drawn, x, row = [], 0.0, 1
    for n, (key, name) in enumerate(entries):
        name, key_width = cut(name, most), 46 * bool(key)
        needs = key_width + LETTER * len(name) + 20
        more = 150 * (n < len(entries) - 1)  # room for the number of those left out
        if row == 3 and x and x + needs + more > width:
            drawn.append(_entry("", f"and {len(entries) - n} more", x - 46, row))
            break
        if x and x + needs > width + 20:
            x, row = 0.0, row + 1
        drawn.append(_entry(key, name, x + key_width - 46, row))
        x += needs
    return "".join(drawn), row if entries else 0


def _entry(key: str, name: str, x: float, row: int) -> str:
    place = f"translate({x:.0f} {ROW * row - 8})"
    return f'<g transform="{place}">{key}<text x="46">{html.escape(name)}</text></g>'


def _of(runs: Mapping[str, RunState], what: str) -> list[tuple[str, Any]]:
    """(run, flag or change) of all runs."""
    return [(label, found) for label, run in runs.items() for found in getattr(run, what)]


def _marks(runs: Mapping[str, RunState]) -> list[tuple]:
    """Changes by letter and flags by number, with the look of their lines."""
    letters = [(step, _letter(n)) for n, (_, (step, _)) in enumerate(_of(runs, "changes"))][-_MARKS:]
    numbers = [(flag.step, str(n)) for n, (_, flag) in enumerate(_of(runs, "flags"), 1)]
    return [(letters, GREY, "2 6", False), (numbers, RED, "8 8", True)]


def _told(runs: Mapping[str, RunState]) -> list[tuple[str, str]]:
    """Lines with their colours: at most two for each flag and each change."""
    run = lambda label: f" ({label})" if len(runs) > 1 else ""  # noqa: E731
    flags = [
        (f"{n}  {flag.name}{run(label)} since step {flag.step}: {flag.saw}", RED)
        for n, (label, flag) in enumerate(_of(runs, "flags"), 1)
    ]
    changes = [
        (f"{_letter(n)}  from step {step}{run(label)}: {text}", INK)
        for n, (label, (step, text)) in enumerate(_of(runs, "changes"))
    ]
    return [
        (line, colour)
        for text, colour in flags + changes
        for line in textwrap.wrap(text, _LETTERS, max_lines=2, placeholder=" …")
    ]


def _last_changes(runs: Mapping[str, RunState]) -> str:
    """The last changes that fit in one line, oldest first."""
    found, room = [], _LETTERS
    for n, (_, (step, text)) in reversed([*enumerate(_of(runs, "changes"))]):
        words = f"{_letter(n)} from step {step}: {text}"
        if found and len(words) + 3 > room:
            break
        found.insert(0, cut(words, room))
        room -= len(found[0]) + 3
    return " · ".join(found)


def _letter(number: int) -> str:
    """The name of a change in the chart: a, b, ..., z, a2, b2, ...

    >>> _letter(0), _letter(27)
    ('a', 'b2')
    """
    return "abcdefghijklmnopqrstuvwxyz"[number % 26] + (str(number // 26 + 1) if number >= 26 else "")

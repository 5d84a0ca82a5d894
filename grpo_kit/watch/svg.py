"""Reward and its parts as SVG text, which the live chart shows at every step, without matplotlib.

A pure function of the rows, at most about 10 KB for a run of any length. Lengths are half pixels: whole numbers, hence
short, and fine enough for a smooth line. It has its own white ground, like the PNG at the end, and so
looks the same on light and dark pages.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from grpo_kit.display import COLOURS, GREY, RED, cut
from grpo_kit.watch.curves import (
    ACCURACY,
    ACCURACY_HIGH,
    ACCURACY_LOW,
    CONSTANT,
    Change,
    accuracy_word,
    labels,
    letter,
    moving_mean,
    part_names,
    part_word,
    parts_title,
    range_of_rows,
    reward_title,
    scale_columns,
    window_of,
)
from grpo_kit.watch.flags import Flag

WIDTH, HEIGHT = 1920, 600  # half pixels
_POINTS = 460  # in all lines together
_MARKS = 20  # most changes shown, the last ones
_LEFT, _GAP, _RIGHT = 70, 90, 24
_TITLE, _ROW, _BOTTOM = 44, 30, 92  # heights: of the title, of a legend's row, of the text below the panels
_LETTER = 11.6  # mean width of a letter
_ACCURACY = (ACCURACY, ACCURACY_LOW, ACCURACY_HIGH)
_DASHES = ("", "14 5", "5 4", "16 5 4 5")


def draw_svg(
    rows: Sequence[Mapping], *, last_step: int = 1, flags: Sequence[Flag] = (), changes: Sequence[Change] = ()
) -> str:
    """The two main panels of a run at present, 960 x 300 pixels.

    rows: the run's, by step; x reaches last_step. Lines, moving means and markers are those of chart.draw: flags
    by number, changes by letter, with the last changes in words below.

    >>> draw_svg([{"step": 1, "reward": 0.5}], last_step=2).startswith("<svg")
    True
    """
    names = part_names(chain.from_iterable(rows))
    ends = chain.from_iterable(map(scale_columns, ("reward", *names)))
    wanted = ("step", "reward", "reward_std", *_ACCURACY, CONSTANT, *names, *ends)
    measured = {n: _numbers(rows, n) for n in wanted}
    steps, reward, spread = (measured[name] for name in ("step", "reward", "reward_std"))
    accuracy = [measured[name] for name in _ACCURACY]
    parts = {name: measured[name] for name in names if np.isfinite(measured[name]).any()}
    keys = [(_key(COLOURS[n % 7], _dash(n)), part_word(name)) for n, name in enumerate(parts)]
    wide = (WIDTH - _LEFT - _GAP - _RIGHT) // 2
    scales = [range_of_rows(some, measured) for some in (["reward"], names)]
    held_out = [(_DOT, accuracy_word(*scales[0], measured))] * bool(np.isfinite(accuracy[0]).any())
    legends = [_legend(held_out, wide), _legend(keys, wide)]
    top = _TITLE + _ROW * max(height for _, height in legends) + 22
    end = max([last_step, 1, *steps.astype(int).tolist()[-1:]])
    left, right = (
        _Panel(x, top, wide, HEIGHT - top - _BOTTOM, end, scale)
        for x, scale in zip((_LEFT, WIDTH - _RIGHT - wide), scales, strict=True)
    )
    most = max(20, _POINTS // (4 + 2 * len(parts)))
    drawn = [left.frame(reward_title([reward]), legends[0][0], flags, changes, named=True)]
    drawn += [left.line(steps, reward, COLOURS[0], "", most, spread), left.accuracy(steps, *accuracy)]
    title = parts_title(names)
    drawn += [right.frame(title, legends[1][0], flags, changes, named=False)]
    for n, values in enumerate(parts.values()):
        drawn += [right.line(steps, values, COLOURS[n % 7], _dash(n), most)]
    drawn += [_words(changes)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH // 2}" '
        f'style="display:block;max-width:100%;height:auto" font-family="sans-serif" font-size="22" fill="{GREY}">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#fff"/>{"".join(drawn)}</svg>'
    )


class _Panel:
    """A place on the page and its scales."""

    def __init__(self, x: int, y: int, width: int, height: int, end: int, scale: tuple[float, float]) -> None:
        self.x, self.y, self.width, self.height, self.end = x, y, width, height, end
        self.scale, room = scale, 0.03 * (scale[1] - scale[0])
        self.low, self.high = scale[0] - room, scale[1] + room

    def across(self, steps: np.ndarray) -> np.ndarray:
        return np.rint(self.x + self.width * np.asarray(steps) / (1.01 * self.end)).astype(int)

    def up(self, values: np.ndarray) -> np.ndarray:
        share = (np.asarray(values) - self.low) / (self.high - self.low)
        return np.rint(self.y + self.height * (1 - share)).astype(int)

    def frame(
        self, title: str, legend: str, flags: Sequence[Flag], changes: Sequence[Change], *, named: bool
    ) -> str:
        """Title, legend, scales, and a line at the first step of each flag or change; in one panel with their names."""
        bottom, end = self.y + self.height, self.x + self.width
        drawn = [f'<text x="{self.x}" y="30" font-size="25" fill="#111">{title}</text>']
        drawn += [f'<g transform="translate({self.x} {_TITLE})">{legend}</g>']
        grid = [(float(self.up(v)), _short(v)) for v in _ticks(self.low, self.high, 6)]
        drawn += [f'<path stroke="#e6e6e6" d="{"".join(f"M{self.x} {y:.0f}H{end}" for y, _ in grid)}"/>']
        words = [f'<text x="{self.x - 10}" y="{y + 8:.0f}">{word}</text>' for y, word in grid]
        words += [f'<text x="{self.x - 14}" y="{bottom + 30}" font-size="20">step</text>']
        below = [
            f'<text x="{self.across(step)}" y="{bottom + 30}">{step:.0f}</text>'
            for step in _ticks(0, self.end, 9, whole=True)
        ]
        drawn.append(
            f'<g text-anchor="end">{"".join(words)}</g><g text-anchor="middle">{"".join(below)}</g>'
            f'<path fill="none" stroke="#999" stroke-width="2" d="M{self.x} {self.y}V{bottom}H{end}"/>'
        )
        numbers = [(flag.step, str(n)) for n, flag in enumerate(flags, 1)]
        letters = [(step, letter(n)) for n, (step, _) in [*enumerate(changes)][-_MARKS:]]
        for marks, colour, dash, y in (
            (letters, "#777", "2 6", bottom - 8),
            (numbers, RED, "8 8", self.y - 4),
        ):
            lines = "".join(f"M{self.across(step)} {self.y}V{bottom}" for step in {step for step, _ in marks})
            drawn += [
                f'<path stroke="{colour}" stroke-width="2.4" stroke-dasharray="{dash}" d="{lines}"/>'
            ] * bool(marks)
            for step, name in labels(marks, letter=_LETTER * self.end / self.width) if named else ():
                drawn.append(f'<text x="{self.across(step) + 4}" y="{y}" fill="{colour}">{name}</text>')
        return "".join(drawn)

    def line(
        self,
        steps: np.ndarray,
        values: np.ndarray,
        colour: str,
        dash: str,
        most: int,
        spread: np.ndarray | None = None,
    ) -> str:
        """A measure over the steps: up to 20 the values, from 21 on pale points under their moving mean."""
        there = np.isfinite(values)
        steps, values = steps[there], values[there]
        if not len(steps):
            return ""
        window = window_of(values)
        middle = moving_mean(values, window)
        few = np.unique(np.linspace(0, len(steps) - 1, min(most, len(steps))).round().astype(int))
        x, drawn = self.across(steps[few]), []
        if spread is not None:
            spread = moving_mean(np.nan_to_num(spread[there]), window)
            low, high = (
                self.up(np.clip(end, *self.scale))[few] for end in (middle - spread, middle + spread)
            )
            outline = _path(np.append(x, x[::-1]), np.append(high, low[::-1]))
            drawn.append(f'<path fill="{colour}" fill-opacity=".15" d="{outline}z"/>')
        points, wide, strong = (values, 7, ".4") if window > 1 else (middle, 10, "1")
        if window > 1 or len(steps) <= 20:
            some = slice(None, None, 2 if len(few) < len(steps) else 1)  # of a long run
            dots = _path(x[some], self.up(points)[few][some], dots=True)
            drawn.append(
                f'<path stroke="{colour}" stroke-opacity="{strong}" stroke-width="{wide}" stroke-linecap="round" '
                f'd="{dots}"/>'
            )
        drawn.append(
            f'<path fill="none" stroke="{colour}" stroke-width="4" stroke-linejoin="round"{_dashes(dash)} '
            f'd="{_path(x, self.up(middle)[few])}"/>'
        )
        return "".join(drawn)

    def accuracy(self, steps: np.ndarray, values: np.ndarray, low: np.ndarray, high: np.ndarray) -> str:
        """Points from end to end of the scale, with their intervals if they have any; a selection of very many."""
        least, most = self.scale
        values, low, high = (least + (most - least) * share for share in (values, low, high))
        there = np.flatnonzero(np.isfinite(values))
        there = there[:: max(1, len(there) // 30)]
        x, y = self.across(steps[there]), self.up(values[there])
        bars = [
            f"M{at} {a}V{b}"
            for at, a, b in zip(x, low[there], high[there], strict=True)
            if np.isfinite([a, b]).all()
            for a, b in [self.up([a, b])]
        ]
        if not len(there):
            return ""
        dots = _path(x, y, dots=True)
        return (
            f'<path stroke="#000" stroke-width="2.4" d="{"".join(bars)}"/>'
            f'<path stroke="#000" stroke-width="12" stroke-linecap="round" d="{dots}"/>'
        )


_DOT = '<circle cx="18" cy="-7" r="6" fill="#000"/>'


def _key(colour: str, dash: str) -> str:
    return f'<path stroke="{colour}" stroke-width="4"{_dashes(dash)} d="M0-7h36"/>'


def _legend(entries: Sequence[tuple[str, str]], width: int) -> tuple[str, int]:
    """Keys with their names, in as many rows as needed, at most 3; and the number of rows."""
    drawn, x, row = [], 0.0, 1
    for n, (key, name) in enumerate(entries):
        name = cut(name, 30)
        needs = 46 + _LETTER * len(name) + 26
        more = 150 * (n < len(entries) - 1)  # room for the number of those left out
        if row == 3 and x and x + needs + more > width:
            drawn.append(_entry("", f"and {len(entries) - n} more", x - 46, row))
            break
        if x and x + needs > width + 26:
            x, row = 0.0, row + 1
        drawn.append(_entry(key, name, x, row))
        x += needs
    return "".join(drawn), row if entries else 0


def _entry(key: str, name: str, x: float, row: int) -> str:
    place = f"translate({x:.0f} {_ROW * row - 8})"
    return f'<g transform="{place}">{key}<text x="46">{html.escape(name)}</text></g>'


def _words(changes: Sequence[Change]) -> str:
    """The last changes that fit in one line, oldest first."""
    told, room = [], int((WIDTH - _LEFT - _RIGHT) / _LETTER)
    for number in reversed(range(len(changes))):
        step, text = changes[number]
        words = f"{letter(number)} from step {step}: {text}"
        if told and len(words) + 3 > room:
            break
        told.insert(0, cut(words, room))
        room -= len(told[0]) + 3
    return (
        f'<text x="{_LEFT}" y="{HEIGHT - 16}" fill="#555">{html.escape(" · ".join(told))}</text>'
        if told
        else ""
    )


def _path(x: np.ndarray, y: np.ndarray, *, dots: bool = False) -> str:
    """Relative to the previous point, which is shortest."""
    moves = [f"{a}{b}" if b < 0 else f"{a} {b}" for a, b in zip(np.diff(x), np.diff(y), strict=True)]
    if dots:
        return f"M{x[0]} {y[0]}h0" + "".join(f"m{move}h0" for move in moves)
    return f"M{x[0]} {y[0]}l{' '.join(moves)}" if moves else f"M{x[0]} {y[0]}"


def _numbers(rows: Sequence[Mapping], name: str) -> np.ndarray:
    return np.array([row.get(name) for row in rows], dtype=float)  # None becomes NaN


def _dash(number: int) -> str:
    return _DASHES[number % len(_DASHES)]


def _dashes(dash: str) -> str:
    return f' stroke-dasharray="{dash}"' if dash else ""


def _ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """Round numbers from low to high, at most so many."""
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    sizes = [size * power for size in (1, 2, 2.5, 5, 10, 20, 25, 50)]
    fitting = [s for s in sizes if (s >= 1 and s % 1 == 0) or not whole]
    for size in fitting or [1.0]:
        first, last = math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9)
        if last - first < most:
            break
    return [size * n for n in range(first, last + 1)]


def _short(value: float) -> str:
    return f"{round(value, 6):g}"

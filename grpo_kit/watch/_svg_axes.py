"""One panel of the drawing: its place, its scales, and lines, points and marks on them, as SVG text in half pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from grpo_kit.watch._curves import ROUGH, moving_mean, window_of
from grpo_kit.watch._held_out_words import ACCURACY

# Heights within a panel: of the title, of a row of the legend, of the numbers below.
TITLE, ROW, AXIS = 44, 30, 46
INK = "currentColor"  # of words
LETTER = 12.6  # mean width of a letter, in DejaVu Sans, which is a wide one
HELD_OUT = (ACCURACY, f"{ACCURACY}_low", f"{ACCURACY}_high")
_SCHEDULES = ("temperature", "learning_rate")
_DASHES = ("", "14 5", "5 4", "16 5 4 5")
Columns = dict[str, np.ndarray]  # of one run: its measures by name, NaN where there is none


class Axes:
    """A panel's place on the page and its scales."""

    def __init__(
        self, x: int, top: int, above: int, width: int, height: int, end: int, scale: tuple[float, float]
    ) -> None:
        self.x, self.top, self.y, self.width, self.height = x, top, top + above, width, height
        self.end, self.scale, room = end, scale, 0.03 * (scale[1] - scale[0])
        self.low, self.high = scale[0] - room, scale[1] + room

    def across(self, steps: np.ndarray) -> np.ndarray:
        return np.rint(self.x + self.width * np.asarray(steps) / (1.01 * self.end)).astype(int)

    def up(self, values: np.ndarray) -> np.ndarray:
        share = (np.asarray(values) - self.low) / (self.high - self.low)
        return np.rint(self.y + self.height * (1 - share)).astype(int)

    def frame(self, title: str, legend: str) -> str:
        """Title, legend and scales."""
        bottom, end = self.y + self.height, self.x + self.width
        grid = [
            (float(self.up(v)), _short(v)) for v in _ticks(self.low, self.high, max(4, self.height // 60))
        ]
        words = [f'<text x="{self.x - 10}" y="{y + 8:.0f}">{word}</text>' for y, word in grid]
        words += [f'<text x="{self.x - 14}" y="{bottom + 30}" font-size="20">step</text>']
        below = [
            f'<text x="{self.across(step)}" y="{bottom + 30}">{step:.0f}</text>'
            for step in _ticks(0, self.end, self.width // 92, whole=True)
        ]
        drawn = [f'<text x="{self.x}" y="{self.top + 30}" font-size="25">{title}</text>'] * bool(title)
        at = self.top + (TITLE if title else 8)
        drawn += [f'<g transform="translate({self.x} {at})">{legend}</g>'] * bool(legend)
        lines = "".join(f"M{self.x} {y:.0f}H{end}" for y, _ in grid)
        return (
            f'{"".join(drawn)}<path stroke="{INK}" stroke-opacity=".25" d="{lines}"/>'
            f'<g text-anchor="end">{"".join(words)}</g><g text-anchor="middle">{"".join(below)}</g>'
            f'<path fill="none" stroke="{INK}" stroke-opacity=".5" stroke-width="2" '
            f'd="M{self.x} {self.y}V{bottom}H{end}"/>'
        )

    def marks(
        self, marks: Sequence[tuple[int, str]], colour: str, dash: str, above: bool, *, named: bool
    ) -> str:
        """A line at the step of each mark; named: with their names, where they do not overlap."""
        bottom, steps = self.y + self.height, sorted({step for step, _ in marks})
        lines = "".join(f"M{self.across(step)} {self.y}V{bottom}" for step in steps)
        drawn = [f'<path stroke="{colour}" stroke-width="2.4" stroke-dasharray="{dash}" d="{lines}"/>']
        for step, name in _labels(marks, letter=LETTER * self.end / self.width) if named else ():
            y = self.y - 6 if above else bottom - 8
            drawn.append(f'<text x="{self.across(step) + 4}" y="{y}" fill="{colour}">{name}</text>')
        return "".join(drawn)

    def line(self, table: Columns, name: str, colour: str, dash: int, most: int) -> str:
        """A measure over the steps: up to 20 the values, from 21 on pale points under their moving mean.

        The reward has its band. A schedule is drawn as it is.
        """
        there = np.isfinite(table[name])
        steps, values = table["step"][there], table[name][there]
        if not len(steps):
            return ""
        window = 1 if name in _SCHEDULES else window_of(values)
        middle, few = moving_mean(values, window), _even(len(steps), most)
        x, drawn = self.across(steps), []
        if name == "reward":
            spread = moving_mean(np.nan_to_num(table["reward_std"][there]), window)
            low, high = (
                self.up(np.clip(end, *self.scale))[few] for end in (middle - spread, middle + spread)
            )
            outline = _path(np.append(x[few], x[few][::-1]), np.append(high, low[::-1]))
            drawn.append(f'<path fill="{colour}" fill-opacity=".2" d="{outline}z"/>')
        if window > 1 or len(steps) <= ROUGH:
            some, wide, strong = (_extremes(values, most), 7, ".5") if window > 1 else (few, 10, "1")
            drawn.append(
                f'<path stroke="{colour}" stroke-opacity="{strong}" stroke-width="{wide}" stroke-linecap="round" '
                f'd="{_path(x[some], self.up(values)[some], dots=True)}"/>'
            )
        drawn.append(
            f'<path fill="none" stroke="{colour}" stroke-width="4" stroke-linejoin="round"{dashes(dash)} '
            f'd="{_path(x[few], self.up(middle)[few])}"/>'
        )
        return "".join(drawn)

    def accuracy(self, table: Columns, colour: str) -> str:
        """Points, with their intervals if they have any; a selection of very many."""
        values, low, high = (table[name] for name in HELD_OUT)
        there = np.flatnonzero(np.isfinite(values))
        there = there[:: max(1, len(there) // 30)]
        if not len(there):
            return ""
        x, y = self.across(table["step"][there]), self.up(values[there])
        bars = [
            f"M{at} {a}V{b}"
            for at, *ends in zip(x, low[there], high[there], strict=True)
            if np.isfinite(ends).all()
            for a, b in [self.up(ends)]
        ]
        dots = _path(x, y, dots=True)
        return (
            f'<path stroke="{colour}" stroke-width="2.4" d="{"".join(bars)}"/>'
            f'<path stroke="{colour}" stroke-width="12" stroke-linecap="round" d="{dots}"/>'
        )


def axis_end(step: int, total: int) -> int:
    """To which step a chart reaches while its run goes on: the axis doubles before the lines come to its end.

    >>> [axis_end(step, 3000) for step in (0, 25, 26, 46, 2900)], axis_end(3, 8)
    ([32, 32, 64, 64, 3000], 8)
    """
    end = 32
    while end < 1.25 * step:
        end *= 2
    return min(end, total)


def _even(n: int, most: int) -> np.ndarray:
    """At most so many of n places, evenly, with the first and the last."""
    return np.unique(np.linspace(0, n - 1, min(most, n)).round().astype(int))


def _extremes(values: np.ndarray, most: int) -> np.ndarray:
    """The places of at most so many values: in each stretch of a long run the lowest and the highest, so that no spike
    is lost.
    """
    if len(values) <= most:
        return np.arange(len(values))
    ends = np.linspace(0, len(values), max(1, most // 2) + 1).round().astype(int)
    found = [
        first + of(values[first:end])
        for first, end in zip(ends, ends[1:], strict=False)
        for of in (np.argmin, np.argmax)
    ]
    return np.unique(found)


def _labels(marks: Sequence[tuple[int, str]], *, letter: float) -> list[tuple[int, str]]:
    """(step, name) as labels that do not overlap, by step: those too near to an earlier one share its place.

    letter: the width of a letter, in steps. If more than two share a place, the first and the last are named.

    >>> _labels([(3, "1"), (9, "3"), (3, "2")], letter=1)
    [(3, '1,2'), (9, '3')]
    >>> _labels([(1, "a"), (2, "b"), (3, "c")], letter=1)
    [(1, 'a–c')]
    """
    places: list[tuple[int, list[str]]] = []
    for step, name in sorted(marks, key=lambda mark: mark[0]):
        if places and step < places[-1][0] + letter * (1 + len(_joined(places[-1][1]))):
            places[-1][1].append(name)
        else:
            places.append((step, [name]))
    return [(step, _joined(names)) for step, names in places]


def _joined(names: Sequence[str]) -> str:
    """Numbers, or letters: three and more that follow each other as a range.

    >>> _joined(["1", "2", "4"]), _joined(["a", "b", "c", "e"])
    ('1,2,4', 'a–c,e')
    """
    place = [int(name) if name.isdecimal() else ord(name[-1]) for name in names]
    runs = [[names[0]]]
    for n, name in enumerate(names[1:], 1):
        if place[n] == place[n - 1] + 1:
            runs[-1].append(name)
        else:
            runs.append([name])
    return ",".join(",".join(run) if len(run) < 3 else f"{run[0]}–{run[-1]}" for run in runs)


def _path(x: np.ndarray, y: np.ndarray, *, dots: bool = False) -> str:
    """Relative to the previous point, which is shortest."""
    moves = [f"{a}{b}" if b < 0 else f"{a} {b}" for a, b in zip(np.diff(x), np.diff(y), strict=True)]
    if dots:
        return f"M{x[0]} {y[0]}h0" + "".join(f"m{move}h0" for move in moves)
    return f"M{x[0]} {y[0]}l{' '.join(moves)}" if moves else f"M{x[0]} {y[0]}"


def dashes(number: int) -> str:
    """The look of the line of a panel's measure with this number, as an attribute."""
    dash = _DASHES[number % len(_DASHES)]
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
    """0.25, 1.5e-4"""
    small = 0 < abs(value) < 1e-3
    number, _, power = f"{value:.{'3e' if small else '4g'}}".partition("e")
    return f"{float(number):g}e{int(power)}" if power else number

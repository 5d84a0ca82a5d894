"""One panel of the drawing: its place, its scales, and lines, points and marks on them, as SVG text in half pixels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_kit.watch._red_flag import ACCURACY
from grpo_kit.watch._run_state import CONSTANT

# Heights within a panel: of the title, of a row of the legend, of the numbers below.
TITLE, ROW, AXIS = 54, 42, 58
INK = "currentColor"  # of words
# Of letters: 9 pixels where the drawing is 560 wide, which JupyterLab leaves it on a page of 1,024.
SIZE = 31
LETTER = 17.75  # mean width of a letter, in DejaVu Sans, which is a wide one
ROUGH = 20  # values; above this number a line shows their moving mean
HELD_OUT = (ACCURACY, f"{ACCURACY}_low", f"{ACCURACY}_high", CONSTANT)
_SCHEDULES = ("temperature", "learning_rate")
_DASHES = ("", "14 5", "5 4", "16 5 4 5")
Columns = dict[str, np.ndarray]  # of one run: its measures by name, NaN where there is none


@dataclass
class Marks:
    """Red flags or changes on the scale of steps, by (step, name), and the look of their lines.

    on_top: their names are above the panel, else at its foot.
    """

    places: Sequence[tuple[int, str]]
    colour: str
    dash: str
    on_top: bool


class Axes:
    """A panel's place on the page and its scales: steps from 0 to `end`, values from low to high."""

    def __init__(
        self,
        x: int,
        top: int,
        head: int,
        width: int,
        height: int,
        end: int,
        scale: tuple[float, float],
    ) -> None:
        self.x = x
        self.top = top
        self.y = top + head
        self.width = width
        self.height = height
        self.end = end
        self.scale = scale
        room = 0.03 * (scale[1] - scale[0])
        self.low = scale[0] - room
        self.high = scale[1] + room

    def across(self, steps: np.ndarray) -> np.ndarray:
        share = np.asarray(steps) / (1.01 * self.end)
        return np.rint(self.x + self.width * share).astype(int)

    def up(self, values: np.ndarray) -> np.ndarray:
        share = (np.asarray(values) - self.low) / (self.high - self.low)
        return np.rint(self.y + self.height * (1 - share)).astype(int)

    def frame(self, title: str, legend: str) -> str:
        """Title, legend and scales."""
        bottom = self.y + self.height
        end = self.x + self.width
        words = []
        grid = []
        for value in _ticks(self.low, self.high, max(4, self.height // 50)):
            y = self.up(value)
            grid.append(f"M{self.x} {y}H{end}")
            words.append(f'<text x="{self.x - 10}" y="{y + 11}">{_short(value)}</text>')
        words.append(f'<text x="{self.x - 14}" y="{bottom + 38}">step</text>')
        steps = [
            f'<text x="{self.across(step)}" y="{bottom + 38}">{step:.0f}</text>'
            for step in _ticks(0, self.end, self.width // 110, integers=True)
        ]
        head = ""
        legend_y = self.top + 8
        if title:
            head = f'<text x="{self.x}" y="{self.top + 38}" font-size="33">{title}</text>'
            legend_y = self.top + TITLE
        if legend:
            head += f'<g transform="translate({self.x} {legend_y})">{legend}</g>'
        return (
            f'{head}<path stroke="{INK}" stroke-opacity=".25" d="{"".join(grid)}"/>'
            f'<g text-anchor="end">{"".join(words)}</g><g text-anchor="middle">{"".join(steps)}</g>'
            f'<path fill="none" stroke="{INK}" stroke-opacity=".5" stroke-width="2" '
            f'd="M{self.x} {self.y}V{bottom}H{end}"/>'
        )

    def marks(self, marks: Marks, *, named: bool) -> str:
        """A line at the step of each mark; named: with their names, where they do not overlap."""
        bottom = self.y + self.height
        steps = sorted({step for step, _ in marks.places})
        lines = "".join(f"M{self.across(step)} {self.y}V{bottom}" for step in steps)
        look = f'stroke="{marks.colour}" stroke-width="2.4" stroke-dasharray="{marks.dash}"'
        elements = [f'<path {look} d="{lines}"/>']
        if named:
            y = self.y - 6 if marks.on_top else bottom - 8
            for step, name in _labels(marks.places, letter=LETTER * self.end / self.width):
                x = self.across(step) + 4
                elements.append(f'<text x="{x}" y="{y}" fill="{marks.colour}">{name}</text>')
        return "".join(elements)

    def line(self, table: Columns, name: str, colour: str, dash: int, most: int) -> str:
        """A measure over the steps: up to 20 the values, from 21 on pale points under their moving mean.

        The reward has its band. A schedule is drawn as it is.
        """
        is_measured = np.isfinite(table[name])
        values = table[name][is_measured]
        if not values.size:
            return ""
        window = 1 if name in _SCHEDULES else window_of(values)
        mean = moving_mean(values, window)
        x = self.across(table["step"][is_measured])
        rows = _even(len(x), most)
        elements = []
        if name == "reward":
            spread = moving_mean(np.nan_to_num(table["reward_std"][is_measured]), window)
            elements.append(self._band(x[rows], mean[rows], spread[rows], colour))
        if window > 1:
            places = _extremes(values, most)
            elements.append(
                _points(x[places], self.up(values[places]), colour, 7, opacity=".5")
            )
        elif len(x) <= ROUGH:
            elements.append(_points(x[rows], self.up(values[rows]), colour, 10))
        elements.append(
            f'<path fill="none" stroke="{colour}" stroke-width="4" stroke-linejoin="round"{dashes(dash)} '
            f'd="{_path(x[rows], self.up(mean[rows]))}"/>'
        )
        return "".join(elements)

    def _band(self, x: np.ndarray, middle: np.ndarray, spread: np.ndarray, colour: str) -> str:
        """The ground between middle - spread and middle + spread, within the scale."""
        low = self.up(np.clip(middle - spread, *self.scale))
        high = self.up(np.clip(middle + spread, *self.scale))
        outline = _path(np.append(x, x[::-1]), np.append(high, low[::-1]))
        return f'<path fill="{colour}" fill-opacity=".2" d="{outline}z"/>'

    def accuracy(self, table: Columns, colour: str) -> str:
        """Points, with their intervals if they have any, pale where no better than a constant; a selection of many."""
        rows = np.flatnonzero(np.isfinite(table[ACCURACY]))
        rows = rows[_even(len(rows), 30)]
        pale = no_better_rows(table)[rows]
        elements = []
        for chosen, opacity in (rows[~pale], "1"), (rows[pale], ".35"):
            if chosen.size:
                x = self.across(table["step"][chosen])
                values, low, high, _ = (table[name][chosen] for name in HELD_OUT)
                bars = "".join(
                    f"M{place} {self.up(bottom)}V{self.up(top)}"
                    for place, bottom, top in zip(x, low, high, strict=True)
                    if np.isfinite(bottom + top)
                )
                points = _points(x, self.up(values), colour, 12)
                elements.append(
                    f'<g opacity="{opacity}"><path stroke="{colour}" stroke-width="2.4" d="{bars}"/>{points}</g>'
                )
        return "".join(elements)


def no_better_rows(table: Columns) -> np.ndarray:
    """Where the held-out accuracy's interval reaches down to the best constant strategy's accuracy, bool (steps,).

    As _run_state.no_better, but before the first step too. A constant that is never right is not compared.
    """
    constant = table[CONSTANT]
    return (constant > 0) & (table[HELD_OUT[1]] <= constant)


def window_of(values: np.ndarray) -> int:
    """How many values a moving mean covers: 1 up to 20 values, and if all are equal.

    >>> window_of(np.arange(20)), window_of(np.arange(21)), window_of(np.arange(240))
    (1, 5, 21)
    """
    if len(values) <= ROUGH or (values == values[0]).all():
        return 1
    return max(5, len(values) // 12) | 1  # an odd number


def moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of `window` (odd) values around each one; of the existing ones near both ends.

    >>> moving_mean(np.array([0.0, 3.0, 6.0, 0.0]), 3).tolist()
    [1.5, 3.0, 3.0, 3.0]
    """
    places = np.arange(len(values))
    half = window // 2
    first = np.maximum(places - half, 0)
    end = np.minimum(places + half + 1, len(values))
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=float)])
    return (sums[end] - sums[first]) / (end - first)


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
    places = []
    for first, end in zip(ends[:-1], ends[1:], strict=True):
        stretch = values[first:end]
        places += [first + stretch.argmin(), first + stretch.argmax()]
    return np.unique(places)


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
        if places:
            last_step, names = places[-1]
            if step < last_step + letter * (1 + len(_joined(names))):
                names.append(name)
                continue
        places.append((step, [name]))
    return [(step, _joined(names)) for step, names in places]


def _joined(names: Sequence[str]) -> str:
    """Numbers, or letters: three and more that follow each other as a range.

    >>> _joined(["1", "2", "4"]), _joined(["a", "b", "c", "e"])
    ('1,2,4', 'a–c,e')
    """
    places = [int(name) if name.isdecimal() else ord(name[-1]) for name in names]
    runs = [[names[0]]]
    for name, place, before in zip(names[1:], places[1:], places, strict=False):
        if place == before + 1:
            runs[-1].append(name)
        else:
            runs.append([name])
    return ",".join(",".join(run) if len(run) < 3 else f"{run[0]}–{run[-1]}" for run in runs)


def _points(x: np.ndarray, y: np.ndarray, colour: str, size: int, *, opacity: str = "") -> str:
    """Round dots."""
    pale = f' stroke-opacity="{opacity}"' if opacity else ""
    return f'<path stroke="{colour}"{pale} stroke-width="{size}" stroke-linecap="round" d="{_path(x, y, dots=True)}"/>'


def _path(x: np.ndarray, y: np.ndarray, *, dots: bool = False) -> str:
    """Relative to the previous point, which is shortest."""
    start = f"M{x[0]} {y[0]}"
    moves = [
        f"{a}{b}" if b < 0 else f"{a} {b}" for a, b in zip(np.diff(x), np.diff(y), strict=True)
    ]
    if dots:
        return f"{start}h0" + "".join(f"m{move}h0" for move in moves)
    if not moves:
        return start
    return f"{start}l{' '.join(moves)}"


def dashes(number: int) -> str:
    """The look of the line of a panel's measure with this number, as an attribute."""
    dash = _DASHES[number % len(_DASHES)]
    return f' stroke-dasharray="{dash}"' if dash else ""


def _ticks(low: float, high: float, most: int, *, integers: bool = False) -> list[float]:
    """Round numbers from low to high, at most so many. integers: no fractions."""
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    sizes = [size * power for size in (1, 2, 2.5, 5, 10, 20, 25, 50)]
    if integers:
        sizes = [size for size in sizes if size >= 1 and size % 1 == 0] or [1.0]
    for size in sizes:
        first = math.ceil(low / size - 1e-9)
        last = math.floor(high / size + 1e-9)
        if last - first < most:
            break
    return [size * n for n in range(first, last + 1)]


def _short(value: float) -> str:
    """0.25, 1.5e-4"""
    text = f"{value:.3e}" if 0 < abs(value) < 1e-3 else f"{value:.4g}"
    if "e" not in text:
        return text
    number, power = text.split("e")
    return f"{float(number):g}e{int(power)}"
